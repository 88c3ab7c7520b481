"""`forerun train` where its package is not installed, and what it refuses where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun import main
from forerun_train.trainer.options import KINDS


def test_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, whatever follows `train`."""

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr("forerun.main.import_module", missing)
    for arguments in (["train"], ["train", "dflash", "--data", "x"], ["train", "--help"]):
        assert main.run(arguments) == 2
        message = capsys.readouterr().err
        assert "pip install 'forerun[train]', or pip install ./training in a checkout" in message
        assert message.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_command(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train", kind, "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--preset", "--seq-len", "--max-errors", "--resume", "--learning-rate"):
        assert flag in text


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "output must be given"),
        (["--preset", "smok"], "preset 'smok' is not known; one of: smoke"),
        (["--preset", "smoke", "--seq-len", "4"], "seq_len must be at least 16, got 4"),
        (["--learning-rte", "1"], "Did you mean --learning-rate?"),
    ],
)
def test_what_training_refuses(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "run")] if flags else []
    assert main.run(["train", "dflash", "--data", "d.jsonl", *output, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_flags_override_a_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def kept(options: Any) -> Path:
        given.append(options)
        return tmp_path

    monkeypatch.setattr("forerun_train.trainer.run.run", kept)
    flags = ["--data", "d", "--output", "o", "--target", "t", "--target-layer-ids", "1"]
    flags += ["--target-layer-ids", "3", "--no-view", "--max-steps", "7", "--logs", "tensorboard"]
    assert main.run(["train", "dspark", "--preset", "smoke", *flags]) == 0
    (options,) = given
    assert (options.kind, options.target, options.max_steps) == ("dspark", "t", 7)
    assert (options.target_layer_ids, options.logs) == ((1, 3), ("tensorboard",))
    assert options.view is False and options.compile is None
    assert options.seq_len == 256  # of the preset
    assert main.run(["train", "dflash", "--data", "d", "--output", "o"]) == 0
    assert Path(given[1].target, "config.json").exists()  # the bundled one
