# mypy: allow-untyped-defs, allow-incomplete-defs
"""The input of the verify pass, from drafts of any origin."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options


def build_verify_inputs_ref(
    last_token: Tensor,
    drafts: Tensor,
    slots: Tensor,
    draft_limit: Tensor,
    depth: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `build_verify_inputs`."""
    input_ids = torch.cat([last_token.unsqueeze(1), drafts], 1).clamp_(0, vocab_size - 1)
    if depth is None:
        depth = torch.arange(1, drafts.shape[1] + 1, device=drafts.device).unsqueeze(0)
    return input_ids, torch.where(depth <= draft_limit[slots].unsqueeze(1), drafts, -1)


def build_verify_inputs(
    last_token: Tensor,
    drafts: Tensor,
    slots: Tensor,
    draft_limit: Tensor,
    depth: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The token ids that the target runs on, and the drafts that its samples are compared with.

    Args:
        last_token: [B] int64.
        drafts: [B, K] int64, any row stride. An id outside the vocabulary is replaced by one
            inside for the forward, and is never accepted.
        slots: [B] int64.
        draft_limit: [S] int32, per slot: drafts at a greater depth are not accepted.
        depth: [B, K] int32, of every draft in a tree, any row stride; None: a chain, 1 ... K.
        vocab_size: of the target.

    Returns:
        input_ids [B, W] int64, W = K + 1; candidates [B, K] int64, -1 where nothing may match.
    """
    if not use_triton(drafts) and library.serves_tables(drafts):
        return cpu.verify_inputs(last_token, drafts, slots, draft_limit, depth, vocab_size)
    if not use_triton(drafts):
        return build_verify_inputs_ref(last_token, drafts, slots, draft_limit, depth, vocab_size)
    batch, num_drafts = drafts.shape
    input_ids = drafts.new_empty(batch, num_drafts + 1)
    candidates = drafts.new_empty(batch, num_drafts)
    _build_verify_inputs[(batch,)](
        last_token, drafts, slots, draft_limit, depth, input_ids, candidates,
        drafts.stride(0), 0 if depth is None else depth.stride(0), vocab_size,
        NUM_TOKENS=num_drafts + 1, BLOCK=triton.next_power_of_2(num_drafts + 1), num_warps=1,
        **pdl_options(drafts),
    )  # fmt: skip
    return input_ids, candidates


@jit
def _build_verify_inputs(
    last_token, drafts, slots, draft_limit, depth, input_ids, candidates,
    drafts_stride, depth_stride, vocab_size,
    NUM_TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)  # token 0 is `last_token`, token i is draft i - 1
    drafted = (i > 0) & (i < NUM_TOKENS)
    draft = tl.load(drafts + request * drafts_stride + i - 1, mask=drafted, other=-1)
    draft_depth = i
    if depth is not None:
        draft_depth = tl.load(depth + request * depth_stride + i - 1, mask=drafted, other=0)
    limit = tl.load(draft_limit + tl.load(slots + request))
    target = candidates + request * (NUM_TOKENS - 1) + i - 1
    tl.store(target, tl.where(draft_depth <= limit, draft, -1), mask=drafted)
    id = tl.where(i == 0, tl.load(last_token + request), draft)
    id = tl.minimum(tl.maximum(id, 0), vocab_size - 1)
    tl.store(input_ids + request * NUM_TOKENS + i, id, mask=i < NUM_TOKENS)
