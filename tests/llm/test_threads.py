"""One engine thread, callers in any other: what they get, and what reaches whom when it fails."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import EngineClosedError, ForerunError
from tests.cli.support import needs_pair
from tests.golden_engine import CASES, golden_llm

THREADS = 8
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 400}
PROMPTS = [c["prompt"] for c in CASES]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with golden_llm("DFLASH", context_length=600, max_running_requests=6) as made:
        yield made
        made.engine.check()


def kinds(thread: int) -> list[dict[str, Any]]:
    """Requests of a thread: greedy, sampled, with and without drafts."""
    return [
        {**GREEDY, "max_new_tokens": 10 + thread},
        {**GREEDY, "temperature": 1.0, "sampling_seed": thread},
        {**GREEDY, "speculative": False},
    ]


@pytest.mark.covering(0)
@pytest.mark.parametrize("algorithm", ["DFLASH", None])
@pytest.mark.parametrize("overlap_depth", [1, 0], ids=["overlap", "sync"])
def test_threads_get_the_outputs_of_sequential_calls(
    algorithm: str | None, overlap_depth: int
) -> None:
    with golden_llm(algorithm, overlap_depth=overlap_depth, max_running_requests=6) as llm:
        asked = [(PROMPTS[t % len(PROMPTS)], kind) for t in range(THREADS) for kind in kinds(t)]
        want = [llm.generate(input_ids=p, sampling_params=kind).output_ids for p, kind in asked]
        start = threading.Barrier(THREADS)

        def work(thread: int) -> list[list[int]]:
            start.wait()
            own = asked[3 * thread : 3 * thread + 3]
            if thread % 2:
                return [llm.generate(input_ids=p, sampling_params=k).output_ids for p, k in own]
            streams = [llm.generate(input_ids=p, sampling_params=k, stream=True) for p, k in own]
            return [list(stream)[-1].output_ids for stream in streams]

        for _ in range(2):
            with ThreadPoolExecutor(THREADS) as pool:
                got = [ids for out in pool.map(work, range(THREADS)) for ids in out]
            assert got == want
        steps = llm.stats()["decode_steps"]
        llm.engine.check()
    alone = sum(len(ids) - 1 for ids in want)
    assert steps < 3 * alone  # they ran together: less than three times in sequence


def test_text_that_cannot_be_made_ends_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with golden_llm() as llm:
        want = llm.generate(input_ids=PROMPTS[0], sampling_params=LONG).output_ids
        other = llm.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
        next(other)

        class Broken:
            def decode(self, token_ids: list[int], **options: bool) -> str:
                raise ZeroDivisionError("a broken tokenizer")

        monkeypatch.setattr(llm, "tokenizer", Broken())
        with pytest.raises(ZeroDivisionError, match="a broken tokenizer"):
            llm.generate(input_ids=[[1], [2]], sampling_params={"stop": "x", "max_new_tokens": 9})
        assert list(other)[-1].output_ids == want
        assert not llm.engine._requests
        llm.engine.check()


def test_a_stream_closed_by_another_thread_ends(llm: LLM) -> None:
    stream = llm.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
    outputs: list[Any] = []
    reader = threading.Thread(target=lambda: outputs.extend(stream))
    reader.start()
    while not outputs:
        time.sleep(0.001)
    stream.close()
    reader.join(timeout=30)
    assert not reader.is_alive() and not outputs[-1].finished
    assert not llm.engine._requests
    assert next(stream, None) is None
    stream.close()


def test_a_forgotten_stream_aborts_its_requests(llm: LLM) -> None:
    stream = llm.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
    next(stream)
    del stream
    gc.collect()
    llm.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)  # comes after it in the queue
    assert not llm.engine._requests


def test_the_thread_sleeps_when_idle(llm: LLM) -> None:
    llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_what_a_step_raises_reaches_every_caller_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY).output_ids
    streams = [llm.generate(input_ids=p, sampling_params=LONG, stream=True) for p in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    with monkeypatch.context() as broken:

        def launch(plan: object) -> None:
            raise ZeroDivisionError("a broken device")

        broken.setattr(llm.engine.executor, "launch", launch)
        for stream in streams:
            with pytest.raises(ZeroDivisionError, match="a broken device"):
                list(stream)
            assert list(stream) == []
        with pytest.raises(ZeroDivisionError):
            llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert not llm.engine._requests
    assert llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY).output_ids == want


def test_a_closed_llm_raises() -> None:
    llm = golden_llm()
    stream = llm.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
    unread = llm.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
    next(stream)
    waiting: list[Any] = []
    caller = threading.Thread(
        target=lambda: waiting.append(llm.generate(input_ids=PROMPTS[1], sampling_params=LONG))
    )
    caller.start()
    while len(llm.engine._requests) < 2:
        time.sleep(0.001)
    llm.close()
    llm.close()
    caller.join(timeout=30)
    reason = {"type": "abort", "message": "the engine was closed"}
    assert list(stream)[-1].finish_reason == waiting[0].finish_reason == reason
    llm.engine.check()
    for call in (
        lambda: llm.generate("hello"),
        lambda: llm.generate(input_ids=[1]),
        lambda: llm.chat([{"role": "user", "content": "hello"}]),
        lambda: llm.stats(),
        lambda: next(unread),
    ):
        with pytest.raises(EngineClosedError, match="was closed"):
            call()
    assert issubclass(EngineClosedError, ForerunError)


def test_a_forgotten_llm_ends_its_thread() -> None:
    llm = golden_llm()
    thread = llm._loop._thread
    stream = llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, stream=True)
    del llm
    assert list(stream)[-1].finished  # a stream keeps it
    del stream
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.exhaustive
def test_python_ends_while_a_stream_runs() -> None:
    """Without a crash, a hang, or a word."""
    code = (
        "from tests.golden_engine import *\n"
        "llm = golden_llm()\n"
        f"params = {LONG}\n"
        "stream = llm.generate(input_ids=[1], sampling_params=params, stream=True)\n"
        "next(stream)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_pair
@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ["DFLASH", None])
def test_threads_get_the_texts_of_sequential_calls(algorithm: str | None) -> None:
    asked = [
        (f"Tom has {n} apples and buys {n + 3} more. How many apples does he have?", stop)
        for n, stop in zip(
            range(5, 13), [None, "apples.", None, "=", "####", None, "ha", "5"], strict=True
        )
    ]
    with LLM(dtype="float32", device="cpu", speculative_algorithm=algorithm) as llm:

        def answer(asked: tuple[str, str | None], stream: bool = False) -> tuple[str, str]:
            question, stop = asked
            params = {"temperature": 0.0, "max_new_tokens": 40, "stop": stop}
            out = llm.chat([{"role": "user", "content": question}], params, stream=stream)
            out = list(out)[-1] if stream else out
            return out.text, out.finish_reason

        want = [answer(one) for one in asked]
        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(answer, asked)) == want
            assert list(pool.map(answer, asked, [True] * THREADS)) == want
        llm.engine.check()


@pytest.mark.exhaustive
@needs_pair
@pytest.mark.parametrize("algorithm", ["DFLASH", None])
def test_streams_hold_back_what_may_be_a_stop_string(algorithm: str | None) -> None:
    question = "Anna has 154 marbles. She gives 132 to Ben. How many marbles are left?"
    messages = [{"role": "user", "content": question}]
    greedy = {"temperature": 0.0, "max_new_tokens": 64}
    with LLM(dtype="float32", device="cpu", speculative_algorithm=algorithm) as llm:
        text = llm.chat(messages, greedy).text
        for begin, end in ((5, 12), (10, 40), (3, 50), (20, 21)):
            params = {**greedy, "stop": ["not in it", text[begin:end]]}
            whole = llm.chat(messages, params)
            parts = list(llm.chat(messages, params, stream=True))
            assert whole.text == parts[-1].text == text[: text.find(text[begin:end])]
            assert whole.finish_reason == {"type": "stop", "matched": text[begin:end]}
            assert whole.output_ids == parts[-1].output_ids
            for before, after in pairwise(parts):
                assert after.text.startswith(before.text)
                assert after.output_ids[: len(before.output_ids)] == before.output_ids
            for part in parts:
                info = part.meta_info
                assert info["completion_tokens"] == len(part.output_ids)
                histogram = info["spec_correct_drafts_histogram"]
                assert sum(histogram) == info["spec_verify_ct"] == len(info["spec_accept_lengths"])
                assert (
                    sum(i * n for i, n in enumerate(histogram)) == info["spec_num_correct_drafts"]
                )
                assert max(len(part.output_ids) - 1, 0) == sum(info["spec_accept_lengths"])
        llm.engine.check()
