"""`outlines` with its models for OpenAI, vLLM and SGLang. Prints what it got, as JSON.

Arguments: the server's URL.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import outlines
from openai import OpenAI
from outlines.types import JsonSchema, Regex
from pydantic import BaseModel, Field

QUESTION = "How warm is it in Paris?"
SETTINGS: Any = {"max_tokens": 60, "temperature": 0}


class Answer(BaseModel):
    """A structured answer."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=99)


def main(url: str) -> dict[str, Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    kinds: Any = {
        "openai": outlines.from_openai(client, "bundled"),
        "vllm": outlines.from_vllm(client, "bundled"),
        "sglang": outlines.from_sglang(client, "bundled"),
    }
    got: dict[str, Any] = {}
    for kind, model in kinds.items():
        got[kind] = {
            "text": model(QUESTION, **SETTINGS),
            "stream": "".join(model.stream(QUESTION, **SETTINGS)),
            "json": json.loads(model(QUESTION, Answer, **SETTINGS)),
            "json stream": json.loads("".join(model.stream(QUESTION, Answer, **SETTINGS))),
        }
        if kind != "openai":
            spaced = JsonSchema(Answer, whitespace_pattern=r"[ ]?")
            got[kind] |= {
                "choice": model(QUESTION, Literal["Paris", "Rome"], **SETTINGS),
                "regex": model(QUESTION, Regex("[A-Z][a-z]{3,5}"), **SETTINGS),
                "json spaced": json.loads(model(QUESTION, spaced, **SETTINGS)),
            }
    return got


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
