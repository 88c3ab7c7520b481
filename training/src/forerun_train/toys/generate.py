"""The target's forward pass, and greedy generation in large batches.

A preallocated K/V cache, every row at the same position: no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3ForCausalLM


@dataclass
class Cache:
    """``k``, ``v``: [layers, batch, kv_heads, length, head_dim] in the model's dtype."""

    k: Tensor
    v: Tensor

    @staticmethod
    def make(model: Qwen3ForCausalLM, batch: int, length: int) -> Cache:
        c, weight = model.config, model.lm_head.weight
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, length, c.head_dim)
        return Cache(weight.new_zeros(shape), weight.new_zeros(shape))


def rope_table(
    length: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos, sin ``[length, head_dim]`` float32, halves repeated (the Hugging Face layout)."""
    inverse = theta ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rope_theta(model: Qwen3ForCausalLM) -> float:
    """The base of the rotary frequencies. ValueError where the config has none."""
    parameters = model.config.rope_parameters
    theta = None if parameters is None else parameters["rope_theta"]
    if theta is None:
        raise ValueError("the target's config has no rope_theta in rope_parameters")
    return theta


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the last dimension; ``cos``, ``sin`` broadcast against ``x``."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-b, a], dim=-1) * sin.to(x.dtype)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def layer_outputs(
    model: Qwen3ForCausalLM, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Iterator[Tensor]:
    """The residual stream ``[batch, n, H]`` after every layer.

    ``attend(layer, q, k, v)`` supplies the attention. The same for training, aux hidden
    states and generation, so that it compiles as one graph and no caller depends on hooks.
    """
    c, (b, n) = model.config, ids.shape
    x = model.model.embed_tokens(ids)
    for i, layer in enumerate(model.model.layers):
        a = layer.self_attn
        h = F.rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, c.rms_norm_eps)
        q = a.q_proj(h).view(b, n, -1, c.head_dim)
        k = a.k_proj(h).view(b, n, -1, c.head_dim)
        v = a.v_proj(h).view(b, n, -1, c.head_dim).transpose(1, 2)
        q = rotate(
            F.rms_norm(q, (c.head_dim,), a.q_norm.weight, c.rms_norm_eps).transpose(1, 2), cos, sin
        )
        k = rotate(
            F.rms_norm(k, (c.head_dim,), a.k_norm.weight, c.rms_norm_eps).transpose(1, 2), cos, sin
        )
        o = attend(i, q.to(v.dtype), k.to(v.dtype), v)
        x = x + a.o_proj(o.transpose(1, 2).flatten(2))
        h = F.rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, c.rms_norm_eps)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        yield x


def causal_layers(model: Qwen3ForCausalLM, ids: Tensor) -> Iterator[Tensor]:
    """``layer_outputs`` over whole texts from position 0, without a cache."""
    c = model.config
    cos, sin = rope_table(ids.shape[1], c.head_dim, rope_theta(model), ids.device)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return layer_outputs(model, ids, cos, sin, attend)


def normed(model: Qwen3ForCausalLM, x: Tensor) -> Tensor:
    """The last layer's output after the final norm."""
    return F.rms_norm(x, x.shape[-1:], model.model.norm.weight, model.config.rms_norm_eps)


def head(model: Qwen3ForCausalLM, x: Tensor) -> Tensor:
    """Logits of the last layer's output."""
    logits: Tensor = model.lm_head(normed(model, x))
    return logits


def forward_cached(
    model: Qwen3ForCausalLM, ids: Tensor, cache: Cache, start: int, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """Logits ``[batch, V]`` after ``ids`` [batch, n] at positions ``start …``.

    n > 1 only from position 0.
    """
    n, end = ids.shape[1], start + ids.shape[1]

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.k[i, :, :, start:end], cache.v[i, :, :, start:end] = k, v
        keys, values = cache.k[i, :, :, :end], cache.v[i, :, :, :end]
        if n > 1:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        # the query heads of one K/V head, as its query rows
        grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, keys, values).view_as(q)

    *_, x = layer_outputs(model, ids, rope[0][start:end], rope[1][start:end], attend)
    return head(model, x[:, -1])


@torch.inference_mode()
def greedy(
    model: Qwen3ForCausalLM, prompts: Tensor, lengths: Tensor, new_tokens: int, eos: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Continues ``prompts`` [batch, p], right-padded to p from their ``lengths`` [batch].

    Returns ids ``[batch, p + new_tokens]`` and the end of each (exclusive, EOS included). All
    sequences are at the same position in every step; one that is still inside its prompt is fed
    the prompt, so no mask is needed.
    """
    (b, p), device = prompts.shape, prompts.device
    total, first = p + new_tokens, int(lengths.min())
    c = model.config
    rope = rope_table(total, c.head_dim, rope_theta(model), device)
    cache = Cache.make(model, b, total)
    out = torch.full((b, total), eos[-1], dtype=torch.long, device=device)
    out[:, :p] = prompts
    ends = lengths + new_tokens
    stops = torch.tensor(list(eos), device=device)
    ids, at = prompts[:, :first], 0
    for i in range(first, total):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            token = forward_cached(model, ids, cache, at, rope).argmax(-1)
        running = (i >= lengths) & (i < ends)
        out[:, i] = torch.where(running, token, out[:, i])
        ends = torch.where(running & torch.isin(token, stops), i + 1, ends)
        if i % 16 == 0 and bool((ends <= i + 1).all()):
            break
        ids, at = out[:, i : i + 1], i
    return out, ends


def batches(
    prompts: Sequence[Sequence[int]], batch: int
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Prompts grouped by length: (their indices, ids [n, p] padded with 0, lengths [n])."""
    lengths = np.array([len(p) for p in prompts])
    order = np.argsort(lengths, kind="stable")
    for i in range(0, len(order), batch):
        chosen = order[i : i + batch]
        ids = np.zeros((len(chosen), int(lengths[chosen].max())), dtype=np.int64)
        for row, j in enumerate(chosen):
            ids[row, : lengths[j]] = prompts[j]
        yield chosen.tolist(), torch.from_numpy(ids), torch.from_numpy(lengths[chosen])
