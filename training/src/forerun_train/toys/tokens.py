"""Token arrays for training: text to ``uint16`` streams with known start positions."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from forerun.evals.word_problems import TEST_SEED
from forerun_train.toys.tokenizer import END_OF_TEXT, load_tokenizer, render_chat, special_ids
from forerun_train.toys.word_problems import Problem, generate, stream

TEST_QUESTIONS = 4096
"""Number of problems of the test seed whose questions are excluded from training."""

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a careful math tutor. Show your work.",
    "Solve the problem step by step.",
    "Answer with short steps and give the final number after ####.",
)

Tokens = npt.NDArray[np.uint16]
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenStream:
    """``tokens`` [n] uint16, and ``starts`` [m] int64: where a training sequence may start."""

    tokens: Tokens
    starts: npt.NDArray[np.int64]

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, starts=self.starts)

    @staticmethod
    def load(path: Path) -> TokenStream:
        with np.load(path) as data:
            return TokenStream(data["tokens"], data["starts"])


def python_stream(texts: Sequence[str], folder: Path, workers: int) -> TokenStream:
    """Source files, each ended by ``<|endoftext|>``; sequences start at unindented lines."""
    tokenizer = load_tokenizer(folder)
    chunks = [texts[i : i + 64] for i in range(0, len(texts), 64)]
    tokens = np.concatenate(_in_parallel(partial(_encode_files, folder), chunks, workers))
    ends_line, opens_line = _line_tables(tokenizer)
    starts = np.flatnonzero(ends_line[tokens[:-1]] & opens_line[tokens[1:]]) + 1
    return TokenStream(tokens, starts)


def chat_stream(first_seed: int, problems: int, folder: Path, workers: int) -> TokenStream:
    """Conversations about word problems; sequences start at a conversation."""
    share = -(-problems // (4 * workers))
    jobs = [(first_seed + i, share) for i in range(4 * workers)]
    parts = _in_parallel(partial(_encode_chats, folder), jobs, workers)
    tokens = np.concatenate([tokens for tokens, _ in parts])
    offsets = np.cumsum([0, *[len(tokens) for tokens, _ in parts[:-1]]])
    starts = np.concatenate(
        [starts + offset for (_, starts), offset in zip(parts, offsets, strict=True)]
    )
    return TokenStream(tokens, starts.astype(np.int64))


def prompt_text(problem: Problem) -> str:
    return render_chat([("user", problem.question)], generation_prompt=True)


def held_out_questions() -> frozenset[str]:
    return frozenset(p.question for p in generate(TEST_SEED, TEST_QUESTIONS))


def training_problems(seed: int) -> Iterator[Problem]:
    unseen = held_out_questions()
    return (p for p in stream(seed) if p.question not in unseen)


def _encode_files(folder: Path, texts: Sequence[str]) -> Tokens:
    tokenizer = load_tokenizer(folder)
    end = special_ids(tokenizer)[END_OF_TEXT]
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in encoded])


def _encode_chats(folder: Path, job: tuple[int, int]) -> tuple[Tokens, npt.NDArray[np.int64]]:
    seed, count = job
    problems, rng = training_problems(seed), random.Random(seed)
    texts: list[str] = []
    while count > 0:
        turns = 1 if rng.random() < 0.92 else 2
        messages = [("system", rng.choice(_SYSTEM))] if rng.random() < 0.1 else []
        for p in islice(problems, turns):
            messages += [("user", p.question), ("assistant", p.answer_text)]
        texts.append(render_chat(messages))
        count -= turns
    encoded = load_tokenizer(folder).encode_batch_fast(texts, add_special_tokens=False)
    lengths = np.array([len(e.ids) for e in encoded], dtype=np.int64)
    tokens = np.fromiter(
        (i for e in encoded for i in e.ids), dtype=np.uint16, count=int(lengths.sum())
    )
    return tokens, np.cumsum(lengths) - lengths


def _line_tables(tokenizer: Tokenizer) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two masks over the vocabulary: tokens that end a line; that can start an unindented one."""
    texts = [
        tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())
    ]
    ends = np.array([t.endswith("\n") or t == END_OF_TEXT for t in texts])
    opens = np.array([t[:1].isalpha() or t[:1] in ("@", "#", '"') for t in texts])
    return ends, opens


def _in_parallel(work: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> list[Result]:
    if workers <= 1:
        return [work(job) for job in jobs]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return pool.map(work, jobs, chunksize=1)
