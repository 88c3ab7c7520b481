"""Documents packed into rows of equal length, in an endless order that can be resumed.

Row r of every batch has documents of its own: those at places r, r + B, r + 2B and so on of the
epochs, one after the other, each shuffled anew. So a row depends on the seed and the batch size
alone, whichever rank makes it, and its state is a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun_train.data.records import DataError, Records
from forerun_train.data.rendering import Document, Renderer

WAITING = 2.0  # sequences' worth of documents that a row chooses from
AT_ONCE = 8  # records of a row that are read and tokenized together
KEPT_EPOCHS = 3  # orders that are remembered


@dataclass(frozen=True)
class PackedBatch:
    """B sequences of T tokens, each of several documents."""

    input_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool: whether the loss counts a token as a target
    document_ids: Tensor  # [B, T] int32, from 0 in each sequence; -1 on padding
    position_ids: Tensor  # [B, T] int64, from 0 in each document


@dataclass
class Lane:
    """What one row of the batches is made of: its next place, and the documents that wait."""

    next: int = 0  # a step of B in the epochs
    waiting: list[tuple[int, int, Document]] = field(default_factory=list)  # step, part of a record
    read: dict[int, list[Document]] = field(default_factory=dict)  # by step, not yet waiting

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"next": self.next, "waiting": [[step, part] for step, part, _ in self.waiting]}


class PackedStream:
    """Batches without end, of one rank."""

    def __init__(
        self,
        source: Records,
        renderer: Renderer,
        seq_len: int,
        batch_size: int,
        seed: int,
        rows: slice | None = None,
    ) -> None:
        """
        Args:
            batch_size: sequences of all ranks together.
            rows: those of this rank; None: all.

        Raises:
            ConfigError: the source is empty.
        """
        if not len(source):
            raise ConfigError("there is no record to make batches of.")
        self._source, self._seq_len, self._seed = source, seq_len, seed
        self._batch_size, self._renderer = batch_size, renderer
        tokenizer = renderer.tokenizer
        self._padding = int(tokenizer.pad_token_id or tokenizer.eos_token_id or 0)
        own = range(batch_size)[rows or slice(None)]
        self._lanes = {row: Lane() for row in own}
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._bad: set[int] = set()

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            self._refill()
            rows = [self._row(lane) for lane in self._lanes.values()]
            yield PackedBatch(*(torch.stack(column) for column in zip(*rows, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's rows are. Those of all ranks together serve any number of ranks."""
        return {"lanes": {str(row): lane.state() for row, lane in self._lanes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the batch after which the state was taken.

        Raises:
            ConfigError: the state is that of another batch size or of other ranks.
        """
        kept = state["lanes"]
        for row, lane in self._lanes.items():
            if str(row) not in kept:
                raise ConfigError(
                    f"the checkpoint has no state of the data for row {row}; it was made with"
                    " another batch size."
                )
            lane.next = int(kept[str(row)]["next"])
            entries = [(int(step), int(part)) for step, part in kept[str(row)]["waiting"]]
            steps = list(dict.fromkeys(step for step, _ in entries))
            found = dict(zip(steps, self._documents([(row, s) for s in steps]), strict=True))
            lane.waiting = [(step, part, found[step][part]) for step, part in entries]

    def _refill(self) -> None:
        """Reads records until every row has enough documents to choose from."""
        barren = 0
        while True:
            for lane in self._lanes.values():
                self._queue(lane)
            asked = [
                (row, lane.next + i)
                for row, lane in self._lanes.items()
                if not self._is_full(lane)
                for i in range(AT_ONCE)
            ]
            if not asked:
                return
            found = self._documents(asked)
            for (row, step), documents in zip(asked, found, strict=True):
                self._lanes[row].read[step] = documents
            barren = 0 if any(found) else barren + len(asked)
            if barren > 2 * len(self._source) + self._batch_size * AT_ONCE:
                raise ConfigError(
                    f"no record has a label within seq_len {self._seq_len}; raise seq_len, or check"
                    " the data."
                )

    def _is_full(self, lane: Lane) -> bool:
        return sum(len(each.ids) for _, _, each in lane.waiting) >= WAITING * self._seq_len

    def _queue(self, lane: Lane) -> None:
        """Lets documents wait that are read, as many as the row wants."""
        while not self._is_full(lane) and lane.next in lane.read:
            documents = lane.read.pop(lane.next)
            lane.waiting += [(lane.next, part, each) for part, each in enumerate(documents)]
            lane.next += 1

    def _documents(self, places: list[tuple[int, int]]) -> list[list[Document]]:
        """The documents of records, (row, step) each; none of those that cannot be used."""
        indices = [self._index(row + step * self._batch_size) for row, step in places]
        records = [self._source[index] for index in indices]
        out = []
        for index, found in zip(indices, self._renderer.documents(records), strict=True):
            if isinstance(found, DataError):
                self._refuse(index, found)
                found = []
            cut = [each.cut(self._seq_len) for each in found]
            out.append([each for each in cut if each.labels.any()])
        return out

    def _refuse(self, index: int, error: DataError) -> None:
        """Counts a record that the template refuses, once."""
        if index not in self._bad:
            self._bad.add(index)
            self._source.skipped.add(error)
            self._source.skipped.check()

    def _index(self, place: int) -> int:
        """The record at a place of all epochs, one after the other."""
        epoch, at = divmod(place, len(self._source))
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            generator = np.random.default_rng([self._seed, epoch])
            self._orders[epoch] = generator.permutation(len(self._source))
        return int(self._orders[epoch][at])

    def _row(self, lane: Lane) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Packs the document that has waited longest, and then the largest that fit."""
        chosen: list[Document] = []
        room = self._seq_len
        while True:
            fitting = [i for i, each in enumerate(lane.waiting) if len(each[2].ids) <= room]
            if not fitting:
                break
            best = max(fitting, key=lambda i: len(lane.waiting[i][2].ids)) if chosen else 0
            chosen.append(lane.waiting.pop(best)[2])
            room -= len(chosen[-1].ids)
        return self._packed(chosen)

    def _packed(self, documents: list[Document]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids = torch.full((self._seq_len,), self._padding, dtype=torch.int64)
        labels = torch.zeros(self._seq_len, dtype=torch.bool)
        numbers = torch.full((self._seq_len,), -1, dtype=torch.int32)
        positions = torch.zeros(self._seq_len, dtype=torch.int64)
        at = 0
        for number, document in enumerate(documents):
            part = slice(at, at + len(document.ids))
            ids[part] = torch.from_numpy(document.ids.astype(np.int64))
            labels[part] = torch.from_numpy(document.labels)
            numbers[part] = number
            positions[part] = torch.arange(len(document.ids))
            at = part.stop
        return ids, labels, numbers, positions
