"""Packed sequences of random tokens, and of word problems, without the data half of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun_train.batch import Batch
from forerun_train.toys.word_problems import stream
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.run import Data, Reader


def packed(rows: list[list[int]], vocab: int, seed: int = 0) -> Batch:
    """Random tokens in documents of these lengths; the first third of each is not supervised."""
    generator = torch.Generator().manual_seed(seed)
    parts = [_documents(lengths) for lengths in rows]
    ids = torch.randint(vocab - 1, (len(rows), sum(rows[0])), generator=generator)
    return Batch(ids, *(torch.stack(each) for each in zip(*parts, strict=True)))


def _documents(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    mask = [torch.arange(n) >= n // 3 for n in lengths]
    documents = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]
    positions = [torch.arange(n) for n in lengths]
    return torch.cat(mask), torch.cat(documents), torch.cat(positions)


@dataclass
class WordProblems:
    """Word problems as chats, packed; the answers are supervised."""

    tokenizer: Any
    options: TrainOptions
    seed: int
    rows: slice
    count: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]

    def __iter__(self) -> Iterator[Batch]:
        size = self.options.batch_size
        while True:
            seeds = range(self.seed + self.count * size, self.seed + (self.count + 1) * size)
            self.count += 1
            rows = [self._row(seed) for seed in seeds[self.rows]]
            yield Batch(*(torch.stack(each) for each in zip(*rows, strict=True)))

    def _row(self, seed: int) -> tuple[Tensor, ...]:
        length, columns = self.options.seq_len, ([], [], [], [])  # type: ignore[var-annotated]
        for document, problem in enumerate(stream(seed)):
            chat = [{"role": "user", "content": problem.question}]
            prompt = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
            ids = self.tokenizer(prompt)["input_ids"]
            answer = self.tokenizer(problem.answer_text)["input_ids"]
            whole = [*ids, *answer, self.tokenizer.eos_token_id]
            supervised = [i >= len(ids) for i in range(len(whole))]
            documents = [document] * len(whole)
            for column, values in zip(
                columns, (whole, supervised, documents, range(len(whole))), strict=True
            ):
                column.extend(values)
            if len(columns[0]) >= length:
                break
        kinds = torch.int64, torch.bool, torch.int32, torch.int64
        return tuple(
            torch.tensor(column[:length], dtype=kind)
            for column, kind in zip(columns, kinds, strict=True)
        )


def word_problems(options: TrainOptions, reader: Reader) -> Data:
    """`OpenData` of a run; training and validation have different seeds."""

    def of(seed: int) -> WordProblems:
        rows = reader.ranks.rows(options.batch_size)
        return WordProblems(reader.tokenizer, options, seed, rows)

    return Data(lambda: of(0), lambda: of(900_000))
