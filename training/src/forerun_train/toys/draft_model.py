"""The DFlash draft in training: Qwen3 layers over blocks of mask tokens.

Every token of a block attends to the projected aux hidden states of the target at all positions
before the block's anchor, and to the whole block.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forerun_train.toys.generate import rotate


@dataclass(frozen=True)
class DraftShape:
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 6144
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    num_target_layers: int = 12
    block_size: int = 16
    mask_token_id: int = 3
    target_layer_ids: tuple[int, ...] = (1, 3, 6, 8, 10)


def block_mask(anchors: Tensor, length: int, block: int) -> Tensor:
    """Attention mask, bool ``[b, 1, n·block, length + n·block]``, for ``anchors`` [b, n].

    Tokens of anchor a see context positions strictly before a, and all tokens of their block.
    """
    b, n = anchors.shape
    place = torch.arange(length, device=anchors.device)
    context = (place < anchors[:, :, None]).repeat_interleave(block, dim=1)
    owner = torch.arange(n, device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner[None, :]).expand(b, -1, -1)
    return torch.cat([context, own], dim=2)[:, None]


class Attention(nn.Module):
    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.s = s
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(s.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(s.head_dim, s.rms_norm_eps)
        self.k_norm = nn.RMSNorm(s.head_dim, s.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of ``x`` [b, q, H] over ``context`` [b, c, H] and itself.

        ``mask`` [b, 1, q, c + q], ``cos``, ``sin`` [b, 1, c + q, head_dim].
        """
        s, (b, n, _), c = self.s, x.shape, context.shape[1]
        both = torch.cat([context, x], dim=1)
        q = self.q_norm(self.q_proj(x).view(b, n, -1, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).view(b, c + n, -1, s.head_dim)).transpose(1, 2)
        v = self.v_proj(both).view(b, c + n, -1, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos[:, :, c:], sin[:, :, c:]), rotate(k, cos, sin)
        groups = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        o = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        mixed: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = Mlp(s.hidden_size, s.intermediate_size)
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, mask, cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Draft(nn.Module):
    """Parameter names are those of the z-lab checkpoint."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(
            len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False
        )
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_hidden_layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for p in self.parameters():
            if p.ndim >= 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, blocks: Tensor, aux_hidden_states: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states ``[b, n·B, H]`` of embedded ``blocks`` [b, n·B, H].

        Target ``aux_hidden_states`` [b, c, K·H], ``anchors`` [b, n].
        """
        s, c = self.shape, aux_hidden_states.shape[1]
        context = self.hidden_norm(self.fc(aux_hidden_states))
        offset = torch.arange(s.block_size, device=anchors.device)
        rows = (anchors[:, :, None] + offset).flatten(1)
        place = torch.cat([torch.arange(c, device=rows.device).expand(len(rows), -1), rows], dim=1)
        inverse = s.rope_theta ** (-torch.arange(0, s.head_dim, 2, device=rows.device) / s.head_dim)
        angle = place[:, None, :, None].float() * inverse
        angle = torch.cat([angle, angle], dim=-1)
        cos, sin = angle.cos(), angle.sin()
        mask = block_mask(anchors, c, s.block_size)
        x = blocks
        for layer in self.layers:
            x = layer(x, context, mask, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden


def save_draft(model: Draft, folder: Path) -> None:
    """z-lab's files, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = asdict(model.shape)
    dflash = {
        "mask_token_id": values.pop("mask_token_id"),
        "target_layer_ids": list(values.pop("target_layer_ids")),
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **values,
        "dflash_config": dflash,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * model.shape.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": model.shape.num_hidden_layers,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_draft(folder: Path, device: str = "cpu") -> Draft:
    config = json.loads((folder / "config.json").read_text())
    config |= config["dflash_config"]
    values = {k: config[k] for k in asdict(DraftShape())}
    model = Draft(DraftShape(**values | {"target_layer_ids": tuple(values["target_layer_ids"])}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device, torch.float32)
