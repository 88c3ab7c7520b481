"""Scores of a pair: accuracy on word problems, accept length on them and on held-out Python.

Weights are rounded to bfloat16 (as shipped) and run in float32 (as served on a CPU).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from forerun.evals.prompts import held_out
from forerun.evals.word_problems import TEST_SEED, extract_answer
from forerun_train.toys.accept import AcceptScore, Guess, accept_score
from forerun_train.toys.draft import block_guesses
from forerun_train.toys.draft_model import load_draft
from forerun_train.toys.eagle import chain_guesses
from forerun_train.toys.eagle_model import load_eagle
from forerun_train.toys.regen import Samples, regenerate
from forerun_train.toys.target import load_target
from forerun_train.toys.tokenizer import END_OF_TEXT, IM_END, load_tokenizer, special_ids
from forerun_train.toys.tokens import prompt_text
from forerun_train.toys.word_problems import generate


def score_pair(
    target_folder: Path,
    draft_folder: Path,
    eagle_folder: Path,
    device: str,
    *,
    eagle_steps: int = 7,
    problems: int = 1024,
    accept_problems: int = 256,
    code_prompts: int = 60,
    code_tokens: int = 160,
) -> dict[str, Any]:
    """Scores the drafts that exist."""
    tokenizer = load_tokenizer(target_folder)
    ids = special_ids(tokenizer)
    eos = [ids[IM_END], ids[END_OF_TEXT]]
    target = load_target(target_folder, device, torch.float32)
    asked = generate(TEST_SEED, problems)
    prompts = [tokenizer.encode(prompt_text(p), add_special_tokens=False).ids for p in asked]
    chats = regenerate(target, prompts, new_tokens=176, length=384, eos=eos, batch=256)
    right = [
        extract_answer(tokenizer.decode(chats.ids[i, chats.prompt[i] : chats.end[i]].tolist()))
        == p.answer
        for i, p in enumerate(asked)
    ]
    facts: dict[str, Any] = {
        "word_problem_accuracy": sum(right) / len(right),
        "wrong": [p.question for p, ok in zip(asked, right, strict=True) if not ok][:10],
        "word_problem_tokens": float((chats.end - chats.prompt).mean()),
    }
    first = Samples(
        chats.ids[:accept_problems], chats.prompt[:accept_problems], chats.end[:accept_problems]
    )
    code = [
        tokenizer.encode(row["prompt"], add_special_tokens=False).ids
        for row in held_out()[:code_prompts]
    ]
    programs = regenerate(target, code, new_tokens=code_tokens, length=400, eos=eos, batch=64)
    for name, (guess, drafts) in _drafts(target, draft_folder, eagle_folder, eagle_steps).items():
        facts[name] = {
            skill: _facts(accept_score(guess, drafts, texts, target.lm_head.weight.device))
            for skill, texts in (("word_problems", first), ("python", programs))
        }
    return facts


def _drafts(
    target: Qwen3ForCausalLM, draft_folder: Path, eagle_folder: Path, eagle_steps: int
) -> dict[str, tuple[Guess, int]]:
    """Name -> (its guesses, drafts per step)."""
    device = str(target.lm_head.weight.device)
    found: dict[str, tuple[Guess, int]] = {}
    if (draft_folder / "model.safetensors").exists():
        draft = load_draft(draft_folder, device).eval()
        found["draft"] = block_guesses(draft, target), draft.shape.block_size - 1
    if (eagle_folder / "model.safetensors").exists():
        eagle = load_eagle(eagle_folder, device).eval()
        found["eagle3"] = chain_guesses(eagle, target, eagle_steps), eagle_steps
    return found


def _facts(score: AcceptScore) -> dict[str, Any]:
    return {
        "accept_length": round(score.accept_length, 3),
        "tokens": score.tokens,
        "steps": score.steps,
        "per_position": [round(x, 3) for x in score.per_position],
    }
