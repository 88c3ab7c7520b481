"""The commit of the checkout that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
