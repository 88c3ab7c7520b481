"""Every drafter gives the answers of plain decoding over HTTP, whatever else is in the batch.

Grammars, penalties, log-probabilities, seeds and ends of three APIs, streamed and not, are sent at
once to a server that speculates. The answers are those of a server that decodes one request at a
time without drafts.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.server.equality import TEXTS, Question, answer, compare, questions
from tests.server.support import ENGINE, LiveServer, flags

pytest.importorskip("xgrammar")

Answered = list[tuple[Question, Any]]
Cell = tuple[str | None, bool]  # algorithm, overlap

CLIENTS = 24  # requests in flight: 8 of them run, the others join as these end
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "speculative_adaptive": False,  # drafts in every step, whatever they bring
    "constrained_json_disable_any_whitespace": True,  # so that JSON ends
    "tool_call_parser": "hermes",
}
# One request at a time, nothing cached or captured.
PLAIN = {
    **COMMON,
    "max_running_requests": 1,
    "max_total_tokens": 1024,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}
OVERLAP = {**COMMON, "max_running_requests": 8, "max_total_tokens": 8192}
# Prompts are prefilled in pieces, and requests are preempted.
SYNC = {
    **COMMON,
    "max_running_requests": 8,
    "max_total_tokens": 320,
    "page_size": 16,
    "chunked_prefill_size": 24,
    "disable_overlap_schedule": True,
}
ALGORITHMS: dict[str | None, dict[str, Any]] = {
    None: {},
    "DFLASH": {},
    "EAGLE3": {},
    "NGRAM": {},
    "SUFFIX": {},
    "DFLASH,SUFFIX": {"speculative_suffix_per_key": True},
    "DDTREE": {"speculative_ddtree_budget": 12},
}
CELLS: list[Cell] = list(product(ALGORITHMS, (True, False)))


def start(cell: Cell, **settings: Any) -> LiveServer:
    algorithm, overlap = cell
    drafts = {} if algorithm is None else {"speculative_algorithm": algorithm}
    sizes = OVERLAP if overlap else SYNC
    return LiveServer(*flags(**{**sizes, **drafts, **ALGORITHMS[algorithm], **settings}))


def ask(live: LiveServer, asked: list[tuple[Question, bool]]) -> list[Any]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda each: answer(live.http, *each), asked))


def answered(live: LiveServer, asked: list[Question]) -> Answered:
    answers = ask(live, [(question, False) for question in asked])
    return list(zip(asked, answers, strict=True))


@cache
def reference() -> Answered:
    with LiveServer(*flags(**PLAIN)) as live:
        return answered(live, questions(2))


def hold(live: LiveServer, want: Answered) -> None:
    """All of them at once and in another order, streamed and not."""
    info = live.get("/server_info")
    algorithm, sync = info["speculative_algorithm"], info["disable_overlap_schedule"]
    asked = [(at, stream) for at in range(len(want)) for stream in (False, True)]
    random.Random(0).shuffle(asked)
    answers = ask(live, [(want[at][0], stream) for at, stream in asked])
    for (at, stream), got in zip(asked, answers, strict=True):
        question, whole = want[at]
        compare(got, whole, f"{algorithm}, {sync=}, {stream=}: {question.name}")
    live.wait_idle()
    if algorithm is not None:
        state = live.get("/server_info")["internal_states"][0]
        assert state["spec_decode_num_accepted_tokens"] > len(asked)


@pytest.mark.exhaustive
def test_some_pairs_of_options(server: LiveServer) -> None:
    assert ENGINE["speculative_algorithm"] == "DFLASH"
    with LiveServer(*flags(**PLAIN)) as live:
        want = answered(live, questions(2)[::6])
    hold(server, want)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_pairs_of_options_with_every_drafter(cell: Cell) -> None:
    """Every pair with a third of the drafters; on a GPU every triple with each of them."""
    want = reference()[CELLS.index(cell) % 3 :: 3]
    with start(cell) as live:
        hold(live, want)


@pytest.mark.exhaustive
def test_keys_share_no_texts_for_drafts(tmp_path: Path) -> None:
    """A key's first request is as slow as on a new server, and its second one is fast."""
    keys = tmp_path / "keys"
    keys.write_text("alice a-key\nbob b-key\n")
    drafts = {"speculative_algorithm": "SUFFIX", "speculative_suffix_per_key": True}
    settings = {**OVERLAP, **drafts, "disable_radix_cache": True, "api_key_file": str(keys)}
    body = {"text": TEXTS[2], "sampling_params": {"temperature": 0, "max_new_tokens": 60}}

    def lengths(live: LiveServer, key: str) -> list[int]:
        headers = {"Authorization": f"Bearer {key}"}
        answered = live.http.post("/generate", json=body, headers=headers).raise_for_status()
        found: list[int] = answered.json()["meta_info"]["spec_accept_lengths"]
        return found

    with LiveServer(*flags(**settings), key="a-key") as live:
        of_alice = [lengths(live, "a-key") for _ in range(2)]
        of_bob = [lengths(live, "b-key") for _ in range(2)]
    assert of_alice == of_bob and len(of_bob[0]) > 2 * len(of_bob[1])


@pytest.mark.gpu
def test_triples_of_options_on_a_gpu() -> None:
    """With CUDA graphs. All servers start at once: that takes most of the time."""
    gpu = {"device": "cuda", "cuda_graph_max_bs": 8}
    with ExitStack() as stack:
        plain = LiveServer(*flags(**{**PLAIN, "device": "cuda"}))
        lives = [start(cell, **gpu) for cell in CELLS]
        for live in (plain, *lives):
            stack.callback(live.process.kill)  # those that were never entered
        want = answered(stack.enter_context(plain), questions(3))
        for live in lives:
            stack.enter_context(live)
        stack.callback(end, lives)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda live: hold(live, want), lives))


def end(lives: list[LiveServer]) -> None:
    """Begins to end all of them."""
    for live in lives:
        live.process.terminate()
