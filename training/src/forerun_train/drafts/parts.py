"""Modules of drafts in training: float32 parameters, computation in the dtype of the input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.config.model_config import ModelConfig
from forerun.kernels.elementwise.qk_norm_rope import rotate
from forerun.layers.rope import Rope
from forerun.models.block_convolution import ConvolutionConfig
from forerun_train.masks import AttentionMask, attend

STD = 0.02  # of initial matrices


def matrix(*shape: int) -> nn.Parameter:
    """A parameter of normal values."""
    return nn.Parameter(torch.randn(*shape) * STD)


class Linear(nn.Module):
    """y = x Wᵀ + b: `weight` [out, in], `bias` [out] or none, in x's dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = matrix(outputs, inputs)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Table(nn.Module):
    """A row per token: `weight` [V, size]."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = matrix(rows, size)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids, any shape -> [..., size] of `dtype`."""
        return F.embedding(ids, self.weight).to(dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · w over the last dimension; statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class RopeTables(nn.Module):
    """cos and signed sin of positions, as the engine has them, in float32."""

    table: Tensor

    def __init__(self, model: ModelConfig, max_positions: int) -> None:
        super().__init__()
        rope = Rope(model.rope, model.head_dim, max_positions, torch.float32, torch.device("cpu"))
        self.register_buffer("table", rope.table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, S] -> cos and sin, [B, S, 1, D] each."""
        cos, sin = self.table[positions].unbind(2)
        return cos, sin


@dataclass(frozen=True)
class Injected:
    """What all layers attend to besides the rows themselves."""

    context: Tensor  # [B, T, H]: C, which goes into k and v without an input norm
    of_context: tuple[Tensor, Tensor]  # cos and sin, [B, T, 1, D]
    of_rows: tuple[Tensor, Tensor]  # of the rows, [B, Q, 1, D]


class InjectedAttention(nn.Module):
    """Rows attend to injected context and to each other, under a mask over [context, rows]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads = model.num_heads, model.num_kv_heads, model.head_dim
        heads, kv_heads, dim = self.heads
        self.q_proj = Linear(model.hidden_size, heads * dim)
        self.k_proj = Linear(model.hidden_size, kv_heads * dim)
        self.v_proj = Linear(model.hidden_size, kv_heads * dim)
        self.o_proj = Linear(heads * dim, model.hidden_size)
        self.q_norm = RMSNorm(dim, model.rms_norm_eps)
        self.k_norm = RMSNorm(dim, model.rms_norm_eps)

    def forward(self, x: Tensor, injected: Injected, mask: AttentionMask) -> Tensor:
        """x [B, Q, H] -> [B, Q, H]."""
        dim = self.heads[2]
        q = turned(self.q_norm(self.q_proj(x).unflatten(-1, (-1, dim))), injected.of_rows)
        keys, values = [], []
        for source, places in ((injected.context, injected.of_context), (x, injected.of_rows)):
            k = self.k_norm(self.k_proj(source).unflatten(-1, (-1, dim)))
            keys.append(turned(k, places))
            values.append(self.v_proj(source).unflatten(-1, (-1, dim)))
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        rows = attend(q, k, v, mask, 1 / math.sqrt(dim))
        out: Tensor = self.o_proj(rows.transpose(1, 2).flatten(2))
        return out


def turned(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of x [B, S, heads, D], computed in float32."""
    return rotate(x.float(), cos_sin).to(x.dtype)


class GatedMLP(nn.Module):
    """down(SiLU(gate(x)) · up(x))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner)
        self.up_proj = Linear(size, inner)
        self.down_proj = Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class BlockConvolution(nn.Module):
    """Grouped dynamic convolutions over the rows of a block (`models/block_convolution.py`)."""

    def __init__(self, config: ConvolutionConfig, hidden_size: int) -> None:
        super().__init__()
        taps, groups = config.kernel_size, hidden_size // config.group_size
        self.shape, self.group = (2, taps, groups), config.group_size
        base = torch.zeros(2, taps, hidden_size)
        base[:, 0] = 1  # the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = Linear(hidden_size, 2 * taps * groups)
        nn.init.zeros_(self.kernel_projection.weight)

    def dynamic(self, x: Tensor) -> Tensor:
        """What depends on the rows' inputs x [n, R, H]: [n, R, 2, K, groups]."""
        out: Tensor = self.kernel_projection(x).unflatten(-1, self.shape)
        return out

    def convolve(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """x [n, R, H] -> [n, R, H], sums in float32."""
        wide, taps = x.float(), dynamic[:, :, side].float().repeat_interleave(self.group, -1)
        total = torch.zeros_like(wide)
        for tap in range(self.shape[1]):
            kernel = self.base_kernel[side, tap].float() + taps[:, :, tap]
            moved = F.pad(wide, (0, 0, tap, 0))[:, : wide.shape[1]]
            total = total + kernel * moved
        return total.to(x.dtype)
