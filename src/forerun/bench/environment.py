"""The environment of a measurement, so that it can be repeated."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun import LLM
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
    """For `--json`: the environment, and the engine's choices at start."""
    chosen = llm.explain()
    here = Environment.here(str(chosen["device"])).as_dict()
    if chosen["threads"] is not None:
        here["threads"] = chosen["threads"]["count"]
    return {**here, "engine": chosen}


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The checkout's commit; None where `folder` is not tracked by git (an installed copy)."""
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(folder, "rev-parse", "--short", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if head and changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it fails or git is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
