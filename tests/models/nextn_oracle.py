"""The MTP layer in plain PyTorch and transformers' decoder layer: dense masks, no K/V cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3


@dataclass
class Oracle:
    weights: dict[str, Tensor]  # of the whole checkpoint
    config: PreTrainedConfig  # eager attention

    def __post_init__(self) -> None:
        self.prefix = f"model.layers.{self.config.num_hidden_layers}."
        parts: Any = llama if isinstance(self.config, LlamaConfig) else qwen3
        name = "Llama" if parts is llama else "Qwen3"
        names = vars(parts)
        self.make_norm = names[f"{name}RMSNorm"]
        self.rope = names[f"{name}RotaryEmbedding"](self.config)
        self.layer = names[f"{name}DecoderLayer"](self.config, 0).eval()
        own = self.layer.state_dict()
        self.layer.load_state_dict({key: self.weights[self.prefix + key] for key in own})
        self.table = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.table)

    def norm(self, x: Tensor, name: str) -> Tensor:
        norm = self.make_norm(x.shape[-1], self.config.rms_norm_eps)
        norm.weight.data = self.weights[f"{self.prefix}{name}.weight"]
        return norm(x)

    @torch.no_grad()
    def forward(self, ids: Tensor, h: Tensor) -> Tensor:
        """Tokens and hidden states at positions 0 … n - 1, causal; returns [n, H]."""
        n = len(ids)
        both = torch.cat((self.norm(self.table[ids], "enorm"), self.norm(h, "hnorm")), -1)
        x = (both @ self.weights[f"{self.prefix}eh_proj.weight"].T)[None]
        at = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        out = self.layer(
            x, attention_mask=mask, position_ids=at, position_embeddings=self.rope(x, at)
        )
        out = out[0] if isinstance(out, tuple) else out
        return self.norm(out.view(n, -1), "shared_head.norm")

    def chain(self, ids: Tensor, h: Tensor, sample: Any, steps: int) -> list[int]:
        """Drafts after ids [n], where the target has run on all but the last id: h [n - 1, H].

        `draw`: (logits [V], the position to draw for) -> a token.
        """
        tokens, drafts = ids[1:], []
        for i in range(steps):
            out = self.forward(tokens, h)
            drafts.append(int(sample(out[-1] @ self.head.T, len(ids) + i)))
            tokens = torch.cat((tokens, tokens.new_tensor(drafts[-1:])))
            h = torch.cat((h, out[-1:]))
        return drafts
