"""EAGLE-3 in plain PyTorch and transformers' Llama modules: dense masks, no K/V cache.

A draft's chain is a list of inputs (position, token, hidden state), and every step recomputes all
of them. A parallel draft (P-EAGLE) has masks as further inputs, and is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


@dataclass
class Oracle:
    weights: dict[str, Tensor]  # all of the draft's, including embedding and LM head
    config: LlamaConfig
    prefix: str  # of the layer's tensor names
    norm_before_residual: bool = False
    norm_output: bool = False
    aux: int = 3
    thetas: tuple[float, ...] = ()  # of layers whose RoPE differs

    def rope(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 … n - 1."""
        config = self.config
        if self.thetas:
            own = {"rope_type": "default", "rope_theta": self.thetas[layer]}
            config = LlamaConfig(**{**config.to_dict(), "rope_parameters": own})
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(len(x))[None])
        return cos, sin

    def norm(self, x: Tensor, name: str) -> Tensor:
        norm = LlamaRMSNorm(x.shape[-1], self.config.rms_norm_eps)
        norm.weight.data = self.weights[name + ".weight"]
        return norm(x)

    def heads(self, x: Tensor, name: str) -> Tensor:
        """[1, heads, n, D], normalised if the checkpoint has a norm."""
        p = f"{self.prefix}self_attn.{name}"
        bias = self.weights.get(f"{p}_proj.bias")
        y = F.linear(x, self.weights[f"{p}_proj.weight"], bias)
        y = y.view(1, len(x), -1, self.config.head_dim)
        if f"{p}_norm.weight" in self.weights:
            y = self.norm(y, f"{p}_norm")
        return y.transpose(1, 2)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        if "input_norm.weight" in self.weights:
            aux_hidden_states = self.norm(aux_hidden_states, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            parts = aux_hidden_states.chunk(self.aux, -1)
            normed = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            aux_hidden_states = torch.cat(normed, -1)
        return aux_hidden_states @ self.weights["fc.weight"].T

    def forward(self, ids: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs at positions 0 … n - 1, causal; returns (normed, fed back), [n, H] each."""
        n, p = len(ids), self.prefix
        embedded = self.norm(self.weights["embed_tokens.weight"][ids], p + "input_layernorm")
        normed = self.norm(h, p + "hidden_norm")
        residual = normed if self.norm_before_residual else h
        x = torch.cat((embedded, normed), -1)
        q, k, v = (self.heads(x, name) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rope(x, 0))
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = repeat_kv(k, group), repeat_kv(v, group)
        scores = q @ k.transpose(2, 3) / self.config.head_dim**0.5
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        out = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).reshape(n, -1)
        o = p + "self_attn.o_proj."
        residual = residual + F.linear(
            out, self.weights[o + "weight"], self.weights.get(o + "bias")
        )
        mlp = LlamaMLP(self.config)
        names = {name: self.weights[f"{p}mlp.{name}"] for name in mlp.state_dict()}
        mlp.load_state_dict(names)
        residual = residual + mlp(self.norm(residual, p + "post_attention_layernorm"))
        for i in range(1, self.config.num_hidden_layers):
            residual = self.ordinary_layer(i, residual, self.rope(x, i))
        last = self.norm(residual, "norm")
        return last, last if self.norm_output else residual

    def ordinary_layer(self, i: int, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Layer i > 0, a layer of transformers: [n, H] -> [n, H]."""
        kind = Qwen3DecoderLayer if f"layers.{i}.self_attn.q_norm.weight" in self.weights else None
        layer = (kind or LlamaDecoderLayer)(self.config, i).eval()
        p = f"layers.{i}."
        own = {n.removeprefix(p): w for n, w in self.weights.items() if n.startswith(p)}
        layer.load_state_dict(own)
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        out = layer(x[None], attention_mask=mask, position_embeddings=rope)
        return (out[0] if isinstance(out, tuple) else out).view_as(x)

    @torch.inference_mode()
    def parallel(self, ids: Tensor, aux_hidden_states: Tensor, mask: int, steps: int) -> Tensor:
        """Logits [steps, V_d] of drafts after ids [n], with as many masks as needed.

        The arguments are those of `chain`. (P-EAGLE, section 3: masks have a shared hidden state.)
        """
        shared = self.weights["mask_hidden"].view(1, -1).expand(steps - 1, -1)
        tokens = torch.cat((ids[1:], ids.new_full((steps - 1,), mask)))
        normed, _ = self.forward(tokens, self.fuse(torch.cat((aux_hidden_states, shared))))
        return normed[-steps:] @ self.weights["lm_head.weight"].T

    @torch.inference_mode()
    def chain(self, ids: Tensor, aux_hidden_states: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Drafts after ids [n], where the target has run on all but the last id.

        Args:
            aux_hidden_states: [n - 1, aux * H_t].

        Returns:
            (target's token ids [steps], logits [steps, V_d]).
        """
        tokens, h = ids[1:], self.fuse(aux_hidden_states)
        drafts, logits = [], []
        for _ in range(steps):
            normed, again = self.forward(tokens, h)
            row = normed[-1] @ self.weights["lm_head.weight"].T
            column = row.argmax()
            token = column + self.weights["d2t"][column] if "d2t" in self.weights else column
            drafts.append(token)
            logits.append(row)
            tokens = torch.cat((tokens, token[None]))
            h = torch.cat((h, again[-1:]))
        return torch.stack(drafts), torch.stack(logits)
