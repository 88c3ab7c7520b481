"""How a model writes calls, for the grammars that enforce them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallSyntax:
    """`opening call separator call closing`; or, if `one_each`, `opening call closing` repeatedly.

    A call is `begin[0] name begin[1] arguments end`. Written as models write it: grammars allow
    nothing else, parsers are more tolerant.
    """

    opening: str  # where it occurs, a call must follow
    begin: tuple[str, str]
    end: str
    closing: str = ""
    separator: str = ""
    one_each: bool = False
    bare: bool = False  # at the beginning of an answer calls need no opening
