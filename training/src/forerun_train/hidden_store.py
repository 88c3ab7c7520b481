"""Hidden states of the target, stored once and read by every run that trains on them.

A folder holds a shard of safetensors per batch and rank, in the order of the data, and
`store.json`, which says what they are of. A shard has its name once it is complete; one that is
missing is made when the store is opened again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from forerun.core.errors import ConfigError, shown
from forerun_train.batch import Batch, HiddenStates
from forerun_train.files import disk_errors, read_object, write_tensors, write_text
from forerun_train.hidden_states import GIB, FrozenTarget
from forerun_train.trainer.options import TrainOptions

META = "store.json"
MADE_AGAIN = "Remove it: the next run makes it again."
KEYS = ("input_ids", "loss_mask", "document_ids", "position_ids", "aux", "final")


@dataclass(frozen=True)
class HiddenStore:
    """A folder of hidden states, of this rank's rows."""

    folder: Path
    batches: int
    rank: int

    def shard(self, index: int) -> Path:
        """The file of a batch."""
        return self.folder / f"batch-{index:08d}-rank-{self.rank}.safetensors"

    def write(self, index: int, batch: Batch, states: HiddenStates, position: Any) -> None:
        """Stores a batch; `position`: where the data stands behind it."""
        fields = (batch.input_ids, batch.loss_mask, batch.document_ids, batch.position_ids)
        values = dict(zip(KEYS, (*fields, states.aux, states.final), strict=True))
        write_tensors(self.shard(index), values, {"position": json.dumps(position)})

    def read(self, index: int) -> Batch:
        """A batch, on the CPU.

        Raises:
            ConfigError: the file is damaged.
        """
        with self._open(index) as file:
            ids, labels, documents, positions, aux, final = map(file.get_tensor, KEYS)
        return Batch(ids, labels, documents, positions, HiddenStates(aux, final))

    def position(self, index: int) -> dict[str, Any]:
        """Where the data stood behind a batch.

        Raises:
            ConfigError: the file is damaged.
        """
        with self._open(index) as file:
            found: dict[str, Any] = json.loads(file.metadata()["position"])
        return found

    @contextmanager
    def _open(self, index: int) -> Iterator[Any]:
        shard = self.shard(index)
        with disk_errors(shard, MADE_AGAIN), safe_open(shard, framework="pt") as file:
            yield file

    @property
    def stored(self) -> int:
        """How many batches are there, from the first on."""
        return next(i for i in range(self.batches + 1) if not self.shard(i).exists())


class StoredStream:
    """The batches of a store, over and over."""

    def __init__(self, store: HiddenStore) -> None:
        self._store, self._next = store, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self._store.read(self._next % self._store.batches)
            self._next += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"stored_batch": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._next = int(state["stored_batch"])


@dataclass(frozen=True)
class StorePlan:
    """What is to be stored."""

    options: TrainOptions
    target: FrozenTarget
    layer_ids: tuple[int, ...]
    rank: int
    world_size: int
    contents: Mapping[str, str]  # fingerprints of target and data

    @property
    def batches(self) -> int:
        """One for every step, unless fewer are asked for."""
        return self.options.stored_batches or self.options.max_steps

    @property
    def bytes(self) -> int:
        """Bytes of all ranks together."""
        tokens = self.batches * self.options.batch_size * self.options.seq_len
        width = (len(self.layer_ids) + 1) * self.target.config.hidden_size
        return tokens * (width * self.target.dtype.itemsize + 21)

    def description(self) -> dict[str, Any]:
        """What must be the same where the store is read."""
        options = self.options
        names = ("data", "template", "seq_len", "batch_size", "seed", "validation_share")
        return {
            **self.contents,
            "target_layer_ids": list(self.layer_ids),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "processes": self.world_size,
            "batches": self.batches,
            **{name: getattr(options, name) for name in names},
        }


def open_store(plan: StorePlan, stream: Any) -> HiddenStore:
    """The store of a run; what it lacks is computed and stored first.

    Args:
        stream: the data, from its beginning.

    Raises:
        ConfigError: it is that of another run, or the disk has not the room.
    """
    assert plan.options.hidden_states is not None
    folder = Path(plan.options.hidden_states)
    store = HiddenStore(folder, plan.batches, plan.rank)
    _check_same(folder, plan)
    done = store.stored
    if done == plan.batches:
        return store
    _check_room(folder, plan, done)
    if plan.rank == 0:
        write_text(folder / META, json.dumps(plan.description(), indent=1))
    if done:
        stream.load_state_dict(store.position(done - 1))
    for index, host in zip(range(done, plan.batches), stream, strict=False):
        batch = Batch.of(host, plan.target.device)
        states = plan.target.hidden_states(batch, plan.layer_ids)
        store.write(index, batch, states, stream.state_dict())
    return store


def _check_same(folder: Path, plan: StorePlan) -> None:
    if not (folder / META).exists():
        return
    stored, now = read_object(folder / META, {}, MADE_AGAIN), plan.description()
    for name, value in now.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{folder} holds hidden states of another run: {name} was {shown(stored.get(name))}"
                f" and is {shown(value)}. Restore it, or give another folder."
            )


def _check_room(folder: Path, plan: StorePlan, done: int) -> None:
    """Says how much will be stored; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = plan.bytes * (plan.batches - done) // plan.batches
    free = shutil.disk_usage(folder).free
    line = (
        f"hidden states: {plan.batches - done} batches take about {needed / GIB:.2f} GiB in"
        f" {folder}, of {free / GIB:.1f} GiB free"
    )
    if needed > 0.95 * free:
        raise ConfigError(
            f"{line}: too little. Lower --stored-batches, or leave out --hidden-states to run the"
            " target in every step."
        )
    if plan.rank == 0:
        print(line, flush=True)
