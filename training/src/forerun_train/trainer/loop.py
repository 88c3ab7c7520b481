"""The training loop: batches in, steps, logs, validation, checkpoints."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun_train.batch import Batch
from forerun_train.drafts.blocks import blocks_at, sample_anchors
from forerun_train.drafts.draft import Draft
from forerun_train.hidden_states import FrozenTarget
from forerun_train.trainer.distributed import Ranks
from forerun_train.trainer.optimizer import Optimizers
from forerun_train.trainer.options import TrainOptions

AHEAD = 4  # batches that are made while the device works


class Stream(Protocol):
    """Batches without end, of this rank (`data/packing.py`)."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class Ahead:
    """Makes batches in a thread, and knows where in the data each of them ends."""

    stream: Stream
    waited: float = 0.0  # seconds, for the last batch
    _queue: queue.Queue[Any] = field(default_factory=lambda: queue.Queue(AHEAD))
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[Ahead]:
        """Runs the thread."""
        thread = threading.Thread(target=self._make, name="batches", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(timeout=10)

    def next(self) -> tuple[Any, dict[str, Any]]:
        """A batch, and the state of the stream behind it.

        Raises:
            Exception: whatever the data raises.
        """
        started = time.perf_counter()
        batch, state = self._queue.get()
        self.waited = time.perf_counter() - started
        if isinstance(batch, Exception):
            raise batch
        return batch, state

    def _make(self) -> None:
        try:
            for batch in self.stream:
                self._put((batch, self.stream.state_dict()))
                if self._stop.is_set():
                    return
        except Exception as error:  # noqa: BLE001  raised by `next`, in the loop's thread
            self._put((error, {}))

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue


@dataclass
class Progress:
    """How much of a run is done: steps of `max_steps`, or what fits into `max_minutes`."""

    max_steps: int
    max_seconds: float | None
    step: int = 0
    done: float = 0.0
    elapsed: float = 0.0  # seconds, those of earlier processes too
    _pace: float | None = None  # of the schedule, per step

    def advance(self) -> None:
        """Counts a step."""
        self.step += 1
        if self._pace is None:
            self.done = self.step / self.max_steps
        else:
            self.done = min(1.0, max(self.done + self._pace, self.step / self.max_steps))

    @property
    def ended(self) -> bool:
        """Whether there is no step left."""
        late = self.max_seconds is not None and self.elapsed >= self.max_seconds
        return self.step >= self.max_steps or self.done >= 1 - 1e-9 or late

    def fit(self, elapsed: float, seconds_per_step: float) -> None:
        """Fits the rest of the schedule to the time that is left."""
        self.elapsed = elapsed
        if self.max_seconds is not None:
            left = max(1.0, (self.max_seconds - elapsed) / seconds_per_step)
            self._pace = (1 - self.done) / left

    def state(self) -> dict[str, Any]:
        """Returns what checkpoints keep."""
        return {"done": self.done, "elapsed": self.elapsed, "pace": self._pace}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state."""
        self.step, self.done = int(state["step"]), float(state["progress"]["done"])
        self.elapsed, self._pace = state["progress"]["elapsed"], state["progress"]["pace"]


@dataclass(frozen=True)
class StepSums:
    """What a step gives, on the device."""

    loss: Tensor  # the mean of weighted losses
    norm: Tensor  # of the gradient
    reached: Tensor  # [D + 1] float32: blocks, and those whose first k drafts are right


class Trainer:
    """One step at a time: target, draft, gradients, update."""

    def __init__(
        self, options: TrainOptions, target: FrozenTarget, draft: Draft, ranks: Ranks
    ) -> None:
        self.options, self.target, self.draft, self.ranks = options, target, draft, ranks
        self.optimizers = Optimizers(draft, options)
        self._generator = torch.Generator(target.device)

    def step(self, host: Any, step: int, done: float) -> StepSums:
        """Runs a step of this rank's sequences; reads nothing of the device."""
        options, device = self.options, self.target.device
        batch = Batch.of(host, device)
        noise = self._noise(step, batch.input_ids.shape[1])
        share = torch.full((), done, device=device)
        size = options.micro_batch or len(batch.input_ids)
        parts = []
        for first in range(0, len(batch.input_ids), size):
            rows = slice(first, first + size)
            parts.append(self._backward(batch.part(rows), noise[rows], share))
        sums = self.ranks.sum(torch.stack(parts).sum(0))
        total, weight = sums[0], sums[1].clamp(min=1e-6)
        # FSDP takes the mean of the ranks' gradients.
        norm = self.optimizers.step(done, self.ranks.size / weight)
        return StepSums(total / weight, norm, sums[2:])

    def _backward(self, batch: Batch, noise: Tensor, done: Tensor) -> Tensor:
        """Adds the gradients of some sequences -> [loss, weight, blocks, reached ...] sums."""
        states = self.target.hidden_states(batch, self.draft.target_layer_ids)
        anchors, chosen = sample_anchors(batch, noise, self.options.anchors)
        blocks = blocks_at(batch, anchors, chosen, self.draft.num_drafts)
        found = self.draft(batch, states, blocks, done)
        found.total.backward()
        reached = found.right.float().cumprod(1).sum(0)
        counts = torch.cat([blocks.valid[:, :, 0].sum().float()[None], reached])
        return torch.cat([torch.stack([found.total.detach(), found.weight]), counts])

    def _noise(self, step: int, length: int) -> Tensor:
        """This rank's part of the random numbers of a step, which are the same for any number of
        ranks: [B, T] uniform.
        """
        size = self.options.batch_size
        self._generator.manual_seed(self.options.seed * 1_000_003 + step)
        noise = torch.rand((size, length), generator=self._generator, device=self.target.device)
        return noise[self.ranks.rows(size)]


@dataclass
class Window:
    """Sums since the last log line."""

    started: float = field(default_factory=time.perf_counter)
    steps: list[StepSums] = field(default_factory=list)
    waited: float = 0.0  # seconds, for batches

    def wait(self) -> None:
        """Waits until the device has done the last step."""
        self.steps[-1].loss.item()

    def read(self) -> dict[str, Any]:
        """Means since the last line; waits for the device, and starts anew."""
        losses = torch.stack([each.loss for each in self.steps])
        norms = torch.stack([each.norm for each in self.steps])
        reached = torch.stack([each.reached for each in self.steps]).sum(0)
        numbers = torch.cat([losses.mean()[None], norms.mean()[None], reached]).tolist()
        loss, norm, blocks, *right = numbers
        now, count = time.perf_counter(), len(self.steps)
        line = {
            "loss": loss,
            "gradient_norm": norm,
            "block_accept_length": round(1 + sum(right) / max(blocks, 1.0), 4),
            "seconds_per_step": (now - self.started) / count,
            "waited_for_data": self.waited / max(now - self.started, 1e-9),
        }
        self.started, self.waited = now, 0.0
        self.steps.clear()
        return line
