"""Whole runs on files, by the command: one process, two, and one that goes on from two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forerun_train.toys.word_problems import generate
from forerun_train.trainer.view import lines_of
from tests.cli.support import needs_pair

FLAGS = (
    "train dflash --preset smoke --device cpu --max-steps 6 --seq-len 128 --batch-size 4"
    " --anchors 8 --log-every 1 --validate-every 6 --save-every 3 --validation-batches 1"
)


def train(data: Path, output: Path, *more: str, ranks: int = 1) -> dict[int, float]:
    """The loss of every step."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m", "forerun"]
    module = launcher if ranks > 1 else ["forerun"]
    done = subprocess.run(
        [sys.executable, "-m", *module, *FLAGS.split(), "--data", str(data), "--output",
         str(output), *more],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {each["step"]: each["loss"] for each in lines_of(output / "log.jsonl") if "loss" in each}


@needs_pair
@pytest.mark.exhaustive
def test_any_number_of_processes_reads_the_same_data(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": p.question, "response": p.answer_text} for p in generate(3, 60)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone = train(data, tmp_path / "alone")
    assert len(set(alone.values())) == 6
    assert train(data, tmp_path / "two", ranks=2) == pytest.approx(alone, rel=1e-2)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000006")
    again = train(data, tmp_path / "two", "--resume")
    assert again == pytest.approx(alone, rel=1e-2)
