# mypy: allow-untyped-defs, allow-incomplete-defs
"""The inputs of a decode step: what the batch needs from the slots' tables, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.paged_kv import compute_kv_slots_ref
from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit_no_specialize, tl, triton, use_triton

MAX_BLOCK = 1024  # page ids that a CTA copies


@dataclass(frozen=True)
class DecodeInputs:
    """B requests of W tokens each, in the batch's order."""

    start: Tensor  # [B] int32, committed length: the position of the first token
    last_token: Tensor  # [B] int64, the token at that position
    positions: Tensor  # [B * W] int32
    next_positions: Tensor  # [B * W] int32, positions + 1: of the tokens that will be sampled
    kv_slots: Tensor  # [B * W] int64, where each token's K/V goes in the flattened pool
    page_table: Tensor  # [B, pages] int32


def build_decode_inputs_ref(
    slots: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    num_tokens: int,
    page_size: int,
    kv_len_ub: int,
) -> DecodeInputs:
    """Reference implementation of `build_decode_inputs`."""
    batch, pages = slots.shape[0], min(page_table.shape[1], -(-kv_len_ub // page_size))
    start, last = kv_len[slots], last_token[slots]
    pages_of_batch = page_table[slots, :pages]
    offsets = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    positions = (start.unsqueeze(1) + offsets).flatten()
    kv_slots = compute_kv_slots_ref(
        pages_of_batch, start, None, num_tokens, batch * num_tokens, page_size
    )
    return DecodeInputs(start, last, positions, positions + 1, kv_slots, pages_of_batch)


def build_decode_inputs(
    slots: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    num_tokens: int,
    page_size: int,
    kv_len_ub: int,
) -> DecodeInputs:
    """Gathers a batch from the slots' tables and lays out its tokens.

    Launched without programmatic dependent launch (PDL): kernels that read these results before
    their PDL wait (attention, RoPE) rely on another such launch in between, the embedding.

    Args:
        slots: [B] int64.
        kv_len: [S] int32, committed lengths.
        last_token: [S] int64.
        page_table: [S, P] int32; it has the pages of W tokens past the committed length.
        num_tokens: W, per request.
        page_size: tokens per page.
        kv_len_ub: at least every committed length + W; only the pages of so many positions are
            copied.
    """
    if not use_triton(slots) and library.serves_tables(slots):
        pages = min(page_table.shape[1], -(-kv_len_ub // page_size))
        return DecodeInputs(
            *cpu.decode_inputs(slots, kv_len, last_token, page_table, num_tokens, page_size, pages)
        )
    if not use_triton(slots):
        return build_decode_inputs_ref(
            slots, kv_len, last_token, page_table, num_tokens, page_size, kv_len_ub
        )
    batch, pages = slots.shape[0], min(page_table.shape[1], triton.cdiv(kv_len_ub, page_size))

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=slots.device)

    total = batch * num_tokens
    out = DecodeInputs(
        start=new(batch),
        last_token=new(batch, dtype=torch.int64),
        positions=new(total),
        next_positions=new(total),
        kv_slots=new(total, dtype=torch.int64),
        page_table=new(batch, pages),
    )
    # Not from `pages`, which grows with the texts: every size would compile a kernel of its own.
    block = min(MAX_BLOCK, triton.next_power_of_2(page_table.shape[1]))
    _build_decode_inputs[(batch, triton.cdiv(pages, block))](
        slots, kv_len, last_token, page_table, out.start, out.last_token,
        out.positions, out.next_positions, out.kv_slots, out.page_table,
        page_table.stride(0), pages,
        NUM_TOKENS=num_tokens, PAGE_SIZE=page_size,
        TOKENS_BLOCK=triton.next_power_of_2(num_tokens), BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )  # fmt: skip
    return out


@jit_no_specialize("pages")
def _build_decode_inputs(
    slots, kv_len, last_token, page_table,
    start_out, last_token_out, positions, next_positions, kv_slots, page_table_out,
    page_table_stride, pages,
    NUM_TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKENS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK page ids of a request; the first one also lays out its tokens."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + request)
    table = page_table + slot * page_table_stride
    i = part * BLOCK + tl.arange(0, BLOCK)
    inside = i < pages
    tl.store(page_table_out + request * pages + i, tl.load(table + i, mask=inside), mask=inside)
    if part == 0:
        start = tl.load(kv_len + slot)
        tl.store(start_out + request, start)
        tl.store(last_token_out + request, tl.load(last_token + slot))
        token = tl.arange(0, TOKENS_BLOCK)
        real = token < NUM_TOKENS
        position = start + token
        page = tl.load(table + position // PAGE_SIZE, mask=real, other=0).to(tl.int64)
        target = request * NUM_TOKENS + token
        tl.store(positions + target, position, mask=real)
        tl.store(next_positions + target, position + 1, mask=real)
        tl.store(kv_slots + target, page * PAGE_SIZE + position % PAGE_SIZE, mask=real)
