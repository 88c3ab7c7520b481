"""Batches: lines in, results out; resumed after a kill; over HTTP with the `openai` client."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.server.app import requests_app
from forerun.server.batches import runner
from forerun.server.batches.lines import read_lines
from forerun.server.batches.offline import Files, _counts, _opened, _results
from forerun.server.batches.runner import Answered, Client, Runner
from tests.cli.support import Result
from tests.server.scripted import Scripted
from tests.server.support import QUESTION, flags, wait_for
from tests.server.test_tools import PLAIN

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = {"messages": [{"role": "user", "content": "Is it warm?"}]}
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_running_requests": 4}


def line(custom_id: str, body: Any = ASK, url: str = CHAT, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


def jsonl(*values: Any) -> bytes:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
    return "".join(f"{text}\n" for text in texts).encode()


def results_of(output: bytes) -> dict[str, dict[str, Any]]:
    """The results by id."""
    values = [json.loads(each) for each in output.splitlines()]
    assert len({value["id"] for value in values}) == len(values)
    for value in values:
        assert set(value) == {"id", "custom_id", "response", "error"}
        assert (value["response"] is None) != (value["error"] is None)
    return {value["id"]: value for value in values}


def run(made: Runner, source: bytes) -> dict[str, dict[str, Any]]:
    answers: list[Answered] = []
    lines = read_lines(io.BytesIO(source), 10_000)
    asyncio.run(made.run(lines, answers.append))
    found = results_of(b"".join(answer.output for answer in answers))
    for answer in answers:
        response = json.loads(answer.output)["response"]
        assert answer.completed == (response is not None and response["status_code"] == 200)
    return found


BAD: list[tuple[Any, str]] = [
    ("{", "not valid JSON"),
    ("[1]", "not a JSON object"),
    ({"url": CHAT, "body": ASK}, "its custom_id must be a text"),
    (line(""), "its custom_id must be a text"),
    ('{"custom_id": "\\ud800"}', "lone surrogate"),
    (line("first"), "that of an earlier line"),
    (line("a", method="GET"), "its method must be POST, got 'GET'"),
    (line("a", url="/v1/chat/completion"), "Did you mean '/v1/chat/completions'"),
    (line("a", url=["x"]), "its url must be one of"),
    (line("a", body=None), "its body must be an object"),
    (line("a", body={**ASK, "stream": True}), "stream is set"),
    (line("a", body={"input": "x", "background": True}, url=RESPONSES), "background is set"),
    (line("a", body={"prompt": "x" * 10_000}), "more than 10000 bytes"),
    ("[" * 9000, "not valid JSON"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_line_costs_no_other(bad: Any, words: str) -> None:
    scripted = Scripted(PLAIN, "Yes.", "No.")
    app = requests_app(scripted.service)
    source = jsonl(line("first"), bad, "", line("last"))
    found = run(Runner(app, Client("x"), width=1), source)
    assert [found[f"batch_req_{n}"]["response"]["status_code"] for n in (1, 4)] == [200, 200]
    error = found["batch_req_2"]["error"]
    assert error["code"] == "invalid_line"
    assert words in error["message"] and "Line 2 is not a request" in error["message"]
    assert len(found) == 3


def test_requests_that_are_refused_have_their_status() -> None:
    scripted = Scripted(PLAIN, "Yes.", "No.", "So.")
    source = jsonl(
        line("a", {**ASK, "model": "gpt-5"}),
        line("b", {"messages": []}),
        line("c"),
        line("d", {"prompt": "x"}, COMPLETIONS),
        line("e", {"input": "x"}, RESPONSES),
    )
    found = run(Runner(requests_app(scripted.service), Client("x"), width=1), source)
    by_id = {value["custom_id"]: value["response"] for value in found.values()}
    assert {name: response["status_code"] for name, response in by_id.items()} == {
        "a": 404, "b": 400, "c": 200, "d": 200, "e": 200,
    }  # fmt: skip
    assert by_id["a"]["body"]["error"]["code"] == "model_not_found"
    assert by_id["c"]["body"]["choices"][0]["message"]["content"] == "Yes."
    assert by_id["d"]["body"]["choices"][0]["text"] == "No."
    assert by_id["e"]["body"]["store"] is False


def test_as_many_as_the_width_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is busy, or whose engine starts again, is asked again."""
    monkeypatch.setattr(runner, "WAIT_SECONDS", 0.001)
    at_once, most, calls = 0, 0, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal at_once, most, calls
        body = json.loads((await receive())["body"])
        at_once, calls = at_once + 1, calls + 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        status = 503 if body["prompt"] == "dead" else (429, 503, 200)[calls % 3]
        await Response(b"{}", status)(scope, receive, send)

    lines = [line(str(n), {"prompt": "x"}, COMPLETIONS) for n in range(20)]
    found = run(Runner(app, Client("x"), 3), jsonl(*lines, line("d", {"prompt": "dead"})))
    assert most == 3 and len(found) == 21
    status = {value["custom_id"]: value["response"]["status_code"] for value in found.values()}
    assert status.pop("d") == 503
    assert set(status.values()) == {200}


def test_an_output_goes_on(tmp_path: Path) -> None:
    """What a kill has cut off is removed; results of another input are refused."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(line("a"), line("b"), "{", line("c")))
    files = Files(source, output)
    ok = {"status_code": 200, "request_id": "r", "body": {}}
    first = {"id": "batch_req_2", "custom_id": "b", "response": ok, "error": None}
    output.write_bytes(jsonl(first) + b'{"id": "batch_req_1", "cus')
    with _opened(output) as file:
        done = _results(file, output)
        with pytest.raises(ConfigError, match="being written by another process"):
            _opened(output)
    assert output.read_bytes() == jsonl(first)
    counts = _counts(files, done, 10_000)
    assert (counts.total, counts.completed, counts.failed) == (4, 1, 0)
    for wrong in ({**first, "custom_id": "x"}, {**first, "id": "batch_req_9"}):
        output.write_bytes(jsonl(wrong))
        with _opened(output) as file, pytest.raises(ConfigError, match="of another input"):
            _counts(files, _results(file, output), 10_000)
    output.write_text("my notes\n")
    with _opened(output) as file, pytest.raises(ConfigError, match="no result of a batch"):
        _results(file, output)
    assert output.read_text() == "my notes\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        _opened(tmp_path / "no" / "x")
    source.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="is empty"):
        _counts(files, {}, 10_000)


def test_an_input_that_is_none(forerun: Callable[..., Result], tmp_path: Path) -> None:
    done = forerun("batch", str(tmp_path / "no"), "--output", str(tmp_path / "out"))
    assert done.code == 2 and "is not a file" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.exhaustive
def test_a_killed_batch_goes_on(llm: LLM, tmp_path: Path) -> None:
    """All requests are answered once, with the engine's own texts."""
    count = 24
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 150}
    lines = [line(str(n), {**body, "seed": n}) for n in range(count)]
    source.write_bytes(jsonl(*lines, "{"))
    command = [
        *(sys.executable, "-m", "forerun", "batch", str(source), "--output", str(output)),
        *flags(**ENGINE, speculative_algorithm="DFLASH"),
    ]
    process = subprocess.Popen(command, start_new_session=True)
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3, 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = output.read_bytes().count(b"\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # a line is bad
    assert f"{count} of {count + 1} requests answered, 1 errors" in done.stderr
    found = results_of(output.read_bytes())
    assert 3 <= begun < len(found) == count + 1
    for n in range(count):
        response = found[f"batch_req_{n + 1}"]["response"]
        want = llm.chat(body["messages"], {"sampling_seed": n, "max_new_tokens": 150})
        assert response["body"]["choices"][0]["message"]["content"] == want.text
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and results_of(output.read_bytes()) == found
