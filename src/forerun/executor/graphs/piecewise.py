"""Piecewise CUDA graphs: a prefill whose attention runs eagerly between captured pieces.

Attention depends on how the tokens are divided into requests and on their contexts; the rest of the
target's forward depends on the number of tokens alone. So for some numbers of tokens (buckets) the
forward is captured as one graph per stretch between two attention calls:

    piece 0        embedding, first norm, QKV projection
    attention 0    eager, on the batch's own tokens with its own plan: RoPE, K/V write, attention
    piece 1        output projection and MLP of layer 0, QKV projection of layer 1
    ...
    piece L        output projection and MLP of the last layer, final norm

A batch takes the smallest bucket that holds its tokens. Padding tokens come after the real ones. In
the pieces no token reads another one, and padding reaches neither K/V nor attention.

A graph starts after all work before it, and later work starts after the graph: programmatic
dependent launch overlaps kernels within a piece only (`kernels/runtime/pdl.py`).

Models do not know about it: the `AttentionContext` that a forward is given ends a piece where
attention begins, and begins the next one. (vLLM: piecewise CUDA graphs, cut by the compiler;
SGLang: breakable CUDA graphs, cut at capture as here.)
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionContext,
    AttentionSpec,
    LatentNormRope,
    LatentProjection,
    QKNormRope,
    RopeInput,
)
from forerun.core.errors import InternalError
from forerun.executor.step.device_step import DeviceStep, TargetForward
from forerun.executor.step.inputs import PrefillBatch, dummy_chunks
from forerun.sampling.sampler import GREEDY

DEFAULT_MAX_TOKENS = 2048
SMALLEST = 32  # tokens
# A prefill is host-bound if launching its kernels takes more than this part of its time.
HOST_BOUND = 0.9
TIMED_RUNS = 2


def token_buckets(largest: int) -> list[int]:
    """Numbers of tokens to capture: 32, 64, 96, 128, 192, 256, 384, ..., and `largest`."""
    powers = [SMALLEST << n for n in range(largest.bit_length())]
    sizes = {*powers, *(size * 3 // 2 for size in powers[1:])}
    return sorted({size for size in sizes if size < largest} | {largest})


@torch.inference_mode()
def host_bound_buckets(step: DeviceStep, buckets: Sequence[int]) -> list[int]:
    """The buckets (ascending) whose prefill takes the host longer to launch than the GPU to run.

    Launching takes about the same time for any number of tokens. So a batch that is padded to such
    a bucket runs no longer than its kernels took to launch: padding does not make it slower.
    Running takes longer the more tokens there are. So these buckets come first, and a bisection
    finds the last one. It runs few sizes, since the first prefill of a size loads its kernels.
    """
    with step.dummy_steps():
        end = bisect.bisect_left(buckets, True, key=lambda count: not _is_host_bound(step, count))
        step.tables.reset_padding_slot()
    return list(buckets[:end])


def _is_host_bound(step: DeviceStep, count: int) -> bool:
    def seconds() -> tuple[float, float]:
        """Measures the time until all is launched, and until all has run."""
        torch.cuda.synchronize(step.tables.device)
        begin = time.perf_counter()
        _dummy_prefill(step, count)
        launched = time.perf_counter() - begin
        torch.cuda.synchronize(step.tables.device)
        return launched, time.perf_counter() - begin

    seconds()  # loads kernels
    runs = [seconds() for _ in range(TIMED_RUNS)]
    launched, whole = min(run[0] for run in runs), min(run[1] for run in runs)
    return launched > HOST_BOUND * whole


def _dummy_prefill(step: DeviceStep, count: int, forward: TargetForward | None = None) -> None:
    """A prefill of `count` tokens of the padding slot, in chunks that its tables hold."""
    tables = step.tables
    chunks = dummy_chunks(tables.padding_slot, count, tables.history.shape[1] - 1, last=False)
    step.prefill(PrefillBatch(chunks, GREEDY), forward)


class GraphRecorder(Protocol):
    """Captures pieces one after another."""

    def begin(self) -> None:
        """Begins a piece."""

    def end(self) -> Callable[[], None]:
        """Ends the piece; returns what replays it."""

    def abort(self) -> None:
        """Ends a piece that an error has interrupted; nothing if none has begun."""

    def borrow(self, x: Tensor) -> Tensor:
        """The memory of x, which later pieces may use for other tensors."""


class CudaGraphRecorder:
    """CUDA graphs in one memory pool; its stream is current while it records.

    `torch.cuda.graph` would wait for the GPU and empty PyTorch's cache at each piece.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Threads of other engines may go on: nothing they do can end up in this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        assert graph is not None, "no piece has begun"
        graph.capture_end()
        return graph.replay

    def abort(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # the capture is invalid; what made it so is being raised
                graph.capture_end()

    def borrow(self, x: Tensor) -> Tensor:
        """A view of x's memory that does not keep it allocated in the pool.

        Kept alive, the inputs of attention would take memory for each layer and bucket.
        """
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        memory = _Memory(x.data_ptr(), (last + 1) * x.element_size())
        flat = torch.as_tensor(memory, device=x.device)
        if flat.data_ptr() != x.data_ptr():
            raise InternalError("PyTorch copied memory that it was to share.")
        return flat.view(x.dtype).as_strided(x.shape, x.stride())


class _Memory:
    """Bytes on a GPU that belong to someone else, as PyTorch takes them.

    As bytes, because `__cuda_array_interface__` knows neither bfloat16 nor float8.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass
class _Batch:
    """The real tokens of one replay."""

    ctx: AttentionContext
    count: int
    _ropes: dict[RopeInput, RopeInput] = field(default_factory=dict)

    def rope(self, rope: RopeInput) -> RopeInput:
        """RoPE of the real tokens; one object for all layers, so that it gathers once."""
        if rope not in self._ropes:
            self._ropes[rope] = rope.first(self.count)
        return self._ropes[rope]


Attend = Callable[[_Batch], Tensor]  # the attention of one layer: [T, Hq, D] of the real tokens


@dataclass
class AttentionOutputs:
    """What attention writes and the next piece reads: one buffer for all layers and buckets.

    Past a batch's tokens it holds the outputs of earlier batches (zeros at first), so padding has
    finite values in the pieces.
    """

    max_tokens: int
    _made: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, like: Tensor, heads: int, dim: int) -> Tensor:
        """[T, heads, dim] for the T tokens of `like`."""
        key = heads, dim, like.dtype
        if key not in self._made:
            self._made[key] = like.new_zeros(self.max_tokens, heads, dim)
        return self._made[key][: len(like)]


class _Recording:
    """The pieces of one forward and the attention calls between them, while they are captured."""

    def __init__(self, recorder: GraphRecorder, outputs: AttentionOutputs) -> None:
        self._recorder, self._outputs = recorder, outputs
        self.pieces: list[Callable[[], None]] = []
        self.calls: list[tuple[Attend, Tensor]] = []  # and what the next piece reads of each

    def end_piece(self, *results: Tensor) -> list[Tensor]:
        """Returns the piece's results, valid until the next piece is replayed."""
        self.pieces.append(self._recorder.end())
        return [self._recorder.borrow(x) for x in results]

    def begin_piece(self, attend: Attend, like: Tensor, heads: int, dim: int) -> Tensor:
        """Begins what follows attention; returns its output, valid until the next layer's."""
        out = self._outputs.of(like, heads, dim)
        self.calls.append((attend, out))
        self._recorder.begin()
        return out


@dataclass(frozen=True)
class _RecordingContext(AttentionContext):
    """Runs no attention while the pieces are captured; the replays do."""

    recording: _Recording

    def run(
        self, layer: int, spec: AttentionSpec, qkv: Tensor, norm_rope: QKNormRope, rope: RopeInput
    ) -> Tensor:
        (qkv,) = self.recording.end_piece(qkv)

        def attend(batch: _Batch) -> Tensor:
            own = qkv[: batch.count]
            return batch.ctx.run(layer, spec, own, norm_rope, batch.rope(rope))

        return self.recording.begin_piece(attend, qkv, norm_rope.heads, norm_rope.dim)

    def run_shared(self, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        (q,) = self.recording.end_piece(q)

        def attend(batch: _Batch) -> Tensor:
            return batch.ctx.run_shared(layer, spec, q[: batch.count])

        return self.recording.begin_piece(attend, q, *q.shape[1:])

    def run_latent(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        kv_a: Tensor,
        norm_rope: LatentNormRope,
        rope: RopeInput,
        up: LatentProjection,
    ) -> Tensor:
        q, kv_a = self.recording.end_piece(q, kv_a)

        def attend(batch: _Batch) -> Tensor:
            own = q[: batch.count], kv_a[: batch.count]
            return batch.ctx.run_latent(layer, spec, *own, norm_rope, batch.rope(rope), up)

        return self.recording.begin_piece(attend, q, up.num_heads, up.dims.v)


class PiecewiseForward:
    """A forward over up to N tokens, in pieces."""

    def __init__(self, forward: TargetForward, recorder: GraphRecorder, outputs: AttentionOutputs):
        self._forward, self._recorder, self._outputs = forward, recorder, outputs

    def capture(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> None:
        """Captures the forward over N tokens, and runs nothing.

        Args:
            ids, positions: [N], any valid ones; the padding's, until batches overwrite them.
            ctx: of N tokens.
        """
        self._ids, self._positions = ids.clone(), positions.clone()
        recording = _Recording(self._recorder, self._outputs)
        context = _RecordingContext(ctx.backend, ctx.plan, ctx.batch, recording)
        try:
            self._recorder.begin()
            hidden_states, aux = self._forward(self._ids, self._positions, context)
            recording.end_piece()
        finally:
            self._recorder.abort()
        self._pieces, self._calls = recording.pieces, recording.calls
        self._hidden_states = self._recorder.borrow(hidden_states)
        self._aux = None if aux is None else self._recorder.borrow(aux)

    def __call__(
        self, ids: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """Runs T <= N tokens. The next replay of any step overwrites the tensors it returns."""
        count = ids.shape[0]
        self._ids[:count] = ids
        self._positions[:count] = positions
        batch = _Batch(ctx, count)
        for piece, (attend, out) in zip(self._pieces, self._calls, strict=False):
            piece()
            out[:count] = attend(batch)
        self._pieces[-1]()
        aux = self._aux
        return self._hidden_states[:count], None if aux is None else aux[:count]


class PiecewisePrefill:
    """The captured forwards of one `DeviceStep`, by bucket."""

    def __init__(self, step: DeviceStep, buckets: Sequence[int]) -> None:
        self.step = step
        self.buckets = list(buckets)  # ascending
        self._outputs = AttentionOutputs(max(self.buckets, default=0))
        self._forwards: dict[int, PiecewiseForward] = {}

    def capture(self, recorder: GraphRecorder, count: int) -> None:
        """Captures one bucket; in a block of dummy steps, the largest bucket first."""
        step = self.step
        _dummy_prefill(step, count)  # lazy initialisation must not be captured

        def forward(
            ids: Tensor, positions: Tensor, ctx: AttentionContext
        ) -> tuple[Tensor, Tensor | None]:
            pieces = PiecewiseForward(step.forward, recorder, self._outputs)
            pieces.capture(ids, positions, ctx)
            self._forwards[count] = pieces
            return pieces(ids, positions, ctx)

        _dummy_prefill(step, count, forward)
        step.tables.reset_padding_slot()

    def forward(self, count: int) -> TargetForward | None:
        """Returns what runs a prefill of `count` tokens; None: it runs eagerly."""
        at = bisect.bisect_left(self.buckets, count)
        return None if at == len(self.buckets) else self._forwards[self.buckets[at]]

    def clear(self) -> None:
        """Frees all pieces."""
        self._forwards.clear()
        self._outputs = AttentionOutputs(self._outputs.max_tokens)
