"""The equality matrix: under all conditions, every algorithm gives the output of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.kernels.cpu import library
from tests import property_examples
from tests.engine_runs import run_together
from tests.golden_engine import CASES, golden_llm
from tests.support_cells import passed

NEW = 20
# Of algorithms that know the texts of the runs before: few enough steps could preempt nothing.
WIDTHS: dict[str | None, dict[str, Any]] = {
    "SUFFIX": {"speculative_num_draft_tokens": 5},
    "DFLASH,SUFFIX": {"speculative_num_draft_tokens": 5, "speculative_dflash_block_size": 4},
}
# How the target computes, as settings. Only float32 is near enough to equal without our kernels.
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}


@cache
def prompts(page_size: int, tight: bool) -> list[list[int]]:
    """Five prompts, three of which share a prefix of some pages (if tight, of less than a page)."""
    texts = sorted((c["prompt"] for c in CASES), key=len, reverse=True)
    stem = (texts[0] + texts[1][1:] + texts[2][1:] + texts[3][1:])[:400]
    lengths = (240, 238, 239) if tight else (300, 280, 297)
    if page_size < 256:
        lengths = (70, 50, 67)
    return [*(stem[:length] for length in lengths), texts[-1], texts[-2]]


def params(kind: dict[str, Any], index: int) -> dict[str, Any]:
    seed = {} if kind is GREEDY else {"sampling_seed": 100 + index}
    return {**kind, **seed, "max_new_tokens": NEW, "ignore_eos": True}


def batches(size: int) -> list[list[bool]]:
    """Which requests are sampled: none and all; without exhaustive tests, some in one batch."""
    if property_examples.quick:
        return [[i % 2 == 1 for i in range(size)]]
    return [[False] * size, [True] * size]


@cache
def reference(page_size: int, tight: bool, sampled: bool, form: str = "float32") -> list[list[int]]:
    """Plain decoding, one prompt at a time, without prefix cache."""
    kind = SEEDED if sampled else GREEDY
    with golden_llm(disable_radix_cache=True, **FORMS[form]) as llm:
        return [
            llm.generate(input_ids=p, sampling_params=params(kind, i)).output_ids
            for i, p in enumerate(prompts(page_size, tight))
        ]


@pytest.fixture(params=[False, True], ids=["roomy", "tight"])
def tight(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "NGRAM", "SUFFIX", "DFLASH,SUFFIX"])
def test_output_equals_plain_decoding(
    algorithm: str | None,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    tight: bool,
    form: str,
) -> None:
    if form != "float32" and library.library() is None:
        pytest.skip("without our kernels texts part at near ties")
    settings = {**WIDTHS.get(algorithm, {}), **FORMS[form]}
    wanted = partial(reference, form=form)
    hold(algorithm, page_size, chunk, overlap_depth, tight, wanted, **settings)


def hold(
    algorithm: str | None,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    tight: bool,
    wanted: Callable[[int, bool, bool], list[list[int]]] = reference,
    **settings: Any,
) -> None:
    """One cell of the matrix. `wanted`: output by page size, tight, sampled."""
    settings |= {"page_size": page_size, "chunked_prefill_size": chunk}
    if tight:  # hardly more pages than one request needs
        settings["max_total_tokens"] = {1: 120, 16: 128, 256: 1280}[page_size]
    with golden_llm(algorithm, overlap_depth=overlap_depth, **settings) as llm:
        preempted = 0
        asked = prompts(page_size, tight)
        wants = [wanted(page_size, tight, sampled) for sampled in (False, True)]
        for sampled in batches(len(asked)):
            kinds = [params(SEEDED if each else GREEDY, i) for i, each in enumerate(sampled)]
            want = [wants[each][i] for i, each in enumerate(sampled)]
            llm.engine.flush_cache()
            for warm in (False, True):  # the same prompts again: prefix hits
                got = generate(llm, asked, kinds, tight)
                assert [o[0] for o in got] == want
                preempted += sum(o[1] for o in got)
                if warm and not tight:
                    assert all(o[2] >= len(p) - page_size for o, p in zip(got, asked, strict=True))
            one = generate(llm, asked[:1], kinds[:1], False)
            assert one[0][0] == want[0]
        assert (preempted > 0) == tight
        llm.engine.check()
        passed(llm, __file__)


def generate(
    llm: LLM, asked: list[list[int]], kinds: list[dict[str, Any]], tight: bool
) -> list[tuple[list[int], int, int]]:
    """Output ids, preemptions and cached tokens of each request.

    If tight, every third step also preempts the youngest, as if the pages had run out.
    """
    requests = [
        llm.engine.make_request(ids, SamplingParams.of(kind))
        for ids, kind in zip(asked, kinds, strict=True)
    ]
    run_together(llm.engine, requests, tight)
    return [(r.output, r.preemptions, r.cached_tokens) for r in requests]
