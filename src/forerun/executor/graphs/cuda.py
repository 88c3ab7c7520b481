"""CUDA graphs: a whole decode step, from proposing to committing, as one launch.

A graph is captured per batch bucket and width, greedy and sampled separately (`captured_flags`). A
batch takes the smallest bucket that holds it and is filled up with the padding slot. A ragged pass
takes the smallest that verifies as many tokens; what it has room for beyond goes to drafts too. As
there are many of these, greedy requests share the graphs of sampled ones. An algorithm whose drafts
have no fixed shape proposes and observes eagerly, before and after a captured verify pass. Batches
that do more with the logits than sampling replay two parts (`split.py`). Deferred observes are
graphs of their own, one per bucket.

Short prompts are captured too, up to 16 together, each padded to a bucket of tokens: launching
their kernels one by one takes the host longer than the GPU needs to run them. Other prefills may be
captured in pieces (`piecewise.py`).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.attention.model_attention import StepBuffers
from forerun.core.errors import AlgorithmError, ConfigError
from forerun.core.logprobs import LogprobParams
from forerun.core.plan import PrefillChunk
from forerun.core.widths import DRAFTING_BATCH
from forerun.executor.graphs.host_results import HostResults
from forerun.executor.graphs.piecewise import (
    CudaGraphRecorder,
    GraphRecorder,
    PiecewisePrefill,
)
from forerun.executor.graphs.split import SplitStep, capture_split
from forerun.executor.graphs.steps import DecodeBatch, DeferredBatch, EagerSteps
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import (
    DecodeOutput,
    PrefillBatch,
    PrefillOutput,
    PrefillTokens,
    SampleInput,
    StepShape,
)
from forerun.grammar.bitmask import num_words
from forerun.kernels.sampling.bitmask import TokenMasks
from forerun.kernels.sampling.penalties import DraftPath
from forerun.kernels.speculation.tree import mask_words
from forerun.sampling.logprobs import LogprobQuery
from forerun.sampling.sampler import GREEDY, SAMPLED, SamplingFlags, captured_flags
from forerun.speculative.base import Draft

log = logging.getLogger("forerun")
# Threads of NCCL query events at any time.
CAPTURE_ERROR_MODE = "thread_local"
PREFILL_BUCKETS = (16, 32, 64, 128, 256)  # tokens of a prompt that is captured
PROMPT_BATCHES = (2, 4, 8, 16)  # prompts that are captured together, all padded to the longest
MAX_PADDED_TOKENS = 1024  # of these: for more, a pass over padding takes longer than launching one


class CapturedPrompts(NamedTuple):
    """Prompts of a captured prefill, tokens of each, and whether some are sampled."""

    size: int
    tokens: int
    flags: SamplingFlags

    @property
    def num_tokens(self) -> int:
        return self.size * self.tokens


def captured_prompts(
    largest: int, longest: int, flags: Sequence[SamplingFlags]
) -> list[CapturedPrompts]:
    """Prefills that are captured, of at most `largest` prompts of at most `longest` tokens.

    The smallest bucket is for a single prompt only. Sampling of a few rows costs greedy requests
    little, so several prompts have the last of `flags`, which serve all.
    """
    alone = [CapturedPrompts(1, tokens, each) for tokens in PREFILL_BUCKETS for each in flags]
    several = [
        CapturedPrompts(size, tokens, flags[-1])
        for size in PROMPT_BATCHES
        for tokens in PREFILL_BUCKETS[1:]
        if size * tokens <= MAX_PADDED_TOKENS
    ]
    fitting = [each for each in alone + several if each.size <= largest and each.tokens <= longest]
    return sorted(fitting, key=lambda prompts: prompts.num_tokens)


def batch_buckets(largest: int) -> list[int]:
    """Batch sizes to capture: 1, 2 and 4, then in steps of 8, 16 (from 64) and 32 (from 128)."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, largest + 1, 32), largest}
    return sorted(size for size in sizes if size <= largest)


class PassShape(NamedTuple):
    """The size of a captured decode step."""

    size: int  # the batch bucket
    width: int  # W
    rows: int = 0  # N, of a ragged pass
    drafting: int = 0  # of a ragged pass: the first requests, which draft; 0: all do

    def __str__(self) -> str:
        rows = f", {self.rows} tokens" if self.rows else ""
        return f"{self.size} x {self.width}{rows}" + (
            f", drafts for {self.drafting}" if self.drafting else ""
        )


@dataclass
class _DecodeGraph:
    graph: torch.cuda.CUDAGraph
    slots: Tensor  # [bucket] int64, static
    draft: Draft | None  # [bucket, W - 1], static, if drafts are proposed outside of the graph
    output: DecodeOutput  # static
    whole: bool  # drafts are captured too; otherwise `observe` runs after every replay
    buffers: StepBuffers | None  # of attention backends that plan on the host
    results: HostResults | None  # None: the tokens are copied to the host after the graph
    last_slots: tuple[int, ...] | None = None  # contents of `slots`


@dataclass
class _ObserveGraph:
    graph: torch.cuda.CUDAGraph
    slots: Tensor  # [bucket] int64, static
    counts: Tensor  # [bucket] int32, static
    buffers: StepBuffers | None  # of attention backends that plan on the host


@dataclass
class _PrefillGraph:
    graph: torch.cuda.CUDAGraph
    slots: Tensor  # [prompts] int64, static
    counts: Tensor  # [prompts] int32, static
    output: PrefillOutput  # static; `observe` is set where that runs outside of the graph


class CudaGraphSteps:
    """The captured steps of one executor. Steps without a graph run eagerly."""

    captured = True
    drafting_parts = 2
    cuts_drafts = False  # each W and N would be a graph

    def __init__(
        self,
        step: DeviceStep,
        kv_len_ub: int,
        largest: int,
        widths: Sequence[float],
        piece_buckets: Sequence[int] = (),
    ) -> None:
        """Makes graphs of batches up to `largest`.

        Args:
            kv_len_ub: largest number of KV slots of a request; lengths are read on the device.
            widths: tokens per request, of a ragged pass in the mean (`Limits.verify_shape`).
            piece_buckets: numbers of tokens, ascending, whose prefill is captured in pieces.
        """
        self.step = step
        self.kv_len_ub = kv_len_ub
        self.sizes = batch_buckets(largest)
        verify_shape = step.tables.limits.verify_shape
        # By batch bucket, W and N of its passes, ascending by tokens (`Limits.verify_shape`).
        self.shapes = {
            size: list(dict.fromkeys(verify_shape(size, width) for width in widths))
            for size in self.sizes
        }
        self._eager = EagerSteps(step)
        self.drafts_for_some = self._eager.drafts_for_some
        self._vocab_is_divided = step.model.vocab_is_divided
        self._flags = captured_flags(self._vocab_is_divided)
        # Padding must stay within a request's KV slots.
        prompts = captured_prompts(self.sizes[-1], kv_len_ub - 1, self._flags)
        self.prompts = prompts if step.captures_prefill else []  # ascending by tokens
        self.piecewise = PiecewisePrefill(step, piece_buckets)
        self._decode: dict[tuple[PassShape, SamplingFlags], _DecodeGraph] = {}
        self._split: dict[PassShape, SplitStep | None] = {}
        self._captures_observe = step.deferred is not None and step.captures_drafts
        self.observes: dict[int, _ObserveGraph] = {}  # by batch bucket
        self._prefill: dict[CapturedPrompts, _PrefillGraph] = {}
        self._buffers: dict[PassShape, StepBuffers | None] = {}
        self._results: dict[PassShape, HostResults] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    # --- capture --------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of steps that `capture` records."""
        prefill = len(self.prompts) + len(self.piecewise.buckets)
        return self.num_decode(self.sizes) + prefill

    def num_decode(self, sizes: Sequence[int]) -> int:
        """Number of decode steps that `capture` records of these batch buckets."""
        passes = (key for size in sizes for key in self._passes(size))
        return sum(len(self._flags_of(key)) for key in passes) + len(sizes) * self._captures_observe

    def _passes(self, size: int) -> Iterator[PassShape]:
        for width, rows in self.shapes[size]:
            yield PassShape(size, width, rows)
            if drafting := self._some_of(size, width, rows):
                yield PassShape(size, width, rows, drafting)

    def _flags_of(self, key: PassShape) -> tuple[SamplingFlags, ...]:
        """The flags of its graphs, the fewest operations first."""
        return self._flags[1:] if key.rows else self._flags

    def _some_of(self, size: int, width: int, rows: int) -> int:
        """The half of the requests, if there is a pass of so many tokens that drafts for them only;
        else 0."""
        half = size // self.drafting_parts
        able = self.drafts_for_some and size >= DRAFTING_BATCH
        return half if able and 0 < rows <= size + half * (width - 1) else 0

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], Any] | None = None) -> None:
        """Captures all steps, the largest first, so that smaller ones reuse its memory.

        Args:
            progress: called with the name of each step before it is captured.

        Raises:
            ConfigError: the algorithm uses operations that cannot be captured.
        """
        self.capture_some(self.sizes, self.prompts, self.piecewise.buckets, progress)
        with self.step.dummy_steps():
            if self.step.deferred is not None and not self._captures_observe:
                self._compile_observe()
            self._compile_sampling()

    @torch.inference_mode()
    def capture_some(
        self,
        sizes: Sequence[int],
        prompts: Sequence[CapturedPrompts],
        piece_buckets: Sequence[int],
        progress: Callable[[str], Any] | None = None,
    ) -> None:
        """Captures decode steps of these batch sizes, these prefills, and then prefills in pieces
        of these numbers of tokens; each is ascending.
        """
        self._pool = torch.cuda.graph_pool_handle()
        report = progress or (lambda name: None)
        with self.step.dummy_steps():
            for size in reversed(sizes):
                for key in reversed(list(self._passes(size))):
                    for flags in self._flags_of(key):
                        report(f"decode {key} {_sampling(flags)}")
                        self._decode[key, flags] = self._capture_decode(key, flags)
                if self._captures_observe:
                    report(f"deferred observe of {size}")
                    self.observes[size] = self._capture_observe(size)
            for prefill in reversed(prompts):
                report(f"prefill {prefill.size} x {prefill.tokens} {_sampling(prefill.flags)}")
                self._prefill[prefill] = self._capture_prefill(prefill)
            self._capture_pieces(report, piece_buckets)

    def repeatable(self, run: Callable[[], object]) -> Callable[[], None]:
        graph, _ = self._captured(run)
        return graph.replay

    def clear(self) -> None:
        """Frees all graphs."""
        self._decode.clear()
        self._split.clear()
        self.observes.clear()
        self._buffers.clear()
        self._results.clear()
        self._prefill.clear()
        self.piecewise.clear()

    def _capture_decode(self, key: PassShape, flags: SamplingFlags) -> _DecodeGraph:
        step, slots = self.step, self._padding(key.size)
        shape, width = self._shape_of(key, flags), key.width
        buffers, results = self._buffers_of(key), self._results_of(key)
        whole = step.captures_drafts
        draft = None if whole or width == 1 else step.empty_draft(slots, width)

        def decode() -> DecodeOutput:
            if whole:
                out = step.decode(slots, shape, None, buffers)
            else:  # `observe` is not captured, and plans attention of its own
                given = step.begin(slots, shape, buffers, proposed=draft is not None)
                own = step.empty_draft(slots, width) if draft is None else draft
                verified = step.verify(replace(given, attention=None), own)
                out = step.commit(verified, step.sample(verified.to_sample, shape))
            if results is not None:
                results.store(out)
            return out

        graph, output = self._captured(decode)
        if results is not None:
            results.reset()
        return _DecodeGraph(graph, slots, draft, output, whole, buffers, results)

    def _shape_of(self, key: PassShape, flags: SamplingFlags) -> StepShape:
        return StepShape(
            key.width, self.kv_len_ub, flags, num_rows=key.rows, num_drafting=key.drafting
        )

    def _buffers_of(self, key: PassShape) -> StepBuffers | None:
        """Buffers of backends that plan on the host; greedy and sampled graphs share them."""
        if key not in self._buffers:
            self._buffers[key] = self.step.plan_buffers(key.size)
        return self._buffers[key]

    def _results_of(self, key: PassShape) -> HostResults | None:
        """Shared by the greedy and sampled graphs."""
        if torch.version.hip is not None:  # not tried there
            return None
        if key not in self._results:
            trees, ragged = self.step.caps.makes_trees and key.width > 1, key.rows > 0
            device = self.step.tables.device
            self._results[key] = HostResults(key.size, key.width, device, trees, ragged)
        return self._results[key]

    def _capture_observe(self, size: int) -> _ObserveGraph:
        step, slots, buffers = self.step, self._padding(size), self.step.plan_buffers(size)
        counts = torch.zeros(size, dtype=torch.int32, device=slots.device)
        graph, _ = self._captured(
            lambda: step.observe_deferred(slots, counts, self.kv_len_ub, buffers)
        )
        return _ObserveGraph(graph, slots, counts, buffers)

    def _capture_prefill(self, prompts: CapturedPrompts) -> _PrefillGraph:
        step, slots = self.step, self._padding(prompts.size)
        counts = torch.ones(prompts.size, dtype=torch.int32, device=slots.device)
        shape = StepShape(prompts.tokens, self.kv_len_ub, prompts.flags)

        def prefill() -> PrefillOutput:
            output = step.prefill_padded(slots, counts, shape)
            if not step.captures_drafts:
                return output
            step.observe_prefill(output)
            return replace(output, observe=None)

        graph, output = self._captured(prefill)
        return _PrefillGraph(graph, slots, counts, output)

    def _capture_pieces(self, report: Callable[[str], Any], buckets: Sequence[int]) -> None:
        if not buckets:
            return
        device, recorder = self.step.tables.device, self._recorder()
        for count in reversed(buckets):
            report(f"prefill {count} in pieces")
            with self._on_stream(device):
                self.piecewise.capture(recorder, count)
        # `observe` ran eagerly. If it failed, requests end with that error, as without pieces.
        self.step.algorithm.take_error()

    def _recorder(self) -> GraphRecorder:
        return CudaGraphRecorder(self._pool)

    @contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """Runs the block on the capture stream, after all work before it and before all after it.

        PyTorch's default capture stream belongs to the first device that captured. One stream for
        all graphs: memory that one of them freed is reused on the same stream only.
        """
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(device).wait_stream(stream)

    def _captured(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        failed: Exception | None = None
        device = self.step.tables.device
        graph, output = torch.cuda.CUDAGraph(), None
        try:
            with self._on_stream(device):  # lazy initialisation must not be captured
                run()
            with torch.cuda.graph(graph, self._pool, self._stream, CAPTURE_ERROR_MODE):
                output = run()
        except RuntimeError as error:  # may be caused by an error of the algorithm
            failed = error
        self._raise(self.step.algorithm.take_error() or failed)
        return graph, output

    def _compile_observe(self) -> None:
        """Runs deferred observes of all batch sizes, so that their kernels compile at start.

        `_eager` keeps their buffers: a library may still copy a plan out of pinned memory.
        """
        for size in self.sizes:
            slots, lengths = [self.step.tables.padding_slot] * size, HostBatch.padding(size)
            batch = DeferredBatch(slots, [0] * size, self.kv_len_ub, lengths)
            self._eager.observe_deferred(batch)
        self._raise(self.step.algorithm.take_error())

    def _compile_sampling(self) -> None:
        """Runs what a step in two parts does between them, so that its kernels compile at start."""
        step, sampler = self.step, self.step.sampler
        groups = {
            (last - first, key.width)
            for size in self.sizes
            for key in self._passes(size)
            for first, last in sampler.groups(key.size, key.width)
        }
        for size, width in sorted(groups):
            slots = self._padding(size)
            ids = slots.new_zeros(size, width)
            words = ids.new_ones(size, width, mask_words(width))
            path = DraftPath(ids, words if step.caps.makes_trees and width > 1 else None)
            positions = (ids + 1).int()
            bitmask = slots.new_zeros(1, num_words(step.model.config.vocab_size)).int()
            masks = TokenMasks(bitmask - 1, torch.zeros_like(positions))  # all are allowed
            embedded = step.model.embed(ids.flatten())
            tokens = SampleInput(embedded, positions, slots, path, masks)
            for flags, query in (
                (replace(GREEDY, penalties=True), None),
                (replace(SAMPLED, penalties=True), None),
                (GREEDY, LogprobQuery.of([LogprobParams(top=1)])),
                (SAMPLED, None),
            ):
                sampler.sample(tokens, StepShape(width, self.kv_len_ub, flags, query))

    def _raise(self, failed: Exception | None) -> None:
        if isinstance(failed, AlgorithmError):
            raise ConfigError(
                f"The algorithm cannot be captured: {failed} With"
                " supports_target_verify_for_draft it must not read the device on the host, nor"
                " make tensors from host values, in propose and observe; disable_cuda_graph runs"
                " it uncaptured."
            ) from failed
        if failed is not None:
            raise failed

    def _padding(self, size: int) -> Tensor:
        tables = self.step.tables
        return torch.full((size,), tables.padding_slot, dtype=torch.int64, device=tables.device)

    # --- replay ---------------------------------------------------------------------------------

    def measured_batches(self, largest: int) -> list[int]:
        sizes = [size for size in self.sizes if size <= largest]
        if not self.step.tables.limits.ragged:
            return sizes
        # A bucket has many passes: those of the sizes between follow from their neighbours.
        return [size for size in sizes if size.bit_count() == 1 or size == sizes[-1]]

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        """Replays the step; the tensors returned are overwritten by the next replay.

        On NVIDIA GPUs they are on the host already (`HostResults`), complete when the step is.
        """
        if batch.shape.edits_logits:
            return self._decode_split(batch)
        batch = replace(batch, kv_len_ub=self.kv_len_ub)
        if len(batch.slots) > self.sizes[-1]:
            return self._eager.decode(batch)
        slots, count = self._padded(batch.slots), len(batch.slots)
        captured = self._decode[self._graph_of(batch, len(slots))]
        if slots != captured.last_slots:
            self._fill(captured.slots, slots)
            captured.last_slots = slots
        if captured.draft is not None:
            self._fill_draft(captured.draft, self._eager.propose(batch), count)
        if captured.buffers is not None:
            captured.buffers.begin(batch.lengths)
        captured.graph.replay()
        output, results = captured.output, captured.results
        tokens = output.of_first(count) if results is None else results.replayed(count)
        if not captured.whole:
            self.step.observe(output)
        return tokens

    def _decode_split(self, batch: DecodeBatch) -> DecodeOutput:
        """A step that does more with the logits than sampling (`split.py`)."""
        if len(batch.slots) > self.sizes[-1]:
            return self._eager.decode(batch)
        slots = self._padded(batch.slots)
        key = self._pass_of(batch, len(slots))._replace(drafting=0)
        if key not in self._split:
            self._split[key] = self._capture_split(key)
        split = self._split[key]
        if split is None:
            return self._eager.decode(batch)
        self._fill(split.slots, slots)
        if split.draft is not None:
            self._fill_draft(split.draft, self._eager.propose(batch), len(batch.slots))
        if split.buffers is not None:
            split.buffers.begin(batch.lengths)
        return split.replay(batch.shape, len(batch.slots))

    def _capture_split(self, key: PassShape) -> SplitStep | None:
        """None: there is no memory for it, and steps of this shape run eagerly."""
        device, slots = self.step.tables.device, self._padding(key.size)
        shape, buffers = self._shape_of(key, SAMPLED), self._buffers_of(key)
        try:
            with self.step.dummy_steps(), self._on_stream(device):
                split = capture_split(self.step, self._recorder(), slots, shape, buffers)
        except torch.OutOfMemoryError:
            log.warning("decode %s runs eagerly with penalties: out of memory", key)
            return None
        self._raise(self.step.algorithm.take_error())
        return split

    def observe_deferred(self, batch: DeferredBatch) -> None:
        slots = self._padded(batch.slots)
        counts = [*batch.counts, *[0] * (len(slots) - len(batch.slots))]
        lengths = batch.lengths.padded(len(slots))
        captured = self.observes.get(len(slots))
        if captured is None:
            padded = DeferredBatch(slots, counts, self.kv_len_ub, lengths)
            return self._eager.observe_deferred(padded)
        self._fill(captured.slots, slots)
        self._fill(captured.counts, counts)
        if captured.buffers is not None:
            captured.buffers.begin(lengths)
        captured.graph.replay()

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        captured = None
        if not batch.edits_logits and batch.reads_ends_only:
            captured = self._prefill_graph(batch.chunks, batch.flags)
        if captured is None:
            return self.step.prefill(batch, self.piecewise.forward(batch.num_tokens))
        tables, num_prompts, size = self.step.tables, len(batch.chunks), len(captured.slots)
        padding = size - num_prompts
        slots = [chunk.slot for chunk in batch.chunks] + [tables.padding_slot] * padding
        counts = [chunk.num_tokens for chunk in batch.chunks] + [1] * padding
        self._fill(captured.slots, slots)
        self._fill(captured.counts, counts)
        captured.graph.replay()
        out, ends = captured.output, range(num_prompts)
        pooled = None if batch.pooled is None else batch.pooled.sums(out.hidden_states, ends)
        self.step.observe_prefill(out)
        return PrefillTokens(out.sampled[:num_prompts], pooled=pooled)

    def _prefill_graph(
        self, chunks: Sequence[PrefillChunk], flags: SamplingFlags
    ) -> _PrefillGraph | None:
        """The smallest captured prefill that holds the ends of these prompts."""
        if not all(chunk.last for chunk in chunks):
            return None
        longest, start = max(c.num_tokens for c in chunks), max(c.start for c in chunks)
        alone = len(chunks) == 1
        wanted = flags.widened(self._vocab_is_divided) if alone else self._flags[-1]
        for prompts in self.prompts:
            holds = prompts.size >= len(chunks) and prompts.tokens >= longest
            fits = start + prompts.tokens < self.kv_len_ub  # with padding
            if holds and fits and prompts.flags == wanted:
                return self._prefill[prompts]
        return None

    def _graph_of(self, batch: DecodeBatch, size: int) -> tuple[PassShape, SamplingFlags]:
        """The captured step that serves a batch padded to `size` requests."""
        key, flags = self._pass_of(batch, size), batch.flags.widened(self._vocab_is_divided)
        own = self._flags_of(key)
        return key, own[0] if flags == GREEDY else flags

    def _pass_of(self, batch: DecodeBatch, size: int) -> PassShape:
        """The captured pass of `size` requests that verifies as many tokens.

        Each padding slot takes one of them. The full width, where no ragged pass is as large.
        """
        width, shapes = batch.num_verify_tokens, self.shapes[size]
        if not batch.num_rows and (width, 0) in shapes:
            return PassShape(size, width)
        needed = (batch.num_rows or len(batch.slots) * width) + size - len(batch.slots)
        enough = (shape for shape in shapes if shape[0] >= width and shape[1] >= needed)
        wide, rows = next(enough, shapes[-1])
        some = self._some_of(size, wide, rows)
        return PassShape(size, wide, rows, some if 0 < batch.num_drafting <= some else 0)

    def _padded(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The slots, padded to the next bucket; unchanged if the batch exceeds the largest one."""
        if len(slots) > self.sizes[-1]:
            return tuple(slots)
        size = self.sizes[bisect.bisect_left(self.sizes, len(slots))]
        return (*slots, *[self.step.tables.padding_slot] * (size - len(slots)))

    def _fill(self, static: Tensor, values: Sequence[int]) -> None:
        static.copy_(self.step.tables.upload(values, static.dtype), non_blocking=True)

    @staticmethod
    def _fill_draft(static: Draft, draft: Draft | None, count: int) -> None:
        if draft is None:
            return
        static.tokens[:count] = draft.tokens
        if static.parents is not None and draft.parents is not None:
            static.parents[:count] = draft.parents


def _sampling(flags: SamplingFlags) -> str:
    if not flags.sampled:
        return "greedy"
    return "sampled" if flags.whole_rows else "sampled from own logits"
