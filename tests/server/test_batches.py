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

import openai
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.server.app import requests_app
from forerun.server.batches import runner
from forerun.server.batches.lines import read_lines
from forerun.server.batches.offline import Files, _counts, _opened
from forerun.server.batches.results import read_results
from forerun.server.batches.runner import Answered, Client, Runner
from tests.cli.support import Result
from tests.server.scripted import Scripted
from tests.server.support import QUESTION, LiveServer, flags, wait_for
from tests.server.test_tools import PLAIN

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = {"messages": [{"role": "user", "content": "Is it warm?"}]}
FORM: Any = {"headers": {"Content-Type": "multipart/form-data"}}
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
    at_once, most = 0, 0
    calls: dict[str, int] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal at_once, most
        prompt = json.loads((await receive())["body"])["prompt"]
        at_once, calls[prompt] = at_once + 1, calls.get(prompt, 0) + 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        status = 503 if prompt == "dead" else (429, 503, 200)[calls[prompt] - 1]
        await Response(b"{}", status)(scope, receive, send)

    lines = [line(str(n), {"prompt": str(n)}, COMPLETIONS) for n in range(20)]
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
    output.write_bytes(jsonl(first) + b'{"id":"batch_req_1","cus')
    with _opened(output) as file:
        done = read_results(file, output)
        with pytest.raises(ConfigError, match="being written by another process"):
            _opened(output)
    assert output.read_bytes() == jsonl(first)
    counts = _counts(files, done, 10_000)
    assert (counts.total, counts.completed, counts.failed) == (4, 1, 0)
    for wrong in ({**first, "custom_id": "x"}, {**first, "id": "batch_req_9"}):
        output.write_bytes(jsonl(wrong))
        with _opened(output) as file, pytest.raises(ConfigError, match="of another input"):
            _counts(files, read_results(file, output), 10_000)
    for others in (b"my notes\n", b"my notes", jsonl(first) + b"my notes", jsonl(line("a"))[:-1]):
        output.write_bytes(others)
        with _opened(output) as file, pytest.raises(ConfigError, match="no result of a batch"):
            read_results(file, output)
        assert output.read_bytes() == others
    output.write_bytes(jsonl(first) + b'{"id":"ba')
    with _opened(output) as file:
        assert set(read_results(file, output)) == {2}
    assert output.read_bytes() == jsonl(first)
    with pytest.raises(ConfigError, match="cannot be written"):
        _opened(tmp_path / "no" / "x")
    with pytest.raises(ConfigError, match="is not a file"):
        _opened(Path("/dev/null"))
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


def use(work: Callable[[openai.AsyncOpenAI], Any], *scripts: str, **settings: Any) -> Scripted:
    scripted = Scripted(PLAIN, *scripts, **settings)
    scripted.run(work)
    return scripted


async def batch_of(client: openai.AsyncOpenAI, source: bytes, **more: Any) -> Any:
    """A batch that has ended."""
    file = await client.files.create(file=("in.jsonl", source), purpose="batch")
    assert (file.bytes, file.filename, file.status) == (len(source), "in.jsonl", "processed")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more
    )
    while batch.status in ("validating", "in_progress"):
        assert batch.output_file_id is batch.error_file_id is None  # they are not complete
        await asyncio.sleep(0.01)
        batch = await client.batches.retrieve(batch.id)
    return batch


def test_batches_over_http(tmp_path: Path) -> None:
    source = jsonl(line("a"), "{", line("b", {"messages": []}), line("c", url=COMPLETIONS))

    async def work(client: openai.AsyncOpenAI) -> None:
        batch = await batch_of(client, source, metadata={"x": "y"})
        assert (batch.status, batch.metadata) == ("completed", {"x": "y"})
        assert batch.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
        output = results_of((await client.files.content(batch.output_file_id)).content)
        errors = results_of((await client.files.content(batch.error_file_id)).content)
        (answer,) = output.values()
        assert answer["custom_id"] == "a"
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
        assert errors["batch_req_3"]["response"]["status_code"] == 400
        assert "not valid JSON" in errors["batch_req_2"]["error"]["message"]
        assert "the batch is for" in errors["batch_req_4"]["error"]["message"]
        assert [each.id async for each in client.batches.list()] == [batch.id]
        sizes = {each.filename: each.bytes async for each in client.files.list()}
        assert len(sizes) == 3 and 0 not in sizes.values()
        (sent,) = [each.id async for each in client.files.list(purpose="batch")]
        assert sent == batch.input_file_id
        first, *_ = [each.id async for each in client.files.list(order="asc")]
        assert first == batch.input_file_id
        assert (await client.batches.cancel(batch.id)).status == "completed"
        assert (await client.files.delete(batch.input_file_id)).deleted
        for call in (
            client.files.retrieve(batch.input_file_id),
            client.files.content("file-" + "0" * 32),
            client.files.retrieve("../all"),
            client.batches.retrieve("batch_x"),
            client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call

    scripted = use(work, "Yes.", batch_folder=str(tmp_path / "b"))
    assert len(scripted.engine.prompts) == 1


def test_batches_are_of_their_key_and_bounded(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice a-key\nbob b-key\n")

    async def work(client: openai.AsyncOpenAI) -> None:
        alice, bob = client.with_options(api_key="a-key"), client.with_options(api_key="b-key")
        batch = await batch_of(alice, jsonl(line("a")))
        assert (batch.status, batch.error_file_id) == ("completed", None)
        for call in (
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.files.retrieve(batch.input_file_id),
            bob.files.content(batch.output_file_id),
            bob.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        for _ in range(2):
            await alice.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="4 of 4 are there"):
            await alice.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="all have 3000 bytes"):
            await bob.files.create(file=b"x" * 3000, purpose="batch")
        assert (await batch_of(bob, jsonl(line("a")))).status == "completed"

    settings = {"api_key_file": str(keys), "max_files": 4, "max_files_bytes": 2000}
    scripted = use(work, "Yes.", "No.", batch_folder=str(tmp_path / "b"), **settings)
    assert scripted.engine.tenants == [1, 2]


def test_a_batch_without_a_folder_or_a_purpose(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="start it with --batch-folder"):
            await client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="start it with --batch-folder"):
            await client.batches.list()

    use(work)

    async def purpose(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
            await client.files.create(file=b"x", purpose="fine-tune")
        for form, files, words in (
            ({}, {"file": b"x"}, "purpose is missing; the body is multipart/form-data"),
            ({"purpose": "batch"}, {"other": b"x"}, "file is missing"),
            ({"purpose": "batch", "file": "x"}, {"other": b"x"}, "file must be a file"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                await client.post("/files", cast_to=object, body=form, files=files, options=FORM)

    use(purpose, batch_folder=str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"batch_folder .* cannot be written"):
        Scripted(PLAIN, batch_folder=str(tmp_path / "file"))


@pytest.mark.exhaustive
def test_batches_of_a_live_server_go_on(llm: LLM, tmp_path: Path) -> None:
    """They are cancelled, or go on when a server starts again."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 150}
    source = jsonl(*(line(str(n), {**body, "seed": n}) for n in range(30)))
    settings = flags(**ENGINE, batch_folder=tmp_path / "b")
    ask: Any = {"endpoint": CHAT, "completion_window": "24h"}
    with LiveServer(*settings) as server:
        client = server.client()
        file = client.files.create(file=("a", source), purpose="batch")
        first = client.batches.create(input_file_id=file.id, **ask)
        second = client.batches.create(input_file_id=file.id, **ask)
        assert client.batches.cancel(second.id).status == "cancelled"
        with pytest.raises(openai.ConflictError, match="needs this file"):
            client.with_options(max_retries=0).files.delete(file.id)
        wait_for(lambda: client.batches.retrieve(first.id).request_counts.completed > 2, 60)  # type: ignore[union-attr]
    with LiveServer(*settings) as server:
        client = server.client()
        wait_for(lambda: client.batches.retrieve(first.id).status == "completed", 120)
        batch = client.batches.retrieve(first.id)
        assert client.batches.retrieve(second.id).status == "cancelled"
        found = results_of(client.files.content(batch.output_file_id or "").content)
        assert len(found) == 30
        want = llm.chat(body["messages"], {"sampling_seed": 7, "max_new_tokens": 150})
        answer = found["batch_req_8"]["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == want.text
        server.wait_idle()
