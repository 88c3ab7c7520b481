"""`bench adaptive`, `bench overlap` and `bench algorithms`: arithmetic, bad input, end to end."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from forerun import LLM
from forerun.cli.tables import COLUMNS
from forerun.core.errors import ConfigError
from forerun.main import run
from forerun.scheduler.adaptive_width import FixedWidth
from forerun.speculative import registry
from forerun_bench.adaptive import Cell, policy, sweep
from forerun_bench.algorithms import Row
from forerun_bench.cli import adaptive, algorithms, overlap
from forerun_bench.one_batch import Shape
from tests.bench.test_cli_measure import call, needs_pair
from tests.golden_engine import CASES, golden_llm
from tests.toy_algorithms import register_toys

PROMPTS = [c["prompt"] for c in CASES[:3]]


def shown(table: Any) -> str:
    screen = Console(width=COLUMNS, file=io.StringIO())
    screen.print(table)
    assert isinstance(screen.file, io.StringIO)
    return " ".join(screen.file.getvalue().split())


def test_ratio_is_over_the_better() -> None:
    cell = Cell(128, None, 19777.6, 2479.5, 19617.6, {1: 99, 4: 1}, 1.2, True)
    assert cell.ratio == pytest.approx(19617.6 / 19777.6)
    assert cell.as_dict()["ratio"] == cell.ratio
    text = shown(adaptive.table([cell, Cell(1, 6.5, 1, 3, 6, {8: 1}, 6.4, None)]))
    assert "128 1.20 19778 2480 19618 0.992 1: 99%, 4: 1% yes" in text
    assert "1 6.5 1 3 6 2.000 8: 100% -" in text


def test_another_policy_for_a_while() -> None:
    with golden_llm("NGRAM", speculative_adaptive=True) as llm:
        own = llm.engine.scheduler.widths
        other = FixedWidth(own.widths)
        with pytest.raises(ZeroDivisionError), policy(llm.engine, other):
            assert llm.engine.scheduler.widths is other
            raise ZeroDivisionError
        assert llm.engine.scheduler.widths is own


@pytest.mark.exhaustive
@pytest.mark.parametrize("simulated", [(), (1.2, 5.0)])
def test_sweep(simulated: tuple[float, ...]) -> None:
    own: dict[str, Any] = {"speculative_adaptive": True}
    if simulated:
        own["speculative_simulate_accept_length"] = simulated[0]
    seen: list[Cell] = []
    with golden_llm() as plain, golden_llm("DFLASH", **own) as spec:
        batches = [PROMPTS[:1], PROMPTS]
        cells = sweep(plain, spec, batches, 20, simulated, repetitions=2, on_cell=seen.append)
        width = spec.engine.limits.max_verify_tokens
    assert cells == seen
    assert [c.batch_size for c in cells] == [n for n in (1, 3) for _ in simulated or (1,)]
    for cell in cells:
        assert min(cell.plain, cell.fixed, cell.adaptive) > 0
        assert 0 < sum(cell.widths.values()) <= 2 * 20 and set(cell.widths) <= {1, 2, 4, 8, width}
        if cell.simulated is None:
            assert cell.identical is True
        else:
            assert cell.identical is None
            assert cell.accept_length == pytest.approx(cell.simulated, rel=0.12)


@pytest.mark.parametrize(
    ("engine", "lengths", "message"),
    [
        ({"speculative_algorithm": "NONE"}, [], "needs --speculative-algorithm"),
        ({"speculative_simulate_accept_length": 2.0}, [], "--accept-length"),
        ({}, [2.0, 0.5], "at least 1, got 0.5"),
    ],
)
def test_what_cannot_adapt_is_refused(
    engine: dict[str, Any], lengths: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        adaptive.adaptive_settings(engine, [Shape(1, 8, 8)], lengths, False)


def test_settings_force_the_largest_length() -> None:
    settings = adaptive.adaptive_settings({}, [Shape(4, 8, 8)], [1.0, 3.0], True)
    assert settings["speculative_simulate_accept_length"] == 3.0
    assert settings["speculative_adaptive"] is True
    assert settings["max_running_requests"] == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench adaptive --repetitions 0", "--repetitions must be >= 1"),
        ("bench adaptive --random-input --batch-size 1", "give --accept-length"),
        ("bench adaptive --accept-length 99 --batch-size 1", "the 16 tokens that a step verifies"),
        ("bench overlap --device cpu", "Overlap scheduling needs a GPU"),
        ("bench overlap --disable-overlap-schedule", "Both are measured"),
        ("bench algorithms --num-examples 0", "--num-examples must be >= 1"),
        ("bench algorithms --algorithms DFLUSH", "Unknown speculative_algorithm"),
        ("bench algorithms --speculative-algorithm NGRAM", "with --algorithms"),
    ],
)
@needs_pair
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert run(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@needs_pair
def test_adaptive_json(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch-size", "1", "2", "--input-len", "16", "--output-len", "8")
    out = call(capsys, "bench", "adaptive", *shape, "--repetitions", "1", "--json")
    assert [r["batch_size"] for r in out["results"]] == [1, 2]
    assert out["policy"]["adaptive"] is True and out["policy"]["step_costs"]


def test_overlap_table() -> None:
    row = {
        "batch_size": 32, "off_tok_s": 11507.5, "on_tok_s": 11536.8, "on_over_off": 1.0025,
        "off_step_seconds": 0.01723, "on_step_seconds": 0.01705, "off_host_gap": 0.0303,
        "on_host_gap": 0.0015, "accept_length": 6.4, "identical": None,
    }  # fmt: skip
    text = shown(overlap.table([row]))
    assert "32 11508 11537 1.002 17.23 17.05 3.0% 0.1% 6.40 -" in text


def test_algorithms_table() -> None:
    rows = [
        Row("NONE", {"word-problems": 1.0, "python": 1.0}, 0.008, 1.0, None, True),
        Row("SOME", {"word-problems": 12.04, "python": None}, 0.0194, 3.7, 3.9, False),
        Row("OTHER", reason="It needs a draft model."),
    ]
    text = shown(algorithms.table(rows))
    assert "NONE 1.00 1.00 8.00 1.00 - yes" in text
    assert "SOME 12.04 - 19.40 3.70 3.90 no" in text
    assert "OTHER - - - - - refused" in text


@pytest.mark.exhaustive
@needs_pair
def test_algorithms_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in, somebody else's, and one that cannot start."""
    register_toys()
    names = ("ngram", "dflash", "TOY-LEARNER", "STANDALONE")
    few = ("--num-examples", "1", "--max-new-tokens", "12", "--repetitions", "1")
    out = call(capsys, "bench", "algorithms", "--algorithms", *names, *few, "--json")
    rows = {row["algorithm"]: row for row in out["algorithms"]}
    assert list(rows) == ["NONE", "NGRAM", "DFLASH", "TOY-LEARNER", "STANDALONE"]
    assert "draft" in rows.pop("STANDALONE")["reason"]
    for name, row in rows.items():
        assert row["identical"] is True and row["reason"] is None
        assert set(row["accept_lengths"]) == {"word-problems", "python"}
        assert row["step_seconds"] > 0 and row["speedup"] > 0
        assert (row["adaptive_speedup"] is None) == (name == "NONE")
    assert rows["NONE"]["speedup"] == 1.0
    assert rows["DFLASH"]["accept_lengths"]["word-problems"] > 2


def test_all_installed_algorithms_are_compared() -> None:
    register_toys()
    assert "TOY-TREES" in algorithms.chosen([])
    assert set(algorithms.chosen([])) == set(registry.algorithm_names()) - {"NONE"}
    assert algorithms.chosen(["none", "ngram", "NGRAM"]) == ["NGRAM"]


def test_an_engine_without_simulated_acceptance_is_refused() -> None:
    with golden_llm() as plain, golden_llm("NGRAM", speculative_adaptive=True) as spec:
        assert isinstance(spec, LLM)
        with pytest.raises(AssertionError, match="without simulated acceptance"):
            sweep(plain, spec, [PROMPTS[:1]], 8, [2.0], 1)


def test_json_is_json() -> None:
    assert json.loads(json.dumps(Row("X", reason="y").as_dict()))["reason"] == "y"
