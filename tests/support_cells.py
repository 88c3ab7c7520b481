"""Which engines ran and gave the right text: recorded by tests, read by the support table.

A test calls `passed(llm, __file__)` once its outputs were right. On a CPU the cell must be in
support_cells.json. With FORERUN_RECORD_CELLS=FILE cells are appended to that file instead, also
on a GPU, and

    python -m tests.support_cells FILE && python -m tests.support_table > docs/support.md

adds them to what is known.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from forerun import LLM
from forerun.executor import resolve
from forerun.speculative.registry import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "support_cells.json"
RECORD = "FORERUN_RECORD_CELLS"


@dataclass(frozen=True, order=True)
class Cell:
    on: str  # "CPU", "stand-in for" an architecture, or the name of a GPU
    architecture: str
    algorithm: str
    backend: str


def read_cells() -> dict[Cell, str]:
    """The recorded cells, and the file of a test that covers each."""
    return {Cell(*row[:4]): row[4] for row in json.loads(FILE.read_text())}


def write_cells(cells: dict[Cell, str]) -> None:
    rows = [json.dumps([*astuple(cell), test]) for cell, test in sorted(cells.items())]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def cells_of(llm: LLM) -> list[Cell]:
    """One per backend that serves a phase of the target; none for algorithms of tests."""
    chosen = llm.explain()
    if chosen["algorithm"] not in BUILT_IN:
        return []
    device = torch.device(chosen["device"])
    found = []
    for backend in {told.split(":")[0] for told in chosen["attention"].values()}:
        if device.type == "cuda":
            on = torch.cuda.get_device_name(device)
        elif backend == "torch_native":
            on = "CPU"
        elif arch := resolve.gpu_arch(device):  # which the test says that the stand-in stands for
            on = f"stand-in for {arch}"
        else:
            continue
        found.append(Cell(on, chosen["architecture"], chosen["algorithm"], backend))
    return sorted(found)


def passed(llm: LLM, test: str) -> None:
    """The engine's outputs were right. `test`: the calling file."""
    name = Path(test).resolve().relative_to(ROOT).as_posix()
    if record := os.environ.get(RECORD):
        with open(record, "a", encoding="utf-8") as file:
            file.writelines(json.dumps([*astuple(c), name]) + "\n" for c in cells_of(llm))
        return
    known = read_cells()
    for cell in cells_of(llm):
        on_gpu = torch.device(llm.explain()["device"]).type == "cuda"
        assert on_gpu or cell in known, f"{cell} is not recorded; see {__file__}"


def main() -> None:
    """Adds the recorded files that are named."""
    known = read_cells()
    for name in sys.argv[1:]:
        for line in Path(name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known.setdefault(Cell(*row[:4]), row[4])
    write_cells(known)


if __name__ == "__main__":
    main()
