"""`anthropic`: a tool loop, streams, counts. Prints what it got, as JSON.

Arguments: the server's URL.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic

QUESTION: Any = {"role": "user", "content": "How warm is it in Paris?"}
SETTINGS: Any = {"model": "bundled", "max_tokens": 60, "extra_body": {"temperature": 0}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": CITY}
ONE: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


def main(url: str) -> dict[str, Any]:
    client = Anthropic(base_url=url, api_key="none")
    whole = client.messages.create(**SETTINGS, messages=[QUESTION])
    with client.messages.stream(**SETTINGS, messages=[QUESTION]) as stream:
        pieces = list(stream.text_stream)
    asked: Any = {"messages": [QUESTION], "tools": [TOOL]}
    long: Any = {**SETTINGS, "max_tokens": 200}
    called = client.messages.create(**long, **asked, tool_choice=ONE)
    with client.messages.stream(**long, **asked, tool_choice=ONE) as stream:
        streamed = stream.get_final_message()
    (use,) = [block for block in called.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "20"}
    answered = client.messages.create(
        **SETTINGS,
        tools=[TOOL],
        messages=[
            QUESTION,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ],
    )
    return {
        "chat": whole.content[0].text,  # type: ignore[union-attr]
        "stream": "".join(pieces),
        "tool": use.input,
        "stream tool": streamed.content[-1].input,  # type: ignore[union-attr]
        "stop": called.stop_reason,
        "answer": answered.usage.output_tokens,
        "count": client.messages.count_tokens(model="bundled", messages=[QUESTION]).input_tokens,
        "input": whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
