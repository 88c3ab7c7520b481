"""The EAGLE-3 draft in training: one decoder layer, applied again to its own hidden states.

Every anchor starts a chain. Its first step reads the target's aux hidden states at the position
before the anchor, later steps the output of the step before: training-time test (arXiv 2503.01840).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forerun_train.toys.draft_model import Mlp
from forerun_train.toys.generate import rope_table, rotate


@dataclass(frozen=True)
class EagleShape:
    hidden_size: int = 256
    intermediate_size: int = 512
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 6144
    draft_vocab_size: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    target_layer_ids: tuple[int, ...] = (2, 6, 10)


class Attention(nn.Module):
    """Projections of the layer; attention is computed by `attend_chain`."""

    def __init__(self, s: EagleShape) -> None:
        super().__init__()
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(2 * s.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=False)


class Layer(nn.Module):
    def __init__(self, s: EagleShape) -> None:
        super().__init__()
        self.dim = s.head_dim
        self.self_attn = Attention(s)
        self.mlp = Mlp(s.hidden_size, s.intermediate_size)
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)

    def qkv(
        self, embedded: Tensor, h: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[b, n, H] twice -> rotated q and k, and v: [b, heads, n, D]."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(h)], dim=-1)
        a = self.self_attn
        q, k, v = (
            project(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for project in (a.q_proj, a.k_proj, a.v_proj)
        )
        return rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype), v

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """Attention output [b, heads, n, D] -> the layer's output [b, n, H]."""
        x = h + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def attend_chain(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, mask: Tensor
) -> Tensor:
    """Attention of n chains, each over the context before its anchor and its own earlier tokens.

    Args:
        q: [b, heads, n, D].
        k, v: [b, kv_heads, s, D], made from the target's aux hidden states.
        own_k, own_v: [b, kv_heads, j, n, D].
        mask: bool [b, n, s]: the context positions that each chain sees.
    """
    grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    far = torch.einsum("bhgnd,bhsd->bhgns", grouped, k)
    far = far.masked_fill(~mask[:, None, None], -torch.inf)
    near = torch.einsum("bhgnd,bhjnd->bhgnj", grouped, own_k)
    share = torch.cat([far, near], dim=-1).float().softmax(-1).to(v.dtype)
    out = torch.einsum("bhgns,bhsd->bhgnd", share[..., : k.shape[2]], v)
    out = out + torch.einsum("bhgnj,bhjnd->bhgnd", share[..., k.shape[2] :], own_v)
    return out.flatten(1, 2)


class Eagle(nn.Module):
    """Parameter names are those of the SpecForge checkpoint. ``ids`` [V_d]: the vocabulary."""

    def __init__(self, shape: EagleShape, ids: Tensor) -> None:
        super().__init__()
        if ids.shape != (shape.draft_vocab_size,):
            raise ValueError(f"{len(ids)} tokens for a vocabulary of {shape.draft_vocab_size}")
        self.shape = shape
        self.fc = nn.Linear(
            len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False
        )
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        for p in self.parameters():
            if p.ndim >= 2:
                nn.init.normal_(p, std=0.02)
        known = torch.zeros(shape.vocab_size, dtype=torch.bool)
        known[ids] = True
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", known)
        self.d2t: Tensor
        self.t2d: Tensor

    @property
    def ids(self) -> Tensor:
        """[V_d]: the target's token id of every output of the LM head."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(
        self, embedded: Tensor, aux_hidden_states: Tensor, anchors: Tensor, steps: int
    ) -> list[Tensor]:
        """Chains after ``anchors`` [b, n]: each step's hidden states after the norm, [b, n, H].

        ``embedded`` [b, s, H] and ``aux_hidden_states`` [b, s, K·H] are of the whole texts. Step j
        reads the embedding of the token at anchor + j, or of the last token past the end.
        """
        (b, s, hidden), n = embedded.shape, anchors.shape[1]
        rows = s - 1  # position p has the aux hidden states of p and the token of p + 1
        cos, sin = rope_table(
            s + steps, self.shape.head_dim, self.shape.rope_theta, embedded.device
        )
        h = self.fc(aux_hidden_states[:, :-1])
        q, k, v = self.midlayer.qkv(embedded[:, 1:], h, (cos[:rows], sin[:rows]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = self.midlayer.finish(h, out)

        def at(x: Tensor, place: Tensor) -> Tensor:
            return x.gather(1, place[..., None].expand(b, n, hidden))

        first = anchors - 1
        h = at(h, first)
        mask = torch.arange(rows, device=anchors.device) <= first[..., None]
        normed, own_k, own_v = [self.norm(h)], [], []
        for j in range(1, steps):
            place = first + j
            rope = cos[place][:, None], sin[place][:, None]
            q, new_k, new_v = self.midlayer.qkv(
                at(embedded, (anchors + j).clamp(max=s - 1)), h, rope
            )
            own_k.append(new_k)
            own_v.append(new_v)
            out = attend_chain(q, k, v, torch.stack(own_k, 2), torch.stack(own_v, 2), mask)
            h = self.midlayer.finish(h, out)
            normed.append(self.norm(h))
        return normed


def save_eagle(model: Eagle, folder: Path, steps: int) -> None:
    """SpecForge's format, weights in bfloat16; the number of steps as in speculators' config."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (x.detach().to("cpu", torch.bfloat16 if x.is_floating_point() else x.dtype))
        for name, x in model.state_dict().items()
    }
    weights = {name: x.contiguous() for name, x in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = asdict(model.shape)
    layers = list(values.pop("target_layer_ids"))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **values,
        "num_hidden_layers": 1,
        "target_hidden_size": model.shape.hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
        },
        "speculators_config": {"proposal_methods": [{"speculative_tokens": steps}]},
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_eagle(folder: Path, device: str = "cpu") -> Eagle:
    config = json.loads((folder / "config.json").read_text())
    config["target_layer_ids"] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    values = {k: config[k] for k in asdict(EagleShape())}
    shape = EagleShape(**values | {"target_layer_ids": tuple(values["target_layer_ids"])})
    weights = load_file(folder / "model.safetensors")
    model = Eagle(shape, weights["d2t"] + torch.arange(shape.draft_vocab_size))
    model.load_state_dict(weights)
    return model.to(device, torch.float32)
