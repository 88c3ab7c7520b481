"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) between projections.

A layer keeps one latent row [c | k_rope] per token: c, normed, of R = kv_lora_rank values, and a
rotated key part that all heads share. Decode, verify and draft extend use the absorbed form, one
K/V head of R + Dr and R values. Prefill expands K and V per head where that is cheaper
(`attention/latent.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionContext,
    AttentionSpec,
    LatentNormRope,
    LatentProjection,
    LayerMask,
    RopeInput,
)
from forerun.attention.latent import LatentDims
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.kernels.elementwise.latent_norm_rope import LatentNorm
from forerun.kernels.elementwise.qk_norm_rope import rotate
from forerun.kernels.gemm.head_gemm import head_gemm
from forerun.kernels.runtime.jit import use_triton
from forerun.kvcache.layouts import LatentKV
from forerun.layers.attention import KVLayer
from forerun.layers.communication import WeightPlacement
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.layers.sharding import Shard


class LatentUpProjection(LatentProjection, Module):
    """`weight` [Hq · (Dn + Dv), R]: W_UK rows, then W_UV rows, of every head (kv_b_proj).

    Absorbed and expanded forms read the same matrix; nothing is stored twice.
    """

    def __init__(self, heads: Shard, dims: LatentDims, place: WeightPlacement) -> None:
        """`heads`: of this rank."""
        self._rows, self._ranks = heads.scaled(dims.nope + dims.v), place.comm.size
        self.num_heads, self.dims = heads.count, dims
        self.weight = place.empty(self._rows.count, dims.latent)
        self._fixed_order = place.fixed_order

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {f"{prefix}weight": self._rows} if self._ranks > 1 else {}

    def prepare(self) -> None:
        dims = self.dims
        self._by_head = self.weight.view(self.num_heads, dims.nope + dims.v, dims.latent)
        self._w_uk = self._by_head[:, : dims.nope]  # [Hq, Dn, R]
        self._w_uv_t = self._by_head[:, dims.nope :].transpose(1, 2)  # [Hq, R, Dv]
        self._packed: tuple[cpu.PackedWeights, cpu.PackedWeights] | None = None
        if library.serves(self.weight.dtype, self.weight.device) and not use_triton(self.weight):
            both = self._w_uk.transpose(1, 2), self._w_uv_t.transpose(1, 2)
            if all(cpu.fits(each[0], cpu.plain_format(each.dtype)) for each in both):
                self._packed = cpu.PackedWeights.pack(both[0]), cpu.PackedWeights.pack(both[1])

    def absorb(self, q_nope: Tensor, out: Tensor) -> None:
        if self._packed is None:
            head_gemm(q_nope, self._w_uk, out, self._fixed_order)
        else:
            cpu.head_gemm(q_nope, self._packed[0], out)

    def project_v(self, latent: Tensor) -> Tensor:
        out = latent.new_empty(*latent.shape[:2], self.dims.v)
        if self._packed is None:
            head_gemm(latent, self._w_uv_t, out, self._fixed_order)
        else:
            cpu.head_gemm(latent, self._packed[1], out)
        return out

    def __call__(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        dims = self.dims
        latent, k_rope = rows.split_with_sizes((dims.latent, dims.rope), 1)
        both = latent @ self._by_head[heads].flatten(0, 1).t()
        k_nope, v = both.view(len(rows), -1, dims.nope + dims.v).split((dims.nope, dims.v), -1)
        shared = k_rope.unsqueeze(1).expand(-1, k_nope.shape[1], -1)
        return torch.cat((k_nope, shared), -1), v


class LatentRowNormRope(LatentNormRope):
    """Norm and RoPE of one layer, in plain PyTorch."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = LatentNorm(norm.weight, norm.eps)
        self._norm = norm

    def split(self, kv_a: Tensor, q_rope: Tensor, rope: RopeInput) -> tuple[Tensor, Tensor]:
        rope_dim = q_rope.shape[-1]
        latent, k_rope = kv_a.split_with_sizes((kv_a.shape[1] - rope_dim, rope_dim), 1)
        k_rope = rotate(k_rope.unsqueeze(1), rope.cos_sin).squeeze(1)
        return torch.cat((self._norm(latent), k_rope), 1), rotate(q_rope, rope.cos_sin)


@dataclass(frozen=True)
class LatentHeads:
    """The heads of an MLA layer, as values."""

    num_heads: int  # Hq
    dims: LatentDims
    scale: float  # scores are scale · q·k, with q and k of Dn + Dr values


class LatentAttention(KVLayer):
    """Norm and RoPE of the latent row, its write, and attention of layer `layer_id`."""

    def __init__(
        self,
        layer_id: int,
        mask: LayerMask,
        heads: LatentHeads,
        kv_norm: RMSNorm,
        up: LatentUpProjection,
    ) -> None:
        self.layer_id, self.heads = layer_id, heads
        self.spec = AttentionSpec(mask, heads.scale)
        self._norm_rope, self._up = LatentRowNormRope(kv_norm), up

    def kv_layout(self, kv_dtype: torch.dtype) -> LatentKV:
        dims = self.heads.dims
        return LatentKV(dims.latent, dims.rope, kv_dtype)

    def __call__(self, q: Tensor, kv_a: Tensor, rope: RopeInput, ctx: AttentionContext) -> Tensor:
        """q [T, Hq · (Dn + Dr)], kv_a [T, R + Dr] -> [T, Hq · Dv].

        The rope parts of q and kv_a are half-split: see `deinterleave`.
        """
        q = q.view(len(q), self.heads.num_heads, self.heads.dims.qk)
        args = q, kv_a, self._norm_rope, rope, self._up
        return ctx.run_latent(self.layer_id, self.spec, *args).flatten(1)


def deinterleave(rows: Tensor) -> None:
    """Reorders the rows [..., Dr, in] of a projection in place: pairs (2i, 2i + 1) to halves.

    DeepSeek's checkpoints rotate neighbouring dims; `rotate` rotates dim i with dim i + Dr / 2.
    q and k reordered alike have the same scores.
    """
    rows.copy_(torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), -2))
