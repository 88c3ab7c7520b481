"""Trains the hybrid toy of the tests: a Qwen3.5-shaped target and a DFlash draft for it.

    python -m forerun_train.toys.hybrid runs/hybrid

Five minutes on one CPU core. Text is bytes of generated word problems (`forerun_train.toys.mtp`).
Three layers are gated DeltaNet and one is full attention, as in Qwen3.5. The draft learns from
greedy texts of the target and from the hidden states of its first three layers; the recurrent state
and the K/V of the context both decide what it reads.

The folder gets `target/`, `draft/` (z-lab's format) and `cases.json`: greedy texts of transformers'
model with these weights in float32, and at every token of a text how many drafts of a full block
after it are right. So the accept length of a step is known wherever it begins.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from forerun.models.loader import load_target as load_served
from forerun_train.batch import HiddenStates
from forerun_train.drafts.build import build_draft
from forerun_train.drafts.draft import Draft, right_drafts
from forerun_train.hidden_states import FrozenTarget
from forerun_train.toys.loop import Run, adamw, train
from forerun_train.toys.mtp import BOS, EOS, VOCAB, text
from forerun_train.toys.samples import Samples, batch_of, open_samples
from forerun_train.trainer.distributed import joined_ranks
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.run import DRAFT, Reader
from forerun_train.trainer.run import train as train_draft

MASK: Final = 258
BLOCK: Final = 8
HELD_OUT: Final = 1_000_000
"""Seed of texts that are not trained on."""
CONFIG: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
    },
    "pad_token_id": None,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
READ: Final = (0, 1, 2)
"""Layers of the target that the draft reads."""
PROMPT, RESPONSE = 96, 128
"""Tokens of a sample the draft learns from."""


# --- the target -----------------------------------------------------------------------------


def build() -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(**CONFIG)
    config._attn_implementation = "sdpa"
    target = Qwen3_5ForCausalLM(config)
    for name, weight in target.named_parameters():
        if weight.ndim >= 2 and "conv1d" not in name:
            nn.init.normal_(weight, std=0.02 if "embed" in name else weight.shape[-1] ** -0.5)
    return target


def train_target(steps: int, log: Path, batch: int = 12, length: int = 192) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    target, source = build(), text(0)

    def batch_of_text() -> tuple[Tensor]:
        return (torch.tensor(list(islice(source, batch * length))).view(batch, length),)

    def loss_of(ids: Tensor) -> Tensor:
        logits = target(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    # It ends after its steps, however slow the machine is.
    run = Run(seconds=math.inf, compile=False, max_steps=steps, lr=4e-3, final_lr=0.02)
    optimizer = adamw(target.parameters(), run.lr, decay=0.01)
    train(run, optimizer, batch_of_text, loss_of, log)
    target.eval()
    return target


# --- the draft ------------------------------------------------------------------------------


@torch.inference_mode()
def responses(target: Qwen3_5ForCausalLM, count: int, seed: int, batch: int = 128) -> Samples:
    """Greedy continuations of windows of text."""
    source = text(seed)
    generate: Callable[..., Tensor] = target.generate  # type: ignore[assignment, misc]
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": RESPONSE, "eos_token_id": None}
    kept: list[Tensor] = []
    for _ in range(count // batch):
        prompts = torch.tensor(list(islice(source, batch * PROMPT))).view(batch, PROMPT)
        kept.append(generate(prompts, attention_mask=torch.ones_like(prompts), **how))
    ids = torch.cat(kept).numpy().astype(np.uint16)
    ends = [np.full(len(ids), size, dtype=np.int32) for size in (PROMPT, ids.shape[1])]
    return Samples(ids, *ends)


@torch.no_grad()
def states_of(target: Qwen3_5ForCausalLM, ids: Tensor) -> HiddenStates:
    """What the draft reads of sequences [B, T], by transformers: the trainer has no recurrent
    layers. Its `hidden_states` have the output of layer l at l + 1, and the last ones normalized.
    """
    found = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return HiddenStates(torch.cat([found[layer + 1] for layer in READ], -1), found[-1])


def options_of(folder: Path, **given: Any) -> TrainOptions:
    """The draft's run in `folder`, which has the target."""
    fixed = {
        "kind": "dflash", "target": str(folder / "target"), "data": "-", "device": "cpu",
        "output": str(folder / "run"), "num_layers": 2, "block_size": BLOCK,
        "intermediate_size": 160, "target_layer_ids": READ, "mask_token_id": MASK, "decay": 7.0,
        "seq_len": PROMPT + RESPONSE, "batch_size": 16, "anchors": 12, "learning_rate": 3e-3,
        "final_learning_rate": 0.01, "save_every": 10**6, "validation_batches": 1, "view": False,
    }  # fmt: skip
    return TrainOptions.of(None, fixed | given)


def served_target(folder: Path) -> FrozenTarget:
    """The target in the engine, for its embedding and its LM head."""
    device = torch.device("cpu")
    return FrozenTarget(load_served(folder, torch.float32, device), folder, device)


def train_on(target: Qwen3_5ForCausalLM, samples: Samples, options: TrainOptions) -> None:
    """Trains the draft as `forerun train` does, and exports it to the run's folder."""
    open_data = open_samples([samples], [options.batch_size], partial(states_of, target))
    with joined_ranks(options.device, options.batch_size) as ranks:
        data = open_data(options, Reader(None, VOCAB, ranks))
        train_draft(options, ranks, served_target(Path(options.target)), data, MASK)


def load_draft(folder: Path, target: Path) -> Draft:
    """An exported draft, as it was in training."""
    options = options_of(target.parent, initial_draft=str(folder))
    return build_draft(options, served_target(target), MASK).model.eval()


@torch.no_grad()
def matches(draft: Draft, target: Qwen3_5ForCausalLM, ids: Tensor, prompt: int) -> list[int]:
    """How many drafts of a full block are right after each token of ids [T] from `prompt` on."""
    batch = batch_of(ids[None], torch.tensor([0]), torch.tensor([len(ids)]))
    places = torch.arange(prompt, len(ids))[None]
    chosen = torch.ones_like(places, dtype=torch.bool)
    right = right_drafts(draft, batch, states_of(target, batch.input_ids), places, chosen)
    found: list[int] = right.long().cumprod(2).sum(2)[0].tolist()
    return found


def save_target(target: Qwen3_5ForCausalLM, folder: Path) -> None:
    """config.json and model.safetensors, in bfloat16."""
    deepcopy(target).bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def load_target(folder: Path) -> Qwen3_5ForCausalLM:
    """The stored weights in float32."""
    target = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.eval()
    return target


# --- golden texts ---------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    """Beginnings of texts; the first three share their first 80 tokens."""
    source = text(HELD_OUT)
    parts = [list(islice(source, 120)) for _ in range(8)]
    shared = [parts[0][:80] + part[: 9 * i] for i, part in enumerate(parts[1:4])]
    return shared + [part[: 30 + 10 * i] for i, part in enumerate(parts[4:])]


@torch.inference_mode()
def golden(target: Qwen3_5ForCausalLM, draft: Draft, prompt: list[int], count: int) -> Any:
    """Greedy decoding without a cache, and the right drafts after each of its tokens."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count + BLOCK:  # a block may reach further
        ids.append(int(target(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    right = matches(draft, target, torch.tensor(ids), len(prompt))
    return {"prompt": prompt, "output": ids[len(prompt) :][:count], "matches": right[:count]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a target that is there is not trained again")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--draft-steps", type=int, default=800)
    parser.add_argument("--samples", type=int, default=1536)
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    if not (folder / "target").exists():
        save_target(train_target(args.steps, folder / "target.log"), folder / "target")
    target = load_target(folder / "target")
    samples = responses(target, args.samples, seed=1)
    print(f"{time.perf_counter() - began:.0f} s: target and its texts", flush=True)
    train_on(target, samples, options_of(folder, max_steps=args.draft_steps))
    shutil.copytree(folder / "run" / DRAFT, folder / DRAFT, dirs_exist_ok=True)
    print(f"{time.perf_counter() - began:.0f} s: the draft", flush=True)
    draft = load_draft(folder / DRAFT, folder / "target")
    lines = ",\n".join(json.dumps(golden(target, draft, prompt, 64)) for prompt in prompts())
    (folder / "cases.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
