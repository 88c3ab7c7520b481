"""Trains the DeepSeek-V3-shaped toy of the tests: MLA, experts, and an MTP layer that predicts.

    python -m forerun_train.toys.mtp runs/toy

About five minutes on two CPU cores. Text is bytes of generated word problems. Target and MTP layer
are trained together, the MTP loss weighs `MTP_WEIGHT` (DeepSeek-V3, arXiv 2412.19437, section 2.2);
experts are balanced by the correction bias alone (section 2.1.2).

Kernels take heads of DeepSeek's sizes only, and those are slow to train here. So the trained heads
are small (`SMALL`), and `widened` gives weights of the real sizes that compute the same. The folder
has the target's tensors and, under `model.layers.{L}.`, the MTP layer's; matrices are stored as FP8
blocks, as DeepSeek's own. `cases.json` has greedy texts of transformers' model with these weights,
and the accept length of every step with one draft of the MTP layer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from forerun_train.toys import word_templates_a
from forerun_train.toys.word_text import Draw

BOS, EOS, VOCAB = 256, 257, 264  # after 256 bytes
MTP_WEIGHT: Final = 0.5
BIAS_STEP: Final = 1e-2
"""How fast the correction bias follows the load of experts, at the beginning of the run."""
BLOCK: Final = 128
PLAIN: Final = torch.bfloat16
"""Dtype in which all else is stored, except the correction bias (float32)."""
TEMPLATES: Final = word_templates_a.TEMPLATES[:6]

CONFIG: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
"""Of the model in the checkpoint."""
SMALL: Final = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Heads of the model that is trained."""


class MTPLayer(nn.Module):
    """Names are those of the checkpoint."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, eps), DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(size, eps)

    def forward(
        self,
        embeds: Tensor,
        hidden_states: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Embeddings of the next tokens, the target's final hidden states: [B, n, H] -> same.

        `mask`: additive, where attention needs a causal one (eager).
        """
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden_states)), -1))
        x = self.layer(x, attention_mask=mask, position_embeddings=rope)
        out: Tensor = self.norm(x)
        return out


def build() -> tuple[DeepseekV3ForCausalLM, MTPLayer]:
    """Target and MTP layer, with small heads."""
    config = DeepseekV3Config(**{**CONFIG, **SMALL})
    config._attn_implementation = "sdpa"
    target = DeepseekV3ForCausalLM(config)
    layer = MTPLayer(config)
    for part in (target, layer):
        for name, weight in part.named_parameters():
            if weight.ndim >= 2:
                nn.init.normal_(weight, std=0.02 if "embed" in name else weight.shape[-1] ** -0.5)
    return target, layer


def text(seed: int) -> Iterator[int]:
    """Problems of a few kinds with their answers, one after another."""
    rng = random.Random(seed)
    while True:
        question, lines, answer = rng.choice(TEMPLATES)(Draw(rng))
        yield from (BOS, *"\n".join([question, *lines, f"#### {answer}"]).encode(), EOS)


def losses(target: DeepseekV3ForCausalLM, layer: MTPLayer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropies of the next token and, by the MTP layer, of the one after it; ids [B, n]."""
    inputs = ids[:, :-1]
    hidden = target.model(inputs).last_hidden_state
    embeds = target.model.embed_tokens(inputs[:, 1:])
    rope = target.model.rotary_emb(embeds, torch.arange(embeds.shape[1])[None])
    further = layer(embeds, hidden[:, :-1], rope)
    return (
        F.cross_entropy(target.lm_head(hidden).flatten(0, 1), ids[:, 1:].flatten()),
        F.cross_entropy(target.lm_head(further).flatten(0, 1), ids[:, 2:].flatten()),
    )


def balanced(gates: list[nn.Module]) -> list[Tensor]:
    """Counts each gate's choices of the last forward, [E] each, in place."""
    loads = []
    for gate in gates:
        load = torch.zeros(CONFIG["n_routed_experts"])
        loads.append(load)

        def count(_: nn.Module, __: Any, out: Any, load: Tensor = load) -> None:
            load.copy_(torch.bincount(out[2].flatten(), minlength=len(load)))

        gate.register_forward_hook(count)
    return loads


def train(steps: int) -> tuple[DeepseekV3ForCausalLM, MTPLayer]:
    """AdamW with a cosine."""
    torch.manual_seed(0)
    target, layer = build()
    weights = [*target.parameters(), *layer.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    gates = [m for part in (target, layer) for n, m in part.named_modules() if n.endswith("gate")]
    loads, source = balanced(gates), text(0)
    batch, length, began = 16, 128, time.perf_counter()
    for step in range(steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = (
                4e-3 * min(1.0, step / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
            )
        ids = torch.tensor(list(islice(source, batch * length))).view(batch, length)
        first, second = losses(target, layer, ids)
        (first + MTP_WEIGHT * second).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for gate, load in zip(gates, loads, strict=True):
            bias = gate.e_score_correction_bias
            bias += BIAS_STEP * (1 - done) * (load.mean() - load).sign()
        if step % 50 == 49:
            spent = time.perf_counter() - began
            print(f"{step + 1} {spent:.0f} s: {first.item():.3f} {second.item():.3f}", flush=True)
    return target.eval(), layer.eval()


# --- the checkpoint -------------------------------------------------------------------------


def tensors(target: DeepseekV3ForCausalLM, layer: MTPLayer) -> dict[str, Tensor]:
    """By the checkpoint's names, one tensor per expert."""
    prefix = f"model.layers.{CONFIG['num_hidden_layers']}."
    held = dict(target.state_dict())
    for name, weight in layer.state_dict().items():
        name = name.removeprefix("layer.") if name.startswith("layer.") else name
        held[prefix + ("shared_head.norm.weight" if name == "norm.weight" else name)] = weight
    held[f"{prefix}embed_tokens.weight"] = held["model.embed_tokens.weight"]
    held[f"{prefix}shared_head.head.weight"] = held["lm_head.weight"]
    out: dict[str, Tensor] = {}
    for name, weight in held.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for i, both in enumerate(weight):
                gate, up = both.chunk(2)
                out |= {f"{stem}{i}.gate_proj.weight": gate, f"{stem}{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{i}.down_proj.weight": down for i, down in enumerate(weight)}
        else:
            out[name] = weight
    for i in range(CONFIG["num_hidden_layers"] + 1):
        stem = f"model.layers.{i}.self_attn."
        small = {n.removeprefix(stem): w for n, w in out.items() if n.startswith(stem)}
        out |= {stem + name: w for name, w in widened(small, seed=i).items()}
    return out


def widened(w: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Attention weights for the heads of `CONFIG` that compute what those of `SMALL` do.

    Spaces are embedded by orthonormal matrices: scores and sums do not change. RoPE pairs go where
    their frequency is. The norm over more dims is that much larger, its new weights are arbitrary.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, hidden = CONFIG["num_attention_heads"], CONFIG["hidden_size"]

    def wide(key: str) -> Tensor:
        """[heads, large, small] with orthonormal columns."""
        normal = torch.randn(heads, CONFIG[key], SMALL[key], generator=generator)
        columns: Tensor = torch.linalg.qr(normal)[0]
        return columns

    def spread(rows: Tensor) -> Tensor:
        """Rows [..., small, in] of interleaved pairs among as many zeros as needed."""
        large, small = CONFIG["qk_rope_head_dim"], SMALL["qk_rope_head_dim"]
        pairs = rows.new_zeros(*rows.shape[:-2], small // 2, large // small, 2, rows.shape[-1])
        pairs[..., 0, :, :] = rows.unflatten(-2, (-1, 2))
        return pairs.flatten(-4, -2)

    nope, v = wide("qk_nope_head_dim"), wide("v_head_dim")
    latent = wide("kv_lora_rank")[0]
    small_q, large_q = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"] for c in (SMALL, CONFIG))
    dims = [SMALL["qk_nope_head_dim"], SMALL["qk_rope_head_dim"]]
    q = w["q_b_proj.weight"].view(heads, small_q, -1) * (large_q / small_q) ** 0.5
    q_nope, q_rope = q.split(dims, 1)
    c, k_rope = w["kv_a_proj_with_mqa.weight"].split([SMALL["kv_lora_rank"], dims[1]])
    norm = 0.5 + torch.rand(CONFIG["kv_lora_rank"], generator=generator)
    up = w["kv_b_proj.weight"].view(heads, -1, SMALL["kv_lora_rank"]) * w["kv_a_layernorm.weight"]
    up = up @ latent.t() / norm * (SMALL["kv_lora_rank"] / CONFIG["kv_lora_rank"]) ** 0.5
    up_k, up_v = up.split([dims[0], SMALL["v_head_dim"]], 1)
    out = w["o_proj.weight"].view(hidden, heads, -1)
    return w | {
        "q_b_proj.weight": torch.cat((nope @ q_nope, spread(q_rope)), 1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((latent @ c, spread(k_rope))),
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": torch.cat((nope @ up_k, v @ up_v), 1).flatten(0, 1),
        "o_proj.weight": torch.einsum("nhd,hed->nhe", out, v).flatten(1),
    }


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3 and weight_scale_inv [⌈N/128⌉, ⌈K/128⌉] float32; weight = product."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    whole = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return whole.to(torch.float8_e4m3fn).contiguous(), scale


def save(target: DeepseekV3ForCausalLM, layer: MTPLayer, folder: Path) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    out: dict[str, Tensor] = {}
    for name, weight in tensors(target, layer).items():
        matrix = weight.ndim == 2 and (".self_attn." in name or ".mlp." in name)
        if matrix and ".mlp.gate." not in name:
            out[name], out[name.replace("weight", "weight_scale_inv")] = quantize(weight)
            continue
        keep = torch.float32 if name.endswith("bias") else PLAIN
        out[name] = weight.to(keep).clone()
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    config = {
        **CONFIG,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


# --- golden texts ---------------------------------------------------------------------------


def stored(folder: Path) -> tuple[DeepseekV3ForCausalLM, MTPLayer]:
    """transformers' model and layer with the weights of a checkpoint, dequantized, float32."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_scale_inv")]:
        scale, key = weights.pop(name), name.removesuffix("_scale_inv")
        n, k = weights[key].shape
        whole = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        weights[key] = weights[key].float() * whole
    prefix = f"model.layers.{CONFIG['num_hidden_layers']}."

    def held(name: str) -> Tensor:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return weights[name].float()
        stem, kind = name.rsplit(".", 1)
        experts = [f"{stem}.{i}." for i in range(CONFIG["n_routed_experts"])]
        if kind == "down_proj":
            return torch.stack([weights[f"{e}down_proj.weight"] for e in experts])
        parts = ("gate_proj", "up_proj")
        return torch.stack([torch.cat([weights[f"{e}{p}.weight"] for p in parts]) for e in experts])

    config = DeepseekV3Config(**CONFIG)
    config._attn_implementation = "eager"
    target, layer = DeepseekV3ForCausalLM(config), MTPLayer(config)
    target.load_state_dict({name: held(name) for name in target.state_dict()})
    renamed = {name: name.removeprefix("layer.") for name in layer.state_dict()}
    renamed["norm.weight"] = "shared_head.norm.weight"
    layer.load_state_dict({mine: held(prefix + theirs) for mine, theirs in renamed.items()})
    return target.eval(), layer.eval()


@torch.no_grad()
def golden(
    target: DeepseekV3ForCausalLM, layer: MTPLayer, prompt: list[int], count: int
) -> dict[str, Any]:
    """Greedy decoding, and what verifying one draft per step would accept (bonus counted)."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count + 2:  # the last step may reach further
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    hidden = target.model(torch.tensor([ids])).last_hidden_state
    embeds = target.model.embed_tokens(torch.tensor([ids[1:]]))
    mask = torch.full((embeds.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    rope = target.model.rotary_emb(embeds, torch.arange(embeds.shape[1])[None])
    drafts = target.lm_head(layer(embeds, hidden[:, :-1], rope, mask))[0].argmax(-1).tolist()
    accept, last = [], len(prompt)  # position of the last token
    while last < len(prompt) + count - 1:
        accept.append(2 if drafts[last - 1] == ids[last + 1] else 1)
        last += accept[-1]
    return {"prompt": prompt, "output": ids[len(prompt) :][:count], "accept": accept}


def cases(folder: Path) -> list[dict[str, Any]]:
    """Beginnings of problems that were not trained on."""
    models, source = stored(folder), text(1_000_000)
    out = []
    for i in range(8):
        problem = list(takewhile(lambda token: token != EOS, source))[: 40 + 10 * i]
        out.append(golden(*models, problem, 96))
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    save(*train(args.steps), args.folder)
    lines = ",\n".join(json.dumps(case) for case in cases(args.folder))
    (args.folder / "cases.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
