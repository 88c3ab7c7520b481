"""Masks along drafts, commits and rollbacks, held to a fresh matcher fed token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.grammar import Grammar
from forerun.core.plan import SlotGrammar
from forerun.grammar import state as module
from forerun.grammar.bitmask import forbid, new_bitmask
from forerun.grammar.state import GrammarState
from tests.property_examples import examples

xgrammar = pytest.importorskip("xgrammar")

from tests.grammar.vocab import EOS, VOCAB_SIZE, compiler, tokenizer  # noqa: E402

SCHEMA = '{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}}}}'
GRAMMARS = [
    Grammar("regex", "(ab|a)*c?"),
    Grammar("json_schema", SCHEMA),
    Grammar("ebnf", 'root ::= "(" root ")" | "x"'),
]
ALL = set(range(VOCAB_SIZE))


def allowed(row: torch.Tensor) -> set[int]:
    words = row.tolist()
    return {t for t in ALL if words[t // 32] >> (t % 32) & 1}


def reference(grammar: Grammar, tokens: Sequence[int]) -> set[int] | None:
    """What a fresh matcher allows after tokens; None: they end the grammar, or do not match."""
    matcher = xgrammar.GrammarMatcher(compiler().compile(grammar))
    if not all(matcher.accept_token(token) for token in tokens) or matcher.is_terminated():
        return None
    bitmask = torch.full((1, VOCAB_SIZE // 32), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(bitmask)
    return allowed(bitmask[0])


def state_of(grammar: Grammar, output: Sequence[int] = (), **params: object) -> GrammarState:
    return GrammarState.of(SlotGrammar(grammar, **params), output, compiler())  # type: ignore[arg-type]


def masks(
    state: GrammarState, drafts: Sequence[int], parents: Sequence[int] | None = None
) -> list[set[int]]:
    """Of every node, the tokens that it allows."""
    bitmask = new_bitmask(len(drafts) + 3, VOCAB_SIZE)
    rows = state.fill_masks(drafts, parents, bitmask, 2)
    used = [row for row in rows if row >= 0]
    assert sorted(used) == list(range(2, 2 + len(used)))
    return [ALL if row < 0 else allowed(bitmask[row]) for row in rows]


def test_ids_outside_the_vocabulary_are_no_drafts(capfd: pytest.CaptureFixture[str]) -> None:
    """The library would write a warning for each, and read some as others: ids of 32 bits."""
    state = state_of(GRAMMARS[0])
    right = min(masks(state, [])[0])
    allowed_after = masks(state, [right])
    first = masks(state, [])
    for wrong in (-1, VOCAB_SIZE, 10**9, right + 2**32, 2**62):
        assert masks(state, [wrong, right], [0, 0]) == [first[0], ALL, allowed_after[1]]
    assert capfd.readouterr().err == ""


@examples(60)
@given(st.sampled_from(GRAMMARS), st.integers(0, 2**32), st.booleans())
def test_walks_equal_a_fresh_matcher(grammar: Grammar, seed: int, tree: bool) -> None:
    """Steps with random drafts, mostly allowed ones, of which a random path is committed."""
    rng = random.Random(seed)
    state, output = state_of(grammar), []
    for _ in range(5):
        count = rng.randint(0, 6)
        parents = [rng.randint(0, i) for i in range(count)] if tree else list(range(count))
        paths: list[list[int]] = [[]]
        drafts = []
        for parent in parents:
            options = reference(grammar, [*output, *paths[parent]])
            token = rng.choice(sorted(options)) if options else rng.randrange(VOCAB_SIZE)
            if rng.random() < 0.2:
                token = rng.choice([-1, rng.randrange(VOCAB_SIZE), EOS[0]])
            drafts.append(token)
            paths.append([*paths[parent], token])
        want = [reference(grammar, [*output, *path]) if -1 not in path else None for path in paths]
        got = masks(state, drafts, parents if tree else None)
        assert got == [ALL if each is None else each for each in want]
        node = rng.choice([i for i, each in enumerate(want) if each is not None])
        bonus = want[node]
        assert bonus
        committed = [*paths[node], rng.choice(sorted(bonus))]
        assert state.accept(committed)
        output += committed
        if reference(grammar, output) is None:  # the end
            assert output[-1] in EOS
            assert masks(state, [5, 6]) == [ALL] * 3
            assert state.accept([5]) and not state.is_stuck
            return
        resumed = state_of(grammar, output)  # after a preemption
        assert masks(resumed, []) == masks(state, [])
        assert resumed.num_tokens == state.num_tokens == len(output)


def test_tokens_that_do_not_match_are_found() -> None:
    state = state_of(Grammar("regex", "ab"))
    assert not state.accept(tokenizer()("b")["input_ids"])


def test_nothing_but_the_end_after_the_end() -> None:
    state = state_of(Grammar("regex", "ab"), tokenizer()("ab")["input_ids"])
    assert masks(state, [EOS[0], 7]) == [set(EOS), ALL, ALL]


def test_special_tokens_are_no_text() -> None:
    assert not masks(state_of(Grammar("regex", "(.|\n)+")), [])[0] & {0, 1, 2, 3}
    text, named = '{"type":"any_text"}', '{"type":"const_string","value":"<|im_start|>"}'
    for tag, start in ((text, False), (named, True)):
        first = masks(state_of(Grammar("structural_tag", f'{{"format":{tag}}}')), [])[0]
        assert (1 in first) == start and not first & {0, 2, 3} - set(EOS)


@pytest.mark.parametrize(
    "params", [{"min_new_tokens": 3}, {"ignore_eos": True}], ids=["min_new_tokens", "ignore_eos"]
)
def test_the_end_is_masked_while_the_grammar_goes_on(params: dict[str, object]) -> None:
    (a,) = tokenizer()("a")["input_ids"]
    state = state_of(Grammar("regex", "a{0,4}"), [a], **params)
    chain = masks(state, [a, a, a])
    for node, tokens in enumerate(chain[:3]):
        early = "ignore_eos" in params or 1 + node < 3
        assert bool(tokens & set(EOS)) is not early
        assert tokens - set(EOS)
    assert chain[3] == set(EOS)  # there is nothing else


def test_stop_ids_are_masked_before_min_new_tokens() -> None:
    (a,) = tokenizer()("a")["input_ids"]
    (b,) = tokenizer()("b")["input_ids"]
    grammar = Grammar("regex", "[ab]*")
    state = state_of(grammar, min_new_tokens=1, stop_ids=(b,))
    first, second = masks(state, [a])
    assert not first & {b, *EOS} and a in first
    assert second >= {a, b, *EOS}


def test_forbid() -> None:
    row = new_bitmask(1, 64)[0]
    for word, tokens in ((-1, (0, 31, 32)), (1, (0,)), (-(2**31), (31,))):
        row.fill_(word)
        before = {t for t in range(64) if word >> (t % 32) & 1}
        forbid(row, tokens)
        got = {t for t in range(64) if row.tolist()[t // 32] >> (t % 32) & 1}
        assert got == before - set(tokens)
    row[0], row[1] = 3, 0
    forbid(row, (0, 1))
    assert row.tolist() == [3, 0]  # nothing would be left


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(module, "MAX_STEP_SECONDS", 0.0)
    state = state_of(Grammar("ebnf", 'root ::= root root root | root root | "a" | ""'))
    (a,) = tokenizer()("a")["input_ids"]
    for _ in range(60):
        masks(state, [a] * 8)
        if state.too_slow:
            break
        assert state.accept([a] * 8)
    assert state.too_slow and not state.is_stuck and state.accept([a])
    assert masks(state, [a]) == [ALL, ALL]


def test_a_grammar_that_no_token_continues_is_stuck() -> None:
    state = state_of(Grammar("ebnf", 'root ::= "a" tail | "b"\ntail ::= tail'))
    assert not state.is_stuck
    assert state.accept(tokenizer()("a")["input_ids"])
    assert masks(state, []) == [set()] and state.is_stuck
