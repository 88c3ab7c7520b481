"""Compiles a grammar to see that it ends, in a process that `trials.py` runs and can end.

The result is not sent back: written as JSON it can have a hundred times its size in memory, and
reading it takes longer than to compile the grammar again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forerun.platform.limited_process import limit_cpu, serve

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

MAX_GRAMMAR_BYTES = 256 << 20  # of one compiled grammar
MAX_MEMORY = 1 << 30  # bytes that compiling may take
NICENESS = 19  # the lowest priority
# While it starts, which takes seconds of a CPU: at the lowest priority it would not be ready in
# time where all cores are busy.
STARTING_NICENESS = 5


@dataclass(frozen=True)
class Job:
    """What xgrammar is given."""

    method: str  # of its compiler
    source: str  # JSON of a schema or a structural tag, a regular expression, EBNF
    any_whitespace: bool = True
    patterns: tuple[str, ...] = ()  # within the source

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def compile(self, info: TokenizerInfo) -> CompiledGrammar:
        """
        Raises:
            PatternError: a pattern is not supported.
            RuntimeError, ValueError, TypeError: the source is invalid.
        """
        import xgrammar

        check_patterns(self.patterns)
        # A cache of one compilation: rules of the same form, as of many tools, are compiled once.
        compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=MAX_GRAMMAR_BYTES
        )
        if self.method == "compile_structural_tag":
            return compiler.compile_structural_tag(json.loads(self.source))
        if self.method == "compile_json_schema":
            spaces = self.any_whitespace
            return compiler.compile_json_schema(self.source, any_whitespace=spaces)
        if self.method == "compile_regex":
            return compiler.compile_regex(self.source)
        assert self.method == "compile_grammar"
        return compiler.compile_grammar(self.source)


class PatternError(Exception):
    """A regular expression in a schema, of which the compiler ignores what it does not know."""

    def __init__(self, pattern: str, reason: Exception) -> None:
        super().__init__(str(reason))
        self.pattern, self.reason = pattern, reason


def check_patterns(patterns: Iterable[str]) -> None:
    """
    Raises:
        PatternError: one is not supported.
    """
    import xgrammar

    for pattern in patterns:
        try:
            xgrammar.Grammar.from_regex(pattern)
        except RuntimeError as error:
            raise PatternError(pattern, error) from None


_info: list[TokenizerInfo] = []  # of this process: the last one that was sent


def answer(message: bytes) -> bytes:
    """Compiles. Says why it must not be done elsewhere, if so."""
    import xgrammar

    given = json.loads(message)
    if "info" in given:
        _info[:] = [xgrammar.TokenizerInfo.deserialize_json(given["info"])]
    limit_cpu(given["seconds"])
    job = Job(**given["job"])
    reason = ""
    try:
        job.compile(_info[0])
    except MemoryError:
        reason = "memory"
    except Exception as error:  # noqa: BLE001  found again, and told, by who asks
        reason = "memory" if "bad_alloc" in str(error) else ""
    return reason.encode()


if __name__ == "__main__":
    os.nice(STARTING_NICENESS)
    import xgrammar  # noqa: F401  before it is asked for

    os.nice(NICENESS - STARTING_NICENESS)
    serve(answer, MAX_MEMORY)
