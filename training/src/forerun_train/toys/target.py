"""Training of the target: a narrow, deep Qwen3 on Python and word problems, half each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from forerun_train.toys.generate import causal_layers, head
from forerun_train.toys.loop import Run, adamw, train
from forerun_train.toys.tokens import TokenStream

PROMPT_WEIGHT = 0.1
"""Loss weight of user turns; answers and code have weight 1."""


@dataclass(frozen=True)
class TargetShape:
    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096


@dataclass(frozen=True, kw_only=True)
class TargetRun(Run):
    batch: int = 64
    length: int = 1024
    python_share: float = 0.55
    lr: float = 3e-3
    final_lr: float = 0.02
    warmup: float = 0.03
    weight_decay: float = 0.1


def build_target(shape: TargetShape) -> Qwen3ForCausalLM:
    values = asdict(shape)
    theta = values.pop("rope_theta")
    config = Qwen3Config(
        **values,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


class RowSampler:
    """Sequences ``[batch, length + 1]`` int64 cut from two token streams on the device."""

    def __init__(self, python: TokenStream, chat: TokenStream, run: TargetRun, device: str) -> None:
        self.run = run
        self.generator = torch.Generator(device).manual_seed(run.seed)
        self.parts = []
        for stream, any_offset in ((python, 0.5), (chat, 0.0)):
            tokens = torch.from_numpy(stream.tokens.astype("int16")).to(device)
            last = len(tokens) - run.length - 1
            starts = torch.from_numpy(stream.starts[stream.starts < last]).to(device)
            self.parts.append((tokens, starts, last, any_offset))

    def next(self) -> Tensor:
        n = self.run.batch
        k = round(n * self.run.python_share)
        return torch.cat([self._rows(0, k), self._rows(1, n - k)])

    def _rows(self, which: int, n: int) -> Tensor:
        tokens, starts, last, any_offset = self.parts[which]
        g, device = self.generator, tokens.device
        begin = starts[torch.randint(len(starts), (n,), generator=g, device=device)]
        free = torch.randint(last, (n,), generator=g, device=device)
        begin = torch.where(torch.rand(n, generator=g, device=device) < any_offset, free, begin)
        return tokens[begin[:, None] + torch.arange(self.run.length + 1, device=device)].long()


def label_weights(rows: Tensor, im_start: int, assistant: int) -> Tensor:
    """Weights ``[batch, length]`` of the labels ``rows[:, 1:]``.

    Low inside turns that are not the assistant's.
    """
    place = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    turn = torch.where(rows == im_start, place, -1).cummax(dim=1).values
    role = rows.gather(1, (turn + 1).clamp(max=rows.shape[1] - 1))
    other = (turn >= 0) & ((role != assistant) | (place <= turn + 1))
    return torch.where(other, PROMPT_WEIGHT, 1.0)[:, 1:]


def train_target(
    model: Qwen3ForCausalLM,
    sampler: RowSampler,
    run: TargetRun,
    *,
    im_start: int,
    assistant: int,
    log: Path,
) -> dict[str, float]:
    """Trains in place."""
    device = next(model.parameters()).device.type

    def loss_of(rows: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            *_, x = causal_layers(model, rows[:, :-1])
            logits = head(model, x)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
        )
        weights = label_weights(rows, im_start, assistant).flatten()
        return (losses * weights).sum() / weights.sum()

    model.train()
    optimizer = adamw(model.parameters(), run.lr, run.weight_decay)
    facts = train(run, optimizer, lambda: (sampler.next(),), loss_of, log)
    return facts | {"tokens": facts["steps"] * run.batch * run.length}


def save_target(
    model: Qwen3ForCausalLM, shape: TargetShape, folder: Path, eos: list[int], pad: int
) -> None:
    """Writes Hugging Face files, weights in bfloat16; the tied embedding is stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()
    }
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos[0],
        "pad_token_id": pad,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape.num_hidden_layers,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_target(folder: Path, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """The shipped weights (bfloat16 on disk) in the given dtype."""
    config = json.loads((folder / "config.json").read_text())
    model = build_target(TargetShape(**{k: config[k] for k in asdict(TargetShape())}))
    missing, unexpected = model.load_state_dict(
        load_file(folder / "model.safetensors"), strict=False
    )
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{folder}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    move(model, device, dtype)
    model.eval()
    return model


def move(module: nn.Module, device: str, dtype: torch.dtype | None = None) -> None:
    """In place, through ``nn.Module``: transformers' wrapped ``to`` has a wrong type."""
    module.to(device, dtype)
