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
from forerun.attention.flash import LATENT_DIM, ROPE_DIM
from forerun.attention.flashmla import FlashMla
from forerun.platform.device import gpu_arch
from tests.attention.equality import CAUSAL, Case, Expand, Sizes

pytestmark = pytest.mark.gpu

WINDOW, BLOCK = LayerMask(window=300), LayerMask(Mask.BLOCK)
DENSE = Sizes(heads=32, kv_heads=8, dim=128, positions=2048)
LATENT = Sizes(heads=16, latent=LATENT_DIM, rope=ROPE_DIM, positions=2048)
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
FA3 = [name for name in KINDS if name.startswith("fa3")]


def asks(sizes: Sizes, phase: Phase, page: int = 64) -> AttentionNeed:
    return AttentionNeed(
        "cuda",
        torch.bfloat16,
        sizes.row,
        sizes.heads,
        sizes.kv_heads,
        frozenset({CAUSAL}),
        phase=phase,
        mla=sizes.is_latent,
        dense=not sizes.is_latent,
        arch=gpu_arch(torch.device("cuda")),
        page_sizes=frozenset({page}),
    )


def case_of(name: str, sizes: Sizes, phase: Phase, page: int, sinks: Tensor | None = None) -> Case:
    """Skips where the backend cannot serve this: its reasons are tested on a CPU."""
    kind, need = KINDS[name], asks(sizes, phase, page)
    if reasons := kind.why_not(replace(need, sinks=sinks is not None)):
        pytest.skip("; ".join(reasons))
    return Case.of(kind, sizes, page, torch.device("cuda"), sinks)


def masks_of(name: str) -> list[LayerMask]:
    windows = Mask.CAUSAL in KINDS[name].capabilities.windows
    return [CAUSAL, BLOCK, *([WINDOW] if windows else [])]


def context(case: Case, lengths: Sequence[int]) -> None:
    """K/V of whole contexts, written in both pools."""
    case.prefill([(0, n) for n in lengths], [], reference_only=True)


@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_prefill(name: str, page: int) -> None:
    case = case_of(name, DENSE, Phase.PREFILL, page)
    case.prefill(((0, 700), (0, 1), (0, 333)), [CAUSAL, WINDOW])
    case.prefill(((700, 3), (1, 900), (333, 200)), [CAUSAL, WINDOW])
    case.same_pools()


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_steps(name: str, page: int, q_len: int) -> None:
    case = case_of(name, DENSE, Phase.VERIFY, page)
    context(case, LENGTHS[0])
    case.step(LENGTHS[0], q_len, masks_of(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [32, 64, 96, 192, 256])
@pytest.mark.parametrize("name", KINDS)
def test_head_dims(name: str, dim: int) -> None:
    """A build may have been cut down to the head dims that someone needed."""
    case = case_of(name, replace(DENSE, dim=dim), Phase.PREFILL, 64)
    case.prefill(((0, 700), (0, 1), (0, 333)), [CAUSAL])
    if KINDS[name].why_not(asks(replace(DENSE, dim=dim), Phase.VERIFY)) == []:
        case.step([700, 1, 333], 5, [CAUSAL])


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("name", KINDS)
def test_latent_steps(name: str, page: int, q_len: int) -> None:
    case = case_of(name, LATENT, Phase.VERIFY, page)
    context(case, LENGTHS[0])
    case.step(LENGTHS[0], q_len, [CAUSAL, BLOCK])


@pytest.mark.parametrize("name", KINDS)
def test_latent_prefill(name: str) -> None:
    """Absorbed, then with the heads' own K and V."""
    case = case_of(name, LATENT, Phase.PREFILL, 64)
    case.prefill(((0, 700), (0, 1), (0, 333)), [CAUSAL])
    expand = Expand(LATENT.heads, LATENT_DIM, ROPE_DIM, case.device)
    spec = AttentionSpec(CAUSAL, 0.07)
    case.prefill_expanded(((700, 3), (1, 900), (333, 200)), spec, expand)


@pytest.mark.parametrize("name", KINDS)
def test_sinks(name: str) -> None:
    sinks = torch.randn(DENSE.heads).bfloat16().float()
    case = case_of(name, DENSE, Phase.PREFILL, 64, sinks)
    case.prefill(((0, 700), (0, 1), (0, 333)), [CAUSAL, WINDOW])


def captured(case: Case, batch: AttentionBatch, mask: LayerMask) -> tuple[Callable[[], None], list]:
    """A replay of plan and attention of all layers, and its outputs with their queries."""
    sizes = case.sizes
    count = batch.start.shape[0] * (batch.q_len or 1)
    queries = [case.normal(count, sizes.heads, sizes.row) for _ in range(sizes.layers)]
    spec, attend = AttentionSpec(mask, sizes.row**-0.5), case.attend_with(case.subject)

    def step() -> list[Tensor]:
        plan = case.subject.plan(batch)
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
    return graph.replay, [spec, *zip(queries, outs, strict=True)]


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("sizes", [DENSE, LATENT], ids=["dense", "latent"])
@pytest.mark.parametrize("name", KINDS)
def test_a_captured_step_follows_the_lengths(name: str, sizes: Sizes, q_len: int) -> None:
    """Captured at length 0 with a table for the longest context, right for any lengths."""
    case = case_of(name, sizes, Phase.VERIFY, 64)
    masks = masks_of(name) if not sizes.is_latent else [CAUSAL, BLOCK]
    context(case, [sizes.positions - 1] * 3)
    for mask in masks:
        batch = case.tokens([0, 0, 0], q_len, bound=sizes.positions)
        replay, (spec, *layers) = captured(case, batch, mask)
        for lengths in (*LENGTHS, [0, 5, sizes.positions - q_len]):
            batch.start[:3] = torch.tensor(lengths, dtype=torch.int32)
            replay()
            plan, attend = case.plain.plan(batch), case.attend_with(case.plain)
            for layer, (q, out) in enumerate(layers):
                real = 3 * q_len
                case.close(out[:real], attend(plan, layer, spec, q.float())[:real])


@pytest.mark.parametrize("sizes", [DENSE, LATENT], ids=["dense", "latent"])
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_synchronizes(name: str, phase: Phase, sizes: Sizes) -> None:
    case = case_of(name, sizes, phase, 64)
    batch = case.tokens([9, 8, 7], 4)
    if phase is Phase.PREFILL:
        batch = case.chunks(((0, 9), (0, 8), (0, 7)))
    count = 16 if phase is Phase.VERIFY else 24
    q, spec = case.normal(count, sizes.heads, sizes.row), AttentionSpec(CAUSAL, 0.1)

    def run() -> None:
        case.attend_with(case.subject)(case.subject.plan(batch), 0, spec, q)

    run()  # loads and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
