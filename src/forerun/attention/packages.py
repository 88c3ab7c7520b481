"""Packages that bring attention kernels: whether they are installed, without importing them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """An optional package, or one file of it."""

    module: str  # its top level, as it is imported
    distribution: str  # as pip installs it
    part: str = "__init__.py"  # pattern of a file that must be in it, relative to its folder

    def find(self) -> Path | None:
        """Path of `part`, or of a module that is a single file; None: not installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return None if spec.origin is None else Path(spec.origin)
        for folder in spec.submodule_search_locations:
            for path in sorted(Path(folder).glob(self.part)):
                return path
        return None

    def why_not(self) -> list[str]:
        """The reason to refuse what needs it; empty if it is installed."""
        if self.find() is not None:
            return []
        return [f"{self.distribution} is not installed (pip install {self.distribution})"]


FLASHINFER = Package("flashinfer", "flashinfer-python")
