# mypy: allow-untyped-defs, allow-incomplete-defs
"""Masks tokens that a grammar forbids, between the LM head and the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 4096  # logits that a CTA handles


@dataclass(frozen=True)
class TokenMasks:
    """The tokens that are allowed at each position of a step."""

    bitmask: Tensor  # [N, ceil(V / 32)] int32: bit t % 32 of word t // 32 is token t
    rows: Tensor  # [B, W] int32: the row of the bitmask; -1: every token is allowed

    def between(self, first: int, last: int) -> TokenMasks:
        """Returns the part of requests [first, last)."""
        return TokenMasks(self.bitmask, self.rows[first:last])


def mask_tokens_ref(logits: Tensor, masks: TokenMasks) -> None:
    """Reference implementation of `mask_tokens`."""
    words = masks.bitmask[masks.rows.clamp_min(0)]  # [B, W, words]
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words.unsqueeze(-1) >> bit).bitwise_and_(1).flatten(-2)[..., : logits.shape[-1]]
    forbidden = (allowed == 0) & (masks.rows >= 0).unsqueeze(-1)
    logits.masked_fill_(forbidden, -torch.inf)


def mask_tokens(logits: Tensor, masks: TokenMasks) -> None:
    """Writes -inf at forbidden tokens, in place; positions without a mask are not touched.

    logits: [B, W, V], any float dtype, the last dimension contiguous.
    """
    if not use_triton(logits):
        mask_tokens_ref(logits, masks)
        return
    requests, width, vocab = logits.shape
    _mask_tokens[triton.cdiv(vocab, BLOCK), requests * width](
        logits, masks.bitmask, masks.rows, vocab, logits.stride(0), logits.stride(1),
        masks.bitmask.stride(0), masks.rows.stride(0), width,
        BLOCK=BLOCK, num_warps=4, **pdl_options(logits),
    )  # fmt: skip


@jit
def _mask_tokens(
    logits, bitmask, rows, vocab, request_stride, row_stride, bitmask_stride, rows_stride, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK tokens of the vocabulary at a position; it writes forbidden ones only."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(1).to(tl.int64)
    request, position = at // width, at % width
    row = tl.load(rows + request * rows_stride + position).to(tl.int64)
    if row >= 0:
        id = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = id < vocab
        word = tl.load(bitmask + row * bitmask_stride + id // 32, mask=inside, other=-1)
        forbidden = inside & (((word >> (id % 32)) & 1) == 0)
        logits += request * request_stride + position * row_stride
        tl.store(logits + id, float("-inf"), mask=forbidden)
