"""A clean virtual environment into which example packages are installed with pip.

What the project's own environment has (torch, pytest) it sees through a path, so that nothing is
downloaded; the packages themselves are built and installed, and found by their entry points.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "env" / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True
        )
        (own,) = (folder / "env").glob("lib/python*/site-packages")
        # `addsitedir` and not a bare path: an editable install of Forerun is a path file itself.
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (own / "project.pth").write_text("\n".join(lines) + "\n")

    def install(self, package: str) -> None:
        """From a copy: building leaves files behind."""
        copy = self.folder / package
        junk = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
        shutil.copytree(EXAMPLES / package, copy, ignore=junk)
        self.run(
            *("-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--disable-pip-version-check", str(copy)),
        )

    def run(self, *arguments: str) -> str:
        """The environment's Python; its output, which a failure shows."""
        variables = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout
