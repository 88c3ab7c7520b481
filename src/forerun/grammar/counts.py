"""Large counts of regular expressions and EBNF, written as several small ones.

The compiler writes out counts of up to 128. It counts beyond that while it matches, and then the
masks of some characters' classes are wrong: those of `[#-\\u0800]{129}` lack tokens, and allow
others that are refused. So no larger count reaches it from a pattern: 300 is 9 × 32 + 12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.core.errors import RequestError, shown
from forerun.core.grammar import MAX_GRAMMAR_LENGTH
from forerun.grammar.vocabulary import import_xgrammar

MAX_COUNT = 1 << 20
_WRITTEN_OUT = 128
_BLOCK = 32  # units in a block, and blocks in a larger one

_CLASS = r"\[(?:\\.|[^\]\\])*\]"
_COUNT = r"\{\s*(?P<low>\d+)\s*(?P<range>,\s*(?P<high>\d*)\s*)?\}"
REGEX_PARTS = re.compile(
    r"\\u\{\w+\}|\\u\w{4}|\\x\w\w|\\[pP]\{[^}]*\}|\\c\w|\\.|"
    rf"{_CLASS}|(?P<open>\((?:\?(?:[:=!]|<[=!]|<\w+>))?)|(?P<close>\))|"
    rf"(?P<count>{_COUNT}\??)|(?P<many>[*+?]\??)|.",
    re.DOTALL,
)
_SKIPPED = rf'"(?:\\.|[^"\\])*"|{_CLASS}|#[^\n]*'  # in EBNF
_EBNF = re.compile(rf"{_SKIPPED}|(?P<count>{_COUNT})", re.DOTALL)
# As the compiler prints a grammar: what is counted has a name, and -1 is no upper limit.
_PRINTED = re.compile(rf"{_SKIPPED}|(?P<unit>\w+)\{{(?P<low>\d+), (?P<high>-?\d+)\}}", re.DOTALL)


@dataclass(frozen=True)
class _Form:
    """How a syntax writes sequences and groups."""

    opening: str
    separator: str

    def times(self, unit: str, low: int, high: int | None) -> str:
        """`low` to `high` of a unit, as a group."""
        if high is None:  # `X*` after X would make masks too narrow
            last = low % _BLOCK or _BLOCK
            parts = [self._exactly(unit, low - last), f"{unit}{{{last},}}"]
        else:
            parts = [self._exactly(unit, low), self._up_to(unit, high - low)]
        return self._group(self._sequence(*parts))

    def _exactly(self, unit: str, count: int) -> str:
        if count <= _BLOCK:
            return f"{unit}{{{count}}}" if count else ""
        blocks, rest = divmod(count, _BLOCK)
        return self._sequence(self._exactly(self._block(unit), blocks), self._exactly(unit, rest))

    def _up_to(self, unit: str, count: int) -> str:
        """Whole blocks, and fewer units than a block has; in one way only for every number."""
        if count < _BLOCK:
            return f"{unit}{{0,{count}}}" if count else ""
        blocks, rest = divmod(count + 1, _BLOCK)
        block = self._block(unit)
        fewer = self._sequence(self._up_to(block, blocks - 1), f"{unit}{{0,{_BLOCK - 1}}}")
        if not rest:
            return fewer
        most = self._sequence(self._exactly(block, blocks), self._up_to(unit, rest - 1))
        return self._group(f"{fewer}|{most}")

    def _block(self, unit: str) -> str:
        return self._group(f"{unit}{{{_BLOCK}}}")

    def _group(self, content: str) -> str:
        return f"{self.opening}{content})"

    def _sequence(self, *parts: str) -> str:
        return self.separator.join(part for part in parts if part)


_OF_REGEX, _OF_EBNF = _Form("(?:", ""), _Form("(", " ")


def times(unit: str, low: int, high: int | None) -> str:
    """A regular expression for `low` to `high` of a unit; None: without an upper limit."""
    return _OF_REGEX.times(unit, low, high) if _is_large(low, high) else _short(unit, low, high)


def split_regex(pattern: str) -> str:
    """The same regular expression without large counts.

    Raises:
        RequestError: a count is over `MAX_COUNT`, or the expression becomes too long.
    """
    levels: list[list[str]] = [[]]  # of groups that are open: their parts
    for match in REGEX_PARTS.finditer(pattern):
        parts, kind = levels[-1], match.lastgroup
        if match["open"] is not None:
            levels.append([match[0]])
        elif match["close"] is not None and len(levels) > 1:
            levels.pop()
            levels[-1].append("".join(parts) + ")")
        elif parts and match["count"] is not None:
            low, high = _bounds(match)
            parts[-1] = (
                times(parts[-1], low, high) if _is_large(low, high) else parts[-1] + match[0]
            )
        elif parts and kind == "many":
            parts[-1] += match[0]
        else:
            parts.append(match[0])
        if len(parts[-1] if parts else "") > MAX_GRAMMAR_LENGTH:
            raise _too_large("A regular expression", pattern)
    return "".join("".join(parts) for parts in levels)


def split_ebnf(text: str) -> str:
    """The same grammar without large counts; only then it is not the text that was given.

    Raises:
        RequestError: a count is over `MAX_COUNT`, or the grammar becomes too long.
        RuntimeError: the compiler cannot read it.
    """
    counts = [_bounds(match) for match in _EBNF.finditer(text) if match["count"] is not None]
    if not any(_is_large(low, high) for low, high in counts):
        return text
    printed = str(import_xgrammar().Grammar.from_ebnf(text))
    split = _PRINTED.sub(_small, printed)
    if len(split) > 2 * MAX_GRAMMAR_LENGTH:
        raise _too_large("A grammar", text)
    return split


def _small(match: re.Match[str]) -> str:
    if match["unit"] is None:
        return match[0]
    low, high = int(match["low"]), int(match["high"])
    upper = None if high < 0 else high
    return _OF_EBNF.times(match["unit"], low, upper) if _is_large(low, upper) else match[0]


def _bounds(match: re.Match[str]) -> tuple[int, int | None]:
    """
    Raises:
        RequestError: a count is over `MAX_COUNT`.
    """
    low, high = match["low"], match["high"] if match["range"] is not None else match["low"]
    for count in (low, high or ""):
        if len(count) > len(str(MAX_COUNT)) or int(count or 0) > MAX_COUNT:
            raise RequestError(
                f"The count {shown(match[0])} is over {MAX_COUNT}; leave the limit out, or make it"
                " smaller."
            )
    return int(low), int(high) if high else None


def _is_large(low: int, high: int | None) -> bool:
    return max(low, high or 0) > _WRITTEN_OUT and (high is None or low <= high)


def _short(unit: str, low: int, high: int | None) -> str:
    return f"{unit}{{{low},{'' if high is None else high}}}"


def _too_large(what: str, text: str) -> RequestError:
    return RequestError(
        f"{what} with such counts within each other is too large, {shown(text)}; make them smaller."
    )
