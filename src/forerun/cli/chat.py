"""`forerun chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import Values, engine_flags, sampling_flags, with_flags
from forerun.cli.output import dim, print_error, print_stream, summary
from forerun.core.errors import RequestError, nearest
from forerun.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM, RequestOutput

HELP = "/reset forgets the conversation, /stats shows figures, /exit or Ctrl-D ends."


@with_flags(engine=engine_flags, sampling=lambda: sampling_flags(max_new_tokens=256))
def chat(
    system: Annotated[str | None, typer.Option("--system", help="System message")] = None,
    *,
    engine: Values,
    sampling: Values,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, not the program; Ctrl-D ends."""
    params = SamplingParams.of({"max_new_tokens": 256, **sampling})
    if params.n > 1:
        raise RequestError("a chat has one answer; --n must be 1.")
    if params.max_new_tokens < 1:
        raise RequestError("an answer has tokens; --max-new-tokens must be at least 1.")
    from forerun.llm import LLM  # slow import, after the check above

    with LLM(**engine) as llm:
        conversation = Conversation(llm, params, system)
        interactive = sys.stdin.isatty()
        if interactive:
            dim(HELP)
        for line in _lines():
            if not conversation.take(line):
                break
    if conversation.failed and not interactive:
        raise typer.Exit(1)


class Conversation:
    """The messages so far and the outputs; `take` handles one line of input."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.answers: list[RequestOutput] = []
        self.seconds = 0.0
        self.failed = False  # a message was not answered
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def take(self, line: str) -> bool:
        """Answers a message or runs a command; False ends the conversation."""
        text = line.strip()
        if text == "/exit":
            return False
        commands: dict[str, Callable[[], None]] = {"/reset": self.reset, "/stats": self.stats}
        if text in commands:
            commands[text]()
        elif text.startswith("/"):
            dim(f"Unknown command {text!r}.{nearest(text, [*commands, '/exit'])} {HELP}")
        elif text:
            self.answer(text)
        return True

    def answer(self, text: str) -> None:
        """Streams an answer. A message that cannot be served is removed, and the chat goes on."""
        self.messages.append({"role": "user", "content": text})
        started = time.perf_counter()
        try:
            output = print_stream(
                _stoppable(lambda: self.llm.chat(self.messages, self.params, stream=True))
            )
        except RequestError as error:
            self._refused(f"{error} /reset starts over.")
            return
        if output is None:  # stopped before the first token
            self.messages.pop()
            return
        if output.error is not None:
            self._refused(f"the answer was aborted: {output.error}")
            return
        self.seconds += time.perf_counter() - started
        self.answers.append(output)
        self.messages.append({"role": "assistant", "content": output.text})

    def _refused(self, message: str) -> None:
        self.messages.pop()
        self.failed = True
        print_error(message)

    def stats(self) -> None:
        dim(summary(self.answers, self.seconds) if self.answers else "No answer yet.")


def _stoppable(start: Callable[[], Any]) -> Iterator[RequestOutput]:
    """The outputs of `start()`. Ctrl-C stops between two outputs, never inside an engine step."""
    stopped: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    try:
        outputs = start()
        try:
            for output in outputs:
                yield output
                if stopped:
                    break
        finally:
            outputs.close()  # releases the request's slot and pages
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines of input. At the prompt, Ctrl-C only starts a new line."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 - gives `input` its line editing and history

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
