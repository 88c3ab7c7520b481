"""`instructor` in its modes for OpenAI and Anthropic. Prints what it got, as JSON.

Arguments: the server's URL.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, Field

SETTINGS: Any = {
    "model": "bundled",
    "messages": [{"role": "user", "content": "How warm is it in Paris?"}],
    "max_tokens": 200,
    "max_retries": 0,
}


class Answer(BaseModel):
    """A structured answer."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=99)


def main(url: str) -> dict[str, Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: Any = {**SETTINGS, "response_model": Answer}
    got = {
        mode.name: instructor.from_openai(client, mode=mode).create(**asked)
        for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
    }
    tools = instructor.from_openai(client, mode=Mode.TOOLS)
    got["partial"] = list(tools.create_partial(**asked))[-1]
    anthropic = instructor.from_anthropic(
        Anthropic(base_url=url, api_key="none"), mode=Mode.ANTHROPIC_TOOLS
    )
    got["ANTHROPIC_TOOLS"] = anthropic.create(**asked)
    return {name: answer.model_dump() for name, answer in got.items()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
