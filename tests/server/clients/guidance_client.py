"""`guidance` with its models for OpenAI and SGLang. Prints what it got, as JSON.

Arguments: the server's URL.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from guidance import assistant, gen, models, user
from guidance import json as gen_json
from guidance.models.experimental import SglangModel
from pydantic import BaseModel, Field


class Answer(BaseModel):
    """A structured answer."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=99)


def ask(model: Any, *nodes: Any) -> Any:
    """The model after a turn for each node."""
    for node in nodes:
        with user():
            model += "How warm is it in Paris?"
        with assistant():
            model += node
    return model


def main(url: str) -> dict[str, Any]:
    settings: Any = {"base_url": f"{url}/v1", "api_key": "none", "echo": False}
    got: dict[str, Any] = {}
    for kind, made in (("openai", models.OpenAI), ("sglang", SglangModel)):
        talk = ask(
            made("bundled", **settings),
            gen("text", max_tokens=20, temperature=0.1),
            gen_json("json", schema=Answer, max_tokens=60),
        )
        got[kind] = {"text": talk["text"], "json": json.loads(talk["json"])}
    pattern = gen("regex", regex="[A-Z][a-z]{3,5}", max_tokens=30)
    got["sglang"]["regex"] = ask(SglangModel("bundled", **settings), pattern)["regex"]
    return got


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
