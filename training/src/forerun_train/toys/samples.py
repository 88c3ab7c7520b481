"""Responses of a target as token ids, and as the data of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun_train.batch import Batch, HiddenStates
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.run import Data, OpenData, Reader

HELD_OUT = 0.02
"""Part of each pool that is kept for validation."""


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

    def take(self, chosen: Any) -> Samples:
        """Some of them: a slice or an index."""
        return Samples(self.ids[chosen], self.prompt[chosen], self.end[chosen])


@dataclass
class SampleStream:
    """Batches of some samples of each pool, a sequence each; pools are shuffled in every epoch."""

    pools: Sequence[Samples]
    counts: Sequence[int]  # sequences of each pool in a batch
    seq_len: int
    seed: int
    rows: slice  # of a batch, those of this rank
    states: Callable[[Tensor], HiddenStates] | None = None
    """Input ids [B, T] -> the target's hidden states; None: the trainer runs the target."""
    step: int = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            parts = [self._chosen(i) for i in range(len(self.pools))]
            self.step += 1
            ids, prompt, end = (torch.cat(column)[self.rows] for column in zip(*parts, strict=True))
            batch = batch_of(ids, prompt, end)
            if self.states is None:
                yield batch
            else:
                yield replace(batch, states=self.states(batch.input_ids))

    def _chosen(self, pool: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [n, T], prompt and end [n] of a pool's part of this step."""
        count, size = self.counts[pool], len(self.pools[pool])
        places = range(self.step * count, (self.step + 1) * count)
        orders = {
            epoch: np.random.default_rng([self.seed, pool, epoch]).permutation(size)
            for epoch in {place // size for place in places}
        }
        found = self.pools[pool].take([orders[place // size][place % size] for place in places])
        ids = np.zeros((count, self.seq_len), dtype=np.int64)
        ids[:, : found.ids.shape[1]] = found.ids
        return torch.from_numpy(ids), torch.from_numpy(found.prompt), torch.from_numpy(found.end)

    def state_dict(self) -> dict[str, Any]:
        """The next step."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.step = int(state["step"])


def batch_of(ids: Tensor, prompt: Tensor, end: Tensor) -> Batch:
    """Sequences [B, T] of one document each, whose responses are labels."""
    place = torch.arange(ids.shape[1]).expand_as(ids)
    inside = place < end[:, None]
    labels = inside & (place >= prompt[:, None])
    return Batch(ids, labels, inside.int() - 1, torch.where(inside, place, 0))


def open_samples(
    pools: Sequence[Samples],
    counts: Sequence[int],
    states: Callable[[Tensor], HiddenStates] | None = None,
) -> OpenData:
    """Pools as the data of a run, the last ones of each for validation."""
    held = [max(1, round(HELD_OUT * len(pool))) for pool in pools]
    learnt = [pool.take(slice(0, -n)) for pool, n in zip(pools, held, strict=True)]
    unseen = [pool.take(slice(-n, None)) for pool, n in zip(pools, held, strict=True)]

    def open_them(options: TrainOptions, reader: Reader) -> Data:
        rows = reader.ranks.rows(options.batch_size)
        shape = counts, options.seq_len, options.seed, rows, states
        return Data(lambda: SampleStream(learnt, *shape), lambda: SampleStream(unseen, *shape))

    return open_them
