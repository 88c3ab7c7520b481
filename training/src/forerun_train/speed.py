"""What a training step takes, beside the floor of its parts, each run alone.

Target and draft have random weights, so a config is enough, and texts are random tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.config.model_config import load_model_config
from forerun.llm.bundled import preset
from forerun.models.loader import load_target
from forerun.platform.device import resolve_device
from forerun.platform.progress import progress
from forerun_train.batch import Batch
from forerun_train.drafts.blocks import blocks_at, sample_anchors
from forerun_train.drafts.build import build_draft
from forerun_train.hidden_states import FrozenTarget, check_room
from forerun_train.trainer.distributed import Ranks
from forerun_train.trainer.flops import flops_per_step, peak_flops
from forerun_train.trainer.loop import Trainer
from forerun_train.trainer.memory import check_memory
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.run import compute_dtype

WARM_UP = 2  # runs of each part that are not counted: what is compiled is compiled in these


@dataclass(frozen=True)
class StepTimes:
    """Seconds, each the median of several runs."""

    step: float
    target: float  # forward passes over the sequences of a step
    draft: float  # forward and backward passes over its blocks
    tokens: int  # of a step
    flops: float  # operations that a step needs
    peak: float | None  # operations per second that the device can do

    @property
    def floor(self) -> float:
        """What the passes take without all else."""
        return self.target + self.draft

    def as_dict(self) -> dict[str, float | None]:
        """As JSON has it."""
        return {
            "step_seconds": self.step,
            "target_seconds": self.target,
            "draft_seconds": self.draft,
            "step_over_floor": self.step / self.floor,
            "tokens_per_second": self.tokens / self.step,
            "tflops": self.flops / self.step / 1e12,
            "mfu": None if self.peak is None else self.flops / self.step / self.peak,
        }


def random_target(
    name: str, dtype: torch.dtype, device: torch.device, seq_len: int
) -> FrozenTarget:
    """A target of random weights.

    Args:
        name: a folder with a config.json, or a known model (`forerun.llm.bundled.preset`).

    Raises:
        ConfigError: there is no such model, or its weights do not fit.
    """
    folder = Path(name) if Path(name).is_dir() else preset(name)[0]
    check_room(load_model_config(folder), dtype, device)
    model = load_target(folder, dtype, device, "dummy_normal", max_positions=seq_len)
    return FrozenTarget(model, folder, device)


def random_batch(options: TrainOptions, vocab_size: int, document: int) -> Batch:
    """Packed documents of `document` tokens, the last of a sequence shorter; all are labels."""
    size = options.batch_size, options.seq_len
    places = torch.arange(options.seq_len).expand(size)
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(vocab_size, size, generator=generator)
    number = (places // document).to(torch.int32)
    return Batch(ids, torch.ones(size, dtype=torch.bool), number, places % document)


def measure(options: TrainOptions, document: int, runs: int) -> StepTimes:
    """Times steps of `options`, whose data and output are not used, on one device.

    Raises:
        ConfigError: the target is not known, or there is too little memory.
    """
    device = resolve_device(options.device)
    ranks = Ranks(0, 1, device)
    dtype = compute_dtype(options.dtype, device)
    with progress("random weights"):
        target = random_target(options.target, dtype, device, options.seq_len)
    draft = build_draft(options, target, mask_token=0).model
    print(check_memory(options, target, draft, ranks.size), flush=True)
    if device.type == "cuda" if options.compile is None else options.compile:
        draft.compile_parts()
    host = random_batch(options, target.config.vocab_size, document)
    trainer = Trainer(options, target, draft, ranks)
    step = median_seconds("steps", lambda: trainer.step(host, 0, 0.5), device, runs)
    batch = Batch.of(host, device)
    size = options.micro_batch or options.batch_size
    parts = [batch.part(slice(i, i + size)) for i in range(0, options.batch_size, size)]
    layers = draft.target_layer_ids

    def run_target() -> None:
        for part in parts:
            target.hidden_states(part, layers)

    first = replace(parts[0], states=target.hidden_states(parts[0], layers))
    noise = torch.rand(first.input_ids.shape, device=device)
    anchors, chosen = sample_anchors(first, noise, options.anchors)
    blocks = blocks_at(first, anchors, chosen, draft.num_drafts)
    done = torch.full((), 0.5, device=device)

    def run_draft() -> None:
        assert first.states is not None
        for _ in parts:
            draft(first, first.states, blocks, done).total.backward()

    return StepTimes(
        step,
        median_seconds("target", run_target, device, runs),
        median_seconds("draft", run_draft, device, runs),
        options.batch_size * options.seq_len,
        flops_per_step(options, target, draft),
        peak_flops(device),
    )


def median_seconds(name: str, work: Callable[[], object], device: torch.device, runs: int) -> float:
    """Of some runs, each waited for, after others that are not counted; `name`: of the work."""
    found = []
    with progress(name, WARM_UP + runs) as stage:
        for i in range(WARM_UP + runs):
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - started)
            stage.advance(detail=f"{found[-1]:.2f} s{', warm-up' if i < WARM_UP else ''}")
    return statistics.median(found[WARM_UP:])
