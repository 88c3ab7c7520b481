"""`run`: trains a draft as the options say and exports the best one."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import ConfigError, first_line
from forerun.models.safetensors_files import fingerprint
from forerun.models.tokenizer import load_tokenizer
from forerun_train.batch import Batch
from forerun_train.data.packing import PackedStream
from forerun_train.data.records import open_records
from forerun_train.data.rendering import Renderer
from forerun_train.drafts.build import BuiltDraft, build_draft, initial_vocabulary
from forerun_train.drafts.mask_token import choose_mask_token
from forerun_train.drafts.speculators import (
    check_kind,
    speculators_config,
    speculators_tensors,
)
from forerun_train.files import check_output, disk_errors, export_draft
from forerun_train.hidden_states import FrozenTarget, load_frozen_target
from forerun_train.hidden_store import StoredStream, StorePlan, open_store
from forerun_train.trainer.checkpoint import (
    Checkpoints,
    check_same_contents,
    check_same_settings,
    read_state,
)
from forerun_train.trainer.distributed import Ranks, joined_ranks, shard, whole_parameters
from forerun_train.trainer.flops import flops_per_step, peak_flops
from forerun_train.trainer.loop import Ahead, Progress, Stream, Trainer, Window
from forerun_train.trainer.memory import check_memory
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.report import write_report
from forerun_train.trainer.validation import validate
from forerun_train.trainer.view import Log

DRAFT = "draft"  # the exported one, in the output folder
GO_ON = "What was saved before is intact: repair that, and --resume goes on."
COUNTED_BATCHES = 64  # of which a pruned vocabulary's frequencies are taken


@dataclass(frozen=True)
class Data:
    """What a run reads: streams begin anew with every call."""

    train: Callable[[], Stream]
    validation: Callable[[], Stream]
    fingerprint: str = ""  # of what they say


@dataclass(frozen=True)
class Reader:
    """Who reads the data: a target with its tokenizer, in one of the ranks."""

    tokenizer: Any
    vocab_size: int
    ranks: Ranks


OpenData = Callable[[TrainOptions, Reader], Data]


def run(options: TrainOptions, open_data: OpenData | None = None) -> Path:
    """Trains, and returns the folder of the exported draft.

    Args:
        open_data: makes the data of a run; None: what `options.data` names.

    Raises:
        ConfigError: whatever cannot be done, before it starts.
    """
    options.check()
    if options.layout == "speculators":
        check_kind(options.kind)
    output = Path(options.output)
    with joined_ranks(options.device, options.batch_size) as ranks, disk_errors(output, GO_ON):
        if ranks.first:
            check_output(output)
        checkpoint = _resumed(options, Checkpoints(output, ranks))
        dtype = compute_dtype(options.dtype, ranks.device)
        target = load_frozen_target(options.target, dtype, ranks.device, options.seq_len)
        tokenizer = load_tokenizer(target.folder)
        vocab_size = target.config.vocab_size
        data = (open_data or open_records_of)(options, Reader(tokenizer, vocab_size, ranks))
        mask = choose_mask_token(tokenizer, vocab_size, options.mask_token_id)
        train(options, ranks, target, data, mask, checkpoint)
    return output / DRAFT


def train(
    options: TrainOptions,
    ranks: Ranks,
    target: FrozenTarget,
    data: Data,
    mask_token: int,
    checkpoint: Path | None = None,
) -> None:
    """Trains a draft for a loaded target, from a checkpoint or from the beginning.

    Raises:
        ConfigError: whatever cannot be done.
    """
    contents = {"the target": fingerprint(target.folder), "the data": data.fingerprint}
    if checkpoint is not None:
        check_same_contents(read_state(checkpoint)["contents"], contents)
    ids = _vocabulary(options, data, target, ranks)
    built = build_draft(options, target, mask_token, ids)
    shard(built.model, ranks, target.dtype)
    needed = check_memory(options, target, built.model, ranks.size)
    if ranks.first:
        print(needed, flush=True)
    Job(options, ranks, target, built, data, contents).train(checkpoint)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of target and computation; masters are float32 whatever it is."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def open_records_of(options: TrainOptions, reader: Reader) -> Data:
    """The records of `options.data`, packed."""
    renderer = Renderer.of(reader.tokenizer, options.template, reader.vocab_size)
    train, validation = open_records(
        options.data, options.validation_share, options.seed, options.max_errors
    )
    if reader.ranks.first and train.skipped.count:
        print(train.skipped, flush=True)
    sizes = options.seq_len, options.batch_size, options.seed
    rows = reader.ranks.rows(options.batch_size)
    said = [train.lines.fingerprint, validation.lines.fingerprint, renderer.template or ""]
    return Data(
        lambda: PackedStream(train, renderer, *sizes, rows),
        lambda: PackedStream(validation, renderer, *sizes, rows),
        hashlib.sha256("\n".join(said).encode()).hexdigest()[:16],
    )


def _resumed(options: TrainOptions, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint to go on from; None: a new run."""
    newest = checkpoints.newest()
    if newest is None:
        if options.resume and checkpoints.folder.parent.exists():
            print(f"No checkpoint in {options.output} yet: a new run begins.", flush=True)
        return None
    if not options.resume:
        raise ConfigError(
            f"{options.output} has a run already, at {newest.name}; give --resume to go on with it,"
            " or another output folder."
        )
    check_same_settings(read_state(newest)["settings"], options.settings())
    return newest


def _vocabulary(
    options: TrainOptions, data: Data, target: FrozenTarget, ranks: Ranks
) -> Tensor | None:
    """The tokens of a pruned vocabulary, [V_d] int64, rising: those of the draft that a run begins
    with, or the most frequent labels; None: it is not pruned.

    Raises:
        ConfigError: the target has not so many.
    """
    size, whole = options.draft_vocab_size, target.config.vocab_size
    if options.initial_draft is not None:
        return initial_vocabulary(Path(options.initial_draft))
    if size is not None and size > whole:
        raise ConfigError(f"draft_vocab_size {size} is more than the target has, {whole} tokens.")
    if size is None or size == whole:
        return None
    counts = torch.zeros(whole, dtype=torch.int64)
    for _, batch in zip(range(COUNTED_BATCHES), data.train(), strict=False):
        labels = batch.input_ids[batch.loss_mask]
        counts += torch.bincount(labels, minlength=len(counts))
    counts = ranks.sum(counts.to(ranks.device)).cpu()
    return counts.topk(size).indices.sort().values


@dataclass
class Clock:
    """Seconds of training, those of earlier processes too."""

    earlier: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """So far."""
        return self.earlier + time.perf_counter() - self.started


@dataclass
class Job:
    """A run from its first step to its last."""

    options: TrainOptions
    ranks: Ranks
    target: FrozenTarget
    built: BuiltDraft
    data: Data
    contents: dict[str, str]  # fingerprints of what a resumed run must find again
    best: float = -1.0  # accept length
    progress: Progress = field(init=False)
    _next_fit: int = 0  # the step after which the schedule is fitted to the time again

    def __post_init__(self) -> None:
        minutes = self.options.max_minutes
        seconds = None if minutes is None else 60 * minutes
        self.progress = Progress(self.options.max_steps, seconds)
        self._output = Path(self.options.output)
        self._checkpoints = Checkpoints(self._output, self.ranks)
        self._flops = flops_per_step(self.options, self.target, self.built.model)
        self._peak = peak_flops(self.target.device)
        self._trainer = Trainer(self.options, self.target, self.built.model, self.ranks)

    def train(self, checkpoint: Path | None) -> None:
        """Trains from a checkpoint, or from the beginning."""
        stream = self._stream()
        if checkpoint is not None:
            self._load(checkpoint, stream)
        compiled = self.options.compile
        if self.target.device.type == "cuda" if compiled is None else compiled:
            self.built.model.compile_parts(divided=self.ranks.size > 1)
        resumed = None if checkpoint is None else self.progress.step
        self._log = Log(self.options, self.ranks.first, resumed)
        self._scored = self._validation_batches()
        try:
            with Ahead(stream).running() as batches:
                self._steps(batches)
        except torch.OutOfMemoryError as error:
            size = self.options.micro_batch or self.options.batch_size // self.ranks.size
            raise ConfigError(
                f"The GPU's memory ran out at step {self.progress.step}: {first_line(error)}. Set"
                f" --micro-batch below {size} or --activation-checkpointing, and --resume; the"
                " result stays the same."
            ) from None
        except KeyboardInterrupt:
            if self.ranks.first:
                print(f"Stopped at step {self.progress.step}; {self._kept}. --resume goes on.")
            raise
        finally:
            self._log.close()

    def _stream(self) -> Stream:
        """The data, with hidden states where these are stored."""
        if self.options.hidden_states is None:
            return self.data.train()
        layers = self.built.model.target_layer_ids
        ranks = self.ranks.rank, self.ranks.size
        plan = StorePlan(self.options, self.target, layers, *ranks, self.contents)
        return StoredStream(open_store(plan, self.data.train()))

    def _steps(self, batches: Ahead) -> None:
        progress, options, window = self.progress, self.options, Window()
        clock = Clock(progress.elapsed)
        while not progress.ended:
            host, position = batches.next()
            window.waited += batches.waited
            window.steps.append(self._trainer.step(host, progress.step, progress.done))
            progress.advance()
            validating, saving = (
                self._is_due(every) for every in (options.validate_every, options.save_every)
            )
            warm = progress.step == WARM_STEPS
            if validating or saving or warm or self._is_due(options.log_every):
                line = self._checked(window.read())
                self._fit(clock)
                self._log.write(self._log_line(line))
            elif progress.step == self._next_fit:
                window.wait()
                self._fit(clock)
            if warm and not clock.earlier:
                self._compile_validation()  # compiling is not training
                clock = Clock()
            if validating or progress.ended:
                self._validate()
            if saving or progress.ended:
                self._save(position)
            if validating or saving or warm:
                window.started = time.perf_counter()

    def _checked(self, line: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            ConfigError: the loss is not a number any more; what was saved is from before.
        """
        if math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"]):
            return line
        raise ConfigError(
            f"The loss is {line['loss']} before step {self.progress.step}; {self._kept}. Lower"
            " learning_rate, or set dtype to float32, and start anew in another output folder."
        )

    @property
    def _kept(self) -> str:
        """What a run that ends here leaves."""
        newest = self._checkpoints.newest()
        return "nothing was saved yet" if newest is None else f"{newest.name} is intact"

    def _is_due(self, every: int) -> bool:
        return self.progress.ended or self.progress.step % every == 0

    def _fit(self, clock: Clock) -> None:
        """Fits the schedule to the time that is left, at the pace so far."""
        progress, every = self.progress, 1
        steps = progress.step - WARM_STEPS
        if steps > 0:
            elapsed = self.ranks.of_first(clock.seconds)
            progress.fit(elapsed, elapsed / steps)
            every = max(1, int(FIT_SHARE * (progress.max_seconds or 0) * steps / elapsed))
        if progress.max_seconds is not None:
            self._next_fit = progress.step + every

    def _compile_validation(self) -> None:
        """Runs one batch of validation data, where that compiles what it needs."""
        if self.built.model.compiled:
            options = self.options
            arguments = self.target, self._scored[:1], options.anchors, options.seed
            validate(self.built.model, *arguments)

    def _log_line(self, line: dict[str, Any]) -> dict[str, Any]:
        options, progress = self.options, self.progress
        tokens = options.batch_size * options.seq_len / line["seconds_per_step"]
        rate = self._flops / line["seconds_per_step"] / self.ranks.size
        return {
            "step": progress.step,
            "done": round(progress.done, 4),
            "learning_rate": self._trainer.optimizers.rate(progress.done),
            **line,
            "tokens_per_second": round(tokens),
            "tflops": rate / 1e12,
            **({} if self._peak is None else {"mfu": rate / self._peak}),
        }

    def _validation_batches(self) -> Sequence[Batch]:
        wanted = range(self.options.validation_batches)
        pairs = zip(wanted, self.data.validation(), strict=False)
        whole = [Batch.of(batch, self.target.device) for _, batch in pairs]
        size = self.options.micro_batch or len(whole[0].input_ids)
        return [
            batch.part(slice(first, first + size))
            for batch in whole
            for first in range(0, len(batch.input_ids), size)
        ]

    def _validate(self) -> None:
        """Scores the draft, and exports it if it is the best so far."""
        options = self.options
        found = validate(self.built.model, self.target, self._scored, options.anchors, options.seed)
        self._log.write({"step": self.progress.step, **found.as_log()})
        if self.ranks.first:
            write_report(self._output, options.settings() | {"output": options.output})
        if found.accept_length > self.best:
            self.best = found.accept_length
            self._export()

    def _export(self) -> None:
        parameters = whole_parameters(self.built.model)
        if not self.ranks.first:
            return
        raw, tensors, options = self.built.raw, self.built.stored(parameters), self.options
        if options.layout == "speculators":
            raw = speculators_config(options.kind, raw, self.target.config, options.target)
            tensors = speculators_tensors(tensors)
        export_draft(self._output / DRAFT, raw, tensors)

    def _save(self, position: dict[str, Any]) -> None:
        state = {
            "settings": self.options.settings(),
            "contents": self.contents,
            "data": self.ranks.joined(position),
            "progress": self.progress.state(),
            "best": self.best,
        }
        self._checkpoints.save(
            self.progress.step, self.built.model, self._trainer.optimizers, state
        )

    def _load(self, checkpoint: Path, stream: Stream) -> None:
        state = read_state(checkpoint)
        self._checkpoints.load(checkpoint, self.built.model, self._trainer.optimizers)
        stream.load_state_dict(state["data"])
        self.progress.load(state)
        self.best = float(state["best"])


WARM_STEPS = 3  # what is compiled is compiled in these
FIT_SHARE = 0.02  # of a run's time, after which its schedule is fitted again
