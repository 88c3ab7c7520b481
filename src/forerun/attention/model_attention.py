"""The attention of one model: its pools, a backend per phase, host planning per decode shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    Buffers,
    DecodeShape,
    HostBatch,
)
from forerun.attention.capabilities import PER_STEP, Phase
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
        size = self._batch_size
        self._host = HostBatch.padding(size) if host is None else host.padded(size)
        for (backend, _, offset), buffers in self._made.items():
            backend.prepare(buffers, self._host_batch(backend, offset))

    def of(self, backend: AttentionBackend, batch: AttentionBatch, offset: int) -> Buffers:
        """The attention of a forward whose tokens begin `offset` after the committed length."""
        shape = batch.decode_shape(self._kv_len_ub)
        key = (backend, shape, offset)
        if key not in self._made:
            made = backend.allocate(shape)
            assert made is not None, f"{backend.name} plans on the host and allocates no buffers"
            backend.prepare(made, self._host_batch(backend, offset))
            self._made[key] = made
        return self._made[key]

    def _host_batch(self, backend: AttentionBackend, offset: int) -> HostBatch:
        return self._host.for_pools(backend.pools).shifted(offset)


@dataclass(frozen=True)
class ModelAttention:
    """What the executor holds for the target and for the draft."""

    pools: ModelPools
    backends: Mapping[Phase, AttentionBackend]
    # Runs short prompts with the same number of tokens each, so that they can be captured; None:
    # no backend of this model can.
    short_prefill: AttentionBackend | None = None

    @classmethod
    def of(cls, backend: AttentionBackend) -> ModelAttention:
        """One backend for everything."""
        return cls(backend.pools, dict.fromkeys(Phase, backend), backend)

    @property
    def for_short_prefill(self) -> ModelAttention:
        """The same pools, with `short_prefill` for everything."""
        assert self.short_prefill is not None, "short prefill is not captured for this model"
        return ModelAttention.of(self.short_prefill)

    @property
    def plans_on_host(self) -> bool:
        """Whether decode steps need `StepBuffers`."""
        return any(backend.capabilities.plans_on_host for backend in self._per_step)

    @property
    def records_on_cpu(self) -> bool:
        """Whether decode steps on a CPU may be recorded."""
        return all(backend.capabilities.cpu_graph for backend in self._per_step)

    @property
    def needs_host_pages(self) -> bool:
        """Whether page ids must be known on the host, in prefill or decode."""
        return any(b.capabilities.host_page_table for b in self.backends.values())

    @property
    def _per_step(self) -> list[AttentionBackend]:
        return [self.backends[phase] for phase in PER_STEP if phase in self.backends]

    def backend_of(self, q_len: int | None, extends: bool = False) -> AttentionBackend:
        """Returns the backend of a forward of `q_len` tokens per request (None: chunks of prompts).

        `extends`: they are verified tokens, which the draft observes.
        """
        if q_len is None:
            return self.backends[Phase.PREFILL]
        if q_len == 1:
            return self.backends[Phase.DECODE]
        return self.backends[Phase.EXTEND if extends else Phase.VERIFY]

    def context(
        self,
        batch: AttentionBatch,
        buffers: StepBuffers | None = None,
        offset: int = 0,
        extends: bool = False,
    ) -> AttentionContext:
        """Plans a forward. `buffers`: of this step; needed where `plans_on_host`, in decode."""
        backend = self.backend_of(batch.q_len, extends)
        held = None
        if batch.q_len is not None and backend.capabilities.plans_on_host:
            assert buffers is not None
            held = buffers.of(backend, batch, offset)
        return AttentionContext(backend, backend.plan(batch, held), batch)
