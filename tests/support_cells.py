"""Which engines were run and gave the right text: recorded by the tests, read by the support table.

A test calls `passed(llm)` once its outputs were right. On a CPU the cell must be in
support_cells.json; with FORERUN_RECORD_CELLS=1 it is written there, with the test's file.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from forerun import LLM
from forerun.executor import resolve
from forerun.speculative.registry import BUILT_IN

FILE = Path(__file__).with_name("support_cells.json")
RECORD = "FORERUN_RECORD_CELLS"
ON_CPU = ("torch_native",)  # others run there over a stand-in, for the GPU of `gpu_arch`


@dataclass(frozen=True, order=True)
class Cell:
    on: str  # "CPU", "stand-in for" an architecture, or the name of a GPU
    architecture: str
    algorithm: str
    backend: str


def read_cells() -> dict[Cell, str]:
    """The recorded cells, and the file of a test that covers each."""
    return {Cell(*row[:4]): row[4] for row in json.loads(FILE.read_text())}


def cells_of(llm: LLM) -> list[Cell]:
    """One per backend that serves a phase of the target; none for algorithms of tests."""
    chosen = llm.explain()
    if chosen["algorithm"] not in BUILT_IN:
        return []
    device = torch.device(chosen["device"])
    on = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    stand_in = f"stand-in for {resolve.gpu_arch(device)}"
    names = {told.split(":")[0] for told in chosen["attention"].values()}
    return [
        Cell(
            stand_in if on == "CPU" and name not in ON_CPU else on,
            chosen["architecture"],
            chosen["algorithm"],
            name,
        )
        for name in sorted(names)
    ]


def passed(llm: LLM) -> None:
    """The engine's outputs were right."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    known = read_cells()
    for cell in cells_of(llm):
        if RECORD in os.environ:
            known.setdefault(cell, test)
            rows = [[*astuple(each), file] for each, file in sorted(known.items())]
            FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        elif cell.on == "CPU" or cell.on.startswith("stand-in"):
            assert cell in known, f"{cell} is not recorded: run this test with {RECORD}=1"
