"""Small chat templates that write tool calls and reasoning as the models' own ones do."""

from __future__ import annotations

from forerun.server.parsers.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)

_TOOLS = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
_BEGIN = "{% for m in messages %}<{{ m.role }}>"
_REASONING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_CALLS = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
_END = "<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>"
_NO_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)

PLAIN = f"{_BEGIN}{{{{ m.content }}}}{_END}{{% endif %}}"
# Fails without content, as Qwen 3's first template does. Arguments as objects, or as text.
QWEN3 = (
    _TOOLS
    + _BEGIN
    + _REASONING
    + "{{ m.content + '' }}"
    + _CALLS
    + '{{ "\\n" }}<tool_call>\n{"name": "{{ f.name }}", "arguments": '
    + "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}"
    + "{% endif %}}\n</tool_call>{% endfor %}"
    + _END
    + _NO_THINKING
    + "{% endif %}"
)
# Arguments as an object only; one call per message.
LLAMA3 = (
    _TOOLS
    + _BEGIN
    + "{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + "{% else %}{{ m.content }}{% endif %}"
    + _END
    + "{% endif %}"
)
# Arguments as text only. Prompts end with <think>.
DEEPSEEK_R1 = (
    _TOOLS
    + _BEGIN
    + "{% if m.tool_calls %}"
    + CALLS_BEGIN
    + _CALLS
    + f"{CALL_BEGIN}{{{{ call.type }}}}{SEPARATOR}"
    + "{{ f.name + '\n```json\n' + f.arguments + '\n```' }}"
    + f"{CALL_END}{{% endfor %}}{CALLS_END}"
    + "{% else %}{{ m.content }}{% endif %}"
    + _END
    + "<think>\n{% endif %}"
)
DEEPSEEK_V31 = (
    _TOOLS
    + _BEGIN
    + "{{ m.content or '' }}"
    + "{% if m.tool_calls %}"
    + CALLS_BEGIN
    + _CALLS
    + f"{CALL_BEGIN}{{{{ f.name }}}}{SEPARATOR}{{{{ f.arguments + '' }}}}{CALL_END}"
    + f"{{% endfor %}}{CALLS_END}{{% endif %}}"
    + _END
    + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
UNKNOWN = (
    _BEGIN
    + "{{ m.content }}"
    + _CALLS
    + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}"
    + _END
    + "{% endif %}"
)
