"""The commands that measure, end to end on the bundled pair with the smallest settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.demo import real_models
from forerun.llm.bundled import PAIR
from forerun.main import run

needs_pair = pytest.mark.skipif(
    not all((PAIR / part / "model.safetensors").exists() for part in ("target", "draft")),
    reason="the bundled pair is not there",
)

SHORT = ("--max-new-tokens", "6", "--repetitions", "1")


def call(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """Runs a command that must succeed and print one JSON object and nothing else."""
    code = run(args)
    out = capsys.readouterr().out
    assert code == 0, out
    return json.loads(out)


@needs_pair
def test_demo_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "demo.svg"
    args = ("--max-new-tokens", "12", "--repetitions", "1", "--svg", str(svg))
    out = call(capsys, "demo", "--json", *args)
    assert out["identical"] is True
    assert len(out["prompts"]) == 8
    assert {p["skill"] for p in out["prompts"]} == {"word-problems", "python"}
    for prompt in out["prompts"]:
        assert prompt["tokens"] == 1 + sum(prompt["accept_lengths"]) <= 12
        assert sum(prompt["histogram"]) == len(prompt["accept_lengths"])
    assert out["dtype"] == "float32"
    assert out["environment"]["threads"] >= 1
    picture = svg.read_text(encoding="utf-8")
    assert picture.startswith("<svg") and "identical:" in picture.replace("&#160;", " ")


@pytest.mark.exhaustive
@needs_pair
def test_demo_sampled_text_is_identical_too(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--max-new-tokens", "12", "--repetitions", "1", "--temperature", "0.8", "--seed", "7")
    out = call(capsys, "demo", "--json", *args)
    assert out["identical"] is True
    assert (out["temperature"], out["seed"]) == (0.8, 7)


@pytest.mark.exhaustive
@needs_pair
def test_demo_of_another_target(capsys: pytest.CaptureFixture[str]) -> None:
    """With its draft; a fault of either would be one line."""
    target, draft = ("--model-path", str(PAIR / "target")), str(PAIR / "draft")
    args = (*target, "--speculative-draft-model-path", draft, *SHORT)
    out = call(capsys, "demo", "--real", "--json", *args)
    assert out["identical"] is True and out["algorithm"] == "DFLASH"
    assert [p["skill"] for p in out["prompts"][::2]] == ["dialogue", "code", "maths", "summary"]


@pytest.mark.exhaustive
@needs_pair
def test_demo_without_a_draft_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.cli.demo.real_draft", lambda: None)
    assert run(("demo", "--real", "--json", "--model-path", str(PAIR / "target"), *SHORT)) == 0
    said = capsys.readouterr()
    out = json.loads(said.out)
    assert out["identical"] is True and out["algorithm"] == "NGRAM"
    assert "No draft for HuggingFaceTB/SmolLM2-135M-Instruct" in said.err


def test_the_shipped_draft_is_for_its_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cli.demo.real_draft", lambda: Path("shipped"))
    for algorithm in (None, "DFLASH"):
        draft = real_models(None, None, algorithm).draft
        assert draft["speculative_draft_model_path"] == "shipped"
        mine = real_models(None, "mine", algorithm).draft
        assert mine["speculative_draft_model_path"] == "mine"
    assert real_models(None, None, "NGRAM").draft == {"speculative_algorithm": "NGRAM"}
    assert real_models("m.gguf", None, "NGRAM").target == {"model_path": "m.gguf"}


@needs_pair
def test_one_batch_json(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch-size", "1", "3", "--input-len", "16", "--output-len", "8")
    args = (*shape, "--repetitions", "1", "--dtype", "float32", "--json")
    out = call(capsys, "bench", "one-batch", *args)
    assert [r["batch_size"] for r in out["results"]] == [1, 3]
    assert out["ceilings"]["dtype"] == "float32"
    for result in out["results"]:
        assert result["identical"] is True
        assert result["plain"]["steps"] == 7  # the first token came with the prefill
        assert result["spec"]["steps"] <= 7
        for half in (result["plain"], result["spec"]):
            size = half["weight_bytes"] + half["kv_bytes"]
            read = out["ceilings"]["read_bytes_per_second"]
            assert half["floor_seconds"] == pytest.approx(size / read)
            ratio = half["step_seconds_median"] / half["floor_seconds"]
            assert half["ratio_to_floor"] == pytest.approx(ratio)
            assert half["gemm_seconds"] > 0
            assert half["host_gap"] is None  # no GPU was asked for
        assert result["spec"]["weight_bytes"] > result["plain"]["weight_bytes"]
        assert result["acceptance"]["completion_tokens"] == 8 * result["batch_size"]


@pytest.mark.exhaustive
@needs_pair
def test_one_batch_dummy_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = (PAIR / "target" / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    model = ("--model-path", str(tmp_path), "--load-format", "dummy", "--random-input")
    shape = ("--input-len", "8", "--output-len", "4", "--repetitions", "1")
    out = call(capsys, "bench", "one-batch", *model, *shape, "--json")
    assert out["results"][0]["spec"] is None
    assert out["results"][0]["plain"]["steps"] == 3


@pytest.mark.exhaustive
@needs_pair
def test_one_batch_of_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The steps run in other processes, so their GEMMs cannot be counted."""
    shape = ("--input-len", "8", "--output-len", "6", "--repetitions", "1", "--json")
    ranks = ("--device", "cpu", "--tp-size", "2", "--speculative-algorithm", "NONE")
    out = call(capsys, "bench", "one-batch", *shape, *ranks)
    (result,) = out["results"]
    assert out["ceilings"] is None and "floor_seconds" not in result["plain"]
    assert result["plain"]["steps"] == 5


@pytest.mark.covering(0)
@needs_pair
@pytest.mark.parametrize("skill", ["word-problems", "python"])
def test_eval_json(capsys: pytest.CaptureFixture[str], skill: str) -> None:
    args = ("--num-examples", "3", "--max-new-tokens", "16", "--check-identical")
    out = call(capsys, "eval", skill, *args, "--dtype", "float32", "--json")
    assert out["examples"] == out["identical"] == 3
    assert (out["accuracy"] is None) == (skill == "python")
    assert out["output_tokens"] == out["completion_tokens"] <= 3 * 16
    assert len(out["acceptance_per_position"]) * out["verify_ct"] == out["proposed_drafts"]


@pytest.mark.exhaustive
@needs_pair
def test_vs_transformers_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(
        capsys, "bench", "vs-transformers", "--repetitions", "1", "--max-new-tokens", "4", "--json"
    )
    names = [engine["name"] for engine in out["engines"]]
    assert names[0] == "transformers" and names[2:] == ["forerun, plain", "forerun, DFLASH"]
    for engine in out["engines"]:
        assert engine["prompts_identical_to_transformers"] == out["prompts"] == 8
    speeds = [engine["tok_s_per_prompt"] for engine in out["engines"]]
    assert out["engines"][0]["ratio_to_transformers"] == 1
    assert all(len(speed) == 8 and min(speed) > 0 for speed in speeds)


@pytest.mark.exhaustive
@needs_pair
def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--num-examples", "2", "--max-new-tokens", "8")
    assert run(("eval", "word-problems", *few)) == 0
    assert "accuracy" in capsys.readouterr().out
    shape = ("--input-len", "8", "--output-len", "4", "--repetitions", "1")
    assert run(("bench", "one-batch", *shape)) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(lines)
    assert "Measured ceilings" in lines[0]
    for word in ("same", "floor", "gemms", "gap", "accept", "yes"):
        assert word in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("demo --repetitions 0", "--repetitions must be >= 1"),
        ("demo --algorithm DFLUSH", "Unknown speculative_algorithm"),
        ("demo --model-path m.gguf", "need --real; add it"),
        ("demo --real --model-path m.gguf", "there is no such file"),
        (
            "bench algorithms --algorithms NGRAM --algorithms SUFFIX --speculative-num-steps 3",
            "speculative_num_steps is no option of NGRAM, SUFFIX; drop it.",
        ),
        (
            "doctor --determinism --speculative-num-steps 3",
            "speculative_num_steps is set without speculative_algorithm; set it too.",
        ),
        ("bench one-batch --batch-size 0", "--batch-size must be >= 1"),
        ("bench one-batch --device cpu --profile p", "--profile records GPU kernels"),
        ("bench one-batch --tp-size 2 --profile p", "--profile records steps of this process"),
        ("bench one-batch --load-format dummy --model-path m", "add --random-input"),
        ("bench vs-transformers --dtype int8", "--dtype must be float32 or bfloat16"),
        ("eval python --num-examples 0", "--num-examples must be >= 1"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert run(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_trained_seeds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("eval", "word-problems", "--seed", "5", "--num-examples", "1")) == 2
    assert "may have been trained on" in capsys.readouterr().err
