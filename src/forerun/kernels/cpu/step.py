"""The small kernels of a step on a CPU; arguments as of those in `kernels/speculation`."""

from __future__ import annotations

import ctypes
from ctypes import c_int64

import torch
from torch import Tensor

from forerun.kernels.cpu.library import call


def run_with(name: str, tensors: tuple[Tensor | None, ...], *integers: int) -> None:
    """Calls a kernel with its structure: pointers, then 64-bit integers."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    words = (c_int64 * (len(tensors) + len(integers)))(*addresses, *integers)
    call(name, ctypes.addressof(words), keep=words)


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table [V, H], ids [T] int64 -> [T, H]; ids are within the table."""
    ids = ids.contiguous()
    out = table.new_empty(ids.shape[0], table.shape[1])
    row_bytes = table.shape[1] * table.element_size()
    call(
        "forerun_take_rows", table.data_ptr(), ids.data_ptr(), ids.shape[0], table.shape[0],
        row_bytes, out.data_ptr(),
    )  # fmt: skip
    return out


def decode_inputs(
    slots: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    num_tokens: int,
    page_size: int,
    pages: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `DecodeInputs` in order; `pages`: of a request that are copied."""
    batch = slots.shape[0]
    total = batch * num_tokens
    start = slots.new_empty(batch, dtype=torch.int32)
    positions, following = (slots.new_empty(total, dtype=torch.int32) for _ in range(2))
    table = slots.new_empty(batch, pages, dtype=torch.int32)
    last, kv_slots = slots.new_empty(batch), slots.new_empty(total)
    out = start, last, positions, following, kv_slots, table
    tensors = slots, kv_len, last_token, page_table, *out
    sizes = batch, num_tokens, page_size, page_table.stride(0), pages
    run_with("forerun_decode_inputs", tensors, *sizes)
    return out


def kv_slots(page_table: Tensor, start: Tensor, num_tokens: int, page_size: int) -> Tensor:
    """KV slots [B * num_tokens] int64 of `num_tokens` tokens per request from `start` [B] on."""
    batch = start.shape[0]
    out = start.new_empty(batch * num_tokens, dtype=torch.int64)
    sizes = batch, num_tokens, page_size, page_table.stride(0)
    run_with("forerun_kv_slots", (page_table, start, out), *sizes)
    return out


def copy_rows(source: Tensor, target: Tensor) -> None:
    """source -> target [R, C], of one dtype; elements of a row are contiguous in both."""
    size = source.element_size()
    call(
        "forerun_copy_rows", source.data_ptr(), source.stride(0) * size, source.shape[0],
        source.shape[1] * size, target.data_ptr(), target.stride(0) * size,
    )  # fmt: skip


def verify_inputs(
    last_token: Tensor,
    drafts: Tensor,
    slots: Tensor,
    draft_limit: Tensor,
    depth: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """(input_ids [B, K + 1], candidates [B, K])."""
    batch, num_drafts = drafts.shape
    input_ids = drafts.new_empty(batch, num_drafts + 1)
    candidates = drafts.new_empty(batch, num_drafts)
    tensors = last_token, drafts, slots, draft_limit, depth, input_ids, candidates
    depth_stride = 0 if depth is None else depth.stride(0)
    sizes = batch, num_drafts, drafts.stride(0), depth_stride, vocab_size
    run_with("forerun_verify_inputs", tensors, *sizes)
    return input_ids, candidates


def accept_commit(
    candidates: Tensor,
    sampled: Tensor,
    slots: Tensor,
    start: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    num_committed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(num_committed [B], ids [B, W]); `state`: kv_len, last_token, history of the slots."""
    kv_len, last_token, history = state
    committed, ids = torch.empty_like(start), sampled.new_empty(sampled.shape)
    given = candidates, sampled, slots, start, num_committed
    strides = candidates.stride(0), sampled.stride(0), history.stride(0)
    sizes = *sampled.shape, *strides, kv_len.shape[0] - 1
    tensors = *given, kv_len, last_token, history, committed, ids
    run_with("forerun_accept_commit", tensors, *sizes)
    return committed, ids


def ring_write(buffer: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> None:
    """buffer [S, R, C]: buffer[slot, position mod R] = value [B, C], contiguous."""
    size = buffer.shape[2] * buffer.element_size()
    sizes = values.shape[0], buffer.shape[1], size, values.stride(0) * values.element_size()
    run_with("forerun_ring_write", (buffer, slots, positions, values), *sizes)


def ring_read(buffer: Tensor, slots: Tensor, positions: Tensor, empty: Tensor) -> Tensor:
    """buffer [S, R, C] -> [B, W, C] at positions [B, W] int64; zeros where empty [B, W]."""
    batch, width = positions.shape
    out = buffer.new_empty(batch, width, buffer.shape[2])
    tensors = buffer, slots, positions.contiguous(), empty.contiguous(), out
    sizes = batch, width, buffer.shape[1], buffer.shape[2] * buffer.element_size()
    run_with("forerun_ring_read", tensors, *sizes)
    return out


def prompt_lookup(
    history: Tensor, slots: Tensor, start: Tensor, min_match: int, max_match: int, num_drafts: int
) -> Tensor:
    """Drafts [B, K]."""
    drafts = slots.new_empty(slots.shape[0], num_drafts)
    sizes = *drafts.shape, history.stride(0), min_match, max_match
    run_with("forerun_prompt_lookup", (history, slots, start, drafts), *sizes)
    return drafts


def suffix_append(
    given: tuple[Tensor, ...],
    corpus: tuple[Tensor, ...],
    writing: tuple[Tensor, Tensor],
    sizes: tuple[int, int],
) -> None:
    """`given`: slots, start, committed, history, groups; the fields of `Corpus` and `Writing`."""
    slots, history, tokens = given[0], given[3], corpus[0]
    counts = tokens.shape[1], tokens.shape[0] - 1, history.shape[0] - 1
    run_with(
        "forerun_suffix_append",
        (*given, *corpus, *writing),
        slots.shape[0],
        *sizes,
        history.stride(0),
        *counts,
    )


def suffix_drafts(
    given: tuple[Tensor, ...], rule: tuple[int, ...], num_drafts: int
) -> tuple[Tensor, Tensor]:
    """Drafts and confidence [B, K].

    Args:
        given: history, slots, start, groups; tokens, length and group of `Corpus`; limits.
        rule: depth, min_prob, positions of a part, places that vote, and what probability 1 is.
    """
    history, slots, tokens = given[0], given[1], given[4]
    drafts = slots.new_empty(slots.shape[0], num_drafts)
    confidence = torch.empty(drafts.shape, dtype=torch.float32)
    sizes = *drafts.shape, history.stride(0), tokens.shape[1], tokens.shape[0]
    run_with("forerun_suffix_drafts", (*given, drafts, confidence), *sizes, *rule)
    return drafts, confidence
