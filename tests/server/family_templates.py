"""Small chat templates with the structure of those that the families' models publish."""

from __future__ import annotations

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_BEGIN = "{% for m in messages %}"
_CALLS = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
_EACH = "{% for key, value in f.arguments | items %}"
_VALUE = "{{ value if value is string else value | tojson }}"
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_CONTENT = "{{ m.content or '' }}"
_NO_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def _turns(calls: str, tail: str = "", thought: str = _THOUGHT) -> str:
    return (
        f"{_TOOLS}{_BEGIN}<|im_start|>{{{{ m.role }}}}\n{thought}{_CONTENT}{calls}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        f"{tail}{{% endif %}}"
    )


QWEN3_CODER = _turns(
    f"{_CALLS}{{{{ '\\n' }}}}<tool_call>\n<function={{{{ f.name }}}}>\n{_EACH}"
    f"<parameter={{{{ key }}}}>\n{_VALUE}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>"
    "{% endfor %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}",
)
GLM45 = _turns(
    f"{_CALLS}{{{{ '\\n' }}}}<tool_call>{{{{ f.name }}}}\n{_EACH}<arg_key>{{{{ key }}}}</arg_key>\n"
    f"<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}",
    _NO_THINKING,
)
GLM47 = _turns(
    f"{_CALLS}<tool_call>{{{{ f.name }}}}{_EACH}<arg_key>{{{{ key }}}}</arg_key>"
    f"<arg_value>{_VALUE}</arg_value>{{% endfor %}}</tool_call>{{% endfor %}}",
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>"
    "{% endif %}",
)
MINIMAX_M2 = _turns(
    "{% if m.tool_calls %}\n<minimax:tool_call>\n"
    f'{_CALLS}<invoke name="{{{{ f.name }}}}">\n{_EACH}<parameter name="{{{{ key }}}}">{_VALUE}'
    "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
    "<think>\n",
)
# The name of a function is in the call's id alone.
KIMI_K2 = _turns(
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}{% endif %}",
)
_GEMMA_VALUE = (
    '{% macro written(v) %}{% if v is string %}<|"|>{{ v }}<|"|>'
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v | items %}{{ k }}:{{ written(x) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for x in v %}{{ written(x) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
GEMMA4 = (
    f"{_GEMMA_VALUE}{_TOOLS}{{% if enable_thinking %}}<|think|>{{% endif %}}"
    f"{_BEGIN}<|turn>{{{{ m.role }}}}\n{_CALLS}<|tool_call>call:{{{{ f.name }}}}{{{{ '{{' }}}}"
    "{% if f.arguments is string %}{{ f.arguments }}{% else %}"
    f"{_EACH}{{{{ key }}}}:{{{{ written(value) }}}}{{{{ ',' if not loop.last }}}}"
    "{% endfor %}{% endif %}{{ '}' }}<tool_call|>{% endfor %}"
    f"{_CONTENT}<turn|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking | default(false) %}"
    "<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
_MISTRAL = (
    f"<s>{_TOOLS}{_BEGIN}{{% if m.role == 'user' %}}[INST]{{{{ m.content }}}}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    f"{_CONTENT}"
)
_MISTRAL_END = "</s>{% endif %}{% endfor %}"
MISTRAL = (
    f"{_MISTRAL}{{% if m.tool_calls %}}[TOOL_CALLS][{{% for call in m.tool_calls %}}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]{% endif %}' + _MISTRAL_END
)
MISTRAL_ARGS = (
    f"{_MISTRAL}{_CALLS}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]"
    "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
    "{% endfor %}" + _MISTRAL_END
)
_PAIRS = (
    f"{_CALLS}{{{{ f.name }}}}({_EACH}{{{{ key }}}}="
    "{% if value is boolean %}{{ 'True' if value else 'False' }}{% else %}{{ value | tojson }}"
    "{% endif %}{{ ', ' if not loop.last }}{% endfor %})"
)
LLAMA4 = _turns(
    f"{{% if m.tool_calls %}}[{_PAIRS}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]{{% endif %}}",
    thought="",
)
OLMO3 = _turns(
    f"{{% if m.tool_calls %}}<function_calls>{_PAIRS}{{{{ '\\n' if not loop.last }}}}"
    "{% endfor %}</function_calls>{% endif %}",
    "<think>",
)
GRANITE = _turns(
    "{% if m.tool_calls %}<|tool_call|>[{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    '{{ ", " if not loop.last }}{% endfor %}]{% endif %}'
    "{% if thinking %}Write 'Here is my thought process:' and 'Here is my response:'.{% endif %}",
    thought="",
)
# Thoughts are told beside calls only; a message has one call.
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    f"{_TOOLS}{_BEGIN}{{% if m.tool_calls %}}"
    "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    f"{{% endif %}}{_CALLS}<|start|>assistant to=functions.{{{{ f.name }}}}<|channel|>commentary "
    "json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    f"{_CONTENT}<|end|>{{% else %}}<|start|>{{{{ m.role }}}}<|message|>{_CONTENT}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
