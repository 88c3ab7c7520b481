"""The environment of a measurement, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import forerun
from forerun import LLM
from forerun.evals.commit import commit
from forerun.platform.device import device_name, versions


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions, machine and commit of this process."""

    forerun: str
    versions: dict[str, str | None]
    device: str
    hardware: str
    threads: int  # intra-op threads on a CPU
    commit: str | None  # None outside a checkout; "+" when tracked files are changed

    @classmethod
    def here(cls, device: str = "cpu") -> Environment:
        return cls(
            forerun=forerun.__version__,
            versions=versions(),
            device=device,
            hardware=device_name(torch.device(device)),
            threads=torch.get_num_threads(),
            commit=commit(),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line, shown under a table."""
        at = f" (commit {self.commit})" if self.commit else ""
        threads = f", {self.threads} threads" if self.device == "cpu" else ""
        return f"forerun {self.forerun}{at}, torch {torch.__version__}, {self.hardware}{threads}"


def environment(llm: LLM) -> dict[str, Any]:
    """Returns what `--json` shows: the environment, and the engine's choices at start."""
    chosen = llm.explain()
    here = Environment.here(str(chosen["device"])).as_dict()
    if chosen["threads"] is not None:
        here["threads"] = chosen["threads"]["count"]
    return {**here, "engine": chosen}


def made_with(where: Mapping[str, Any]) -> str:
    """The line under a table, from `environment(llm)`."""
    chosen = where["engine"]
    return f"{chosen['dtype']}, {Environment.here(chosen['device']).line()}"
