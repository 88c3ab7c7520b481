"""The attention of one model: its pools, a backend per phase, host planning per decode shape."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    Buffers,
    DecodeShape,
    HostBatch,
)
from forerun.attention.capabilities import HostLengths
from forerun.kvcache.pools import ModelPools


class StepBuffers:
    """The buffers of one captured decode step, over all backends and forwards in it.

    They are made when the step first runs (its warm-up, before capture) and prepared again before
    every run: `begin`, then the step.
    """

    def __init__(self, batch_size: int, kv_len_ub: int) -> None:
        """`kv_len_ub`: the longest context that any run of this step may meet."""
        self._batch_size = batch_size
        self._kv_len_ub = kv_len_ub
        self._host = HostBatch.padding(batch_size)
        self._made: dict[tuple[AttentionBackend, DecodeShape, int], Buffers] = {}

    def begin(self, host: HostBatch | None) -> None:
        """Prepares all buffers for a run; `host` None: padding slots alone."""
        self._host = (host or HostBatch([], [])).padded(self._batch_size)
        for (backend, _, offset), buffers in self._made.items():
            backend.prepare(buffers, self._host.shifted(offset))

    def of(self, backend: AttentionBackend, batch: AttentionBatch, offset: int) -> Buffers | None:
        """For a forward whose tokens begin `offset` after the committed length."""
        if not backend.capabilities.plans_on_host:
            return None
        shape = batch.decode_shape(self._kv_len_ub)
        key = (backend, shape, offset)
        if key not in self._made:
            made = backend.allocate(shape)
            assert made is not None, f"{backend.name} plans on the host and allocates no buffers"
            backend.prepare(made, self._host.shifted(offset))
            self._made[key] = made
        return self._made[key]


@dataclass(frozen=True)
class ModelAttention:
    """What the executor holds for the target and for the draft."""

    pools: ModelPools
    prefill: AttentionBackend
    decode: AttentionBackend

    @property
    def plans_on_host(self) -> bool:
        """Whether decode steps need `StepBuffers`."""
        return self.decode.capabilities.plans_on_host

    @property
    def needs_exact_lengths(self) -> bool:
        return self.decode.capabilities.host_lengths is HostLengths.EXACT

    @property
    def needs_host_pages(self) -> bool:
        """Whether page ids must be known on the host, in prefill or decode."""
        return any(b.capabilities.host_page_table for b in (self.prefill, self.decode))

    def context(
        self, batch: AttentionBatch, buffers: StepBuffers | None = None, offset: int = 0
    ) -> AttentionContext:
        """Plans a forward. `buffers`: of this step; needed where `plans_on_host`, in decode."""
        if batch.q_len is None:
            return AttentionContext(self.prefill, self.prefill.plan(batch), batch)
        held = None
        if self.plans_on_host:
            assert buffers is not None
            held = buffers.of(self.decode, batch, offset)
        return AttentionContext(self.decode, self.decode.plan(batch, held), batch)
