# mypy: allow-untyped-defs, allow-incomplete-defs
"""Suffix decoding: drafts from what followed the end of a text before, in it or in other texts.

(Suffix decoding, arXiv 2411.04975.) The paper walks a trie of all suffixes that counts how often
each occurred. Here nothing is indexed: the end of the text is compared with every position, and the
counts are taken over the places that match, one for each part of the request's own text and one for
each text of the corpus. A search reads the corpus once, a few megabytes. On GPUs three kernels:

    longest_matches (prompt_lookup.py)   the best match of each part
    _vote                                the tokens behind the best matches, by majority
    append_ref in plain PyTorch          what a step has committed goes to the corpus
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.prompt_lookup import Ends, Texts, longest_matches

TEXT_TOKENS = 256  # of a text of the corpus
OWN_PART = 256  # positions of a request's own text that give one match, or more in long texts
MAX_VOTES = 32  # best matches that vote, of either kind
ONE = 1 << 20  # probability 1 in fixed point: sums are the same on every device


@dataclass(frozen=True)
class Corpus:
    """Texts of past and running requests, in device memory of a fixed size.

    Text 0 is empty for ever: padding is written there. The others are a ring. A request writes to
    one text after the other; each begins with the end of the request's text before it.
    """

    tokens: Tensor  # [N + 1, TEXT_TOKENS] int32
    length: Tensor  # [N + 1] int32, tokens of each text
    slot: Tensor  # [N + 1] int64, the slot that has written a text last
    group: Tensor  # [N + 1] int32: only requests of the same group see a text
    taken: Tensor  # [1] int64, texts begun so far

    @classmethod
    def new(cls, texts: int, device: torch.device) -> Corpus:
        """An empty corpus of N = `texts`."""
        rows = torch.zeros(texts + 1, dtype=torch.int64, device=device)
        length = torch.zeros_like(rows, dtype=torch.int32)
        tokens = length.new_zeros(texts + 1, TEXT_TOKENS)
        return cls(tokens, length, rows, length.clone(), rows.new_zeros(1))


@dataclass(frozen=True)
class Writing:
    """Where each slot writes; a row of zeros has written nothing yet."""

    text: Tensor  # [S] int64
    first: Tensor  # [S] int32, the position in the request's text of the corpus text's first token


@dataclass(frozen=True)
class Rule:
    """How drafts are chosen and scored."""

    depth: int  # D: the longest end of the text that is compared, in tokens
    # [D + 1] int32: drafts that a match of this many tokens can answer for.
    limits: Tensor
    min_prob: int  # a draft is not answered for below this probability of all up to it, of `ONE`


def append(
    corpus: Corpus,
    writing: Writing,
    ends: Ends,
    committed: Tensor,
    sizes: tuple[int, int],
    groups: Tensor,
) -> None:
    """Adds the tokens that a step has committed to the corpus.

    Args:
        ends: the requests' texts before the step; the history has its tokens already.
        committed: [B] int32, tokens committed; 0 for none.
        sizes: W, the most tokens that a step commits; and how many tokens before those that are
            added a text begins with, so that they can be matched.
        groups: [S] int32, of the slots.
    """
    history, slots, start = ends
    if use_triton(history) or not library.serves_tables(history):
        append_ref(corpus, writing, ends, committed, sizes, groups)
        return
    places = corpus.tokens, corpus.length, corpus.slot, corpus.group, corpus.taken
    given = slots, start, committed, history, groups
    cpu.suffix_append(given, places, (writing.text, writing.first), sizes)


def append_ref(
    corpus: Corpus,
    writing: Writing,
    ends: Ends,
    committed: Tensor,
    sizes: tuple[int, int],
    groups: Tensor,
) -> None:
    """Reference implementation of `append`, and on GPUs."""
    (history, slots, start), (width, depth) = ends, sizes
    count, capacity = corpus.tokens.shape[0] - 1, corpus.tokens.shape[1]
    text, first = writing.text[slots], writing.first[slots]
    full = start + width - first >= capacity
    real = slots < history.shape[0] - 1  # not the padding slot
    fresh = ((text == 0) | (corpus.slot[text] != slots) | full) & real
    taken = corpus.taken + fresh.cumsum(0)
    text = torch.where(fresh, (taken - 1) % count + 1, text)
    corpus.slot[text * fresh] = slots
    real = real & (corpus.slot[text] == slots)  # a text that another has just taken is lost
    text = text * real
    first = torch.where(fresh, (start - (depth - 1)).clamp_min(0), first)
    positions = start.unsqueeze(1) + torch.arange(1 - depth, width + 1, device=slots.device)
    column = positions - first.unsqueeze(1)
    kept = (column >= 0) & (positions <= (start + committed).unsqueeze(1)) & real.unsqueeze(1)
    found = history[slots.unsqueeze(1), positions.clamp(0, history.shape[1] - 1)]
    corpus.tokens[text.unsqueeze(1) * kept, column * kept] = found * kept
    corpus.length[text] = (start + committed + 1 - first) * real
    corpus.group[text] = groups[slots]
    corpus.taken.copy_(taken[-1:])
    writing.text[slots] = text
    writing.first[slots] = first


def suffix_drafts(
    corpus: Corpus,
    rule: Rule,
    ends: Ends,
    groups: Tensor,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Drafts for the end of each request's text.

    Of a set of places that match at least m tokens, the token behind most of them is the draft, and
    those that have another leave; the share that stays is the draft's confidence. That is done for
    every m, in the request's own text and in the corpus; the drafts with the best score are
    returned. A score is the number of drafts that are expected to be accepted: the sum of the
    products of the confidences. Ties: the own text, then the longer match.

    Args:
        groups: [S] int32, of the slots.
        num_drafts: K.

    Returns:
        tokens [B, K] int64, confidence [B, K] float32: the probability that each draft is right,
        given that those before it are; 0 from the first that the match does not answer for.
    """
    history, slots, start = ends
    if not use_triton(history) and library.serves_tables(history):
        texts = corpus.tokens, corpus.length, corpus.group
        given = history, slots, start, groups, *texts, rule.limits
        sizes = rule.depth, rule.min_prob, OWN_PART, MAX_VOTES, ONE
        return cpu.suffix_drafts(given, sizes, num_drafts)
    others = Texts(corpus.tokens, TEXT_TOKENS, corpus.length, corpus.group, groups)
    found = [
        longest_matches(ends, texts, 1, rule.depth) for texts in (Texts(history, OWN_PART), others)
    ]
    lengths, following = _candidates(ends, found, corpus, num_drafts)
    last = history[slots, start.long()].long()
    if not use_triton(history):
        return vote_ref(lengths, following, last, rule)
    tokens = last.new_empty(len(slots), num_drafts)
    confidence = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    _vote[(len(slots),)](
        lengths, following, last, rule.limits, tokens, confidence,
        rule.depth, rule.min_prob, num_drafts,
        VOTES=MAX_VOTES, DRAFTS=triton.next_power_of_2(num_drafts), ONE=ONE,
        num_warps=1, **pdl_options(history),
    )  # fmt: skip
    return tokens, confidence


def _candidates(
    ends: Ends, found: list[Tensor], corpus: Corpus, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """The best matches of a request's own text and of the corpus, and what followed them.

    Returns:
        lengths [B, 2, MAX_VOTES] int32, longest first, 0: none; following
        [B, 2, MAX_VOTES, K] int32, -1 behind a text. The own text goes on with its own end.
    """
    history, slots, start = ends
    best = [each.topk(min(MAX_VOTES, each.shape[1])).values for each in found]
    best = [F.pad(each, (0, MAX_VOTES - each.shape[1]), value=-1) for each in best]
    at = [(each & 0x7FFFFFFF) * (each >= 0) for each in best]
    ahead = torch.arange(1, num_drafts + 1, device=slots.device)
    last = start.view(-1, 1, 1).long()
    period = (last - at[0].unsqueeze(2)).clamp_min(1)
    own = history[slots.view(-1, 1, 1), at[0].unsqueeze(2) + 1 + (ahead - 1) % period]
    flat = at[1].unsqueeze(2) + ahead
    text = at[1].unsqueeze(2) // TEXT_TOKENS
    inside = flat < text * TEXT_TOKENS + corpus.length[text]
    other = corpus.tokens.view(-1)[flat * inside].masked_fill(~inside, -1)
    lengths = torch.stack([each >> 32 for each in best], 1).clamp_min(0)
    return lengths.int(), torch.stack([own, other], 1)


def vote_ref(lengths: Tensor, following: Tensor, last: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Reference implementation of `_vote`: `suffix_drafts` for the results of `_candidates`."""
    levels = torch.arange(rule.depth, 0, -1, device=last.device)
    limits = rule.limits[levels]
    order = torch.arange(MAX_VOTES, device=last.device)
    alive = lengths.unsqueeze(2) >= levels.view(-1, 1)  # [B, 2, D, N]
    prob = torch.full(alive.shape[:3], ONE, device=last.device)
    score = torch.zeros_like(prob)
    tokens, confidences = [], []
    for i in range(following.shape[3]):
        token = following[..., i]
        votes = alive & (token >= 0).unsqueeze(2)
        same = (token.unsqueeze(3) == token.unsqueeze(2)).unsqueeze(2) & votes.unsqueeze(3)
        counts = same.sum(4) * votes
        most, which = (counts * MAX_VOTES + (MAX_VOTES - 1 - order)).max(3)
        most, total = most // MAX_VOTES, alive.sum(3).clamp_min(1)
        chosen = token.unsqueeze(2).expand(counts.shape).gather(3, which.unsqueeze(3))
        prob = prob * most // total
        answers = (i < limits) & (prob >= rule.min_prob) & (prob > 0)
        score += prob * answers
        tokens.append(torch.where(most > 0, chosen.squeeze(3), last.view(-1, 1, 1)))
        confidences.append(most / total * answers)
        alive = votes & (token.unsqueeze(2) == chosen)
    first = torch.arange(2 * rule.depth - 1, -1, -1, device=last.device)
    best, index = (score.flatten(1) * (2 * rule.depth) + first).max(1, keepdim=True)
    found, index = best >= 2 * rule.depth, index.unsqueeze(2)

    def of_best(each: list[Tensor]) -> Tensor:
        return torch.stack(each, 3).flatten(1, 2).gather(1, index.expand(-1, 1, len(each)))[:, 0]

    proposed = torch.where(found, of_best(tokens), last.unsqueeze(1))
    return proposed.long(), of_best(confidences) * found


@jit
def _vote(
    lengths, following, last, limits, tokens, confidence, depth, min_prob, num_drafts,
    VOTES: tl.constexpr, DRAFTS: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request; N = VOTES."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    n, k = tl.arange(0, VOTES), tl.arange(0, DRAFTS)
    again = tl.load(last + request).to(tl.int32)
    best_score = 0
    best_tokens = tl.zeros((DRAFTS,), tl.int32) + again
    best_shares = tl.zeros((DRAFTS,), tl.float32)
    for place in range(request * 2, request * 2 + 2):
        length = tl.load(lengths + place * VOTES + n)
        before = 0
        for back in range(0, depth):
            alive = length >= depth - back
            total = tl.sum(alive.to(tl.int32), 0)
            if total > before:
                before = total
                limit = tl.load(limits + depth - back)
                prob, score = ONE, 0
                chosen = tl.zeros((DRAFTS,), tl.int32) + again
                shares = tl.zeros((DRAFTS,), tl.float32)
                for i in range(0, num_drafts):
                    token = tl.load(following + (place * VOTES + n) * num_drafts + i)
                    votes = alive & (token >= 0)
                    same = (token[:, None] == token[None, :]) & votes[None, :] & votes[:, None]
                    # The most votes, then the first candidate.
                    top = tl.max(tl.sum(same.to(tl.int32), 1) * VOTES + (VOTES - 1 - n), 0)
                    most, first = top // VOTES, VOTES - 1 - top % VOTES
                    draft = tl.sum(tl.where(n == first, token, 0), 0)
                    total = tl.maximum(tl.sum(alive.to(tl.int32), 0), 1)
                    prob = prob * most // total
                    answers = (i < limit) & (prob >= min_prob) & (prob > 0)
                    score += tl.where(answers, prob, 0)
                    share = tl.where(answers, most.to(tl.float32) / total.to(tl.float32), 0.0)
                    chosen = tl.where((k == i) & (most > 0), draft, chosen)
                    shares = tl.where(k == i, share, shares)
                    alive = votes & (token == draft)
                better = score > best_score
                best_score = tl.where(better, score, best_score)
                best_tokens = tl.where(better, chosen, best_tokens)
                best_shares = tl.where(better, shares, best_shares)
    out = request * num_drafts + k
    tl.store(tokens + out, best_tokens.to(tl.int64), mask=k < num_drafts)
    tl.store(confidence + out, best_shares, mask=k < num_drafts)
