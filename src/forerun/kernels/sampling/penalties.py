# mypy: allow-untyped-defs, allow-incomplete-defs
"""Logit bias and penalties, between the LM head and the sampler.

How often a token occurs is counted anew in every step, from the tokens that the slots' history
holds on the device: one pass over the context, which is short beside the vocabulary. So there is no
table of counts to keep in step with commits, trees, preemptions and rejected drafts, and no memory
that lasts. The launches, for B requests of W tokens:

    zeros, _count_tokens    words [B, V]: how often a token is in the output, and whether it is in
                            the prompt (bit 30); bias [B, V].
    _penalize               reads every logit once, writes it in float32.

The distribution after a draft depends on the drafts before it: the kernel adds those on its path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.sampling_params import columns_of
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.tree import mask_words, unpack_bits

# Columns of `PenaltyBatch.ints`. Kernels have them as numbers.
PROMPT_TOKENS, NUM_BIASES, NUM_INTS = 0, 1, 2
IN_PROMPT = 1 << 30  # a word is the count in the output, with this bit if the prompt has the token
BLOCK = 1024  # logits, tokens or biases that a CTA handles


@dataclass(frozen=True)
class PenaltyBatch:
    """B requests in the tables of S slots."""

    slots: Tensor  # [B] int64
    floats: Tensor  # [S, columns_of("logits")] float32
    ints: Tensor  # [S, NUM_INTS] int32: tokens of the prompt, entries of the biases
    bias_ids: Tensor  # [S, MAX_BIASES] int32, all different
    biases: Tensor  # [S, MAX_BIASES] float32
    history: Tensor  # [S, positions] int32, token ids by position

    def column(self, name: str) -> Tensor:
        """[B] float32: the requests' values of a parameter that edits logits."""
        return self.floats[self.slots, columns_of("logits").index(name)]


@dataclass(frozen=True)
class DraftPath:
    """The tokens that a verify pass runs on."""

    ids: Tensor  # [B, W] int64: the last token, which the history has too, and the drafts
    ancestors: Tensor | None  # [B, W, words] int64, of `Tree`; None: a chain

    def between(self, first: int, last: int) -> DraftPath:
        """Returns the part of requests [first, last)."""
        ancestors = None if self.ancestors is None else self.ancestors[first:last]
        return DraftPath(self.ids[first:last], ancestors)


def penalize_ref(
    logits: Tensor, positions: Tensor, batch: PenaltyBatch, path: DraftPath | None, bound: int
) -> Tensor:
    """Reference implementation of `penalize`."""
    vocab, slots = logits.shape[-1], batch.slots
    counts, in_prompt = count_tokens_ref(batch, positions[:, 0] - 1, vocab, bound)
    counts = counts.unsqueeze(1)
    if path is not None and path.ids.shape[1] > 1:
        drafts = path.ids[:, None, 1:].expand(-1, logits.shape[1], -1)
        on_path = _on_path(path).int().expand(drafts.shape)
        counts = counts.repeat(1, logits.shape[1], 1).scatter_add_(2, drafts, on_path)
    bias = torch.zeros(len(slots), 1, vocab, device=logits.device)
    entry = torch.arange(batch.biases.shape[1], device=logits.device)
    unused = entry >= batch.ints[slots, NUM_BIASES, None]
    bias.squeeze(1).scatter_add_(
        1,
        batch.bias_ids[slots].long().masked_fill(unused, 0),
        batch.biases[slots].masked_fill(unused, 0.0),
    )
    frequency, presence, repetition = batch.floats[slots][:, :3, None, None].unbind(1)
    x = logits.float()
    x = torch.where(bias != 0, x + bias, x)
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(in_prompt.unsqueeze(1) | (counts > 0), repeated, x)
    return x - frequency * counts - presence * (counts > 0)


def count_tokens_ref(
    batch: PenaltyBatch, last: Tensor, vocab: int, bound: int
) -> tuple[Tensor, Tensor]:
    """How often each token is in the output [B, V] int32, and whether in the prompt [B, V] bool.

    `last` [B]: position of the last known token, below `bound`.
    """
    slots = batch.slots
    at = torch.arange(bound, device=last.device)
    known, prompt = at <= last.unsqueeze(1), at < batch.ints[slots, PROMPT_TOKENS, None]
    ids = batch.history[slots, :bound].long().masked_fill(~known, 0)
    empty = torch.zeros(len(slots), vocab, dtype=torch.int32, device=last.device)
    counts = empty.scatter_add(1, ids, (known & ~prompt).int())
    return counts, empty.scatter_add(1, ids, (known & prompt).int()) > 0


def _on_path(path: DraftPath) -> Tensor:
    """[B or 1, W, W - 1] bool: whether draft j is before the token that token i samples."""
    width, device = path.ids.shape[1], path.ids.device
    if path.ancestors is None:
        return torch.ones(1, width, width - 1, dtype=torch.bool, device=device).tril(-1)
    return unpack_bits(path.ancestors, width)[:, :, 1:]


def penalize(
    logits: Tensor, positions: Tensor, batch: PenaltyBatch, path: DraftPath | None, bound: int
) -> Tensor:
    """Adds biases and applies penalties; `SamplingParams` has the formula.

    Args:
        logits: [B, W, V], any float dtype; they stay as they are.
        positions: [B, W] integers, of the tokens to be sampled; the history is known up to
            positions[:, 0] - 1.
        batch: the parameters of the B requests.
        path: the drafts that the logits depend on; None: W is 1.
        bound: exceeds every known position; on the host.

    Returns:
        [B, W, V] float32, exactly the given logits where a request has neither.
    """
    bound = min(bound, batch.history.shape[1])
    if not use_triton(logits):
        return penalize_ref(logits, positions, batch, path, bound)
    requests, width, vocab = logits.shape
    words = torch.zeros(requests, vocab, dtype=torch.int32, device=logits.device)
    bias = torch.zeros(requests, vocab, dtype=torch.float32, device=logits.device)
    options = pdl_options(logits)
    _count_tokens[triton.cdiv(max(bound, batch.biases.shape[1]), BLOCK), requests](
        positions, batch.slots, batch.ints, batch.history, batch.bias_ids, batch.biases,
        words, bias, vocab, positions.stride(0), batch.history.stride(0), batch.biases.stride(0),
        IN_PROMPT=IN_PROMPT, BLOCK=BLOCK, num_warps=4, **options,
    )  # fmt: skip
    drafts = None if path is None or width == 1 else path
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _penalize[triton.cdiv(vocab, BLOCK), requests](
        logits, out, words, bias,
        None if drafts is None else drafts.ids, None if drafts is None else drafts.ancestors,
        batch.slots, batch.floats, vocab, logits.stride(0), logits.stride(1),
        batch.floats.stride(0), width,
        IN_PROMPT=IN_PROMPT, BLOCK=BLOCK, TOKENS=triton.next_power_of_2(width),
        WORDS=mask_words(width), num_warps=4, **options,
    )  # fmt: skip
    return out


@jit
def _count_tokens(
    positions, slots, ints, history, bias_ids, biases, words, bias,
    vocab, positions_stride, history_stride, biases_stride,
    IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK positions (and biases) of a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request)
    prompt_tokens, num_biases = tl.load(ints + slot * 2), tl.load(ints + slot * 2 + 1)
    known = at < tl.load(positions + request * positions_stride)
    id = tl.load(history + slot * history_stride + at, mask=known, other=0)
    known &= (id >= 0) & (id < vocab)
    words += request * vocab
    tl.atomic_add(words + id, 1, mask=known & (at >= prompt_tokens), sem="relaxed")
    tl.atomic_or(words + id, IN_PROMPT, mask=known & (at < prompt_tokens), sem="relaxed")
    biased = at < num_biases
    biased_id = tl.load(bias_ids + slot * biases_stride + at, mask=biased, other=0)
    value = tl.load(biases + slot * biases_stride + at, mask=biased, other=0.0)
    tl.store(bias + request * vocab + biased_id, value, mask=biased)


@jit
def _penalize(
    logits, out, words, bias, drafts, ancestors, slots, floats,
    vocab, request_stride, row_stride, floats_stride, num_tokens,
    IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK tokens of the vocabulary, for all W rows of a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, request = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    id = first + tl.arange(0, BLOCK)
    inside = id < vocab
    word = tl.load(words + request * vocab + id, mask=inside, other=0)
    added = tl.load(bias + request * vocab + id, mask=inside, other=0.0)
    in_prompt, known = word >= IN_PROMPT, word & (IN_PROMPT - 1)
    floats += tl.load(slots + request) * floats_stride
    frequency, presence, repetition = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
    drafted = 0
    if drafts is not None:  # few blocks have a drafted token
        i = tl.arange(0, TOKENS)
        mask = (i > 0) & (i < num_tokens)
        draft = tl.load(drafts + request * num_tokens + i, mask=mask, other=-1)
        drafted = tl.sum((mask & (draft >= first) & (draft < first + BLOCK)).to(tl.int32), 0)
    for row in range(num_tokens):
        count = known
        if drafts is not None:
            path, own = 0, ancestors
            if ancestors is not None:
                own = ancestors + (request * num_tokens + row) * WORDS
                path = tl.load(own)
            # A token's ancestors come before it.
            for node in range(1, tl.where(drafted > 0, row + 1, 1)):
                draft_id = tl.load(drafts + request * num_tokens + node)
                if ancestors is not None:
                    if WORDS > 1:
                        path = tl.load(own + node // 64)
                    draft_id = tl.where(((path >> (node & 63)) & 1) != 0, draft_id, -1)
                count += (id == draft_id).to(tl.int32)
        x = tl.load(logits + request * request_stride + row * row_stride + id, mask=inside)
        x = x.to(tl.float32)
        x = tl.where(added != 0, x + added, x)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(in_prompt | (count > 0), repeated, x)
        x = x - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
        tl.store(out + (request * num_tokens + row) * vocab + id, x, mask=inside)
