"""Suffix decoding: kernels and reference against a trie with counts, written as loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from forerun.kernels.cpu import library
from forerun.kernels.speculation import suffix as module
from forerun.kernels.speculation.suffix import ONE, Corpus, Rule, Writing, append, suffix_drafts

DEPTH, CAPACITY, PART = 6, 32, 16

Texts = Sequence[Sequence[int]]


@pytest.fixture(params=["ref", "triton", "cpu"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation runs."""
    if request.param != "triton" and torch.cuda.is_available():
        pytest.skip("without a GPU")
    if request.param != "triton":
        monkeypatch.delenv("TRITON_INTERPRET")
    if request.param == "ref":
        monkeypatch.setattr(library, "_load", lambda: library.Loaded(None, None))
    elif request.param == "cpu" and library.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(module, "TEXT_TOKENS", CAPACITY)
    monkeypatch.setattr(module, "OWN_PART", PART)
    monkeypatch.setattr(module, "MAX_VOTES", 8)
    return str(request.param)


def rule(device: torch.device, factor: float = 1.0, min_prob: float = 0.0) -> Rule:
    limits = torch.tensor([int(factor * m) for m in range(DEPTH + 1)], dtype=torch.int32)
    return Rule(DEPTH, limits.to(device), round(min_prob * ONE))


def match(text: Sequence[int], at: int, end: Sequence[int]) -> int:
    """Tokens before and at `at` that equal the last ones of `end`, DEPTH at most."""
    length = 0
    while length < min(DEPTH, at + 1, len(end)) and text[at - length] == end[-1 - length]:
        length += 1
    return length


def places(spans: Sequence[tuple[Sequence[int], int, int]], end: Sequence[int]) -> Texts:
    """Best match of each span [first, last) of a text, best first: [length, following...]."""
    found = []
    for order, (text, first, last) in enumerate(spans):
        lengths = [(match(text, at, end), at) for at in range(first, last)]
        if lengths and max(lengths)[0]:
            length, at = max(lengths)
            found.append((length, order, at, text))
    found.sort(key=lambda each: each[:3], reverse=True)
    return [[length, *text[at + 1 :]] for length, _, at, text in found[: module.MAX_VOTES]]


def walk(
    matches: Texts, count: int, limit: int, min_prob: float
) -> tuple[Fraction, list[int], list[Fraction]]:
    """Score, tokens and confidence of the majority of `matches`, as of a trie with counts."""
    alive, prob, score = list(matches), Fraction(1), Fraction(0)
    tokens: list[int] = []
    shares: list[Fraction] = []
    for i in range(count):
        votes = Counter(each[i + 1] for each in alive if len(each) > i + 1)
        if not votes:
            break
        token, most = votes.most_common(1)[0]  # of equal ones the first
        prob *= Fraction(most, len(alive))
        if i < limit and prob >= min_prob:
            score += prob
            shares.append(Fraction(most, len(alive)))
        tokens.append(token)
        alive = [each for each in alive if len(each) > i + 1 and each[i + 1] == token]
    return score, tokens, shares


def expected(
    own: Sequence[int], texts: Texts, count: int, factor: float, min_prob: float
) -> tuple[Fraction, list[int], list[float]]:
    last = len(own) - 1
    parts = [(own, at, min(at + PART, last)) for at in range(0, last, PART)]
    of_own = []
    for length, *following in places(parts, own):
        of_own.append([length, *following * (count // len(following) + 1)])
    of_texts = places([(text, 0, len(text) - 1) for text in texts], own)
    best: tuple[Fraction, list[int], list[Fraction]] = Fraction(0), [], []
    for matches in (of_own, of_texts):
        for m in range(DEPTH, 0, -1):
            alive = [each for each in matches if each[0] >= m]
            found = walk(alive, count, min(count, int(factor * m)), min_prob)
            if alive and found[0] > best[0]:
                best = found
    tokens = best[1] + [own[-1]] * (count - len(best[1]))
    return best[0], tokens, [float(x) for x in best[2]] + [0.0] * (count - len(best[2]))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("factor", "min_prob"), [(1.0, 0.0), (2.5, 0.3), (0.5, 0.0)])
def test_drafts_are_those_of_the_trie(
    way: str, factor: float, min_prob: float, device: torch.device
) -> None:
    """Texts in few letters, from one token on; a group sees its own texts only."""
    generator = torch.Generator().manual_seed(int(factor * 10))
    history = torch.randint(3, (7, 90), generator=generator, dtype=torch.int32)
    history[2] = torch.arange(90) + 100  # nothing matches
    history[3] = 7  # everything does, in its own text
    history[4, 60:] = 2 - history[4, 60:]
    corpus = Corpus.new(12, torch.device("cpu"))
    corpus.tokens.copy_(torch.randint(3, corpus.tokens.shape, generator=generator))
    corpus.length[1:] = torch.randint(0, CAPACITY + 1, (12,), generator=generator)
    corpus.group[6:] = 1
    slots, start = torch.tensor([6, 5, 2, 3, 4, 0, 1]), torch.tensor([89, 31, 40, 70, 80, 0, 3])
    groups = torch.tensor([0, 0, 1, 0, 1, 1, 0], dtype=torch.int32)
    corpus.tokens[7, :6] = history[4, 75:81]  # a long match that others of its group share
    corpus.length[7] = 31
    on = Corpus(*(getattr(corpus, name).to(device) for name in Corpus.__dataclass_fields__))
    for count in (1, 7):
        ends = history.to(device), slots.to(device), start.int().to(device)
        by = rule(device, factor, min_prob)
        tokens, confidence = suffix_drafts(on, by, ends, groups.to(device), count)
        for i, (slot, last) in enumerate(zip(slots.tolist(), start.tolist(), strict=True)):
            texts = [
                corpus.tokens[row, : corpus.length[row]].tolist()
                for row in range(13)
                if corpus.group[row] == groups[slot]
            ]
            own = history[slot, : last + 1].tolist()
            want = expected(own, texts, count, factor, min_prob)
            assert tokens[i].tolist() == want[1], (slot, count)
            assert confidence[i].tolist() == pytest.approx(want[2], rel=1e-6)


class Requests:
    """Requests that commit random tokens, and the texts that the corpus should hold."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.corpus = Corpus.new(count, device)
        rows = torch.zeros(4, dtype=torch.int64, device=device)
        self.writing = Writing(rows, rows.int())
        self.history = torch.zeros(4, 200, dtype=torch.int32, device=device)
        self.groups = torch.tensor([5, 6, 7, 0], dtype=torch.int32, device=device)
        self.ends = [0, 0, 0, 0]
        self.texts: dict[int, tuple[int, int, int]] = {}  # by row: slot, first, end
        self.rows = [0, 0, 0, 0]
        self.taken = 0

    def admit(self, slot: int, prompt: list[int]) -> None:
        self.history[slot, : len(prompt)] = torch.tensor(prompt, device=self.history.device)
        self.ends[slot] = len(prompt)
        self.writing.text[slot] = self.writing.first[slot] = self.rows[slot] = 0

    def step(self, slots: list[int], width: int, counts: list[int]) -> None:
        device, start = self.history.device, [max(self.ends[slot] - 1, 0) for slot in slots]
        for slot, at in zip(slots, start, strict=True):
            drafted = torch.randint(1000, (width,), dtype=torch.int32)
            self.history[slot, at + 1 : at + 1 + width] = drafted.to(device)
        rows = torch.tensor(slots, device=device)
        ends = self.history, rows, torch.tensor(start, dtype=torch.int32, device=device)
        committed = torch.tensor(counts, dtype=torch.int32, device=device)
        append(self.corpus, self.writing, ends, committed, (width, DEPTH), self.groups)
        real = [slot for slot in slots if slot < 3]
        self._expect(real, width, dict(zip(slots, counts, strict=True)))

    def _expect(self, slots: list[int], width: int, counts: dict[int, int]) -> None:
        for slot in slots:
            row, start = self.rows[slot], self.ends[slot] - 1
            held = self.texts.get(row)
            if held is None or held[0] != slot or start + width - held[1] >= CAPACITY:
                self.rows[slot] = self.taken % (len(self.corpus.length) - 1) + 1
                self.taken += 1
                self.texts[self.rows[slot]] = (slot, max(start - DEPTH + 1, 0), 0)
        for slot in slots:
            self.ends[slot] += counts[slot]
            owner, first, _ = self.texts[self.rows[slot]]
            if owner != slot:  # taken by another in this step
                self.rows[slot] = 0
                continue
            self.texts[self.rows[slot]] = (slot, first, self.ends[slot])

    def check(self, contents: dict[int, list[int]]) -> None:
        """`contents`: of texts whose request has ended, by row; the others are compared here."""
        assert int(self.corpus.length[0]) == 0
        for row, (slot, first, end) in self.texts.items():
            length = int(self.corpus.length[row])
            if self.rows[slot] == row:
                contents[row] = self.history[slot, first:end].tolist()
                assert int(self.corpus.group[row]) == int(self.groups[slot])
            assert self.corpus.tokens[row, :length].tolist() == contents[row], row


@pytest.mark.parametrize("texts", [3, 20])
def test_what_was_committed_is_in_the_corpus(way: str, texts: int, device: torch.device) -> None:
    """Also with padding, in slots used again, in long texts, and where the ring comes round."""
    torch.manual_seed(texts)
    requests, contents = Requests(texts, device), dict[int, list[int]]()
    requests.admit(0, [3, 1])
    requests.admit(1, list(range(30)))
    requests.admit(2, list(range(7)))
    for i in range(30):
        width = int(torch.randint(1, 6, ()))
        counts = torch.randint(1, width + 1, (5,)).tolist()
        slots = [0, 1, 2] if i % 3 else [2, 0]
        requests.step([*slots, 3, 3], width, [*counts[: len(slots)], 1, 1])
        requests.check(contents)
        if i == 13:
            requests.admit(1, list(range(50, 80)))
    assert requests.taken > 6
