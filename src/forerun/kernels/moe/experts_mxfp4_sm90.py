"""Launches the kernel for Hopper of experts in MXFP4 (`experts_mxfp4_sm90.cu`), compiled by NVRTC.

As `experts_sm90.py`: for up to 128 tokens one persistent kernel computes both grouped GEMMs and
reads the weights of the touched experts once; one thread loads W by TMA, two warps gather x or act
by cp.async, CTAs claim work tiles one by one, and counters tell when act is written. What differs:

- A stage has 512 columns, 64 for each of 8 warps along K. A warp converts its codes to bfloat16 in
  registers and multiplies by mma.sync, which leaves the order of columns to the kernel: a thread
  takes them as the stored layout has them, and reads the same columns of x. The 8 sums of a work
  tile are added up in shared memory, in order.
- Two values are converted at a time: sign and magnitude go to their places in both halves of a
  word by one multiplication, and a product with the scale makes up for the exponent. All exact.
- Scales come with their stage, [64 columns][row], two bytes each.
- Biases and the clamped SwiGLU are in the epilogue.

How K is divided does not depend on the number of tokens. So a token's result is the same alone and
among up to 127 others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.kernels.moe.config import Sm90Mxfp4Config
from forerun.kernels.moe.experts import ClampedSwiglu
from forerun.kernels.moe.experts_sm90 import MAX_TILES, QUEUE, ExpertShape
from forerun.kernels.moe.routing import Routed
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

if TYPE_CHECKING:
    from forerun.kernels.moe.experts_mxfp4 import Mxfp4Matrices

SOURCE = Path(__file__).with_name("experts_mxfp4_sm90.cu")
CHUNK, K_WARPS = 64, 8  # columns of a warp in a stage
THREADS = 32 * (3 + 2 * K_WARPS)


def smem_bytes(config: Sm90Mxfp4Config) -> int:
    """Dynamic shared memory per CTA: pipeline, sums, mbarriers, tiles, alignment to 1,024 bytes."""
    row = K_WARPS * CHUNK // 2 + 2 * K_WARPS  # of W, with scales
    x_row = K_WARPS * CHUNK * 2 + 64
    stage = config.block_n * row + config.block_m * x_row
    sums = 4 * config.block_n * config.block_m * K_WARPS
    return config.num_stages * (stage + 16) + sums + 8 + 12 * QUEUE + 8 * MAX_TILES + 1024


def cuda_source(config: Sm90Mxfp4Config, shape: ExpertShape, alpha: float, limit: float) -> str:
    """`experts_mxfp4_sm90.cu` with its configuration as macros in front, ready to compile."""
    macros: dict[str, int | str] = {
        "BLOCK_M": config.block_m,
        "ROW_BLOCKS": config.block_n // 32,
        "NUM_STAGES": config.num_stages,
        "EXPERT_H": shape.hidden,
        "EXPERT_I": shape.width,
        "EXPERT_TOP_K": shape.top_k,
        "ALPHA": f"{float(alpha)}f",
        "LIMIT": f"{float(limit)}f",
    }
    return nvrtc.with_macros(SOURCE, macros)


def expert_partials_mxfp4_sm90(
    x: Tensor,
    weights: tuple[Mxfp4Matrices, Mxfp4Matrices],
    routed: Routed,
    swiglu: ClampedSwiglu,
    config: Sm90Mxfp4Config,
) -> Tensor:
    """`expert_partials_mxfp4` for bfloat16 and up to 128 tokens: float32 [k, T, H]."""
    (w13, w2), tiles = weights, routed.tiles
    tokens, (experts, hidden, width), top_k = x.shape[0], w2.shape, routed.experts.shape[1]
    assert tiles is not None and tiles.progress is not None
    max_tiles = tiles.tiles.shape[1]
    assert max_tiles <= MAX_TILES and max_tiles + 2 <= len(tiles.progress)
    assert tokens <= config.block_m or tiles.block_m == config.block_m
    inputs = x, swiglu.b13, swiglu.b2, w13.values, w13.scales, w2.values, w2.scales
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in inputs)
    act = x.new_empty(tokens * top_k, width)
    out = routed.new_partials(x)
    # As in `experts_sm90.py`: 8 rows of gate, the 8 rows of up that go with them, and so on. An
    # element of the descriptor is two bytes of codes, or four rows' scales.
    paired = w13.values.view(2 * experts, width // 8, 8, hidden // 2).transpose(0, 1)
    scales13 = w13.scales.flatten(2).view(torch.int64).unflatten(2, (2, -1))
    scales2 = w2.scales.flatten(2).view(torch.int64)
    n, chunks = config.block_n, K_WARPS
    args = (
        nvrtc.tma_descriptor(paired.view(torch.bfloat16), (n // 16, 2, 8, 64)),
        nvrtc.tma_descriptor(scales13, (1, chunks, 2, n // 8)),
        nvrtc.tma_descriptor(w2.values.flatten(0, 1).view(torch.bfloat16), (n, 64)),
        nvrtc.tma_descriptor(scales2, (1, chunks, n // 4)),
        x, act, out, swiglu.b13, swiglu.b2, routed.weights, tiles.pairs, tiles.tiles,
        tiles.progress, max_tiles, tokens,
    )  # fmt: skip
    shape = ExpertShape(hidden, width, top_k)
    kernel = _load_kernel(x.device, config, shape, swiglu.alpha, swiglu.limit)
    nvrtc.launch(kernel, gpu_of(x.device).num_sms, THREADS, args, x.device)
    return out


_load_kernel = nvrtc.loader(
    "experts_mxfp4_sm90_kernel", cuda_source, lambda config, *_: smem_bytes(config)
)
