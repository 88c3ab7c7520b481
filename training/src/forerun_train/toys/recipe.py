"""The whole recipe: corpus → tokenizer → token streams → target → responses → drafts → scores.

    python -m forerun_train.toys.recipe --stage all --out runs/pair --wheels wheels

Every stage reads and writes files under ``--out`` and is skipped where its result is there already
(``--again`` redoes it). Settings and results are kept in ``recipe.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

STAGES = ("corpus", "tokenizer", "tokens", "target", "regen", "draft", "eagle3", "eval")


@dataclass(frozen=True)
class Settings:
    out: Path
    wheels: Path | None
    workers: int
    device: str
    tiny: bool
    target_seconds: float
    draft_seconds: float
    target_batch: int
    chat_problems: int
    regen_chat: int
    regen_python: int
    regen_seconds: float
    draft_layers: int
    draft_lr: float
    dpace: float
    eagle_seconds: float
    eagle_lr: float
    eagle_steps: int
    eagle_vocab: int
    warm: bool

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def target(self) -> Path:
        return self.out / "target"

    @property
    def draft(self) -> Path:
        return self.out / "draft"

    @property
    def eagle3(self) -> Path:
        return self.out / "eagle3"


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    s = Settings(**{k: v for k, v in vars(args).items() if k not in ("stage", "again")})
    s.out.mkdir(parents=True, exist_ok=True)
    stages = STAGES if args.stage == "all" else tuple(args.stage.split(","))
    for stage in stages:
        run, result = _STAGES[stage]
        if not args.again and (s.out / result).exists():
            print(f"{stage}: {result} is there, skipped")
            continue
        if args.again:
            shutil.rmtree(s.out / "runs" / stage, ignore_errors=True)
        started = time.perf_counter()
        facts = run(s) or {}
        facts["wall_seconds"] = round(time.perf_counter() - started, 1)
        _note(s, stage, facts)
        print(stage, json.dumps(facts), flush=True)


def corpus_stage(s: Settings) -> dict[str, Any]:
    from forerun_train.toys.corpus import build_corpus

    if s.wheels is None:
        raise SystemExit(
            "the corpus stage needs --wheels: a folder filled by pip download --no-deps"
        )
    return build_corpus(s.wheels, s.data)


def tokenizer_stage(s: Settings) -> dict[str, Any]:
    from forerun_train.toys.corpus import read_documents
    from forerun_train.toys.tokenizer import render_chat, save_tokenizer, train_tokenizer
    from forerun_train.toys.tokens import training_problems

    documents = read_documents(s.data / "python_train.xz")
    random.Random(0).shuffle(documents)
    sample, size = [], 0
    for text in documents:
        sample.append(text[:60_000])
        size += len(sample[-1])
        if size > 20_000_000:
            break
    for p in islice(training_problems(999_999), 20_000):
        chat = render_chat([("user", p.question), ("assistant", p.answer_text)])
        sample.append(re.sub(r"<\|im_(?:start|end)\|>", "\n", chat))
    tokenizer = train_tokenizer(sample)
    save_tokenizer(tokenizer, s.target)
    return {"vocabulary": tokenizer.get_vocab_size()}


def tokens_stage(s: Settings) -> dict[str, Any]:
    from forerun_train.toys.corpus import read_documents
    from forerun_train.toys.tokens import chat_stream, python_stream

    documents = read_documents(s.data / "python_train.xz")[: 200 if s.tiny else None]
    python = python_stream(documents, s.target, s.workers)
    python.save(s.data / "python_tokens.npz")
    chat = chat_stream(0, s.chat_problems, s.target, s.workers)
    chat.save(s.data / "chat_tokens.npz")
    return {
        "python_tokens": len(python.tokens),
        "python_starts": len(python.starts),
        "chat_tokens": len(chat.tokens),
        "chats": len(chat.starts),
    }


def target_stage(s: Settings) -> dict[str, Any]:
    import torch

    from forerun_train.toys.target import (
        RowSampler,
        TargetRun,
        TargetShape,
        build_target,
        load_target,
        move,
        save_target,
        train_target,
    )
    from forerun_train.toys.tokenizer import (
        END_OF_TEXT,
        IM_END,
        IM_START,
        assistant_id,
        load_tokenizer,
        special_ids,
    )
    from forerun_train.toys.tokens import TokenStream

    torch.manual_seed(0)
    shape = TargetShape(num_hidden_layers=4, intermediate_size=128) if s.tiny else TargetShape()
    run = TargetRun(seconds=s.target_seconds, batch=s.target_batch, compile=s.device == "cuda")
    if s.tiny:
        run = TargetRun(seconds=s.target_seconds, batch=4, length=128, compile=False)
    tokenizer = load_tokenizer(s.target)
    ids, assistant = special_ids(tokenizer), assistant_id(tokenizer)
    streams = [TokenStream.load(s.data / f"{name}_tokens.npz") for name in ("python", "chat")]
    warm = s.warm and (s.target / "model.safetensors").exists()
    if warm:
        model = load_target(s.target, s.device, torch.float32)
    else:
        model = build_target(shape)
        move(model, s.device)
    facts = train_target(
        model,
        RowSampler(streams[0], streams[1], run, s.device),
        run,
        im_start=ids[IM_START],
        assistant=assistant,
        log=s.out / "target_log.jsonl",
    )
    save_target(model, shape, s.target, eos=[ids[IM_END], ids[END_OF_TEXT]], pad=ids[END_OF_TEXT])
    parameters = sum(p.numel() for p in model.parameters())
    return {**facts, "parameters": parameters, "run": vars(run), "shape": vars(shape)}


def regen_stage(s: Settings) -> dict[str, Any]:
    import torch

    from forerun_train.toys.regen import joined, python_prompts, regenerate, verified_chats
    from forerun_train.toys.target import load_target
    from forerun_train.toys.tokenizer import (
        END_OF_TEXT,
        IM_END,
        assistant_id,
        load_tokenizer,
        special_ids,
    )
    from forerun_train.toys.tokens import TokenStream

    tokenizer = load_tokenizer(s.target)
    ids, assistant = special_ids(tokenizer), assistant_id(tokenizer)
    eos = [ids[IM_END], ids[END_OF_TEXT]]
    model = load_target(s.target, s.device, torch.bfloat16 if s.device == "cuda" else torch.float32)
    started = time.perf_counter()
    chats = verified_chats(
        model,
        TokenStream.load(s.data / "chat_tokens.npz"),
        s.regen_chat,
        224,
        im_end=ids[IM_END],
        answer_opens=assistant,
        batch=16 if s.tiny else 2048,
    )
    chats.save(s.data / "chat_samples.npz")
    between = time.perf_counter()
    stream = TokenStream.load(s.data / "python_tokens.npz")
    code = python_prompts(stream, s.regen_python, (16, 32, 64, 96, 128, 160, 192), eos, seed=1)
    new, batch = (24, 16) if s.tiny else (192, 8192)
    programs = joined(
        [
            regenerate(
                model,
                code,
                new_tokens=new,
                length=384,
                eos=eos,
                batch=batch,
                seconds=s.regen_seconds,
            )
        ],
        keep=8,
    )
    programs.save(s.data / "python_samples.npz")
    return {
        "chats": len(chats),
        "chat_response_tokens": int((chats.end - chats.prompt).sum()),
        "programs": len(programs),
        "python_response_tokens": int((programs.end - programs.prompt).sum()),
        "chat_seconds": round(between - started, 1),
        "python_seconds": round(time.perf_counter() - between, 1),
    }


def draft_stage(s: Settings) -> dict[str, Any]:
    from forerun_train.toys.tokenizer import MASK, load_tokenizer, special_ids

    layers = _layers_of(s.target)
    return _train(
        s,
        s.draft,
        {
            "kind": "dflash",
            "num_layers": s.draft_layers,
            "block_size": 16,
            "intermediate_size": 640,
            "target_layer_ids": (1, 3, 6, 8, 10) if layers == 12 else (0, layers - 2),
            "mask_token_id": special_ids(load_tokenizer(s.target))[MASK],
            "anchors": 4 if s.tiny else 16,
            "learning_rate": s.draft_lr,
            "decay": 7.0,
            "dpace": s.dpace,
            "max_minutes": s.draft_seconds / 60,
        },
        (4, 4) if s.tiny else (40, 152),
    )


def eagle3_stage(s: Settings) -> dict[str, Any]:
    layers = _layers_of(s.target)
    return _train(
        s,
        s.eagle3,
        {
            "kind": "eagle3",
            "block_size": s.eagle_steps + 1,
            "draft_vocab_size": s.eagle_vocab,
            "target_layer_ids": (2, 6, 10) if layers == 12 else (0, 1, layers - 1),
            "anchors": 4 if s.tiny else 32,
            "learning_rate": s.eagle_lr,
            "max_minutes": s.eagle_seconds / 60,
        },
        (4, 4) if s.tiny else (40, 120),
    )


def _layers_of(target: Path) -> int:
    return int(json.loads((target / "config.json").read_text())["num_hidden_layers"])


def _train(
    s: Settings, folder: Path, given: dict[str, Any], counts: tuple[int, int]
) -> dict[str, Any]:
    """Trains a draft as `forerun train` does, on the target's responses; `counts`: word problems
    and Python in a batch. A run that was ended goes on.
    """
    from forerun_train.toys.samples import Samples, open_samples
    from forerun_train.trainer.options import TrainOptions
    from forerun_train.trainer.run import run
    from forerun_train.trainer.view import LOG, lines_of

    pools = [Samples.load(s.data / f"{name}_samples.npz") for name in ("chat", "python")]
    output = s.out / "runs" / folder.name
    fixed = {
        "target": str(s.target),
        "data": str(s.data),
        "output": str(output),
        "resume": True,
        "seq_len": max(pool.ids.shape[1] for pool in pools),
        "batch_size": sum(counts),
        "max_steps": 200_000,
        "final_learning_rate": 0.01,
        "validate_every": 1500,
        "save_every": 1500,
        "log_every": 250,
        "device": s.device,
        "view": False,
    }
    if s.warm and (folder / "model.safetensors").exists():
        fixed["initial_draft"] = str(folder)
    options = TrainOptions.of(None, fixed | given)
    shutil.copytree(run(options, open_samples(pools, counts)), folder, dirs_exist_ok=True)
    lines = lines_of(output / LOG)
    scored = [line for line in lines if "accept_length" in line]
    return {"steps": lines[-1]["step"], "last": scored[-1], "run": options.settings()}


def eval_stage(s: Settings) -> dict[str, Any]:
    """Accuracy and accept lengths of both drafts: `forerun eval` on the held-out prompts."""
    from forerun import LLM, SamplingParams
    from forerun.evals.prompts import chat_encoder, encoder, need, python_prompts, word_prompts
    from forerun.evals.scoring import evaluate
    from forerun_train.evaluate import algorithm_of

    facts: dict[str, Any] = {}
    for folder in (s.draft, s.eagle3):
        settings: dict[str, Any] = {
            "speculative_algorithm": algorithm_of(folder),
            "speculative_draft_model_path": str(folder),
            "speculative_adaptive": False,
            "device": s.device,
        }
        with LLM(str(s.target), **settings) as llm:
            tokenizer = need(llm.tokenizer)
            asked = (
                (word_prompts(chat_encoder(tokenizer), 3 if s.tiny else 200), 256),
                (python_prompts(encoder(tokenizer), 2 if s.tiny else 60), 128),
            )
            facts[folder.name] = [
                evaluate(llm, prompts, SamplingParams(temperature=0, max_new_tokens=new))[0]
                for prompts, new in asked
            ]
    found = {name: [each.as_dict() for each in results] for name, results in facts.items()}
    (s.out / "scores.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


_STAGES: dict[str, tuple[Callable[[Settings], dict[str, Any] | None], str]] = {
    "corpus": (corpus_stage, "data/python_train.xz"),
    "tokenizer": (tokenizer_stage, "target/tokenizer.json"),
    "tokens": (tokens_stage, "data/chat_tokens.npz"),
    "target": (target_stage, "target/model.safetensors"),
    "regen": (regen_stage, "data/python_samples.npz"),
    "draft": (draft_stage, "draft/model.safetensors"),
    "eagle3": (eagle3_stage, "eagle3/model.safetensors"),
    "eval": (eval_stage, "scores.json"),
}


def _note(s: Settings, stage: str, facts: dict[str, Any]) -> None:
    path = s.out / "recipe.json"
    notes = json.loads(path.read_text()) if path.exists() else {}
    notes[stage] = facts
    path.write_text(json.dumps(notes, indent=1, default=str) + "\n")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m forerun_train.toys.recipe", description=__doc__)
    p.add_argument("--stage", default="all", help=f"all, or some of {','.join(STAGES)}")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--wheels", type=Path, default=None, help="where the packages' wheels lie")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--again", action="store_true", help="run stages whose results are there")
    p.add_argument("--warm", action="store_true", help="go on from the weights that are there")
    p.add_argument("--tiny", action="store_true", help="sizes for a smoke test")
    p.add_argument("--target-seconds", type=float, default=420.0)
    p.add_argument("--draft-seconds", type=float, default=420.0)
    p.add_argument("--target-batch", type=int, default=64)
    p.add_argument("--chat-problems", type=int, default=2_500_000)
    p.add_argument("--regen-chat", type=int, default=1_000_000)
    p.add_argument("--regen-python", type=int, default=200_000)
    p.add_argument(
        "--regen-seconds",
        type=float,
        default=float("inf"),
        help="at most so long for Python responses",
    )
    p.add_argument("--draft-layers", type=int, default=2)
    p.add_argument("--draft-lr", type=float, default=1.5e-3)
    p.add_argument(
        "--dpace",
        type=float,
        default=0.0,
        help="alpha of D-PACE position weights; 0: exp(-(j-1)/7)",
    )
    p.add_argument("--eagle-seconds", type=float, default=150.0)
    p.add_argument("--eagle-lr", type=float, default=2e-3)
    p.add_argument("--eagle-steps", type=int, default=7, help="tokens a chain, also in the eval")
    p.add_argument("--eagle-vocab", type=int, default=4096, help="tokens the head can say")
    return p


if __name__ == "__main__":
    main()
