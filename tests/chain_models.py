"""Creates chain drafts for the golden target, without training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.golden_engine import CASES, GOLDEN

TARGET = GOLDEN / "target"
CONFIG: dict[str, Any] = json.loads((TARGET / "config.json").read_text())
HIDDEN, VOCAB, LAYERS = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["num_hidden_layers"]
LAST = f"model.layers.{LAYERS}."  # prefix of the MTP layer
AUX = "eagle_aux_hidden_state_layer_ids"
PRUNED = 200  # size of the pruned vocabulary
MASK = VOCAB - 1  # of parallel drafts

EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "target_hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "draft_vocab_size": PRUNED,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eagle_config": {AUX: [1, 3, 4]},
}

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {k: v for k, v in EAGLE3.items() if k != "eagle_config"},
    "draft_vocab_size": VOCAB,
    "target_hidden_size": HIDDEN,
    AUX: [i + 1 for i in EAGLE3["eagle_config"][AUX]],  # they count the embedding
    "speculators_config": {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}]
    },
}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def hugging_face(folder: Path = TARGET) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def states() -> list[tuple[Tensor, list[Tensor]]]:
    """For every golden text: ids [n], and the target's hidden states [n, H] of all layers."""
    model, out = hugging_face(), []
    for case in CASES:
        ids = torch.tensor(case["prompt"] + case["output"])
        hidden = model(ids[None], output_hidden_states=True).hidden_states
        out.append((ids, [layer[0] for layer in hidden]))
    return out


def fitted(x: list[Tensor], y: list[Tensor]) -> Tensor:
    """W [out, in] that minimises |x Wᵀ - y|² + |W|² (ridge regression)."""
    inputs, targets = torch.cat(x).double(), torch.cat(y).double()
    ridge = torch.eye(inputs.shape[1], dtype=torch.float64)
    return torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ targets).T.float().contiguous()


def eagle3_layer(hidden: int) -> dict[str, Tensor]:
    """Small random weights of an EAGLE-3 draft's layer."""
    wide, heads, kv_heads = EAGLE3["intermediate_size"], 4 * 16, 2 * 16
    shapes = {
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (wide, hidden),
        "midlayer.mlp.up_proj": (wide, hidden),
        "midlayer.mlp.down_proj": (hidden, wide),
    }
    draw = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.randn(shape, generator=draw) * 0.1 + ("norm" in name)
        for name, shape in shapes.items()
    }


def random_eagle3(folder: Path, hidden: int, vocab: int, layers: list[int]) -> Path:
    """An untrained draft for any target."""
    draw = torch.Generator().manual_seed(1)
    weights = eagle3_layer(hidden) | {
        "fc.weight": torch.eye(hidden).repeat(1, len(layers)),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(vocab, hidden, generator=draw),
    }
    sizes = {"hidden_size": hidden, "target_hidden_size": hidden, "vocab_size": vocab}
    sizes |= {"draft_vocab_size": vocab, "eagle_config": {AUX: layers}}
    return write(folder, EAGLE3 | sizes, weights)


def eagle3(folder: Path, whole: bool = False) -> Path:
    """An EAGLE-3 draft whose first draft token is sometimes correct.

    `fc` is fitted to predict the target's last hidden state of the next token, and the layer adds
    small random values. The vocabulary has no multiples of 3. With `whole`: the target's vocabulary
    and LM head, in speculators' format.
    """
    layers = EAGLE3["eagle_config"][AUX]
    weights = eagle3_layer(HIDDEN)
    target, texts = load_file(TARGET / "model.safetensors"), states()
    aux = [torch.cat([h[i + 1] for i in layers], 1)[:-1] for _, h in texts]
    weights["fc.weight"] = fitted(aux, [h[-1][1:] for _, h in texts])
    weights["norm.weight"] = torch.ones(HIDDEN)
    if whole:
        renamed = {name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
        return write(folder, SPECULATORS, renamed)
    ids = torch.tensor([i for i in range(VOCAB) if i % 3])[:PRUNED]
    weights["lm_head.weight"] = target["model.embed_tokens.weight"][ids]
    weights["d2t"] = ids - torch.arange(PRUNED)
    return write(folder, EAGLE3, weights)


def peagle(folder: Path) -> Path:
    """That EAGLE-3 draft as P-EAGLE's: with a second layer, masks, and an embedding of its own."""
    eagle3(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    first = {n: w for n, w in weights.items() if n.startswith("midlayer.") and "hidden_" not in n}
    for name, weight in first.items():
        narrow = weight[:, :HIDDEN] if weight.shape[-1] == 2 * HIDDEN else weight
        noise = 0.1 * torch.randn(narrow.shape, generator=generator)
        weights[name.replace("midlayer.", "layers.1.")] = narrow + noise
    weights["midlayer.self_attn.q_proj.weight"] *= 10  # what a mask is says what it attends to
    size = weights["fc.weight"].shape[1]
    weights["mask_hidden"] = 0.01 * torch.randn(1, 1, size, generator=generator)
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    weights["embed_tokens.weight"] = table + 0.01 * torch.randn(table.shape, generator=generator)
    own = {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2}
    return write(folder, {**EAGLE3, **own, "parallel_drafting": True, "pard_token": MASK}, weights)


def pard(folder: Path) -> Path:
    """The target with noise on its weights, as a draft that reads masks."""
    standalone(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": MASK}))
    return folder


def nextn(folder: Path, layers: int = 1) -> Path:
    """The target with an MTP layer: a copy of its last layer after a fitted projection.

    The projection predicts that layer's input at position p + 1 from the token at p + 1 and the
    hidden state at p. Further layers are the first with noise on it.
    """
    weights, texts = load_file(TARGET / "model.safetensors"), states()
    table = weights["model.embed_tokens.weight"]
    inputs = [torch.cat((unit(table[ids[1:]]), unit(h[-1][:-1])), 1) for ids, h in texts]
    weights[f"{LAST}eh_proj.weight"] = fitted(inputs, [h[-2][1:] for _, h in texts])
    weights[f"{LAST}enorm.weight"] = weights[f"{LAST}hnorm.weight"] = torch.ones(HIDDEN)
    weights[f"{LAST}shared_head.norm.weight"] = weights["model.norm.weight"]
    copied = f"model.layers.{LAYERS - 1}."
    for name in list(weights):
        if name.startswith(copied):
            weights[LAST + name.removeprefix(copied)] = weights[name]
    # Copies of the tensors that it shares with the target, as in DeepSeek's checkpoints.
    weights[f"{LAST}embed_tokens.weight"] = weights[f"{LAST}shared_head.head.weight"] = table
    unshared = {name: tensor.clone() for name, tensor in weights.items()}  # for safetensors
    generator = torch.Generator().manual_seed(0)
    for i in range(1, layers):
        own = {n: w for n, w in unshared.items() if n.startswith(LAST)}
        for name, weight in own.items():
            noisy = weight * (1 + 0.05 * torch.randn(weight.shape, generator=generator))
            unshared[name.replace(LAST, f"model.layers.{LAYERS + i}.")] = noisy
    return write(folder, {**CONFIG, "num_nextn_predict_layers": layers}, unshared)


def unit(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=CONFIG["rms_norm_eps"])


def standalone(folder: Path, noise: float = 0.1) -> Path:
    """The target with noise on its weights."""
    shutil.copytree(TARGET, folder)
    weights = load_file(TARGET / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        weights[name] = weight * (1 + noise * torch.randn(weight.shape, generator=generator))
    save_file(weights, folder / "model.safetensors")
    return folder
