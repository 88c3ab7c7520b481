"""Large counts: the masks are those that the same expression has for Python, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forerun.core.errors import RequestError
from forerun.core.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar
from forerun.grammar.compiler import GrammarCompiler
from forerun.grammar.counts import MAX_COUNT, split_ebnf, split_regex
from forerun.grammar.vocabulary import Vocabulary, VocabularySource

xgrammar = pytest.importorskip("xgrammar")

# Parts of characters, of units, and beyond the end.
PIECES = ("a", "aa", "é", "漢", "a漢é", "a" * 40, "é" * 150, "1", "a1", '"', 'a"', 'é"', "1]", "]")
TOKENS = [piece.encode() for piece in PIECES] + [
    b"\xe6",
    b"\xbc\xa2",
    b"\xa2a",
    b"[",
    b"[1",
    b",1",
    b"{",
]
TOKENS += [b":"]
EOS = len(TOKENS)
CHARACTERS = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"


class Pieces(GrammarCompiler):
    """Compiles for a vocabulary of `TOKENS`."""

    def vocabulary(self) -> Vocabulary:
        info = xgrammar.TokenizerInfo([*TOKENS, b""], xgrammar.VocabType.RAW, stop_token_ids=[EOS])
        return Vocabulary(self.source, info, {})


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: Any) -> Pieces:
    return Pieces(VocabularySource(tmp_path_factory.mktemp("none"), len(TOKENS) + 1, (EOS,)))


def allowed(matcher: Any) -> set[int]:
    bitmask = torch.empty(1, 1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(bitmask)
    return {token for token in range(EOS + 1) if int(bitmask[0, 0]) >> token & 1}


def accepted(matcher: Any) -> set[int]:
    """As the matcher says when it is given a token."""
    found = set()
    for token in range(EOS + 1):
        if matcher.accept_token(token):
            found.add(token)
            matcher.rollback(1)
    return found


def after(compiled: Any, text: str) -> Any:
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_string(text), text[-20:]
    return matcher


def sizes(low: int, high: int | None) -> Iterator[int]:
    """Numbers of units around the places where something changes."""
    ends = {0, 1, 31, 32, 33, 127, 128, 129, low, low - 1, low + 1}
    ends |= set() if high is None else {high, high - 1, high - 40}
    yield from sorted(n for n in ends if 0 <= n <= (low + 140 if high is None else high))


@pytest.mark.parametrize(
    "unit", ["[#-\u0800]", "[a1漢]", CHARACTERS, "(a|é)", "\\x61", "(?:[a-c]1)"]
)
@pytest.mark.parametrize(
    ("low", "high"), [(129, 129), (150, None), (20, 150), (0, 300), (1, 1056), (128, 2000)]
)
def test_masks_are_those_of_python(compiler: Pieces, unit: str, low: int, high: int | None) -> None:
    count = f"{{{low},{'' if high is None else high}}}"
    compiled = compiler.compile(Grammar(REGEX, f'{unit}{count}"'))
    whole = re.compile(f'(?:{unit})*"?')
    one = "a1" if unit.startswith("(?:") else "a"
    for n in sizes(low, high):
        matcher, expected = after(compiled, one * n), set()
        for token, piece in enumerate(TOKENS):
            # Pieces of a character fit where the character does; the matcher is compared below.
            text = piece.decode(errors="ignore")
            if text.encode() != piece:
                continue
            units = text.removesuffix('"')
            partly = unit.startswith("(?:") and units.endswith("a")
            total = n + len(units) // len(one) if not partly else n + len(units + "1") // len(one)
            fits = total <= (total if high is None else high)
            fits = fits and (not text.endswith('"') or total >= low)
            if fits and whole.fullmatch(text + "1" * partly):
                expected.add(token)
        masked = allowed(matcher)
        ids = {
            t for t, piece in enumerate(TOKENS) if piece.decode(errors="ignore").encode() == piece
        }
        assert {t for t in masked if t in ids} == expected, (n, unit)
        assert masked == accepted(matcher)


@pytest.mark.parametrize(
    ("kind", "text", "begin", "low", "high", "end"),
    [
        (JSON_SCHEMA, {"type": "string", "minLength": 300}, '"', 300, None, '"'),
        (JSON_SCHEMA, {"type": "string", "maxLength": 10_000}, '"', 0, 10_000, '"'),
        (JSON_SCHEMA, {"type": "string", "pattern": "^[a漢]{200,1000}$"}, '"', 200, 1000, '"'),
        (
            JSON_SCHEMA,
            {"type": "object", "patternProperties": {"^[a漢]{130}$": {"const": 1}}},
            '{"',
            130,
            130,
            '": 1}',
        ),
        (EBNF, 'root ::= [#-\u0800]{130,150} # {999}\n  "\\""', "", 130, 150, '"'),
        (
            STRUCTURAL_TAG,
            {"format": {"type": "regex", "pattern": '[#-\u0800]{20,150}"'}},
            "",
            20,
            150,
            '"',
        ),
        (
            STRUCTURAL_TAG,
            {"format": {"type": "grammar", "grammar": 'root ::= [#-\u0800]{130} "\\""'}},
            "",
            130,
            130,
            '"',
        ),
    ],
)
def test_every_kind_counts(
    compiler: Pieces, kind: str, text: Any, begin: str, low: int, high: int | None, end: str
) -> None:
    source = text if isinstance(text, str) else json.dumps(text)
    compiled = compiler.compile(Grammar(kind, source))
    for n in sizes(low, high):
        matcher = after(compiled, begin + "a" * n)
        assert allowed(matcher) == accepted(matcher)
        assert xgrammar.GrammarMatcher(compiled).accept_string(begin + "a" * n + end) == (n >= low)
    if high is not None:
        assert not xgrammar.GrammarMatcher(compiled).accept_string(begin + "a" * (high + 1))


def test_items_are_counted(compiler: Pieces) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 130, "maxItems": 300}
    compiled = compiler.compile(Grammar(JSON_SCHEMA, json.dumps(schema)))
    for n in (1, 129, 130, 300):
        matcher = after(compiled, "[" + ",".join("1" * n))
        assert allowed(matcher) == accepted(matcher)
        assert matcher.accept_string("]") == (n >= 130)
    assert not xgrammar.GrammarMatcher(compiled).accept_string("[" + ",".join("1" * 301))


@pytest.mark.parametrize(
    "pattern",
    [
        "\\{300}",
        "[{300}]",
        "[\\]{300}]",
        "a{3}",
        "x{1,128}?",
        "(a|b{2})*",
        "^\\u{61}{2}$",
        ")",
        "(a",
    ],
)
def test_what_has_no_large_count_stays(pattern: str) -> None:
    assert split_regex(pattern) == pattern


@pytest.mark.parametrize("count", [129, 160, 161, 1024, 1025, 33_000])
def test_split_counts_are_equal(count: int) -> None:
    for pattern in (
        f"(?:a[b\\]]){{{count}}}",
        f"(x|\\)y)\\d{{0,{count}}}",
        f"a+[{{9999}}]{{5,{count}}}",
    ):
        split = split_regex(pattern)
        assert all(int(n) <= 128 for n in re.findall(r"(?<!\[)\{(?:\d+,)?(\d+)\}", split))
        for n in (0, 4, 5, count - 1, count, count + 1):
            for text in ("a]" * n, ")y" + "1" * n, "aa" + "9" * n):
                assert bool(re.fullmatch(split, text)) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (REGEX, "a{1099511627776}"),
        (REGEX, f"a{{2,{MAX_COUNT + 1}}}"),
        (EBNF, 'root ::= "a"{1099511627776}'),
        (JSON_SCHEMA, '{"type":"string","minLength":1099511627776}'),
        (JSON_SCHEMA, '{"type":"string","maxLength":1099511627776}'),
        (JSON_SCHEMA, '{"type":"array","items":{},"minItems":1099511627776}'),
        (JSON_SCHEMA, '{"type":"object","maxProperties":1099511627776}'),
        (JSON_SCHEMA, '{"type":"string","pattern":"^a{4294967297}$"}'),
        (JSON_SCHEMA, '{"type":"object","patternProperties":{"a{4294967297}":{}}}'),
        (STRUCTURAL_TAG, '{"format":{"type":"regex","pattern":"a{4294967297}"}}'),
        (REGEX, "a{9" + "9" * 5000 + "}"),
    ],
)
def test_what_cannot_be_held_is_refused(compiler: Pieces, kind: str, source: str) -> None:
    with pytest.raises(RequestError, match=f"over {MAX_COUNT}") as refused:
        compiler.compile(Grammar(kind, source))
    assert len(str(refused.value)) < 300


@pytest.mark.exhaustive
def test_the_largest_count(compiler: Pieces) -> None:
    schema = json.dumps({"type": "string", "minLength": 1, "maxLength": MAX_COUNT})
    matcher = after(compiler.compile(Grammar(JSON_SCHEMA, schema)), '"' + "a" * 5000)
    assert allowed(matcher) == accepted(matcher)


def test_counts_within_counts_have_a_limit() -> None:
    with pytest.raises(RequestError, match="too large"):
        split_regex("(" * 9 + "a" + "{1,99999}){1,99999}" * 8 + ")")


def test_a_grammar_without_large_counts_is_not_touched() -> None:
    text = 'root ::= "a{300}" [{300}] # {300}\n'
    assert split_ebnf(text) is text
