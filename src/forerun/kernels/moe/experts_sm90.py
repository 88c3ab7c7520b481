"""Launches the experts' kernel for Hopper (`experts_sm90.cu`), compiled by NVRTC.

For up to 128 tokens the time of both grouped GEMMs is that of reading the weights of the touched
experts once. One persistent kernel reads them without a pause:

- A work tile is an expert tile (up to 16 pairs of one expert) by 64 rows of the expert's weight: 32
  of gate and 32 of up, or 64 of down. A CTA computes its work tiles of gate/up, then those of down.
  They are fixed for few tokens. For more, CTAs claim them one by one, by an atomic addition while
  the work tile before is loaded: SMs do not get equal bandwidth.
- Warp-specialized: one thread loads W by TMA into an SMEM pipeline that runs on across work tiles,
  two warps gather the rows of x or act by cp.async, and two consumer warpgroups alternate
  (ping-pong), so that one multiplies while the other stores.
- W is wgmma's left operand, 64 rows, and the pairs are its N, 16 columns.
- W in e4m3 is read from shared memory and converted to bfloat16 in registers, as in
  `gemm_fp8_sm90.py`, whose order of columns it has; scales multiply the sums, in float32.
- Up to 4 tokens come with the router's logits (`router_logits_sm90.py`); every CTA chooses their
  experts.
- down needs whole rows of act, from many CTAs. They count the finished work tiles of each expert
  tile; only the warps that load act wait for that count, while W of down fills the pipeline. CTAs
  wait for gate/up alone, which waits for nothing, so that no two wait for each other. All CTAs have
  to run at once for that: the grid is what fits on the GPU, and a second such kernel must not run
  on another stream.

Sums are accumulated in float32 in one order, the same in both configurations, and rounded once. A
column of wgmma's result depends on the same column of its operand only. So a token's result is the
same alone and among up to 127 others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.elementwise.quantize_fp8 import GROUP
from forerun.kernels.moe.config import DECODE_BLOCK_M, Sm90MoeConfig
from forerun.kernels.moe.fp8_matrices import Fp8Matrices
from forerun.kernels.moe.router_sm90 import routing_macros
from forerun.kernels.moe.routing import Routed, RouterLogits, Routing
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

SOURCE = Path(__file__).with_name("experts_sm90.cu")
BLOCK_N = 64  # rows of W
THREADS = 384
QUEUE = 32  # claimed work tiles that are kept
MAX_TILES = 640  # more than 128 tokens make with 512 experts, 16 a token


class ExpertShape(NamedTuple):
    """What the kernel is compiled for besides its configuration."""

    hidden: int  # H
    width: int  # I
    top_k: int  # experts of a token, shared ones included


def smem_bytes(config: Sm90MoeConfig, fp8: int = 0) -> int:
    """Dynamic shared memory per CTA: pipeline, mbarriers, tiles, alignment to 1,024 bytes."""
    rows = (BLOCK_N if fp8 else 2 * BLOCK_N) + 2 * DECODE_BLOCK_M  # bytes of a column
    stage = rows * config.block_k + (4 * BLOCK_N if fp8 == 2 else 0)
    claims = 12 * QUEUE * config.dynamic
    return config.num_stages * (stage + 16) + 16 + claims + 8 * MAX_TILES + 1024


def cuda_source(
    config: Sm90MoeConfig,
    shape: ExpertShape,
    choose: tuple[Routing, bool] | None = None,
    fp8: int = 0,
) -> str:
    """`experts_sm90.cu` with its configuration as macros in front, ready to compile.

    `choose`: the CTAs choose the experts by this routing, and whether it has a correction bias.
    `fp8`: the macro of this name.
    """
    macros = {
        "BLOCK_K": config.block_k,
        "NUM_STAGES": config.num_stages,
        "CTAS_PER_SM": config.ctas_per_sm,
        "DYNAMIC": int(config.dynamic),
        "EXPERT_H": shape.hidden,
        "EXPERT_I": shape.width,
        "EXPERT_TOP_K": shape.top_k,
        "FP8": fp8,
        "CHOOSE": int(choose is not None),
    }
    if choose is not None:
        macros |= routing_macros(*choose)
    return nvrtc.with_macros(SOURCE, macros)


def expert_partials_sm90(
    x: Tensor,
    weights: tuple[Tensor, Tensor] | tuple[Fp8Matrices, Fp8Matrices],
    routed: Routed | RouterLogits,
    config: Sm90MoeConfig,
    num_more: int = 0,
) -> Tensor:
    """`expert_partials` for bfloat16 and up to 128 tokens: float32 [k, T, H].

    Args:
        weights: w13 and w2; in e4m3, interleaved.
        num_more: so many [T, H] are left after these for the caller to fill.
    """
    (w13, w2), scales, fp8 = _values_and_scales(weights)
    tokens, (experts, hidden, width) = x.shape[0], w2.shape
    inputs: tuple[Tensor | None, ...]
    if isinstance(routed, RouterLogits):
        routing, bias, top_k = routed.routing, routed.correction_bias, routed.num_choices
        choose, max_tiles, factor = (routing, bias is not None), 0, routing.routed_scaling_factor
        inputs = None, None, None, routed.progress, routed.logits, bias
    else:
        tiles, top_k, choose, factor = routed.tiles, routed.experts.shape[1], None, 1.0
        assert tiles is not None and tiles.progress is not None
        max_tiles = tiles.tiles.shape[1]
        assert max_tiles <= MAX_TILES and max_tiles + 2 <= len(tiles.progress)
        assert tiles.block_m == DECODE_BLOCK_M
        inputs = routed.weights, tiles.pairs, tiles.tiles, tiles.progress, None, None
    others_too = isinstance(routed, Routed) and routed.is_part  # choices not computed here: zeros
    assert hidden % config.block_k == 0 and width % config.block_k == 0
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, w13, w2))
    act = x.new_empty(tokens * top_k, width)
    shape = top_k + num_more, tokens, hidden
    new = torch.zeros if others_too else torch.empty
    out = new(shape, dtype=torch.float32, device=x.device)
    # [I / 8, 2E, 8, H]: a box has 8 rows of gate, the 8 rows of up that go with them, and so on.
    # Of e4m3, an element of the descriptor is two.
    paired = w13.view(2 * experts, width // 8, 8, hidden).transpose(0, 1).view(torch.bfloat16)
    rows = w2.view(experts * hidden, width).view(torch.bfloat16)
    args = (
        nvrtc.tma_descriptor(paired, (BLOCK_N // 16, 2, 8, 64)),
        nvrtc.tma_descriptor(rows, (BLOCK_N, 64)),
        x, act, out, *scales, *inputs, float(factor), max_tiles, tokens,
    )  # fmt: skip
    grid = gpu_of(x.device).num_sms * config.ctas_per_sm
    kernel = _load_kernel(x.device, config, ExpertShape(hidden, width, top_k), choose, fp8)
    nvrtc.launch(kernel, grid, THREADS, args, x.device)
    return out


def _values_and_scales(
    weights: tuple[Tensor, Tensor] | tuple[Fp8Matrices, Fp8Matrices],
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None], int]:
    """Returns the arguments, and the macro `FP8`."""
    w13, w2 = weights
    if isinstance(w13, Tensor):
        assert isinstance(w2, Tensor)
        return (w13, w2), (None, None), 0
    assert isinstance(w2, Fp8Matrices) and w13.interleaved and w2.interleaved
    fp8 = 2 if w13.grouped or w2.grouped else 1
    for each in (w13, w2):
        assert each.scales.shape[1] == (1 if fp8 == 1 else each.values.shape[2] // GROUP)
    return (w13.values, w2.values), (w13.scales, w2.scales), fp8


_load_kernel = nvrtc.loader(
    "experts_sm90_kernel",
    cuda_source,
    lambda config, shape, choose=None, fp8=0: smem_bytes(config, fp8),
)
