"""`openai-agents` over chat completions and responses. Prints what it got, as JSON.

Arguments: the server's URL.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

QUESTION, NEXT = "How warm is it in Paris?", "And in Rome?"
GREEDY = ModelSettings(max_tokens=400, temperature=0)
ONE_CALL = ModelSettings(
    max_tokens=400, temperature=0, tool_choice="required", parallel_tool_calls=False
)


class Answer(BaseModel):
    """A structured answer."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=99)


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"{city}: 20"


async def streamed(agent: Agent) -> str:
    run = Runner.run_streamed(agent, QUESTION)
    data = [e.data for e in [e async for e in run.stream_events()] if e.type.startswith("raw")]
    return "".join(d.delta for d in data if d.type == "response.output_text.delta")


async def of_both(made: Callable[..., Agent]) -> dict[str, Any]:
    """What works the same over both APIs."""
    called = await Runner.run(made(model_settings=ONE_CALL, tools=[weather]), QUESTION)
    typed = await Runner.run(made(output_type=Answer), QUESTION)
    assert isinstance(typed.final_output, Answer)
    other = made(name="other", handoff_description="Knows the weather.")
    handed = await Runner.run(made(model_settings=ONE_CALL, handoffs=[other]), QUESTION)
    results = [item.output for item in called.new_items if item.type == "tool_call_output_item"]
    return {
        "text": (await Runner.run(made(), QUESTION)).final_output,
        "stream": await streamed(made()),
        "results": results,
        "answer": len(called.final_output),
        "typed": typed.final_output.model_dump(),
        "last agent": handed.last_agent.name,
    }


async def chains(made: Callable[..., Agent], client: AsyncOpenAI) -> dict[str, Any]:
    """The same second answer with the conversation kept in three ways."""
    agent = made()
    first = await Runner.run(agent, QUESTION)
    whole = [*first.to_input_list(), {"role": "user", "content": NEXT}]
    sent = await Runner.run(agent, whole)  # type: ignore[arg-type]
    chained = await Runner.run(agent, NEXT, previous_response_id=first.last_response_id)
    session = OpenAIConversationsSession(openai_client=client)
    for text in (QUESTION, NEXT):
        kept = await Runner.run(agent, text, session=session)
    texts = [run.final_output for run in (sent, chained, kept)]
    return {"chains": texts, "items": len(await session.get_items())}


async def main(url: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    def with_model(kind: Any) -> Callable[..., Agent]:
        model = kind(model="bundled", openai_client=client)
        usual = {"name": "one", "model": model, "model_settings": GREEDY}
        return lambda **settings: Agent(**{**usual, **settings})

    responses = with_model(OpenAIResponsesModel)
    return {
        "chat": await of_both(with_model(OpenAIChatCompletionsModel)),
        "responses": await of_both(responses),
        **await chains(responses, client),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
