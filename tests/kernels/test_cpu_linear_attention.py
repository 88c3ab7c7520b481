"""Gated DeltaNet of the CPU kernels against loops in float64, and its bits in any passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu.linear_attention import gated_rms_norm
from forerun.kernels.linear_attention.causal_conv import ConvState, causal_conv_cpu
from forerun.kernels.linear_attention.chunks import PromptChunks
from forerun.kernels.linear_attention.gated_delta import DeltaGates, DeltaState
from forerun.kernels.linear_attention.gated_delta import gated_delta_cpu as gated_delta
from forerun.kernels.linear_attention.replay import (
    DeltaStates,
    SnapshotRows,
    replay_gated_delta_cpu,
)
from tests.kernels import test_linear_attention as cases
from tests.kernels.cpu_levels import at_levels
from tests.kernels.test_linear_attention import ODD, SMALL, Heads, normal

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("level"),
    at_levels("native"),
]

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
HEADS = pytest.mark.parametrize("heads", [SMALL, ODD], ids=["small", "odd"])
TOKENS = 23


def gated_delta_cpu(
    qkv: Tensor, of: DeltaGates, kept: DeltaState, prompts: PromptChunks | None = None
) -> Tensor:
    return gated_delta(qkv, of, kept, prompts)


def gated_delta_of_trees(qkv: Tensor, of: DeltaGates, kept: DeltaState, parents: Tensor) -> Tensor:
    return gated_delta(qkv, of, kept, parents=parents)


def conv_of_trees(x: Tensor, weight: Tensor, kept: ConvState, parents: Tensor) -> Tensor:
    return causal_conv_cpu(x, weight, kept, parents=parents)


@pytest.fixture(autouse=True, params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@HEADS
@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_equal_the_definition(heads: Heads, dtype: torch.dtype) -> None:
    for tokens in (1, 5):
        cases.check_update(gated_delta_cpu, tokens, heads, dtype, CPU)
    for counts in ((1, 3, 2), (130, 1, 17)):
        cases.check_prefill(gated_delta_cpu, counts, heads, dtype, CPU)
    cases.check_tree(gated_delta_of_trees, 7, heads, dtype, CPU)
    cases.check_replay(replay_gated_delta_cpu, [1, 0, 4], heads, torch.float32, CPU)


@pytest.mark.parametrize(("size", "channels"), [(4, 130), (3, 7), (2, 20)])
def test_convolution_equals_the_definition(size: int, channels: int) -> None:
    for tokens in (1, 5):
        cases.test_conv_update(causal_conv_cpu, tokens, size, channels, CPU)
    cases.test_conv_update_of_trees(conv_of_trees, 5, size, channels, CPU)
    cases.test_conv_prefill(causal_conv_cpu, (40, 1, 5), size, channels, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(6, 12), (4, 64)])
def test_gated_norm(heads: int, dim: int, dtype: torch.dtype) -> None:
    cases.test_gated_norm(gated_rms_norm, heads, dim, dtype, CPU)


def prompt(count: int) -> PromptChunks:
    return PromptChunks.of([count], lambda host: host)


@HEADS
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_delta_rule(heads: Heads, dtype: torch.dtype) -> None:
    """A prompt at once and in chunks, decode steps, and passes of which a part is committed."""
    qkv = normal(TOKENS, heads.conv, seed=8, device=CPU, dtype=dtype)
    of = cases.gates(TOKENS, heads, CPU, dtype)

    def rows(at: slice) -> tuple[Tensor, DeltaGates]:
        return qkv[at], replace(of, a=of.a[at], b=of.b[at])

    def new() -> DeltaState:
        return cases.state(heads, CPU, [2], [0])

    whole = new()
    want = gated_delta_cpu(*rows(slice(None)), whole, prompt(TOKENS))
    for end in (1, 9):
        chunked = new()
        for at in (slice(0, end), slice(end, TOKENS)):
            count = len(qkv[at])
            assert torch.equal(gated_delta_cpu(*rows(at), chunked, prompt(count)), want[at])
        assert torch.equal(chunked.state[2], whole.state[2])
    for commits in ([1], [4, 1, 3]):
        kept, at, step = new(), 0, 0
        while at < TOKENS:
            width = 1 if commits == [1] else 5
            committed = min(commits[step % len(commits)], TOKENS - at)
            index = torch.arange(at, at + width).clamp(max=TOKENS - 1)
            index[committed:] = 0  # drafts that are not accepted
            part = replace(of, a=of.a[index], b=of.b[index])
            out = gated_delta_cpu(qkv[index], part, kept)
            assert torch.equal(out[:committed], want[at : at + committed])
            kept.num_passes[2] += 1
            kept.num_pending[2] = committed
            at, step = at + committed, step + 1
        assert torch.equal(replayed(kept), whole.state[2])


def replayed(kept: DeltaState) -> Tensor:
    """The state of slot 2 with what is pending."""
    snapshots = torch.zeros(1, *kept.state.shape[1:])
    states = (each.unsqueeze(0) for each in (kept.state, kept.k, kept.delta, kept.g))
    counts = kept.num_pending[2:3]
    rows = SnapshotRows(torch.tensor([2]), torch.tensor([0]), counts, kept.num_passes)
    replay_gated_delta_cpu(DeltaStates(*states, snapshots.unsqueeze(0)), rows)
    return snapshots[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_convolution(dtype: torch.dtype) -> None:
    x = normal(TOKENS, 37, seed=1, device=CPU, dtype=dtype)
    weight = normal(37, 4, seed=2, device=CPU, dtype=dtype)

    def new() -> ConvState:
        return cases.conv_state(4, 37, [1], CPU, dtype)

    whole = new()
    want = causal_conv_cpu(x, weight, whole, prompt(TOKENS))
    for width, committed in ((1, 1), (5, 3)):
        kept = new()
        kept.num_pending[1] = 0
        for at in range(0, TOKENS, committed):
            index = torch.arange(at, at + width).clamp(max=TOKENS - 1)
            count = min(committed, TOKENS - at)
            assert torch.equal(causal_conv_cpu(x[index], weight, kept)[:count], want[at:][:count])
            kept.num_pending[1] = count


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_trees(dtype: torch.dtype) -> None:
    """A tree's token has the bits of a chain of its path."""
    heads, parents = ODD, torch.tensor([[-1, 0, 0, 1, 2]])
    nodes, channels = parents.shape[1], heads.conv
    x = normal(nodes, channels, seed=8, device=CPU, dtype=dtype)
    of = cases.gates(nodes, heads, CPU, dtype)
    weight = normal(channels, 4, seed=2, device=CPU, dtype=dtype)

    def delta() -> DeltaState:
        return cases.state(heads, CPU, [2], [1])

    def conv() -> ConvState:
        return cases.conv_state(4, channels, [0], CPU, dtype)

    whole = gated_delta_of_trees(x, of, delta(), parents)
    convolved = conv_of_trees(x, weight, conv(), parents)
    for node in range(nodes):
        path = cases.path_to(parents[0].tolist(), node)
        part = replace(of, a=of.a[path], b=of.b[path])
        assert torch.equal(gated_delta_cpu(x[path], part, delta())[-1], whole[node])
        assert torch.equal(causal_conv_cpu(x[path], weight, conv())[-1], convolved[node])
