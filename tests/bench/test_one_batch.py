"""The arithmetic of a batch's trace, and the command line of `bench one-batch`."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from forerun.cli.tables import COLUMNS
from forerun.core.errors import ConfigError, RequestError
from forerun.core.request import Request
from forerun.evals.acceptance import Acceptance
from forerun.evals.prompts import windows
from forerun_bench.bounds import Bounds
from forerun_bench.cli.inputs import check
from forerun_bench.cli.one_batch import fill_in, table, too_few
from forerun_bench.cli.options import LISTS, repeat_flag
from forerun_bench.one_batch import BatchTiming, OneBatch, Shape, Trace, random_prompts, trace
from tests.golden_engine import golden_llm

# Two requests: prompts done after 2 results, then steps of 0.1, 0.3 and 0.2 seconds; one request
# ends in the second of these.
TRACE = Trace(
    steps=((0.5, 1), (1.0, 3), (1.1, 7), (1.4, 13), (1.6, 15)),
    prefill_steps=2,
    whole_steps=4,
    output_ids=((1,) * 8, (2,) * 7),
    acceptance=Acceptance(15, 6, 18, (2, 1, 3)),
)


def test_prefill_ends_with_the_last_first_token() -> None:
    assert TRACE.prefill_seconds == 1.0
    assert TRACE.step_seconds == pytest.approx([0.1, 0.3])  # not the tail
    assert TRACE.decode_tok_s == pytest.approx((15 - 3) / (1.6 - 1.0))
    assert TRACE.whole_tok_s == pytest.approx((13 - 3) / (1.4 - 1.0))
    assert replace(TRACE, whole_steps=5).whole_tok_s == TRACE.decode_tok_s
    overlapping = replace(TRACE, whole_steps=2)  # a request ended before all had their first token
    assert overlapping.step_seconds == [] and overlapping.whole_tok_s == 0


def test_timing_pools_the_steps_of_all_repetitions() -> None:
    slow = Trace(((2.0, 2), (3.0, 4)), 1, 2, ((1, 1), (2, 2)), Acceptance())
    timing = BatchTiming.of([TRACE, slow, slow])
    assert timing.prefill_seconds == 2.0
    assert timing.decode_tok_s == pytest.approx(2.0)
    assert timing.step_seconds_median == pytest.approx(0.65)  # of 0.1 0.3 1.0 1.0
    assert timing.step_seconds_p90 == pytest.approx(1.0)
    assert timing.steps == 1 and timing.too_few_steps
    none = BatchTiming.of([replace(TRACE, whole_steps=2)] * 2)
    assert (none.step_seconds_median, none.step_seconds_p90, none.steps) == (None, None, 0)


def test_result_shows_both_ways() -> None:
    plain = BatchTiming(0.1, 0.01, 0.02, 100.0, 10)
    spec = BatchTiming(0.1, 0.02, 0.03, 350.0, 3)
    result = OneBatch(4, 16, 8, plain, spec, TRACE.acceptance, True)
    assert result.speedup == pytest.approx(3.5)
    out = result.as_dict()
    assert out["accept_length"] == 15 / 6
    assert out["plain"]["decode_tok_s"] == 100.0
    assert out["spec"]["step_seconds_p90"] == 0.03
    assert table([result], "SOME").row_count == 2
    alone = OneBatch(4, 16, 8, plain)
    assert alone.speedup is None
    assert alone.as_dict()["spec"] is None
    assert table([alone], None).row_count == 1


def test_table_fits_its_columns() -> None:
    """The widest figures that a large model on a GPU gives."""
    plain = BatchTiming(0.7831, 0.01752, 0.03211, 11234.0, 10)
    bounds = Bounds(1, 2, 3, floor_seconds=0.01534, gemm_seconds=0.01678, host_gap=0.1234)
    result = OneBatch(32, 1024, 128, plain, plain, TRACE.acceptance, True, bounds, bounds)
    screen = Console(width=COLUMNS, file=io.StringIO())
    screen.print(table([result], "DFLASH"))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "…" not in shown
    row = " ".join(shown.splitlines()[-2].split())
    assert row == "DFLASH 783 17.52 32.11 11234 15.34 1.14 16.78 12.3% 1.00 2.50 yes"
    assert result.as_dict()["spec"]["ratio_to_floor"] == pytest.approx(17.52 / 15.34)


def test_too_few_whole_batch_steps_are_reported() -> None:
    few, none = BatchTiming(0.1, 0.01, 0.02, 1.0, 3), BatchTiming(0.1, None, None, 1.0, 0)
    enough = BatchTiming(0.1, 0.01, 0.02, 1.0, 30)
    assert too_few(OneBatch(8, 100, 8, enough, enough)) is None
    assert "in only 3 steps" in (too_few(OneBatch(8, 100, 8, enough, few)) or "")
    bounds = Bounds(1, 2, 3, floor_seconds=0.01, gemm_seconds=0.01)
    result = OneBatch(8, 100, 8, none, None, plain_bounds=bounds)
    assert "in only 0 steps" in (too_few(result) or "")
    half = result.as_dict()["plain"]
    assert half["too_few_steps"] is True
    assert half["step_seconds_median"] is None and half["ratio_to_floor"] is None
    assert table([result], None).row_count == 1


@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_only_steps_of_the_whole_batch_count(algorithm: str | None, overlap_depth: int) -> None:
    """Prompts of many chunks: the first request ends while the last ones prefill, or does not."""
    settings = {
        "chunked_prefill_size": 16,
        "max_running_requests": 4,
        "max_mixed_step_ms": 0,  # prompts do not go first
        "overlap_depth": overlap_depth,
    }
    prompts = [[7 + i] * 64 for i in range(4)]
    with golden_llm(algorithm, **settings) as llm:
        short = trace(llm.engine, prompts, 4)
        llm.engine.flush_cache()
        long = trace(llm.engine, prompts, 160)
        llm.engine.flush_cache()
        whole = trace(llm.engine, prompts, 160, only_whole=True)
    assert whole.whole_steps == long.whole_steps < len(long.steps)
    assert sum(map(len, whole.output_ids)) == whole.steps[-1][1] < long.steps[-1][1]
    for ended, text in zip(whole.output_ids, long.output_ids, strict=True):
        assert ended == text[: len(ended)]
    assert short.step_seconds == []
    steps = long.step_seconds
    tokens = [out for _, out in long.steps]
    assert len(steps) == long.whole_steps - long.prefill_steps > 2
    for before, after in pairwise(tokens[long.prefill_steps - 1 : long.whole_steps]):
        assert after - before >= len(prompts)
        if algorithm is None:
            assert after - before == len(prompts)
    assert BatchTiming.of([short]).too_few_steps


@pytest.mark.parametrize("only_whole", [False, True])
def test_a_request_that_fails_is_no_measurement(
    only_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with golden_llm(None) as llm:
        step = llm.engine.step

        def failing() -> list[Request]:
            changed = step()
            if any(request.output for request in changed):
                llm.engine.abort_all("invalid logits")
            return changed

        monkeypatch.setattr(llm.engine, "step", failing)
        with pytest.raises(RequestError, match="has failed: invalid logits"):
            trace(llm.engine, [[7] * 8] * 2, 20, only_whole=only_whole)
        monkeypatch.undo()
        assert len(trace(llm.engine, [[7] * 8] * 2, 20).output_ids) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--batch-size 1 4 16 --json", "--batch-size 1 --batch-size 4 --batch-size 16 --json"),
        ("--batch-size=2 --dtype float32", "--batch-size=2 --dtype float32"),
        ("--batch-size 1 --batch-size 4", "--batch-size 1 --batch-size 4"),
        ("--page-size 16 64", "--page-size 16 64"),
        ("--input-len 8 9 --batch-size 1", "--input-len 8 --input-len 9 --batch-size 1"),
    ],
)
def test_lists_are_written_as_in_sglang(line: str, expected: str) -> None:
    assert repeat_flag(line.split(), LISTS) == expected.split()


@pytest.mark.parametrize(
    ("shape", "repetitions", "engine", "message"),
    [
        (Shape(0, 8, 8), 1, {}, "--batch-size must be >= 1, got 0"),
        (Shape(1, -1, 8), 1, {}, "--input-len must be >= 1"),
        (Shape(1, 8, 1), 1, {}, "--output-len must be >= 2"),
        (Shape(1, 8, 8), 0, {}, "--repetitions must be >= 1"),
        (Shape(1, 8, 8), 1, {"load_format": "dummy"}, "add --random-input"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    shape: Shape, repetitions: int, engine: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check([shape], repetitions, False, engine)


def test_slots_suffice_for_the_largest_batch() -> None:
    settings = fill_in({"model_path": "m"}, [Shape(1, 900, 8), Shape(16, 8, 8)], True)
    assert settings["max_running_requests"] == 16
    assert settings["max_total_tokens"] >= 16 * (8 + 8)
    assert settings["skip_tokenizer_init"] is True
    assert "speculative_algorithm" not in settings
    given = fill_in({"max_running_requests": 2, "model_path": "m"}, [Shape(4, 8, 8)], False)
    assert given["max_running_requests"] == 2


def test_prompts_have_the_length_asked_for() -> None:
    assert windows([1, 2, 3], 2, 5) == [[1, 2, 3, 1, 2], [3, 1, 2, 3, 1]]
    spread = windows(list(range(100)), 4, 10)
    assert [w[0] for w in spread] == [0, 22, 44, 66]
    prompts = random_prompts(50, 3, 7)
    assert [len(p) for p in prompts] == [7, 7, 7]
    assert prompts == random_prompts(50, 3, 7)
    assert all(0 <= t < 50 for p in prompts for t in p)
    assert len({tuple(p) for p in prompts}) == 3
