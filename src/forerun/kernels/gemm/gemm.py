"""GEMMs of decode and verify steps, with fused epilogues: y = x Wᵀ for up to 512 tokens.

W [N, K] is bfloat16 and row-major, as in checkpoints. With so few tokens, most of these GEMMs are
bound by reading W once. There are two implementations, and `dispatch.py` chooses:

- `gemm_triton.py`: stream-K, in Triton, for any GPU;
- `gemm_sm90.py`: persistent and warp-specialized, in CUDA C++, for Hopper.

Bias, residual, SiLU(gate) * up and argmax are computed in the epilogue. RMSNorm is split in two
(deferred RMSNorm): the GEMM whose epilogue adds the residual, r, stores r * w and each tile's sum
of squares of r. The next GEMM multiplies its accumulators by 1 / sqrt(mean(r²) + eps), a factor
that is constant along K (`DeferredNorm`).

Results are deterministic. Within a bucket of M (`m_bucket`), a token's result does not depend on
the number of tokens in the batch.

Without Triton (a CPU outside the tests), each function runs its reference implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm import gemm_fp8_sm90, gemm_sm90, gemm_triton
from forerun.kernels.gemm.arguments import GemmArguments
from forerun.kernels.gemm.config import GemmConfig, Sm90Fp8GemmConfig, Sm90GemmConfig, num_tiles
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.runtime.jit import use_triton
from forerun.kernels.sampling.argmax import argmax_ref


@dataclass(frozen=True)
class DeferredNorm:
    """An RMSNorm that the next GEMM finishes: the norm is `x * inv_rms()`."""

    x: Tensor  # [M, K]: r * w, r the input of the norm and w its weight
    sum_of_squares: Tensor  # [P, M] float32, one row per N tile of the GEMM before; sums to Σ r²
    eps: float

    def inv_rms(self) -> Tensor:
        """[M, 1] float32: 1 / sqrt(mean(r²) + eps)."""
        mean = self.sum_of_squares.sum(0) / self.x.shape[1]
        return torch.rsqrt(mean + self.eps).unsqueeze(1)


@dataclass(frozen=True)
class GemmWeight:
    """The constant operands of a GEMM. Two GEMMs with the same object must not run at once."""

    weight: Tensor  # [N, K]; e4m3 values if there are scales
    bias: Tensor | None  # [N]
    semaphores: Tensor  # [>= tiles] int32, zero; every GEMM leaves them zero
    scales: Tensor | None = None  # [N, G] float32
    group: int = 0  # columns that share a scale; 0: G is 1

    @classmethod
    def from_tensor(cls, weight: Tensor, bias: Tensor | None = None) -> GemmWeight:
        return cls(weight, bias, gemm_triton.new_semaphores(weight))

    @classmethod
    def from_fp8(cls, weight: Fp8Weight, bias: Tensor | None = None) -> GemmWeight:
        group = weight.group if weight.scales.shape[1] > 1 else 0
        semaphores = gemm_triton.new_semaphores(weight.values)
        return cls(weight.values, bias, semaphores, weight.scales, group)

    def plain(self) -> Tensor:
        """[N, K] float32, for reference implementations."""
        if self.scales is None:
            return self.weight.float()
        return Fp8Weight(self.weight, self.scales, self.group or self.weight.shape[1]).dequantize()


def gemm(x: Tensor | DeferredNorm, w: GemmWeight, config: GemmConfig) -> Tensor:
    """x [M, K] -> x Wᵀ + b, [M, N]."""
    if not use_triton(w.weight):
        return _gemm_ref(x, w).to(_input(x).dtype)
    out = _input(x).new_empty(_input(x).shape[0], w.weight.shape[0])
    _launch(config, w, _arguments(x, w, out=out))
    return out


def gemm_add(
    x: Tensor | DeferredNorm, w: GemmWeight, residual: Tensor, config: GemmConfig
) -> Tensor:
    """residual [M, N] + x Wᵀ + b, as a new tensor."""
    if not use_triton(w.weight):
        return (_gemm_ref(x, w) + residual.float()).to(residual.dtype)
    out = torch.empty_like(residual)
    _launch(config, w, _arguments(x, w, out=out, residual=residual))
    return out


def gemm_add_deferred_norm(
    x: Tensor | DeferredNorm,
    w: GemmWeight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    config: GemmConfig,
) -> tuple[DeferredNorm, Tensor]:
    """r = residual [M, N] + x Wᵀ + b -> (deferred RMSNorm of r, r)."""
    if not use_triton(w.weight):
        out = gemm_add(x, w, residual, config)
        r = out.float()
        norm_out = (r * norm_weight.float()).to(out.dtype)
        return DeferredNorm(norm_out, r.square().sum(1).unsqueeze(0), eps), out
    out, norm_out = torch.empty_like(residual), torch.empty_like(residual)
    m, n = residual.shape
    sum_of_squares = residual.new_empty(-(-n // config.block_n), m, dtype=torch.float32)
    args = _arguments(
        x,
        w,
        residual=residual,
        norm_weight=norm_weight,
        out=out,
        norm_out=norm_out,
        sum_of_squares_out=sum_of_squares,
    )
    _launch(config, w, args)
    return DeferredNorm(norm_out, sum_of_squares, eps), out


def gemm_silu_mul(x: Tensor | DeferredNorm, w: GemmWeight, config: GemmConfig) -> Tensor:
    """W = [gate; up]: SiLU(x gateᵀ) * (x upᵀ), [M, N / 2]."""
    if not use_triton(w.weight):
        gate, up = _gemm_ref(x, w).chunk(2, -1)
        return (F.silu(gate) * up).to(_input(x).dtype)
    out = _input(x).new_empty(_input(x).shape[0], w.weight.shape[0] // 2)
    _launch(config, w, _arguments(x, w, out=out, silu_mul=True))
    return out


def gemm_argmax(x: Tensor | DeferredNorm, w: GemmWeight, config: GemmConfig) -> Tensor:
    """argmax over N of `gemm` (rounded to bfloat16 as there), [M] int64; ties: the lowest index.

    INVALID_TOKEN for rows with a NaN or +inf, or of -inf alone.
    """
    if not use_triton(w.weight):
        return argmax_ref(gemm(x, w, config))
    m, tiles = _input(x).shape[0], -(-w.weight.shape[0] // config.block_n)
    tile_max = torch.empty(m, tiles, dtype=torch.float32, device=w.weight.device)
    tile_argmax = torch.empty(m, tiles, dtype=torch.int32, device=w.weight.device)
    _launch(config, w, _arguments(x, w, tile_max=tile_max, tile_argmax=tile_argmax))
    return gemm_triton.reduce_argmax(tile_max, tile_argmax)


def gemm_partials(x: Tensor, w: GemmWeight, config: GemmConfig) -> Tensor:
    """Split-K partials of x Wᵀ, [S, M, N] float32: the reader sums them. The bias is not added.

    S is `config.split_k`; in Triton, `config.num_ctas` must be S times the number of tiles.
    """
    m, n = x.shape[0], w.weight.shape[0]
    if isinstance(config, Sm90GemmConfig | Sm90Fp8GemmConfig):
        split_k, rest = config.split_k, 0
    else:
        split_k, rest = divmod(config.num_ctas, num_tiles(m, n, config))
    assert rest == 0 and split_k > 0
    if not use_triton(w.weight):
        slices = zip(x.tensor_split(split_k, 1), w.plain().tensor_split(split_k, 1), strict=True)
        return torch.stack([F.linear(a.float(), b) for a, b in slices])
    partials = torch.empty(split_k, m, n, dtype=torch.float32, device=x.device)
    _launch(
        config,
        w,
        GemmArguments(x, w.weight, None, scales=w.scales, group=w.group, partials=partials),
    )
    return partials


def _input(x: Tensor | DeferredNorm) -> Tensor:
    return x.x if isinstance(x, DeferredNorm) else x


def _arguments(x: Tensor | DeferredNorm, w: GemmWeight, **epilogue: Any) -> GemmArguments:
    """The operands, with the other fields of `GemmArguments`."""
    epilogue |= {"scales": w.scales, "group": w.group}
    if isinstance(x, DeferredNorm):
        return GemmArguments(x.x, w.weight, w.bias, x.sum_of_squares, x.eps, **epilogue)
    return GemmArguments(x, w.weight, w.bias, **epilogue)


def _gemm_ref(x: Tensor | DeferredNorm, w: GemmWeight) -> Tensor:
    """x Wᵀ + b in float32."""
    y = F.linear(_input(x).float(), w.plain())
    if isinstance(x, DeferredNorm):
        y = y * x.inv_rms()
    return y if w.bias is None else y + w.bias.float()


def _launch(config: GemmConfig, w: GemmWeight, args: GemmArguments) -> None:
    if isinstance(config, Sm90GemmConfig):
        gemm_sm90.launch(config, args)
    elif isinstance(config, Sm90Fp8GemmConfig):
        gemm_fp8_sm90.launch(config, args)
    else:
        gemm_triton.launch(config, args, w.semaphores)
