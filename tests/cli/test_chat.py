"""`forerun chat`: what is kept, what is forgotten, and what stops an answer."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.cli.chat import Conversation
from forerun.core.errors import RequestError
from forerun.core.sampling_params import SamplingParams
from forerun.llm import RequestOutput
from tests.cli.support import needs_pair


class Model:
    """Answers with the words of `answer`, one more an output; notes what it was asked."""

    def __init__(self) -> None:
        self.answer: list[str] = ["fine,", " thanks"]
        self.refuse: str | None = None
        self.abort: str | None = None  # the reason that the last output gives
        self.ctrl_c_after: int | None = None
        self.asked: list[list[dict[str, str]]] = []
        self.closed = 0

    def chat(self, messages: Any, params: SamplingParams, *, stream: bool) -> Any:
        assert stream
        self.asked.append([dict(message) for message in messages])
        if self.refuse:
            raise RequestError(self.refuse)
        return self._stream()

    def _stream(self) -> Iterator[RequestOutput]:
        try:
            for end in range(1, len(self.answer) + 1):
                if self.ctrl_c_after == end:
                    os.kill(os.getpid(), signal.SIGINT)
                meta = {
                    "completion_tokens": end,
                    "spec_verify_ct": end,
                    "spec_num_proposed_drafts": 0,
                    "spec_correct_drafts_histogram": [end],
                }
                reason = {"type": "abort", "message": self.abort} if self.abort else None
                yield RequestOutput("".join(self.answer[:end]), [1] * end, reason, meta, [1])
        finally:
            self.closed += 1


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def conversation(model: Model) -> Conversation:
    return Conversation(model, SamplingParams(), system="Be brief.")  # type: ignore[arg-type]


def roles(messages: list[dict[str, str]]) -> str:
    return "".join(message["role"][0] for message in messages)


def test_the_history_is_sent_along(conversation, model, capsys) -> None:
    assert conversation.take("How are you?\n")
    assert capsys.readouterr().out == "fine, thanks\n"
    assert conversation.take("Good.")
    assert [roles(asked) for asked in model.asked] == ["su", "suau"]
    assert model.asked[1][2] == {"role": "assistant", "content": "fine, thanks"}


def test_reset_keeps_the_system_message(conversation, model) -> None:
    conversation.take("a")
    conversation.take("/reset")
    conversation.take("b")
    assert roles(model.asked[-1]) == "su"


def test_exit_ends_and_nothing_else_does(conversation, model) -> None:
    assert not conversation.take("/exit")
    assert conversation.take("/rset")
    assert conversation.take("   ")
    assert model.asked == []


def test_an_unknown_command_names_the_nearest(conversation, capsys) -> None:
    conversation.take("/rset")
    assert "Did you mean '/reset'?" in capsys.readouterr().err


def test_stats(conversation, capsys) -> None:
    conversation.take("/stats")
    assert "No answer yet." in capsys.readouterr().err
    conversation.take("a")
    conversation.take("b")
    capsys.readouterr()
    conversation.take("/stats")
    assert capsys.readouterr().err.startswith("4 tokens in ")


def test_a_refused_message_is_taken_back(conversation, model, capsys) -> None:
    conversation.take("a")
    model.refuse = "the prompt is longer than the context."
    assert conversation.take("b" * 100)
    err = capsys.readouterr().err
    assert err.startswith("forerun: error: the prompt is longer than the context.")
    assert len(err.splitlines()) == 1
    model.refuse = None
    conversation.take("c")
    assert [m["content"] for m in model.asked[-1][1:]] == ["a", "fine, thanks", "c"]


def test_ctrl_c_stops_the_answer_and_not_the_program(conversation, model, capsys) -> None:
    model.answer, model.ctrl_c_after = ["one ", "two ", "three ", "four"], 2
    handler = signal.getsignal(signal.SIGINT)
    assert conversation.take("count")
    assert capsys.readouterr().out.startswith("one two ")
    assert "three" not in capsys.readouterr().out
    assert model.closed == 1  # the request's slot and pages went back
    assert signal.getsignal(signal.SIGINT) is handler
    model.ctrl_c_after = None
    assert conversation.take("again")
    assert model.asked[-1][2] == {"role": "assistant", "content": "one two "}


@needs_pair
def test_over_a_pipe(forerun, monkeypatch) -> None:
    long = "and " * 5000
    lines = ["What is 2 plus 3?", long, "/reset", "/stats", "What is 4 plus 5?", "/exit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    result = forerun("chat", "--temperature", "0", "--max-new-tokens", "16")
    assert result.code == 1  # one message was refused
    assert len(result.out.strip().splitlines()) >= 2
    errors = [line for line in result.err.splitlines() if line.startswith("forerun: error:")]
    assert len(errors) == 1
    assert "context" in errors[0]
    assert "tok/s" in result.err


def test_bad_flags(forerun) -> None:
    assert "--n must be 1" in forerun("chat", "--n", "2").error
    assert "--max-new-tokens must be at least 1" in forerun("chat", "--max-new-tokens", "0").error


def test_an_aborted_answer_is_an_error_and_the_chat_goes_on(conversation, model, capsys) -> None:
    model.abort = "NaN logits"
    assert conversation.take("one")
    out, err = capsys.readouterr()
    assert out == "fine, thanks\n"
    assert err == "forerun: error: the answer was aborted: NaN logits\n"
    assert conversation.failed
    model.abort = None
    conversation.take("two")
    assert roles(model.asked[-1]) == "su"
    assert capsys.readouterr().err == ""
