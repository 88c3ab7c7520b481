"""Backends over libraries of others that are installed, on a GPU: eager and captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, LayerMask, Mask
from forerun.attention.capabilities import AttentionNeed, Phase
from forerun.attention.fa3 import LIBRARIES, Fa3, Fa3Library
from forerun.attention.fa4 import Fa4
from forerun.attention.flashmla import FlashMla
from forerun.attention.paged import LATENT_ROW
from forerun.platform.device import gpu_arch
from tests.attention.pair import BLOCK, CAUSAL, Expand, Pair, Sizes

pytestmark = pytest.mark.gpu

WINDOW = LayerMask(window=300)
DENSE = Sizes(32, 8, 128, positions=2048)
LATENT = Sizes(16, 1, sum(LATENT_ROW), LATENT_ROW[0], positions=2048)
LENGTHS = ([700, 1500, 90], [1900, 300, 1025])


def _fa3(library: type[Fa3Library]) -> type[AttentionBackend]:
    """With this build and no other."""

    class OneBuild(Fa3):
        @classmethod
        def find(cls) -> type[Fa3Library] | None:
            return None if library.find() is None else library

    return OneBuild


KINDS: dict[str, type[AttentionBackend]] = {
    **{f"fa3-{library.name}": _fa3(library) for library in LIBRARIES},
    "fa4": Fa4,
    "flashmla": FlashMla,
}


def asks(sizes: Sizes, phase: Phase, page: int = 64) -> AttentionNeed:
    return AttentionNeed(
        "cuda",
        torch.bfloat16,
        sizes.dim,
        sizes.heads,
        sizes.kv_heads,
        frozenset({CAUSAL}),
        phase=phase,
        mla=sizes.latent > 0,
        latent_dim=sizes.latent,
        dense=sizes.latent == 0,
        arch=gpu_arch(torch.device("cuda")),
        page_sizes=frozenset({page}),
    )


def pair(
    name: str,
    sizes: Sizes,
    phase: Phase,
    page: int,
    masks: Sequence[LayerMask],
    sinks: Tensor | None = None,
) -> Pair:
    """Skips where the backend cannot serve this: its reasons are tested on a CPU."""
    kind, need = KINDS[name], replace(asks(sizes, phase, page), sinks=sinks is not None)
    if reasons := kind.why_not(need):
        pytest.skip("; ".join(reasons))
    windows = frozenset[Mask]() if sizes.latent else kind.capabilities.windows
    each = Pair(
        kind, sizes, page, [m for m in masks if m.window is None or m.mask in windows], need
    )
    each.sinks = None if sinks is None else sinks.to(each.device)
    return each


def context(each: Pair, lengths: Sequence[int]) -> None:
    """K/V of whole contexts, written in both pools."""
    each.prefill([(0, n) for n in lengths], subject_attends=False)


SLIDING = (LayerMask(Mask.SLIDING_BLOCK, 300), LayerMask(Mask.SLIDING_BLOCK, 3))
ALL_MASKS = (CAUSAL, BLOCK, WINDOW, *SLIDING)


@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_prefill(name: str, page: int) -> None:
    each = pair(name, DENSE, Phase.PREFILL, page, [CAUSAL, WINDOW])
    each.prefill([(0, 700), (0, 1), (0, 333)])
    each.prefill([(700, 3), (1, 900), (333, 200)])
    each.same_pools()


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_steps(name: str, page: int, q_len: int) -> None:
    each = pair(name, DENSE, Phase.VERIFY, page, ALL_MASKS)
    context(each, LENGTHS[0])
    each.step(LENGTHS[0], q_len)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [32, 64, 96, 192, 256])
@pytest.mark.parametrize("name", KINDS)
def test_head_dims(name: str, dim: int) -> None:
    """A build may have been cut down to the head dims that someone needed."""
    each = pair(name, replace(DENSE, dim=dim), Phase.PREFILL, 64, [CAUSAL])
    each.prefill([(0, 700), (0, 1), (0, 333)])
    if KINDS[name].why_not(asks(replace(DENSE, dim=dim), Phase.VERIFY)) == []:
        each.step([700, 1, 333], 5)


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("name", KINDS)
def test_latent_steps(name: str, page: int, q_len: int) -> None:
    each = pair(name, LATENT, Phase.VERIFY, page, [CAUSAL, BLOCK])
    context(each, LENGTHS[0])
    each.step(LENGTHS[0], q_len)


@pytest.mark.parametrize("name", KINDS)
def test_latent_prefill(name: str) -> None:
    """Absorbed, then with the heads' own K and V."""
    each = pair(name, LATENT, Phase.PREFILL, 64, [CAUSAL])
    each.prefill([(0, 700), (0, 1), (0, 333)])
    expand, spec = Expand(LATENT, each.device), AttentionSpec(CAUSAL, 0.07)
    each.prefill_expanded([(700, 3), (1, 900), (333, 200)], spec, expand)


@pytest.mark.parametrize("name", KINDS)
def test_sinks(name: str) -> None:
    sinks = torch.randn(DENSE.heads).bfloat16().float()
    each = pair(name, DENSE, Phase.PREFILL, 64, [CAUSAL, WINDOW], sinks)
    each.prefill([(0, 700), (0, 1), (0, 333)])


Layer = tuple[Tensor, Tensor]  # queries, output


def captured(
    each: Pair, batch: AttentionBatch, spec: AttentionSpec
) -> tuple[Callable[[], None], list[Layer]]:
    """A replay of plan and attention of all layers, and what it reads and writes."""
    sizes = each.sizes
    count = batch.start.shape[0] * (batch.q_len or 1)
    queries = [each.normal(count, sizes.heads, sizes.dim) for _ in range(sizes.layers)]
    attend = each.run(each.subject)

    def step() -> list[Tensor]:
        plan = each.subject.plan(batch)
        return [attend(plan, layer, spec, q) for layer, q in enumerate(queries)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    return graph.replay, list(zip(queries, outs, strict=True))


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("sizes", [DENSE, LATENT], ids=["dense", "latent"])
@pytest.mark.parametrize("name", KINDS)
def test_a_captured_step_follows_the_lengths(name: str, sizes: Sizes, q_len: int) -> None:
    """Captured at length 0 with a table for the longest context, right for any lengths."""
    each = pair(name, sizes, Phase.VERIFY, 64, ALL_MASKS)
    context(each, [sizes.positions - 1] * 3)
    real = 3 * q_len
    for mask in each.masks:
        batch, spec = each.batch([0, 0, 0], q_len), each.spec(mask)
        replay, layers = captured(each, batch, spec)
        for lengths in (*LENGTHS, [0, 5, sizes.positions - q_len]):
            batch.start[:3] = torch.tensor(lengths, dtype=torch.int32)
            replay()
            plan, attend = each.plain.plan(batch), each.run(each.plain)
            for layer, (q, out) in enumerate(layers):
                each.close(out[:real], attend(plan, layer, spec, q.float())[:real])


@pytest.mark.parametrize("sizes", [DENSE, LATENT], ids=["dense", "latent"])
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_synchronizes(name: str, phase: Phase, sizes: Sizes) -> None:
    each = pair(name, sizes, phase, 64, [CAUSAL])
    verify = phase is Phase.VERIFY
    batch = each.batch([9, 8, 7], 4) if verify else each.chunks([(0, 9), (0, 8), (0, 7)])
    q = each.normal(16 if verify else 24, sizes.heads, sizes.dim)

    def run() -> None:
        each.run(each.subject)(each.subject.plan(batch), 0, each.spec(CAUSAL), q)

    run()  # loads and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
