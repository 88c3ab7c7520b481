"""`bench overlap` and `bench algorithms`: arithmetic, bad input, end to end."""

from __future__ import annotations

import json

import pytest

from forerun.main import run
from forerun.speculative import registry
from forerun_bench.algorithms import Row
from forerun_bench.cli import algorithms, overlap
from tests.bench.test_cli_measure import call, needs_pair
from tests.bench.test_widths import shown
from tests.toy_algorithms import register_toys


@pytest.mark.parametrize(
    ("line", "message"),
    [
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


def test_json_is_json() -> None:
    assert json.loads(json.dumps(Row("X", reason="y").as_dict()))["reason"] == "y"
