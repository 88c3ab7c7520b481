"""Basic use of `litellm`. Prints what it got, as JSON. Arguments: the server's URL."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is downloaded
import litellm

MESSAGES = [{"role": "user", "content": "How warm is it in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SCHEMA = {"name": "answer", "schema": PARAMETERS, "strict": True}


def main(url: str) -> dict[str, Any]:
    call: Any = {"model": "openai/bundled", "api_base": f"{url}/v1", "api_key": "none", "seed": 3}
    chat = {**call, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    whole = litellm.completion(**chat)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    text = litellm.text_completion(
        model="text-completion-openai/bundled", prompt="def f(x):", temperature=0, max_tokens=8,
        api_base=f"{url}/v1", api_key="none",
    )  # fmt: skip
    tools = {**call, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 200}
    tools |= {"parallel_tool_calls": False}
    got: dict[str, Any] = {
        "chat": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "stream usage": next(c.usage.completion_tokens for c in chunks if hasattr(c, "usage")),
        "completion": text.choices[0].text,
    }
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        message = litellm.completion(**tools, tool_choice=choice).choices[0].message
        name = "named" if choice is named else "required"
        got[f"tool {name}"] = json.loads(message.tool_calls[0].function.arguments)
        pieces = litellm.completion(**tools, tool_choice=choice, stream=True)
        deltas = [d for c in pieces for d in c.choices[0].delta.tool_calls or []]
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
        got[f"stream tool {name}"] = json.loads(arguments)
    answer = litellm.completion(
        **{**call, "messages": MESSAGES, "max_tokens": 200},
        response_format={"type": "json_schema", "json_schema": SCHEMA},
    )
    got["json_schema"] = json.loads(answer.choices[0].message.content)
    response = litellm.responses(
        **{name: value for name, value in call.items() if name != "seed"},
        input=MESSAGES[0]["content"], temperature=0, max_output_tokens=60,
    )  # fmt: skip
    got["responses"] = response.output[0].content[0].text
    return got


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
