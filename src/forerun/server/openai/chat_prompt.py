"""How a conversation becomes a prompt: what chat completions and `/tokenize` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from forerun.core.errors import RequestError
from forerun.llm.prompts import Ending
from forerun.server.http.strict_model import MAX_VARIABLES, StrictModel

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
THINKING = ("enable_thinking", "thinking")  # variables of templates that switch reasoning


def variables_of(given: Mapping[str, Any] | None, effort: Effort | None) -> dict[str, Any]:
    """Variables of the chat template: those given, and the effort of reasoning.

    Raises:
        RequestError: they contradict each other.
    """
    known = dict(given or {})
    if effort is None:
        return known
    if known.get("reasoning_effort", effort) != effort:
        raise RequestError(
            "reasoning_effort and chat_template_kwargs.reasoning_effort differ; give one."
        )
    switched = dict.fromkeys(THINKING, effort != "none")
    return {**switched, **known, "reasoning_effort": effort}


class ChatPrompt(StrictModel):
    """Fields beside the messages."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_VARIABLES, description="Variables of the model's chat template"
    )
    reasoning_effort: Effort | None = Field(
        None,
        description="A variable of the chat template; enable_thinking is set, too (none: false)",
    )
    add_generation_prompt: bool | None = Field(
        None, description="False: the prompt ends with the last message"
    )
    continue_final_message: bool | None = Field(
        None, description="The answer goes on with the text of the last message"
    )

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template.

        Raises:
            RequestError: they contradict each other.
        """
        return variables_of(self.chat_template_kwargs, self.reasoning_effort)

    @property
    def ending(self) -> Ending:
        """
        Raises:
            RequestError: the fields contradict each other.
        """
        return Ending.of(self.add_generation_prompt, self.continue_final_message)
