# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of a mixture of experts: y = Σ_j weight_j · down(silu(gate(x)) · up(x)).

Every expert has a gate/up matrix and a down matrix, stacked in `w13` [E, 2I, H] (gate rows before
up rows) and `w2` [E, H, I]. There are two grouped GEMMs. A CTA computes one tile (up to BLOCK_M
pairs of one expert, from `ExpertTiles`) by one block of output columns:

1. `_gate_up`: rows of x are gathered; SiLU(gate) * up in the epilogue -> one row per pair;
2. `_down`: times the pair's weight -> partials [k, T, H], by choice.

With many tokens on Hopper, the rows between them are in the order of the experts' lists, so that
both of `_down`'s operands, and `_gate_up`'s weights, are boxes that TMA reads.

The partials of a token are added up in the order of the choices, by the RMSNorm that follows (as
split-K partials) or by `combine`; nothing is added atomically. So a token's result does not depend
on which other tokens are in the batch, within the ranges of `choose_moe`; in a fixed order nor on
how many there are: partials are float32 then, and both kernels for bfloat16 have the same SiLU.

On Hopper, up to `MAX_DECODE_TOKENS` tokens have one kernel for both (`experts_sm90.py`).

gpt-oss's experts have biases and another activation (`ClampedSwiglu`), Gemma 4's have GELU
(`GELU_TANH`): both on the Triton kernels.

Tiles of one expert have neighbouring CTAs with the same block of columns, so that its weights are
read from memory once. CTAs beyond the tiles in use return at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.elementwise.gated_act import gate_by, gelu_tanh_mul_ref, silu_mul_ref
from forerun.kernels.gemm.gemm_triton import prefetch_weight
from forerun.kernels.moe.config import (
    SM90_FEW_TOKENS,
    GroupedGemmConfig,
    MoeConfig,
    Sm90MoeConfig,
    choose_moe,
    choose_moe_sm90,
)
from forerun.kernels.moe.experts_sm90 import expert_partials_sm90
from forerun.kernels.moe.fp8_matrices import Fp8Matrices
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.routing import ExpertTiles, Routed, RouterLogits
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

PREFETCH_K = 512  # columns of its w2 tile that a CTA prefetches into L2 (PDL)
COMBINE_BLOCK = 1024


class GeluTanh:
    """Activation of Gemma 4's experts: gelu(gate) · up, in GELU's tanh form."""

    def act(self, gate_up: Tensor) -> Tensor:
        """Reference implementation: [..., 2I], gate first -> [..., I]."""
        return gelu_tanh_mul_ref(gate_up)


GELU_TANH = GeluTanh()


@dataclass(frozen=True, eq=False)
class ClampedSwiglu:
    """Activation of gpt-oss's experts: biases, and (up + 1) · gate · sigmoid(alpha · gate).

    gate is clamped to at most `limit`, up to within ±limit.
    """

    b13: Tensor  # [E, 2I]
    b2: Tensor  # [E, H]: weighted with the expert's output
    alpha: float
    limit: float

    def act(self, gate_up: Tensor) -> Tensor:
        """Reference implementation: [..., 2I], gate first -> [..., I], rounded once."""
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).to(gate_up.dtype)


ExpertActivation = ClampedSwiglu | GeluTanh | None  # None: SiLU without biases


def expert_partials_ref(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    routed: Routed,
    shared: Tensor | None = None,
    activation: ExpertActivation = None,
) -> Tensor:
    """Reference implementation of `expert_partials`: one GEMM per expert, none on the host."""
    (tokens, top_k), num_experts = routed.experts.shape, len(w13)
    ids = routed.experts.flatten()
    order = ids.argsort(stable=True)  # pairs, by expert
    expert = torch.arange(num_experts, device=ids.device).unsqueeze(1)
    ends = (ids <= expert).sum(1, dtype=torch.int32)  # [E], where each expert's pairs end
    gate_up = torch._grouped_mm(x[order // top_k], w13.transpose(1, 2), offs=ends)
    swiglu = activation if isinstance(activation, ClampedSwiglu) else None
    assert not routed.is_part or shared is None
    owner = ids[order].clamp(max=num_experts - 1)
    if swiglu is not None:
        gate_up = gate_up + swiglu.b13[owner]
    act = silu_mul_ref(gate_up, x.dtype) if activation is None else activation.act(gate_up)
    by_expert = torch._grouped_mm(act, w2.transpose(1, 2), offs=ends)
    if swiglu is not None:
        by_expert = by_expert + swiglu.b2[owner]
    out = by_expert[order.argsort()].view(tokens, top_k, -1).transpose(0, 1).float()
    out = out * routed.weights.t().unsqueeze(-1)
    if routed.is_part:  # rows behind the last expert's are undefined
        out = out.masked_fill((routed.experts == num_experts).t().unsqueeze(-1), 0.0)
    return out if shared is None else torch.cat((out[:1] + shared.float(), out[1:]))


def expert_partials(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    routed: Routed | RouterLogits,
    shared: Tensor | GatedOutput | None = None,
    config: MoeConfig | None = None,
    activation: ExpertActivation = None,
) -> Tensor:
    """The weighted output of every token's experts, by choice: x [T, H] -> [k, T, H].

    float32; on a GPU in x's dtype for more than `MAX_DECODE_TOKENS` tokens, but in a fixed order.
    A gated output comes after them, [k + 1, T, H], from Hopper's kernel or in a fixed order.

    Args:
        routed: of `route` for the same x, with its tiles; or of `router_logits_sm90`. Of a part of
            the experts, other choices are zeros.
        shared: [T, H], added to the first choice, or a gated output of x. Not with a part.
        config: Triton's tile sizes; None: `choose_moe_sm90`, or else `choose_moe`.
        activation: with biases, if it has some; None: SiLU without biases.
    """
    tokens, (_, hidden, width) = x.shape[0], w2.shape
    if isinstance(routed, RouterLogits):
        assert config is None and activation is None
        return partials_with_shared_sm90(x, (w13, w2), routed, shared, SM90_FEW_TOKENS)
    if not use_triton(x):
        gated = shared.result() if isinstance(shared, GatedOutput) else shared
        return expert_partials_ref(x, w13, w2, routed, gated, activation)
    assert routed.tiles is not None
    plain = activation is None and not isinstance(shared, Tensor)
    if config is None and plain and routed.tiles.progress is not None:
        sm90 = choose_moe_sm90(tokens, hidden, width, x.dtype, gpu_of(x.device))
        if sm90 is not None:
            return partials_with_shared_sm90(x, (w13, w2), routed, shared, sm90)
    config = config or choose_moe(tokens, gpu_of(x.device), x.itemsize, routed.fixed_order)
    own = isinstance(shared, GatedOutput) and routed.fixed_order  # as Hopper's kernel leaves it
    out = routed.new_partials(x, num_more=int(own))
    added = shared.result(out[-1] if own else None) if isinstance(shared, GatedOutput) else shared
    _run_grouped_gemms(x, (w13, w2), routed, None if own else added, (config, activation), out)
    return out


def _run_grouped_gemms(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    routed: Routed,
    shared: Tensor | None,
    form: tuple[MoeConfig, ExpertActivation],
    out: Tensor,
) -> None:
    """Fills the first k of `out` by Triton's kernels; `shared` is added to the first choice."""
    (w13, w2), (config, activation), tiles = weights, form, routed.tiles
    tokens, (_, hidden, width) = x.shape[0], w2.shape
    assert tiles is not None and tiles.block_m == config.block_m
    assert x.is_contiguous() and w13.is_contiguous() and w2.is_contiguous()
    assert hidden % 8 == 0 and width % 8 == 0 and routed.experts.shape[0] == tokens
    top_k = routed.experts.shape[1]
    act = x.new_empty(tokens * top_k, width)
    read_act, read_w13, read_w2 = act, w13, w2
    if config.tma:
        read_act = tma_descriptor(act, config.block_m, config.down)
        read_w13 = tma_descriptor(w13, config.gate_up.block_n, config.gate_up)
        read_w2 = tma_descriptor(w2, config.down.block_n, config.down)
    swiglu = activation if isinstance(activation, ClampedSwiglu) else None
    b13, b2 = (None, None) if swiglu is None else (swiglu.b13, swiglu.b2)
    alpha, limit = (0.0, 0.0) if swiglu is None else (swiglu.alpha, swiglu.limit)
    _gate_up[grid(tiles, width, config.gate_up)](
        x, read_w13, b13, act, tiles.pairs, tiles.tiles,
        tiles.tiles.shape[1], hidden // 8, width // 8,
        TOP_K=top_k, ALPHA=alpha, LIMIT=limit, GELU=isinstance(activation, GeluTanh),
        **constants(tiles, config.gate_up), BLOCK_K=config.gate_up.block_k,
        EVEN_K=hidden % config.gate_up.block_k == 0, TMA=config.tma, **pdl_options(x),
    )  # fmt: skip
    _down[grid(tiles, hidden, config.down)](
        read_act, read_w2, b2, out, routed.weights, shared, tiles.pairs, tiles.tiles,
        tiles.tiles.shape[1], tokens, hidden // 8, width // 8,
        PREFETCH_K if width % 64 == 0 else 0,
        TOP_K=top_k, NUM_THREADS=32 * config.down.num_warps,
        **constants(tiles, config.down), BLOCK_K=config.down.block_k,
        EVEN_K=width % config.down.block_k == 0, TMA=config.tma, **pdl_options(x),
    )  # fmt: skip


def tma_descriptor(matrix: Tensor, rows: int, config: GroupedGemmConfig) -> Any:
    """The tensor descriptor of [..., K], all rows below one another, for boxes [rows, block_k]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix.flatten(0, -2), [rows, config.block_k])


def partials_with_shared_sm90(
    x: Tensor,
    weights: tuple[Tensor, Tensor] | tuple[Fp8Matrices, Fp8Matrices],
    routed: Routed | RouterLogits,
    shared: Tensor | GatedOutput | None,
    config: Sm90MoeConfig,
) -> Tensor:
    """Calls the kernel for Hopper; a gated output is one more, [k + 1, T, H]."""
    if shared is None:
        return expert_partials_sm90(x, weights, routed, config)
    assert isinstance(shared, GatedOutput), "dense shared experts are for more tokens"
    out = expert_partials_sm90(x, weights, routed, config, num_more=1)
    shared.result(out[-1])
    return out


def grid(tiles: ExpertTiles, columns: int, config: GroupedGemmConfig) -> tuple[int]:
    """Returns the CTAs of a grouped GEMM with so many output columns."""
    return (tiles.tiles.shape[1] * -(-columns // config.block_n),)


def constants(tiles: ExpertTiles, config: GroupedGemmConfig) -> dict[str, int]:
    """Returns what every grouped GEMM is compiled with."""
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def combine_ref(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference implementation of `combine`."""
    return partials.float().sum(0).to(dtype)


def combine(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the choices: [k, T, H] -> [T, H] in `dtype`."""
    if not use_triton(partials):
        return combine_ref(partials, dtype)
    top_k, tokens, hidden = partials.shape
    out = torch.empty(tokens, hidden, dtype=dtype, device=partials.device)
    _combine[(tokens, -(-hidden // COMBINE_BLOCK))](
        partials, out, tokens, hidden,
        TOP_K=top_k, BLOCK=COMBINE_BLOCK, num_warps=4, **pdl_options(out),
    )  # fmt: skip
    return out


@jit
def pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M: tl.constexpr):
    """(mask, pairs) [BLOCK_M] of an expert's tile of `rows` rows."""
    m = tl.arange(0, BLOCK_M)
    m_mask = m < rows
    return m_mask, tl.load(pairs + tl.load(tiles + max_tiles + tile) + m, mask=m_mask, other=0)


@jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """`ClampedSwiglu.act` of float32."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)


@jit
def store_weighted(
    acc, out, weights, shared, pair, n, m_mask, mask, T, H, TOP_K: tl.constexpr
):  # fmt: skip
    """Stores acc [M, N], rounded, times the pairs' weights; a token's first with `shared`.

    `mask`: [M, N] or [M, 1].
    """
    acc *= tl.load(weights + pair, mask=m_mask, other=0.0)[:, None]
    token, choice = (pair // TOP_K).to(tl.int64), pair % TOP_K
    if shared is not None:
        first_choice = mask & (choice == 0)[:, None]
        address = shared + token[:, None] * H + n[None, :]
        acc += tl.load(address, mask=first_choice, other=0.0).to(tl.float32)
    address = out + (choice * T.to(tl.int64) + token)[:, None] * H + n[None, :]
    tl.store(address, acc.to(out.dtype.element_ty), mask=mask)


@jit_no_specialize("max_tiles")
def _gate_up(
    x,  # [T, H]
    w13,  # [E, 2I, H], with TMA its tensor descriptor
    b13,  # [E, 2I] or None
    act,  # [T * k, I], by pair, with TMA in the order of `pairs`
    pairs,
    tiles,  # [3, max_tiles]
    max_tiles,
    h_vectors,  # H / 8
    i_vectors,  # I / 8
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,  # of `ClampedSwiglu`, with b13
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    H, I = h_vectors * 8, i_vectors * 8  # noqa: E741  so that the compiler knows of the 8
    tile, n_block = tl.program_id(0) % max_tiles, tl.program_id(0) // max_tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before the wait: `_down` reads the tiles as soon as it starts.
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.load(tiles + 2 * max_tiles + tile)
    if rows > 0:
        expert = tl.load(tiles + tile).to(tl.int64)
        m_mask, pair = pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_tile = x + (pair // TOP_K).to(tl.int64)[:, None] * H + k[None, :]
        if TMA:
            w_row = expert.to(tl.int32) * 2 * I + n_block * BLOCK_N
        else:
            gate_tile = w13 + expert * 2 * I * H + tl.minimum(n, I - 1)[:, None] * H + k[None, :]
            up_tile = gate_tile + I * H
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, H, BLOCK_K):
            k_mask = first + k[None, :] < H
            if EVEN_K:
                xs = tl.load(x_tile + first, mask=m_mask[:, None], other=0.0)
            else:
                xs = tl.load(x_tile + first, mask=m_mask[:, None] & k_mask, other=0.0)
            if TMA:  # zeros past the last column
                gates = w13.load([w_row, first])
                ups = w13.load([w_row + I, first])
            elif EVEN_K:
                gates = tl.load(gate_tile + first)
                ups = tl.load(up_tile + first)
            else:
                gates = tl.load(gate_tile + first, mask=k_mask, other=0.0)
                ups = tl.load(up_tile + first, mask=k_mask, other=0.0)
            gate = tl.dot(xs, tl.trans(gates), gate, input_precision="ieee")
            up = tl.dot(xs, tl.trans(ups), up, input_precision="ieee")
        if b13 is not None:
            bias = b13 + expert * 2 * I + tl.minimum(n, I - 1)
            gate += tl.load(bias).to(tl.float32)[None, :]
            up += tl.load(bias + I).to(tl.float32)[None, :]
        # Rounded as the output of a GEMM is, before the activation.
        gate = gate.to(act.dtype.element_ty).to(tl.float32)
        up = up.to(act.dtype.element_ty).to(tl.float32)
        if GELU:
            out = gate_by(gate, up, True)
        elif b13 is None:
            out = gate * tl.sigmoid(gate) * up
        else:
            out = clamped_swiglu(gate, up, ALPHA, LIMIT)
        row = pair
        if TMA:
            row = tl.load(tiles + max_tiles + tile) + tl.arange(0, BLOCK_M)
        address = act + row.to(tl.int64)[:, None] * I + n[None, :]
        mask = m_mask[:, None] & (n[None, :] < I)
        tl.store(address, out.to(act.dtype.element_ty), mask=mask)


@jit_no_specialize("max_tiles", "T")
def _down(
    act,  # [T * k, I], of `_gate_up`; with TMA both are tensor descriptors
    w2,  # [E, H, I]
    b2,  # [E, H] or None
    out,  # [k, T, H]
    weights,  # [T, k] float32
    shared,  # [T, H] or None
    pairs,
    tiles,  # [3, max_tiles]
    max_tiles,
    T,
    h_vectors,  # H / 8
    i_vectors,  # I / 8
    prefetch_k,  # a multiple of 64, with PDL
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    H, I = h_vectors * 8, i_vectors * 8  # noqa: E741  so that the compiler knows of the 8
    tile, n_block = tl.program_id(0) % max_tiles, tl.program_id(0) // max_tiles
    # Before the wait: the kernel that made the tiles has finished, see `_gate_up`.
    rows = tl.load(tiles + 2 * max_tiles + tile)
    expert = tl.load(tiles + tile, mask=rows > 0, other=0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not TMA:  # noqa: SIM102  the outer one is decided when it is compiled
            if (rows > 0) & (prefetch_k > 0):
                count, w = tl.minimum(I, prefetch_k), w2 + expert * H * I
                prefetch_weight(w, n_block, 0, count, H, I, BLOCK_N, False, NUM_THREADS)
        tl.extra.cuda.gdc_wait()
    if rows > 0:
        m_mask, pair = pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        if TMA:
            act_row = tl.load(tiles + max_tiles + tile)
            w_row = expert.to(tl.int32) * H + n_block * BLOCK_N
        else:
            act_tile = act + pair.to(tl.int64)[:, None] * I + k[None, :]
            w_tile = w2 + expert * H * I + tl.minimum(n, H - 1)[:, None] * I + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, I, BLOCK_K):
            if TMA:  # zeros past the last column; rows of other experts are not stored
                xs = act.load([act_row, first])
                ws = w2.load([w_row, first])
            elif EVEN_K:
                xs = tl.load(act_tile + first, mask=m_mask[:, None], other=0.0)
                ws = tl.load(w_tile + first)
            else:
                k_mask = first + k[None, :] < I
                xs = tl.load(act_tile + first, mask=m_mask[:, None] & k_mask, other=0.0)
                ws = tl.load(w_tile + first, mask=k_mask, other=0.0)
            acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
        if b2 is not None:
            acc += tl.load(b2 + expert * H + tl.minimum(n, H - 1)).to(tl.float32)[None, :]
        # Rounded as the output of a GEMM is, then weighted in float32.
        if TMA:
            acc = acc.to(act.dtype).to(tl.float32)
        else:
            acc = acc.to(act.dtype.element_ty).to(tl.float32)
        mask = m_mask[:, None] & (n[None, :] < H)
        store_weighted(acc, out, weights, shared, pair, n, m_mask, mask, T, H, TOP_K)


@jit_no_specialize("T")
def _combine(
    partials, out, T, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One CTA per BLOCK elements of a token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    address = partials + token * H + at
    total = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(1, TOP_K):
        offset = (choice * T).to(tl.int64) * H
        total += tl.load(address + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=inside)
