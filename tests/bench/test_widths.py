"""`bench widths` and its older name: arithmetic, bad input, end to end on the bundled pair."""

from __future__ import annotations

import gc
import io
import json
import weakref
from typing import Any

import pytest
import torch
from rich.console import Console

from forerun import LLM
from forerun.cli.tables import COLUMNS
from forerun.core.errors import ConfigError
from forerun.evals.prompts import chat_encoder, word_prompts
from forerun.main import run
from forerun.scheduler.adaptive_width import FixedWidth
from forerun_bench.cli import widths as cli
from forerun_bench.cli.widths import Loads, chosen, compare_widths, table, widths_settings
from forerun_bench.one_batch import Shape
from forerun_bench.widths import (
    FULL,
    PLAIN,
    POLICIES,
    RAGGED,
    SINGLE,
    Cell,
    Load,
    engines,
    measure,
    policy,
)
from tests.bench.test_cli_measure import call, needs_pair
from tests.golden_engine import CASES, GOLDEN, golden_llm


def shown(table: Any) -> str:
    screen = Console(width=COLUMNS, file=io.StringIO())
    screen.print(table)
    assert isinstance(screen.file, io.StringIO)
    return " ".join(screen.file.getvalue().split())


def test_ragged_steps_are_compared_with_the_best_of_the_others() -> None:
    speeds = {PLAIN: 100.0, FULL: 80.0, SINGLE: 120.0, RAGGED: 150.0}
    widths: dict[str, dict[float, int]] = {name: {1: 3, 2.5: 1} for name in POLICIES}
    cell = Cell(Load(64, "1.3,5"), speeds, dict.fromkeys(POLICIES, 3.0), widths)
    assert (cell.over_best, cell.over_plain) == (1.25, 1.5)
    assert cell.identical is None and cell.as_dict()["simulated"] == "1.3,5"
    assert "64 1.3,5 100 80 120 150 1.250 1.50 1: 75%, 2.5: 25% -" in shown(table([cell]))
    real = Cell(Load(2), speeds, dict.fromkeys(POLICIES, 3.0), widths, {((1,), (2,))})
    assert real.identical and "2 3.00 100" in shown(table([real]))
    real.texts.add(((1,), (3,)))
    assert real.identical is False


def test_a_batch_that_never_ran_whole_has_no_speed() -> None:
    cell = Cell(Load(256, "2"), dict.fromkeys(POLICIES, 0.0), dict.fromkeys(POLICIES, 2.0))
    cell.widths = {name: {1: 3} for name in POLICIES}
    assert cell.over_best is cell.over_plain is None
    assert "256 2 - - - - - - 1: 100% -" in shown(table([cell]))
    assert "does not fit into the K/V" in shown(table([cell]))


def test_engines_of_a_gpu_leave_their_memory_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    executors: list[weakref.ref[Any]] = []

    class Watched(LLM):
        def __init__(self, **settings: Any) -> None:
            gc.collect()  # as an engine on a GPU does when it starts
            assert not any(executor() for executor in executors)
            super().__init__(**settings)
            executors.append(weakref.ref(self.engine.executor))

    monkeypatch.setattr(cli, "LLM", Watched)
    monkeypatch.setattr(cli, "resolve_device", lambda name: torch.device("cuda"))
    engine = {"model_path": str(GOLDEN / "target"), "device": "cpu", "load_format": "dummy"}
    engine |= {"speculative_algorithm": "NGRAM", "dtype": "float32"}
    loads = Loads([2], ["2"], input_len=8, output_len=6, repetitions=1)
    found = compare_widths(loads, (PLAIN, SINGLE), (engine, True), quiet=True)
    assert len(executors) == 2 and set(found.cells[0].tok_s) == {PLAIN, SINGLE}


def test_the_last_policy_is_compared() -> None:
    cell = Cell(Load(4), {FULL: 80.0, SINGLE: 120.0}, {SINGLE: 2.5}, {SINGLE: {4: 1, 1: 3}})
    assert (cell.judged, cell.over_best, cell.over_plain) == (SINGLE, 1.5, None)
    assert "4 2.50 80 120 1.500 - 1: 75%, 4: 25% no" in shown(table([cell]))
    assert chosen([RAGGED, PLAIN]) == [PLAIN, RAGGED]


def test_another_policy_for_a_while() -> None:
    with golden_llm("NGRAM", speculative_adaptive=True) as llm:
        own = llm.engine.scheduler.widths
        other = FixedWidth(own.widths)
        with pytest.raises(ZeroDivisionError), policy(llm.engine, other):
            assert llm.engine.scheduler.widths is other
            raise ZeroDivisionError
        assert llm.engine.scheduler.widths is own


def test_an_engine_without_simulated_acceptance_is_refused() -> None:
    with golden_llm("NGRAM", speculative_adaptive=True) as spec:
        prompts = [CASES[0]["prompt"]]
        with pytest.raises(ConfigError, match="Acceptance is real"):
            measure([(spec, (SINGLE,))], Cell(Load(1, "2")), prompts, 8, 1)


@pytest.mark.parametrize("lengths", ["2", None])
def test_prompts_of_simulated_loads_are_computed_once(lengths: str | None) -> None:
    own = {"speculative_simulate_accept_length": 2.0} if lengths else {}
    with golden_llm("NGRAM", speculative_adaptive=True, page_size=1, **own) as spec:
        prompts = [CASES[0]["prompt"]]
        measure([(spec, (SINGLE,))], Cell(Load(1, lengths)), prompts, 8, 2)
        assert (spec.engine.metrics().prefix.hits > 0) == (lengths is not None)


def test_every_batch_has_all_of_the_accept_lengths() -> None:
    """Requests of one length end together, so the next batch has the slots of one length."""
    own = {"speculative_simulate_accept_length": 7.0, "max_running_requests": 4}
    with golden_llm("NGRAM", speculative_adaptive=True, **own) as spec:
        for batch in (4, 2, 4, 2):
            cell = Cell(Load(batch, "1,7"))
            measure([(spec, (FULL,))], cell, [CASES[0]["prompt"]] * batch, 16, 1)
            assert cell.accept_length[FULL] == pytest.approx(4, abs=1)


def test_every_run_has_the_same_accept_lengths() -> None:
    """One after the other, requests would have another one each."""
    own = {"speculative_simulate_accept_length": 7.0, "max_running_requests": 4}
    with golden_llm("NGRAM", speculative_adaptive=True, **own) as spec:
        for lengths, mean in (("1,7", 1), ("7,1", 7)):
            cell = Cell(Load(1, lengths))
            measure([(spec, (FULL,))], cell, [CASES[0]["prompt"]], 24, 1)
            assert cell.accept_length[FULL] == pytest.approx(mean, abs=1)


def test_each_policy_has_an_engine() -> None:
    settings = widths_settings({}, [Shape(4, 8, 8)], ["1.3,5", "2"], True)
    assert settings["speculative_simulate_accept_length"] == 5.0
    found = engines(settings)
    assert [name for _, names in found for name in names] == list(POLICIES)
    assert [own.get("speculative_ragged_verify") for own, _ in found] == [None, False, True]
    assert "speculative_simulate_accept_length" not in found[0][0]
    assert [names for _, names in engines(settings, (PLAIN, SINGLE))] == [(PLAIN,), (SINGLE,)]


@pytest.mark.parametrize(
    ("engine", "lengths", "message"),
    [
        ({"speculative_algorithm": "NONE"}, [], "need --speculative-algorithm"),
        ({"speculative_simulate_accept_length": 2.0}, [], "--accept-length"),
        ({}, ["1.3;5"], "must be a number, or several"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    engine: dict[str, Any], lengths: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        widths_settings(engine, [Shape(1, 8, 8)], lengths, False)


@needs_pair
def test_real_acceptance_gives_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch-size", "3", "--input-len", "16", "--output-len", "12", "--dtype", "float32")
    out = call(capsys, "bench", "widths", *shape, "--repetitions", "1", "--json")
    (cell,) = out["results"]
    assert cell["identical"] is True and set(cell["tok_s"]) == set(POLICIES)
    assert cell["accept_length"][FULL] > 1.2
    assert out["policy"]["survival"] and out["policy"]["step_costs"]


@pytest.mark.exhaustive
@needs_pair
def test_simulated_acceptance_by_request(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch-size", "2", "--input-len", "16", "--output-len", "16")
    lengths = ("--accept-length", "1,5", "--speculative-simulate-accept-method", "chance")
    out = call(capsys, "bench", "widths", *shape, *lengths, "--repetitions", "1", "--json")
    (cell,) = out["results"]
    assert cell["simulated"] == "1,5" and cell["identical"] is None
    assert 1 < cell["accept_length"][FULL] < 4


@pytest.mark.exhaustive
@needs_pair
def test_the_older_name_works_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch-size", "1", "--input-len", "16", "--output-len", "8", "--dtype", "float32")
    assert run(["bench", "adaptive", *shape, "--repetitions", "1", "--json"]) == 0
    out, error = capsys.readouterr()
    assert "`bench widths --policies plain full single`" in error
    (cell,) = json.loads(out)["results"]
    assert cell["identical"] is True and cell["simulated"] is None and sum(cell["widths"].values())
    assert cell["ratio"] == cell["adaptive"] / max(cell["plain"], cell["fixed"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench widths --repetitions 0", "--repetitions must be >= 1"),
        ("bench widths --random-input --batch-size 1", "give --accept-length"),
        ("bench widths --accept-length 99 --batch-size 1", "the 16 tokens that a step verifies"),
        ("bench widths --policies plain narrow", "Unknown policy 'narrow'"),
        ("bench widths --policies plain", "needs two or more"),
        ("bench widths --mixed --accept-length 2", "--mixed is for real text"),
    ],
)
@needs_pair
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert run(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@needs_pair
def test_mixed_prompts_take_turns() -> None:
    with LLM(speculative_algorithm="NGRAM", max_running_requests=3) as llm:
        words = word_prompts(chat_encoder(llm.tokenizer), 2)
        found = Loads([3], [], 100, 8, 1, mixed=True).prompts(llm, Shape(3, 100, 8), False)
    assert [found[0], found[2]] == [list(each.ids[:100]) for each in words]
    assert len(found) == 3 and len(found[1]) == 100
