"""Attention between a layer's QKV projection and its output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionContext,
    AttentionSpec,
    LayerMask,
    QKNormRope,
    RopeInput,
)
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, rotate
from forerun.kvcache.layouts import DenseKV, LayerLayout, SharedKV
from forerun.layers.linear import QKVLinear, RowLinear
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm


class KVLayer(Module):
    """The attention of one layer, which keeps something per token."""

    layer_id: int  # in the model's pools

    def kv_layout(self, kv_dtype: torch.dtype) -> LayerLayout:
        """What this layer keeps, stored as `kv_dtype`."""
        raise NotImplementedError(f"{type(self).__name__}.kv_layout")


class HeadNormRope(QKNormRope):
    """QK-norm and RoPE of one layer; in plain PyTorch, q and k heads go together."""

    def __init__(self, heads: int, kv_heads: int, dim: int, norms: HeadNorms | None) -> None:
        self.heads, self.dim, self.norms = heads, dim, norms
        self.parts = [heads + kv_heads, kv_heads]  # q and k, v
        self.halves = [heads, kv_heads]
        self.norm: RMSNorm | None = None
        if norms is not None:
            stacked = torch.cat((norms.q.expand(heads, -1), norms.k.expand(kv_heads, -1)))
            self.norm = RMSNorm.of(stacked, norms.eps)

    def split(self, qkv: Tensor, rope: RopeInput) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], -1, self.dim)
        qk, v = heads.split_with_sizes(self.parts, 1)
        if self.norm is not None:
            qk = self.norm(qk)
        q, k = rotate(qk, rope.cos_sin).split_with_sizes(self.halves, 1)
        return q, k, v


class Attention(KVLayer):
    """QK-norm, RoPE, K/V write and attention of layer `layer_id` over paged K/V."""

    def __init__(
        self,
        layer_id: int,
        mask: LayerMask,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        """`qk_norm`: over every q head and every k head before RoPE (Qwen3); prepared before this.

        A family whose scores are scaled otherwise, or more than that, replaces `spec`.
        """
        self.layer_id, self.spec = layer_id, AttentionSpec(mask, scale=1 / math.sqrt(head_dim))
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self._qk_norm = qk_norm

    def kv_layout(self, kv_dtype: torch.dtype) -> DenseKV:
        return DenseKV(self.num_kv_heads, self.head_dim, kv_dtype)

    @property
    def key_norm(self) -> RMSNorm | None:
        return None if self._qk_norm is None else self._qk_norm[1]

    def prepare(self) -> None:
        norms: HeadNorms | None = None
        if self._qk_norm is not None:
            q_norm, k_norm = self._qk_norm
            norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        self._norm_rope = HeadNormRope(*sizes, norms)

    def __call__(self, qkv: Tensor, rope: RopeInput, ctx: AttentionContext) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) · D] -> [T, Hq · D]."""
        return ctx.run(self.layer_id, self.spec, qkv, self._norm_rope, rope).flatten(1)


class SharedAttention(KVLayer):
    """Attention of layer `layer_id` over the K/V of an earlier one, by queries of its own."""

    def __init__(
        self, layer_id: int, source: int, spec: AttentionSpec, head_dim: int, q_norm: RMSNorm
    ) -> None:
        """`source`: the layer whose K/V is read. `q_norm`: over every head; prepared before."""
        self.layer_id, self.source, self.spec = layer_id, source, spec
        self.head_dim, self._q_norm = head_dim, q_norm

    def kv_layout(self, kv_dtype: torch.dtype) -> SharedKV:
        return SharedKV(self.source)

    def __call__(self, q: Tensor, rope: RopeInput, ctx: AttentionContext) -> Tensor:
        """q [T, Hq · D] -> the same shape."""
        heads = q.view(-1, self.head_dim)  # a matrix, as kernels of norms take it
        normed = self._q_norm(heads).view(len(q), -1, self.head_dim)
        return ctx.run_shared(self.layer_id, self.spec, rotate(normed, rope.cos_sin)).flatten(1)


@dataclass(frozen=True)
class KVScales:
    """Scales of one layer's K and V in float8: stored is k / `k` and v / `v`. Powers of two."""

    k: float = 1.0
    v: float = 1.0

    @classmethod
    def of(cls, k: float, v: float) -> KVScales:
        """Scales of a checkpoint, finite and positive, rounded up to powers of two.

        e4m3 has as many bits for any value in its range, so that a power of two in place of a scale
        costs no precision but below the range: of its 18 binades the lowest, at most. Rounded up,
        nothing saturates that would not have done so.
        """
        return cls(*(2.0 ** math.ceil(math.log2(scale)) for scale in (k, v)))


class ProjectedAttention(Module):
    """The attention of one layer with its projections; families derive theirs from it."""

    qkv_proj: QKVLinear
    attn: Attention
    o_proj: RowLinear
    kv_scales = KVScales()  # that are in the weights

    def key_norm(self) -> RMSNorm | None:
        """The last that multiplies keys before RoPE, if that is not the projection."""
        return self.attn.key_norm

    def fold_kv_scales(self, scales: KVScales) -> None:
        """Folds them into the weights before `prepare`: keys and values are stored unscaled.

        Keys are divided, and the scores' scale is multiplied; values are divided, and the output
        projection is multiplied. By powers of two this is exact: nothing but what float8 rounds
        differs from weights left as they are, and neither kernels nor backends know of it.
        """
        norm = self.key_norm()
        if norm is None:
            self.qkv_proj.scale_part("k_proj", 1 / scales.k)
        else:
            norm.scale(1 / scales.k)
        self.attn.spec = replace(self.attn.spec, scale=self.attn.spec.scale * scales.k)
        self.qkv_proj.scale_part("v_proj", 1 / scales.v)
        self.o_proj.scale_weight(scales.v)
        self.kv_scales = scales
