"""MTP layers in plain PyTorch and transformers' decoder layer: dense masks, no K/V cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FAMILIES = {
    "llama": ("Llama", llama),
    "qwen3": ("Qwen3", qwen3),
    "qwen3_5_moe_text": ("Qwen3_5Moe", qwen3_5_moe),
    "qwen3_5_text": ("Qwen3_5", qwen3_5),
    "qwen3_next": ("Qwen3Next", qwen3_next),
    "glm4_moe": ("Glm4Moe", glm4_moe),
    "deepseek_v2": ("DeepseekV2", deepseek_v2),
    "deepseek_v3": ("DeepseekV3", deepseek_v3),
}
HYBRIDS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


@dataclass
class Oracle:
    weights: dict[str, Tensor]  # of the whole checkpoint
    config: PreTrainedConfig  # eager attention
    index: int = 0  # of the layer, if there are several

    def __post_init__(self) -> None:
        self.prefix = f"model.layers.{self.config.num_hidden_layers + self.index}."
        name, parts = FAMILIES[self.config.model_type]
        names = vars(parts)
        self.make_norm = names[f"{name}RMSNorm"]
        rope = f"{name}RotaryEmbedding"
        self.rope = names[rope if rope in names else f"{name}TextRotaryEmbedding"](self.config)
        # The number says whether a layer of DeepSeek's or GLM's has experts, and a hybrid's last
        # has attention.
        layers, kind = self.config.num_hidden_layers, self.config.model_type
        dense_first = "first_k_dense_replace" in self.config.to_dict()
        layer_idx = layers if dense_first else layers - 1 if kind in HYBRIDS else 0
        self.layer = names[f"{name}DecoderLayer"](self.config, layer_idx).eval()
        self.layer.load_state_dict({key: self.weight(key) for key in self.layer.state_dict()})
        self.table = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.table)

    def weight(self, key: str) -> Tensor:
        """Of the layer; transformers holds all experts in one tensor."""
        if self.prefix + key in self.weights:
            return self.weights[self.prefix + key]
        inside, kind = key.rsplit(".", 1)

        def stacked(name: str) -> Tensor:
            names = (f"{self.prefix}{inside}.{i}.{name}.weight" for i in range(10**4))
            return torch.stack(
                [self.weights[n] for n in takewhile(self.weights.__contains__, names)]
            )

        if kind == "down_proj":
            return stacked(kind)
        return torch.cat((stacked("gate_proj"), stacked("up_proj")), 1)

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
        return chain([self], ids, h, sample, steps)


def chain(layers: list[Oracle], ids: Tensor, h: Tensor, sample: Any, steps: int) -> list[int]:
    """Drafts of several layers, as `Oracle.chain`.

    Layer i reads at p what layer i - 1 gave at p and the token at p + 1 + i (DeepSeek-V3, section
    2.2). Past the last layer, that one goes on with what it gave itself at the position before.
    """
    text = ids
    for i in range(steps):
        layer = layers[min(i, len(layers) - 1)]
        first = 1 + min(i, len(layers) - 1)
        out = layer.forward(text[first : first + len(h)], h)
        drafted = sample(out[-1] @ layer.head.T, len(text))
        text = torch.cat((text, text.new_tensor([int(drafted)])))
        h = out if i + 1 < len(layers) else torch.cat((h, out[-1:]))
    return text[len(ids) :].tolist()
