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
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from forerun_train.toys.accept import accept_score, matches
from forerun_train.toys.draft import DraftRun, block_guesses, train_draft
from forerun_train.toys.draft_model import Draft, DraftShape, load_draft, save_draft
from forerun_train.toys.loop import Run, adamw, train
from forerun_train.toys.mtp import BOS, EOS, VOCAB, text
from forerun_train.toys.regen import Samples

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
SHAPE: Final = DraftShape(
    hidden_size=CONFIG["hidden_size"],
    intermediate_size=160,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=VOCAB,
    max_position_embeddings=CONFIG["max_position_embeddings"],
    num_target_layers=CONFIG["num_hidden_layers"],
    block_size=BLOCK,
    mask_token_id=MASK,
    target_layer_ids=(0, 1, 2),
)
PROMPT, RESPONSE = 96, 128
"""Tokens of a sample the draft learns from."""


def eager(seed: int = 0, **settings: Any) -> dict[str, Any]:
    """Settings of a run that ends after its steps, however slow the machine is."""
    return {"seconds": math.inf, "compile": False, "seed": seed, **settings}


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

    def loss_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = target(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), ids.new_zeros(0)

    run = Run(**eager(max_steps=steps, lr=4e-3, final_lr=0.02))
    optimizer = adamw(target.parameters(), run.lr, decay=0.01)
    train(run, optimizer, batch_of_text, loss_of, name="target", log=log)
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
    right = matches(block_guesses(draft, target), torch.tensor(ids), len(prompt), len(ids))
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
    torch.manual_seed(0)
    draft = Draft(SHAPE)
    run = DraftRun(**eager(max_steps=args.draft_steps, lr=3e-3, batch=(16,), anchors=12))
    train_draft(draft, target, [samples], run, folder / "draft.log", lambda: None)
    save_draft(draft, folder / "draft")
    draft = load_draft(folder / "draft").eval()
    unseen = responses(target, 128, HELD_OUT)
    score = accept_score(block_guesses(draft, target), BLOCK - 1, unseen, torch.device("cpu"))
    print(f"{time.perf_counter() - began:.0f} s: accept length {score.accept_length:.2f}")
    lines = ",\n".join(json.dumps(golden(target, draft, prompt, 64)) for prompt in prompts())
    (folder / "cases.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
