"""Prompts are answered in order, resumably, and by the engine; prompts of the splits differ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, ExecutorError, RequestError
from forerun.main import run as run_command
from forerun_train.data.records import DataError
from forerun_train.regenerate import (
    Answers,
    Regeneration,
    _in_order_of_end,
    read_prompts,
    regenerate,
)

GREEDY = SamplingParams(temperature=0, max_new_tokens=16)
LIMIT = 40  # characters of a prompt that the stand-in takes


class Echo:
    """Answers with the number of messages and the last one; "long" is cut off, "fail" fails."""

    def __init__(self) -> None:
        self.most, self._now, self._lock = 0, 0, threading.Lock()
        self.closed = False
        self.seeds: list[int | None] = []

    def close(self) -> None:
        self.closed = True

    def chat(self, messages: Sequence[Any], sampling_params: SamplingParams, *, tools: Any) -> Any:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.seeds.append(sampling_params.sampling_seed)
        time.sleep(0.002)
        with self._lock:
            self._now -= 1
        text = messages[-1]["content"] + (f" {len(tools)} tools" if tools else "")
        if len(text) > LIMIT:
            raise RequestError(f"the prompt has {len(text)} characters")
        kind = "length" if text == "long" else "stop"
        return SimpleNamespace(
            text=f"{len(messages)} {text}",
            output_ids=[1, 2, 3],
            finish_reason={"type": kind},
            error="out of memory" if text == "fail" else None,
        )


def prompts(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def run(data: Path, output: Path, llm: Any = None, sampling: SamplingParams = GREEDY) -> Any:
    found, _ = read_prompts(data)
    answers = Answers(output, Regeneration("t", sampling, {}, str(data)))
    try:
        return regenerate(llm or Echo(), found, answers, sampling, in_flight=8)
    finally:
        answers.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["id"])


def user(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


def test_turns_are_answered_in_order(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    data = prompts(
        tmp_path / "p.jsonl",
        [
            user("a", "b", id="1", topic="t"),
            user("long", "b", id="2"),
            {"messages": [system, *user("a")["messages"]], "id": "3"},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}],
             "id": "4"},
            user("a", id="5", tools=[{"type": "function", "function": {"name": "f"}}]),
        ],
    )  # fmt: skip
    counts = run(data, tmp_path / "o.jsonl")
    first, second, third, fourth, fifth = lines(tmp_path / "o.jsonl")
    assert [m["content"] for m in first["messages"]] == ["a", "1 a", "b", "3 b"]
    assert first["finish_reasons"] == ["stop", "stop"] and first["topic"] == "t"
    assert [m["content"] for m in second["messages"]] == ["long", "1 long"]
    assert second["truncated"] and "truncated" not in first
    assert [m["role"] for m in third["messages"]] == ["system", "user", "assistant"]
    assert [m["content"] for m in fourth["messages"]] == ["a", "1 a"]
    assert fifth["messages"][1]["content"] == "1 a 1 tools"
    assert fifth["tools"][0]["function"]["name"] == "f" and "tools" not in first
    assert (counts.answered, counts.tokens, counts.refused) == (5, 18, 0)


def test_many_are_asked_at_once_and_each_has_its_seed(tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", [user(f"{i}", id=i) for i in range(100)])
    llm = Echo()
    run(data, tmp_path / "o.jsonl", llm)
    assert 4 <= llm.most <= 8
    assert len(set(llm.seeds)) == 100
    again = Echo()
    run(data, tmp_path / "o2.jsonl", again)
    assert sorted(again.seeds) == sorted(llm.seeds)  # type: ignore[type-var]


def test_a_run_goes_on_behind_half_a_line(tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", [user(f"{i}") for i in range(30)])
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(data, whole)
    run(data, cut)
    text = cut.read_bytes()
    end = text.index(b"\n", len(text) // 2)
    kept = text[: end + 1].count(b"\n")
    cut.write_bytes(text[: end + 20])
    counts = run(data, cut)
    assert (counts.kept, counts.answered) == (kept, 30 - kept)
    assert lines(cut) == lines(whole)
    assert cut.read_bytes()[: end + 1] == text[: end + 1]
    assert run(data, cut).answered == 0
    more = prompts(tmp_path / "more.jsonl", [user(f"{i}") for i in range(29, -1, -1)] + [user("x")])
    assert run(more, cut).answered == 1  # prompts may be added and moved


def test_other_settings_are_refused(tmp_path: Path) -> None:
    data, output = prompts(tmp_path / "p.jsonl", [user("a")]), tmp_path / "o.jsonl"
    run(data, output)
    warm = SamplingParams(temperature=0.5, max_new_tokens=16)
    with pytest.raises(
        ConfigError, match=r"o\.jsonl was made with temperature 0\.0, not 0\.5; use"
    ):
        run(data, output, sampling=warm)
    with pytest.raises(ConfigError, match=r"was made with target 't', not 'u'"):
        Answers(output, Regeneration("u", GREEDY))
    sidecar = tmp_path / "o.jsonl.json"
    assert json.loads(sidecar.read_text())["sampling"]["max_new_tokens"] == 16
    for damaged in ("{", "[]", "{}"):
        sidecar.write_text(damaged)
        with pytest.raises(ConfigError, match=r"o\.jsonl\.json is damaged"):
            run(data, output)
    sidecar.unlink()
    with pytest.raises(ConfigError, match=r"o\.jsonl exists, and o\.jsonl\.json, which says"):
        run(data, output)
    assert len(lines(output)) == 1
    other = tmp_path / "other.jsonl"
    run(data, other)
    other.write_text('{"text": "not an answer"}\n')
    with pytest.raises(ConfigError, match=r"other\.jsonl:1: not a line of this command"):
        run(data, other)
    with pytest.raises(ConfigError, match="is a folder; name a JSONL file"):
        run(data, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(data, tmp_path / "file" / "o.jsonl")


def test_settings_that_decide_the_answers_stay(tmp_path: Path) -> None:
    """Of the engine: its weights and dtypes may not change, what only speed depends on may."""
    output = tmp_path / "o.jsonl"
    data = prompts(tmp_path / "p.jsonl", [user("a")])
    run(data, output)
    with pytest.raises(ConfigError, match=r"was made with quantization None, not 'int8'"):
        Answers(output, Regeneration("t", GREEDY, {"quantization": "int8"}))
    speed = {"dtype": "auto", "speculative_algorithm": "NGRAM", "max_total_tokens": 512}
    Answers(output, Regeneration("t", GREEDY, speed)).close()


def test_counts_that_make_no_answers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = prompts(tmp_path / "p.jsonl", [user("a")]), tmp_path / "o.jsonl"
    for flag, value in (("--max-errors", -1), ("--max-new-tokens", 0)):
        arguments = ["--data", str(data), "--output", str(output), flag, str(value)]
        assert run_command(["train", "regenerate", *arguments]) == 2
        assert f"error: {flag} must be >= {value + 1}, got {value}." in capsys.readouterr().err
    assert not output.exists()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    first = Answers(output, Regeneration("t", GREEDY))
    with pytest.raises(ConfigError, match=r"o\.jsonl is being written by another process"):
        Answers(output, Regeneration("t", GREEDY))
    first.close()
    Answers(output, Regeneration("t", GREEDY)).close()


def test_refused_prompts_do_not_stop_the_others(tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", [user("a"), user("b" * 50), user("c")])
    counts = run(data, tmp_path / "o.jsonl")
    assert (counts.answered, counts.refused) == (2, 1)
    assert counts.first_refusal == f"{data}:2: the prompt has 50 characters"
    failing = prompts(tmp_path / "f.jsonl", [user("a"), user("fail")])
    llm = Echo()
    with pytest.raises(ExecutorError, match="out of memory"):
        run(failing, tmp_path / "f-out.jsonl", llm)
    assert llm.closed  # so that nothing in flight is waited for


def test_prompts_that_cannot_be_told_apart(tmp_path: Path) -> None:
    found, _ = read_prompts(prompts(tmp_path / "a.jsonl", [user("a"), user("b"), user("a")]))
    assert len(found) == 2
    twice = prompts(tmp_path / "b.jsonl", [user("a", id=1), user("b", id=1)])
    with pytest.raises(DataError, match=r"b\.jsonl:2: id '1' is that of .*b\.jsonl:1 too"):
        read_prompts(twice)
    bad = prompts(tmp_path / "c.jsonl", [{"text": "a"}, user("a")])
    with pytest.raises(DataError, match=r"c\.jsonl:1: unknown form: needs 'messages'"):
        read_prompts(bad)
    found, skipped = read_prompts(bad, max_errors=1)
    assert (len(found), skipped.count) == (1, 1)
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(prompts(tmp_path / "d.jsonl", []))


def command(data: Path, output: Path, *more: str) -> list[str]:
    flags = ["--data", str(data), "--output", str(output), "--dtype", "float32", "--device", "cpu"]
    return [sys.executable, "-m", "forerun", "train", "regenerate", *flags, *more]


ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(sys.path),
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.exhaustive
def test_a_killed_command_goes_on_to_the_same_answers(tmp_path: Path) -> None:
    """Sampled, with a draft, killed by the system; each answer is that of `LLM.chat`."""
    data = prompts(tmp_path / "p.jsonl", [user(f"What is {i} + 4?", id=i) for i in range(60)])
    flags = ["--temperature", "0.8", "--max-new-tokens", "48", "--in-flight", "4"]
    flags += ["--speculative-algorithm", "NGRAM"]
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    process = subprocess.Popen(command(data, killed, *flags), env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (killed.exists() and killed.stat().st_size > 2000):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = killed.read_bytes().count(b"\n")
    assert 0 < before < 60, "killed too late to show anything"
    done = subprocess.run(
        command(data, killed, *flags), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{60 - before} conversations answered, {before} were there" in done.stderr.replace(
        "\n", " "
    )
    assert "tok/s" in done.stderr
    subprocess.run(command(data, whole, *flags), env=ENVIRONMENT, check=True)
    assert lines(killed) == lines(whole)
    with LLM(dtype="float32", device="cpu") as llm:
        found, _ = read_prompts(data)
        answers = Answers(tmp_path / "own.jsonl", Regeneration("t", GREEDY))
        params = SamplingParams(temperature=0.8, max_new_tokens=48)
        regenerate(llm, found, answers, params, in_flight=60)
        answers.close()
    assert lines(tmp_path / "own.jsonl") == lines(whole)


@pytest.mark.exhaustive
def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", [user("a")])
    for flags, message in (
        (["--in-flight", "0"], "--in-flight must be >= 1, got 0."),
        (["--temperature", "-1"], "temperature"),
    ):
        done = subprocess.run(
            command(data, tmp_path / "o.jsonl", *flags),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and message in done.stderr


def test_the_end_of_a_prompt_takes_as_long_whatever_is_in_flight() -> None:
    """Counted: Python's calls in the thread that submits prompts and books answers."""

    class Pool(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(fn(*args))
            return future

    def calls(ahead: int) -> int:
        count = 0

        def on_event(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        items = list(range(300))
        sys.setprofile(on_event)
        try:
            found = [each.result() for each in _in_order_of_end(Pool(1), abs, items, ahead)]
        finally:
            sys.setprofile(None)
        assert sorted(found) == items
        return count

    assert calls(100) < 1.2 * calls(2)
