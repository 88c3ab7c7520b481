# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of `experts.py` with weights in e4m3, which the grouped GEMMs read as they are.

Up to `MAX_DECODE_TOKENS` tokens are multiplied in bfloat16 (W8A16): the time is that of reading the
weights, which are converted in registers, so nothing but the weights is rounded. For more tokens,
on GPUs with FP8 tensor cores, x and the activations between the GEMMs are quantized too (W8A8),
with a scale per token, or per token and 128 columns where the weights have scales of 128 columns.

Scales multiply sums in float32: those of rows in the epilogue, those of groups after every 128
columns of K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.elementwise.quantize_fp8 import (
    GROUP,
    interleave_groups,
    quantize_groups,
    quantize_tokens,
    scales_of_rows,
)
from forerun.kernels.gemm.gemm_triton import decode_fp8, fp8_weight_mode, prefetch_weight
from forerun.kernels.moe.config import (
    MAX_DECODE_TOKENS,
    Fp8MoeConfig,
    GroupedGemmConfig,
    choose_moe_fp8,
    choose_moe_fp8_sm90,
)
from forerun.kernels.moe.experts import (
    constants,
    expert_partials_ref,
    grid,
    pairs_of_tile,
    partials_with_shared_sm90,
    store_weighted,
)
from forerun.kernels.moe.fp8_matrices import Fp8Matrices
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.routing import ExpertTiles, Routed, RouterLogits
from forerun.kernels.runtime.fp8 import FP8, as_bits, fp8_mode, to_e4m3
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

PREFETCH_K = 512  # columns of its w2 tile that a CTA prefetches into L2 (PDL)


def expert_partials_fp8(
    x: Tensor,
    w13: Fp8Matrices,
    w2: Fp8Matrices,
    routed: Routed | RouterLogits,
    shared: Tensor | GatedOutput | None = None,
    config: Fp8MoeConfig | None = None,
) -> Tensor:
    """`expert_partials` with weights in e4m3: x [T, H] -> [k, T, H].

    Up to `MAX_DECODE_TOKENS` tokens are Hopper's kernel's if the weights are interleaved for it.

    Args:
        routed: of `route` for the same x, with its tiles; or of `router_logits_sm90`. Of a part of
            the experts, other choices are zeros.
        shared: [T, H], added to the first choice, or a gated output of x.
        config: Triton's; None: that of `choose_moe_fp8`.
    """
    if not use_triton(x):
        assert isinstance(routed, Routed)
        gated = shared.result() if isinstance(shared, GatedOutput) else shared
        plain = w13.dequantize(x.dtype), w2.dequantize(x.dtype)
        return expert_partials_ref(x, *plain, routed, gated)
    if w13.interleaved and config is None and len(x) <= MAX_DECODE_TOKENS:
        _, hidden, width = w2.values.shape
        sm90 = choose_moe_fp8_sm90(len(x), hidden, width, x.dtype, gpu_of(x.device))
        assert sm90 is not None
        return partials_with_shared_sm90(x, (w13, w2), routed, shared, sm90)
    assert isinstance(routed, Routed)
    if isinstance(shared, GatedOutput):
        shared = shared.result()
    config = config or choose_moe_fp8(len(x), gpu_of(x.device), w13.scale_kind)
    assert config.quantize_x or not w13.interleaved
    act, act_scales = _run_gate_up(x, w13, routed, config)
    if config.quantize_x and act_scales is None:
        act, act_scales = _quantized(act, w2)
    out = routed.new_partials(x)
    _run_down((act, act_scales), w2, routed, shared, config, out)
    return out


def _quantized(x: Tensor, weight: Fp8Matrices) -> tuple[Tensor, Tensor]:
    quantize = quantize_groups if weight.grouped else quantize_tokens
    return quantize(x, weight.interleaved)


def _run_gate_up(
    x: Tensor, w13: Fp8Matrices, routed: Routed, config: Fp8MoeConfig
) -> tuple[Tensor, Tensor | None]:
    """x [T, H] -> [T * k, I] in x's dtype; or in e4m3, and its scales of groups."""
    tiles, (_, n, hidden), top_k = routed.tiles, w13.values.shape, routed.experts.shape[1]
    assert tiles is not None and tiles.block_m == config.tiles.block_m and x.is_contiguous()
    pairs, width = len(x) * top_k, n // 2
    act, act_scales = x.new_empty(pairs, width), None
    # A CTA that has all of a group quantizes it.
    if config.quantize_x and w13.grouped and config.tiles.gate_up.block_n == GROUP:
        act = act.new_empty(pairs, width, dtype=FP8)
        act_scales = torch.empty(pairs, width // GROUP, device=x.device)
    inputs = _quantized(x, w13) if config.quantize_x else (x, None)
    values = w13.values if config.quantize_x else as_bits(w13.values)
    gate_up_fp8[grid(tiles, width, config.tiles.gate_up)](
        *inputs, values, w13.scales, as_bits(act), act_scales, tiles.pairs, tiles.tiles,
        tiles.tiles.shape[1], hidden // GROUP, width // GROUP,
        TOP_K=top_k, INTERLEAVED=w13.interleaved, NATIVE=fp8_mode(w13.values) == 2,
        **_constants(tiles, w13, config, config.tiles.gate_up), **pdl_options(x),
    )  # fmt: skip
    return act, act_scales


def _run_down(
    act: tuple[Tensor, Tensor | None],
    w2: Fp8Matrices,
    routed: Routed,
    shared: Tensor | None,
    config: Fp8MoeConfig,
    out: Tensor,
) -> None:
    """act [T * k, I], and its scales if it is quantized -> out [k, T, H]."""
    tiles, (_, hidden, width), (tokens, top_k) = routed.tiles, w2.values.shape, routed.experts.shape
    assert tiles is not None
    values = w2.values if config.quantize_x else as_bits(w2.values)
    tile = config.tiles.down
    down_fp8[grid(tiles, hidden, tile)](
        *act, values, w2.scales, out, routed.weights, shared, tiles.pairs, tiles.tiles,
        tiles.tiles.shape[1], tokens, hidden // GROUP, width // GROUP, PREFETCH_K,
        TOP_K=top_k, NUM_THREADS=32 * tile.num_warps,
        **_constants(tiles, w2, config, tile), **pdl_options(out),
    )  # fmt: skip


def _constants(
    tiles: ExpertTiles, weight: Fp8Matrices, config: Fp8MoeConfig, tile: GroupedGemmConfig
) -> dict[str, int]:
    assert GROUP % tile.block_n == 0 and GROUP % tile.block_k == 0
    return constants(tiles, tile) | {
        "BLOCK_K": tile.block_k,
        "SCALES": weight.scale_kind,
        "DECODE": 0 if config.quantize_x else fp8_weight_mode(weight.values),
    }


@jit_no_specialize("max_tiles")
def gate_up_fp8(
    x,  # [T, H]: e4m3 if not DECODE
    x_scales,  # [T, 1] or [T, H / 128]; with DECODE None
    values,  # [E, 2I, H]: e4m3, with DECODE its bits
    scales,  # [E, G, 2I]
    act,  # [T * k, I]; with act_scales the bits of e4m3
    act_scales,  # [T * k, I / 128], where BLOCK_N is 128; or None
    pairs,
    tiles,  # [3, max_tiles]
    max_tiles,
    h_groups,  # H / 128
    i_groups,  # I / 128
    TOP_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # of act in e4m3
    NATIVE: tl.constexpr,  # `to_e4m3`
    SCALES: tl.constexpr,  # `Fp8Matrices.scale_kind`
    DECODE: tl.constexpr,  # of `decode_fp8`; 0: W8A8
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """`experts._gate_up`."""
    H, I = h_groups * 128, i_groups * 128  # noqa: E741
    tile, n_block = tl.program_id(0) % max_tiles, tl.program_id(0) // max_tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before the wait: `down_fp8` reads the tiles as soon as it starts.
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.load(tiles + 2 * max_tiles + tile)
    if rows > 0:
        expert = tl.load(tiles + tile).to(tl.int64)
        m_mask, pair = pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M)
        token = (pair // TOP_K).to(tl.int64)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_tile = x + token[:, None] * H + k[None, :]
        gate_tile = values + (expert * 2 * I + n)[:, None] * H + k[None, :]
        up_tile = gate_tile + I * H
        gate_scales = scales + expert * 2 * I * (h_groups if SCALES else 1)
        gate_scales += n_block * BLOCK_N if SCALES == 2 else n
        row_scales = x_scales
        if DECODE == 0:
            row_scales = x_scales + token * (h_groups if SCALES else 1)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, H, BLOCK_K):
            xs = tl.load(x_tile + first, mask=m_mask[:, None], other=0.0)
            gates = tl.load(gate_tile + first)
            ups = tl.load(up_tile + first)
            group = first // 128
            of_gate = gate_scales + group * 2 * I
            gate = _add_product(gate, xs, gates, row_scales, of_gate, group, m_mask, SCALES, DECODE)
            up = _add_product(up, xs, ups, row_scales, of_gate + I, group, m_mask, SCALES, DECODE)
        if SCALES == 0:
            gate *= _scales(row_scales, gate_scales, 0, m_mask, SCALES, DECODE)
            up *= _scales(row_scales, gate_scales + I, 0, m_mask, SCALES, DECODE)
        address = act + pair.to(tl.int64)[:, None] * I + n[None, :]
        if act_scales is None:
            # Rounded as the output of a GEMM is, before the activation.
            gate = gate.to(act.dtype.element_ty).to(tl.float32)
            up = up.to(act.dtype.element_ty).to(tl.float32)
            out = (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty)
        else:
            value = gate * tl.sigmoid(gate) * up
            scale = scales_of_rows(value)
            tl.store(act_scales + pair.to(tl.int64) * i_groups + n_block, scale, mask=m_mask)
            out = to_e4m3(value / scale[:, None], NATIVE)
            if INTERLEAVED:
                out = interleave_groups(out, BLOCK_M)
        tl.store(address, out, mask=m_mask[:, None])


@jit_no_specialize("max_tiles", "T")
def down_fp8(
    act,  # [T * k, I]: e4m3 if not DECODE
    act_scales,  # [T * k, 1] or [T * k, I / 128]; with DECODE None
    values,  # [E, H, I]: e4m3, with DECODE its bits
    scales,  # [E, G, H]
    out,  # [k, T, H]
    weights,  # [T, k] float32
    shared,  # [T, H] or None
    pairs,
    tiles,  # [3, max_tiles]
    max_tiles,
    T,
    h_groups,  # H / 128
    i_groups,  # I / 128
    prefetch_k,  # a multiple of 64, with PDL
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`experts._down`."""
    H, I = h_groups * 128, i_groups * 128  # noqa: E741
    tile, n_block = tl.program_id(0) % max_tiles, tl.program_id(0) // max_tiles
    # Before the wait: the kernel that made the tiles has finished, see `gate_up_fp8`.
    rows = tl.load(tiles + 2 * max_tiles + tile)
    expert = tl.load(tiles + tile, mask=rows > 0, other=0).to(tl.int64)
    w = values + expert * H * I
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if (rows > 0) & (DECODE > 0):
            count = tl.minimum(I, prefetch_k)
            prefetch_weight(w, n_block, 0, count, H, I, BLOCK_N, False, NUM_THREADS, 1)
        tl.extra.cuda.gdc_wait()
    if rows > 0:
        m_mask, pair = pairs_of_tile(pairs, tiles, max_tiles, tile, rows, BLOCK_M)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        act_tile = act + pair.to(tl.int64)[:, None] * I + k[None, :]
        w_tile = w + n[:, None] * I + k[None, :]
        w_scales = scales + expert * H * (i_groups if SCALES else 1)
        w_scales += n_block * BLOCK_N if SCALES == 2 else n
        row_scales = act_scales
        if DECODE == 0:
            row_scales = act_scales + pair * (i_groups if SCALES else 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, I, BLOCK_K):
            xs = tl.load(act_tile + first, mask=m_mask[:, None], other=0.0)
            ws = tl.load(w_tile + first)
            group = first // 128
            of_w = w_scales + group * H
            acc = _add_product(acc, xs, ws, row_scales, of_w, group, m_mask, SCALES, DECODE)
        if SCALES == 0:
            acc *= _scales(row_scales, w_scales, 0, m_mask, SCALES, DECODE)
        # Rounded as the output of a GEMM is, then weighted in float32.
        acc = acc.to(act.dtype.element_ty if DECODE else out.dtype.element_ty).to(tl.float32)
        mask = m_mask[:, None]
        store_weighted(acc, out, weights, shared, pair, n, m_mask, mask, T, H, TOP_K)


@jit
def _add_product(
    acc, xs, ws, row_scales, w_scales, group, m_mask, SCALES: tl.constexpr, DECODE: tl.constexpr
):  # fmt: skip
    """acc + xs [M, K] times ws [N, K], scaled if they have scales of groups."""
    if DECODE:
        ws = decode_fp8(ws, xs.dtype, DECODE)
    if SCALES:
        scale = _scales(row_scales, w_scales, group, m_mask, SCALES, DECODE)
        acc += tl.dot(xs, tl.trans(ws), input_precision="ieee") * scale
    else:
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
    return acc


@jit
def _scales(
    row_scales, w_scales, group, m_mask, SCALES: tl.constexpr, DECODE: tl.constexpr
):  # fmt: skip
    """Returns scales of a product [M, N]. w_scales: of its columns; of all if SCALES == 2."""
    scale = tl.load(w_scales)
    if SCALES != 2:
        scale = scale[None, :]
    if DECODE == 0:
        of_x = tl.load(row_scales + group, mask=m_mask, other=0.0)
        scale = (scale * of_x)[:, None] if SCALES == 2 else scale * of_x[:, None]
    return scale
