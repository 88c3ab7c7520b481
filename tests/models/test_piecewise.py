"""Prefill in captured pieces gives what the eager prefill gives: every family, ragged chunks."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.executor.graphs.piecewise import AttentionOutputs, CudaGraphRecorder, PiecewiseForward
from forerun.models.base import CausalLM
from forerun.models.loader import load_target
from tests.models.support import CPU, FAMILIES, Loop, family, save
from tests.stand_in_graphs import StandInRecorder

# What is recorded here are PyTorch's operations.
pytestmark = pytest.mark.usefixtures("without_cpu_kernels")

BUCKET = 24
AUX = (0, 2)
# (start, tokens) of the chunks of each forward: a new prompt, several, their next chunks beside a
# new prompt, a whole bucket, one token.
BATCHES = [
    [(0, 5)],
    [(0, 7), (0, 1), (0, 9)],
    [(7, 3), (1, 12), (9, 2), (0, 6)],
    [(10, 24)],
    [(34, 1)],
]


def pieces_of(model: CausalLM, loop: Loop) -> PiecewiseForward:
    def forward(
        ids: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        return model.forward(ids, positions, ctx, AUX)

    pieces = PiecewiseForward(forward, StandInRecorder(), AttentionOutputs(BUCKET + 3))
    capturing = Loop(pieces.capture, loop.backend, loop.table)
    capturing.ragged([(0, torch.zeros(BUCKET, dtype=torch.int64))])
    return pieces


NAMES = [name for name, (_, changes) in FAMILIES.items() if "linear_num_key_heads" not in changes]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("name", NAMES)  # those with recurrent layers are not captured
def test_hidden_states_and_kv_are_those_of_the_eager_prefill(name: str, tmp_path: Path) -> None:
    model = load_target(save(family(name), tmp_path), torch.float32, CPU)
    eager, loop = Loop.of_model(model, 4), Loop.of_model(model, 4)
    pieces = Loop(pieces_of(model, loop), loop.backend, loop.table)
    draw = torch.Generator().manual_seed(3)
    for batch in BATCHES:
        parts = [(start, torch.randint(96, (n,), generator=draw)) for start, n in batch]
        want, want_aux = eager.ragged(parts, AUX)
        got, got_aux = pieces.ragged(parts)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got_aux, want_aux)
        for kind, kept in eager.backend.pools.paged.items():
            torch.testing.assert_close(loop.backend.pools.paged[kind], kept)
    assert all(kept.any() for kept in eager.backend.pools.paged.values())


class Graph:
    """A CUDA graph whose capture an error may have made invalid."""

    capturing = 0
    invalid = False

    def capture_begin(self, **settings: object) -> None:
        Graph.capturing += 1

    def capture_end(self) -> None:
        Graph.capturing -= 1
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("invalid", [False, True])
def test_an_error_of_the_forward_ends_the_capture_and_is_raised(
    invalid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "invalid", invalid)

    def forward(
        ids: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        assert Graph.capturing == 1
        raise torch.OutOfMemoryError("of the forward")

    pieces = PiecewiseForward(forward, CudaGraphRecorder(None), AttentionOutputs(BUCKET))
    ids, ctx = torch.zeros(BUCKET, dtype=torch.int64), Mock(spec_set=["backend", "plan", "batch"])
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="of the forward"):
            pieces.capture(ids, ids.int(), ctx)
        assert Graph.capturing == 0
