"""How a model writes calls: what parsers read by, and grammars enforce."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """How arguments are written. Values: xgrammar's names, where it has one."""

    JSON = "json"
    QWEN_XML = "qwen_xml"
    GLM_XML = "glm_xml"
    MINIMAX_XML = "minimax_xml"
    PYTHON = "python"  # key=value, ...
    GEMMA = "gemma"  # {key:value,...}


@dataclass(frozen=True)
class CallSyntax:
    """`opening inner call separator call closing`, or, if `one_each`, `opening call closing` again
    and again.

    A call is `begin[0] prefix name begin[1] arguments end`. Written as models write it: grammars
    allow nothing else, parsers are more tolerant.
    """

    opening: str  # where it occurs, a call must follow
    begin: tuple[str, str]
    end: str
    closing: str = ""
    separator: str = ""
    one_each: bool = False
    bare: str = ""  # characters, one of which begins calls without an opening that begin an answer
    style: Style = Style.JSON
    inner: str = ""  # before the first call
    prefix: str = ""  # of the name
    number: str = ""  # after the name, before the call's number
    others: tuple[str, ...] = ()  # further forms of `begin[1]`
    leads: tuple[str, ...] = ()  # what stands before an opening where nothing else does
    single: bool = False  # an answer has one call at most
    tolerated: tuple[str, ...] = ()  # openings that are read, too, and that grammars do not allow
