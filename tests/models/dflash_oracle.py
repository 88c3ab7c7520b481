"""DFlash in plain PyTorch, after the paper: one request, dense masks, no K/V cache.

Nothing of the package is used; K/V of context and block are computed anew for every block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Oracle:
    weights: dict[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    dim: int
    theta: float
    eps: float
    windows: tuple[int | None, ...]  # sliding window, including the current token
    # Sliding layers: causal, or the "row": |q - kv| < window, or the "block": the whole block, and
    # the window before it for all rows.
    sliding: str = "causal"
    causal: bool = False  # full layers: a token of a block does not see those after it
    value_scale: float = 1.0
    norm_offset: float = 0.0  # of the weights of all norms
    thetas: tuple[float | None, ...] = ()  # of layers that differ; None: without positions
    rotated: int | None = None  # dims of a head, the first ones; None: all
    interleaved: bool = False  # neighbouring dims are rotated, not halves

    def rms(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name] + self.norm_offset
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * weight

    def rotate(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """x [heads, n, D]."""
        theta = self.thetas[layer] if self.thetas else self.theta
        if theta is None:
            return x
        dims = self.rotated or self.dim
        speed = theta ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        angle = positions.double()[:, None] * speed  # [n, D/2]
        cos, sin = angle.cos().float(), angle.sin().float()
        part, rest = x[..., :dims], x[..., dims:]
        a, b = (part[..., ::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if self.interleaved else -2)
        return torch.cat((turned.flatten(-2), rest), -1)

    def project(self, x: Tensor, layer: int, name: str, heads: int) -> Tensor:
        p = f"layers.{layer}.self_attn.{name}_proj."
        y = F.linear(x, self.weights[p + "weight"], self.weights.get(p + "bias"))
        return y.view(len(x), heads, self.dim).transpose(0, 1)

    def seen(self, layer: int, start: int, q_len: int) -> Tensor:
        """bool [q_len, start + q_len]."""
        kv = torch.arange(start + q_len)
        q = torch.arange(start, start + q_len)[:, None]
        window = self.windows[layer]
        if window is None:
            seen = torch.ones(q_len, start + q_len, dtype=torch.bool)
            return seen & (kv <= q) if self.causal else seen
        if self.sliding == "row":
            return (q - kv).abs() < window
        if self.sliding == "block":
            return (kv >= start - window).expand(q_len, -1)
        return (kv <= q) & (kv > q - window)

    def context(self, aux: Tensor) -> Tensor:
        return self.rms(F.linear(aux, self.weights["fc.weight"]), "hidden_norm.weight")

    def context_kv(self, aux: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """k rotated, v: [Hkv, n, D] of positions 0 … n - 1."""
        c = self.context(aux)
        k = self.project(c, layer, "k", self.kv_heads)
        k = self.rms(k, f"layers.{layer}.self_attn.k_norm.weight")
        v = self.project(c, layer, "v", self.kv_heads) * self.value_scale
        return self.rotate(k, torch.arange(len(c)), layer), v

    def block(self, x: Tensor, aux: Tensor) -> Tensor:
        """Embedded block x [B, H] after aux hidden states [start, n·H]; hidden states [B, H]."""
        start, q_len = len(aux), len(x)
        positions = torch.arange(start, start + q_len)
        for i in range(self.layers):
            name = f"layers.{i}."
            y = self.rms(x, name + "input_layernorm.weight")
            q = self.rms(self.project(y, i, "q", self.heads), name + "self_attn.q_norm.weight")
            k = self.rms(self.project(y, i, "k", self.kv_heads), name + "self_attn.k_norm.weight")
            v = self.project(y, i, "v", self.kv_heads) * self.value_scale
            past_k, past_v = self.context_kv(aux, i)
            k = torch.cat((past_k, self.rotate(k, positions, i)), 1)
            v = torch.cat((past_v, v), 1)
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = self.rotate(q, positions, i) @ k.transpose(1, 2) / self.dim**0.5
            scores = scores.masked_fill(~self.seen(i, start, q_len), -torch.inf)
            sinks = self.weights.get(f"{name}self_attn.attention_sink_bias")
            if sinks is not None:  # as one more key, whose value is 0
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, q_len, 1)), -1)
                v = F.pad(v, (0, 0, 0, 1))
            out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(q_len, -1)
            o = name + "self_attn.o_proj."
            x = x + F.linear(out, self.weights[o + "weight"], self.weights.get(o + "bias"))
            y = self.rms(x, name + "post_attention_layernorm.weight")
            gate = F.silu(F.linear(y, self.weights[name + "mlp.gate_proj.weight"]))
            up = F.linear(y, self.weights[name + "mlp.up_proj.weight"])
            x = x + F.linear(gate * up, self.weights[name + "mlp.down_proj.weight"])
        return self.rms(x, "norm.weight")
