"""Responses written by the target itself: what the draft is trained on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3ForCausalLM

from forerun_train.generate import batches, causal_layers, greedy, head
from forerun_train.tokens import TokenStream


@dataclass(frozen=True)
class Samples:
    """``ids`` [n, length] uint16, padded; ``prompt`` and ``end`` [n].

    The response is ``ids[prompt:end]``.
    """

    ids: npt.NDArray[np.uint16]
    prompt: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]

    def save(self, path: Path) -> None:
        np.savez(path, ids=self.ids, prompt=self.prompt, end=self.end)

    @staticmethod
    def load(path: Path) -> Samples:
        with np.load(path) as data:
            return Samples(data["ids"], data["prompt"], data["end"])

    def __len__(self) -> int:
        return len(self.end)


def regenerate(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    length: int,
    eos: Sequence[int],
    batch: int,
    seconds: float = math.inf,
) -> Samples:
    """Greedy responses to all prompts, in the order of the prompts.

    Those not begun after ``seconds`` stay empty.
    """
    device = model.lm_head.weight.device
    ids = np.full((len(prompts), length), eos[-1], dtype=np.uint16)
    prompt = np.array([len(p) for p in prompts], dtype=np.int32)
    end = np.zeros(len(prompts), dtype=np.int32)
    jobs = list(batches(prompts, batch))
    random.Random(0).shuffle(jobs)
    started = time.perf_counter()
    for members, tokens, lengths in jobs:
        if time.perf_counter() - started > seconds:
            break
        room = min(new_tokens, length - tokens.shape[1])
        out, ends = greedy(model, tokens.to(device), lengths.to(device), room, eos)
        ids[members, : out.shape[1]] = out.cpu().numpy().astype(np.uint16)
        end[members] = ends.cpu().numpy()
    return Samples(ids, prompt, end)


def python_prompts(
    stream: TokenStream, count: int, lengths: Sequence[int], stops: Sequence[int], seed: int
) -> list[list[int]]:
    """Beginnings of code at unindented lines of the training corpus, none across a file's end."""
    rng = np.random.default_rng(seed)
    starts = stream.starts[stream.starts < len(stream.tokens) - max(lengths)]
    prompts: list[list[int]] = []
    while len(prompts) < count:
        size = int(rng.choice(list(lengths)))
        window = stream.tokens[(begin := int(rng.choice(starts))) : begin + size]
        if not np.isin(window, list(stops)).any():
            prompts.append(window.tolist())
    return prompts


@torch.inference_mode()
def verified_chats(
    model: Qwen3ForCausalLM,
    stream: TokenStream,
    count: int,
    length: int,
    *,
    im_end: int,
    answer_opens: int,
    batch: int,
    keep: int = 8,
) -> Samples:
    """The target's own greedy answers to ``count`` problems, found without generating them.

    The target almost always writes the worked solution it was trained on. One forward pass over
    that text shows where its argmax first differs; the text up to there, closed by the argmax, is
    what greedy decoding gives.
    """
    device = model.lm_head.weight.device
    starts = stream.starts[stream.starts < len(stream.tokens) - length][:count]
    kept: list[Samples] = []
    for i in range(0, len(starts), batch):
        rows = stream.tokens[starts[i : i + batch, None] + np.arange(length)].astype(np.int64)
        ids = torch.from_numpy(rows).to(device)
        place = torch.arange(length, device=device)
        # the first answer: from behind "<|im_start|>assistant\n" to its "<|im_end|>", counted
        opened = (ids == answer_opens).int().argmax(1)
        prompt = opened + 2
        closes = ((ids == im_end) & (place >= prompt[:, None])).int()
        end = closes.argmax(1) + 1
        *_, x = causal_layers(model, ids)
        guess = torch.cat([ids[:, :1], head(model, x[:, :-1]).argmax(-1)], dim=1)
        inside = (place >= prompt[:, None]) & (place < end[:, None])
        wrong = (guess != ids) & inside
        first = torch.where(wrong.any(1), wrong.int().argmax(1), end - 1)
        ids.scatter_(1, first[:, None], guess.gather(1, first[:, None]))
        whole = (opened > 0) & (closes.sum(1) > 0)
        out = [t[whole].cpu().numpy() for t in (ids, prompt, first + 1)]
        kept.append(
            Samples(out[0].astype(np.uint16), out[1].astype(np.int32), out[2].astype(np.int32))
        )
    return joined(kept, keep)


def joined(parts: Sequence[Samples], keep: int) -> Samples:
    """All samples whose response has at least ``keep`` tokens."""
    ids = np.concatenate([p.ids for p in parts])
    prompt = np.concatenate([p.prompt for p in parts])
    end = np.concatenate([p.end for p in parts])
    chosen = np.flatnonzero(end - prompt >= keep)
    return Samples(ids[chosen], prompt[chosen], end[chosen])
