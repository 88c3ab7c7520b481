"""Basic use of `langchain-openai`. Prints what it got, as JSON. Arguments: the server's URL."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

QUESTION = "How warm is it in Paris?"


class Answer(BaseModel):
    """A structured answer."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=99)


@tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of some days."""
    return f"{city}: 20"


def main(url: str) -> dict[str, Any]:
    settings: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": "bundled", "seed": 3}
    chat = ChatOpenAI(**settings, max_tokens=60, temperature=0)  # type: ignore[call-arg]
    whole = chat.invoke(QUESTION)
    streamed = list(chat.stream(QUESTION, stream_usage=True))
    scored = chat.bind(logprobs=True).invoke("x").response_metadata["logprobs"]["content"]
    got: dict[str, Any] = {
        "chat": whole.content,
        "usage": whole.usage_metadata,
        "stream": "".join(str(chunk.content) for chunk in streamed),
        "batch": [each.content for each in chat.batch([QUESTION, QUESTION])],
        "completion": OpenAI(**settings, max_tokens=8, temperature=0).invoke("def f(x):"),
        "logprobs": len(scored),
    }
    long = ChatOpenAI(**settings, max_tokens=200)  # type: ignore[call-arg]
    for choice in ("any", "weather"):
        bound = long.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        message: AIMessage = bound.invoke(QUESTION)
        got[f"tool {choice}"] = message.tool_calls[0]["args"]
        total: Any = None
        for chunk in bound.stream(QUESTION):
            total = chunk if total is None else total + chunk
        got[f"stream tool {choice}"] = total.tool_calls[0]["args"]
        result: ToolMessage = weather.invoke(message.tool_calls[0])
        got[f"result {choice}"] = result.content
    for method in ("json_schema", "function_calling"):
        parsed = long.with_structured_output(Answer, method=method).invoke(QUESTION)
        got[method] = parsed.model_dump()
    del settings["seed"]
    responses = ChatOpenAI(**settings, max_tokens=60, temperature=0, use_responses_api=True)  # type: ignore[call-arg]
    got["responses"] = responses.invoke(QUESTION).text
    return got


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
