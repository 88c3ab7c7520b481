"""`forerun train speed`: a step and its parts, of a target without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.main import run
from forerun_train import hidden_states, speed
from forerun_train.speed import random_batch
from forerun_train.trainer.options import TrainOptions

TINY = (
    *("--preset", "smoke", "--seq-len", "64", "--batch-size", "2", "--micro-batch", "1"),
    *("--anchors", "4", "--device", "cpu", "--document", "32", "--runs", "1"),
)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config without weights, of the bundled target's shape with fewer layers."""
    monkeypatch.setattr(speed, "WARM_UP", 0)  # no test depends on times
    config = json.loads((bundled("target") / "config.json").read_text())
    keys: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 256}
    config = {k: v for k, v in config.items() if k not in ("layer_types", "max_window_layers")}
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    return tmp_path


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_step_beside_its_parts(
    target: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "speed", kind, "--target", str(target), *TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = found["target_seconds"] + found["draft_seconds"]
    assert min(found["target_seconds"], found["draft_seconds"]) > 0
    assert found["step_over_floor"] == pytest.approx(found["step_seconds"] / parts)
    assert found["tokens_per_second"] == pytest.approx(2 * 64 / found["step_seconds"])
    assert found["mfu"] is None  # a CPU's peak is not known
    assert found["settings"]["kind"] == kind


@pytest.mark.exhaustive
def test_the_table(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "speed", "--target", str(target), *TINY]) == 0
    assert "tokens per second" in capsys.readouterr().out


@pytest.mark.parametrize("of_a_run", [False, True])
def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
    target: Path, of_a_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "memory", lambda device: (1 << 20, 1 << 20))
    monkeypatch.delattr(speed, "load_target")
    monkeypatch.delattr(hidden_states, "load_target")
    load = hidden_states.load_frozen_target if of_a_run else speed.random_target
    with pytest.raises(ConfigError, match=r"alone take .* GiB in float32, and 0\.0 GiB of cpu"):
        load(str(target), torch.float32, torch.device("cpu"), 64)


def test_documents_of_a_batch() -> None:
    given = {"kind": "dflash", "target": "t", "data": "d", "output": "o"}
    options = TrainOptions.of("smoke", given | {"seq_len": 64, "batch_size": 2})
    batch = random_batch(options, 100, 24)
    assert batch.document_ids[0].tolist() == [0] * 24 + [1] * 24 + [2] * 16
    assert batch.position_ids[1].tolist() == [*range(24), *range(24), *range(16)]
    assert int(batch.input_ids.max()) < 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "nothing"], "Unknown preset 'nothing'"),
        (["--document", "1"], "--document must be at least 2"),
        (["--runs", "0"], "--runs must be at least 1"),
    ],
)
def test_what_is_refused(
    target: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "speed", "--target", str(target), *TINY, *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
