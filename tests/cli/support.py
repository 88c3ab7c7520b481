"""Results of a command line, and models to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.golden_engine import GOLDEN

# A small real target on token ids, quick to load: command lines end with these flags.
GOLDEN_FLAGS = (
    *("--model-path", str(GOLDEN / "target"), "--dtype", "float32", "--skip-tokenizer-init"),
    *("--max-total-tokens", "1024", "--device", "cpu"),
)
PAIR = Path(__file__).parents[2] / "src" / "forerun" / "assets" / "pair"

needs_pair = pytest.mark.skipif(
    not all((PAIR / name / "config.json").exists() for name in ("target", "draft")),
    reason="the bundled pair is not in this checkout",
)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a refusal, without its head; fails if there is more or less."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("forerun: error: ")
        assert "Traceback" not in self.out + self.err
        return lines[0].removeprefix("forerun: error: ")
