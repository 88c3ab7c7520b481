# mypy: allow-untyped-defs, allow-incomplete-defs
"""The end of a step: how many sampled tokens are committed, and the slots advanced by them.

The accept rule is "sample and match", lossless for any deterministic draft (`count_committed`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options


@dataclass(frozen=True)
class SlotState:
    """The state of S slots that a step advances. The last slot is the padding slot."""

    kv_len: Tensor  # [S] int32, committed tokens in the K/V cache; 0 in the padding slot
    last_token: Tensor  # [S] int64, the newest sampled token, at position kv_len
    history: Tensor  # [S, positions] int32, token ids by position


def count_committed(candidates: Tensor, sampled: Tensor) -> Tensor:
    """How many tokens a step commits: the drafts that the target sampled too, and one more.

    Token i of the verify pass samples y_i ~ p_i given that the drafts before it stand. While draft
    and sample agree, the next token's condition holds; the first y that differs is itself a valid
    sample, and what follows was computed under a false condition. The output follows the target's
    distribution exactly, and with keyed noise it is the text of plain decoding. A row of invalid
    logits (INVALID_TOKEN) ends the committed tokens.

    Args:
        candidates: [B, K] int64, K >= 0: the drafts that may be accepted.
        sampled: [B, K + 1] int64.

    Returns:
        [B] int32: 1 + the length of the longest prefix with candidates[:, i] == sampled[:, i].
    """
    agree = ((candidates == sampled[:, :-1]) & (candidates >= 0)).to(torch.int32)
    return agree.cumprod(-1, dtype=torch.int32).sum(-1, dtype=torch.int32) + 1


def accept_commit_ref(
    candidates: Tensor,
    sampled: Tensor,
    slots: Tensor,
    start: Tensor,
    state: SlotState,
    num_committed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `accept_commit`."""
    if num_committed is None:
        num_committed = count_committed(candidates, sampled)
    ids = sampled.clamp_min(0)
    state.kv_len[slots] = start + num_committed
    last = (num_committed - 1).long().unsqueeze(1)
    state.last_token[slots] = ids.gather(1, last).squeeze(1)
    offsets = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    state.history[slots.unsqueeze(1), start.unsqueeze(1) + offsets] = ids.int()
    state.kv_len[-1:].zero_()
    return num_committed, ids


def accept_commit(
    candidates: Tensor,
    sampled: Tensor,
    slots: Tensor,
    start: Tensor,
    state: SlotState,
    num_committed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decides how many tokens are committed and writes them to the slots' state.

    The token id INVALID_TOKEN (-1) of a row of NaN or infinite logits is stored as 0, so that
    whatever reads the state or the returned ids on the device (embeddings) stays in range. The
    host finds the sentinel in `sampled`.

    Args:
        candidates: [B, K] int64, K >= 0.
        sampled: [B, W] int64, W = K + 1; sampled[:, i] has position start + i + 1.
        slots: [B] int64.
        start: [B] int32, committed lengths before the step.
        state: the slots' state, updated in place.
        num_committed: [B] int32 in 1 ... W: decided elsewhere (a draft tree, simulated
            acceptance); None: by `count_committed`.

    Returns:
        num_committed [B] int32 and the sampled ids, INVALID_TOKEN replaced by 0, [B, W] int64.
    """
    if not use_triton(sampled) and library.serves_tables(sampled):
        tables = state.kv_len, state.last_token, state.history
        return cpu.accept_commit(candidates, sampled, slots, start, tables, num_committed)
    if not use_triton(sampled):
        return accept_commit_ref(candidates, sampled, slots, start, state, num_committed)
    committed = torch.empty_like(start)
    ids = sampled.new_empty(sampled.shape)
    _accept_commit[(len(slots),)](
        candidates, sampled, slots, start, num_committed,
        state.kv_len, state.last_token, state.history, committed, ids,
        candidates.stride(0), sampled.stride(0), state.history.stride(0), state.kv_len.shape[0] - 1,
        NUM_TOKENS=sampled.shape[1], BLOCK=triton.next_power_of_2(sampled.shape[1]),
        num_warps=1, **pdl_options(sampled),
    )  # fmt: skip
    return committed, ids


@jit
def _accept_commit(
    candidates, sampled, slots, start_ptr, num_committed, kv_len, last_token, history,
    committed_ptr, ids_ptr,
    candidates_stride, sampled_stride, history_stride, padding_slot,
    NUM_TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < NUM_TOKENS
    token = tl.load(sampled + request * sampled_stride + i, mask=inside, other=-1)
    draft = tl.load(candidates + request * candidates_stride + i, mask=i < NUM_TOKENS - 1, other=-1)
    if num_committed is None:
        # The first token that differs; past the last draft all do.
        agree = (draft == token) & (draft >= 0)
        committed = tl.min(tl.where(agree, BLOCK, i), 0) + 1
    else:
        committed = tl.load(num_committed + request)
    slot, start = tl.load(slots + request), tl.load(start_ptr + request)
    id = tl.maximum(token, 0)
    tl.store(committed_ptr + request, committed)
    tl.store(ids_ptr + request * NUM_TOKENS + i, id, mask=inside)
    tl.store(kv_len + slot, tl.where(slot == padding_slot, 0, start + committed))
    tl.store(last_token + slot, tl.sum(tl.where(i == committed - 1, id, 0), 0))
    tl.store(history + slot * history_stride + start + 1 + i, id.to(tl.int32), mask=inside)
