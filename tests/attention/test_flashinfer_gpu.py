"""FlashInfer's real kernels, where it is installed: eager, and captured with lengths that change.

They compile when they first run (nvcc), which takes minutes for the whole file.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionNeed, LayerMask, Mask
from forerun.attention.capabilities import Phase
from forerun.attention.flashinfer import FlashInfer
from forerun.attention.flashinfer_mla import FlashInferMla
from forerun.attention.trtllm_mha import TrtllmMha
from forerun.platform.device import gpu_arch
from tests.attention.pair import BLOCK, CAUSAL, REQUESTS, Pair, Sizes, trees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
    ),
]

DENSE, LATENT = Sizes(32, 8, 128), Sizes(16, 1, 576, latent=512)
WINDOW = LayerMask(window=40)
CHUNKS = [((0, 70), (0, 1), (0, 33)), ((70, 3), (1, 90), (33, 2))]
FIRST, SECOND = [73, 91, 35], [200, 3, 120]
# (backend, page, masks, phase)
CASES = [
    (FlashInfer, 1, [CAUSAL, WINDOW, BLOCK], Phase.VERIFY),
    (FlashInfer, 16, [CAUSAL, WINDOW, BLOCK], Phase.VERIFY),
    (FlashInfer, 64, [CAUSAL], Phase.VERIFY),
    (FlashInferMla, 16, [CAUSAL, BLOCK], Phase.VERIFY),
    (FlashInferMla, 64, [CAUSAL, BLOCK], Phase.VERIFY),
    (TrtllmMha, 16, [CAUSAL, BLOCK], Phase.VERIFY),
    (TrtllmMha, 64, [CAUSAL, BLOCK], Phase.VERIFY),
    (TrtllmMha, 64, [CAUSAL], Phase.VERIFY),
    (TrtllmMha, 64, [CAUSAL, WINDOW], Phase.DECODE),
]
IDS = [f"{kind.name}-{page}-{len(masks)}-{p.value}" for kind, page, masks, p in CASES]


def pair(
    kind: type[AttentionBackend], page: int, masks: list[LayerMask], phase: Phase = Phase.VERIFY
) -> Pair:
    device = torch.device("cuda")
    need = AttentionNeed(
        "cuda", torch.bfloat16, 0, 0, 0, frozenset(masks), phase, arch=gpu_arch(device)
    )
    sizes = LATENT if kind is FlashInferMla else DENSE
    if kind is TrtllmMha and BLOCK in masks and need.arch != "sm_90":
        pytest.skip("TRTLLM-gen is causal only")
    return Pair(kind, sizes, page, masks, need)


def filled(
    kind: type[AttentionBackend], page: int, masks: list[LayerMask], phase: Phase = Phase.VERIFY
) -> Pair:
    """With K/V of two ragged chunks."""
    each = pair(kind, page, masks, phase)
    for spans in CHUNKS:
        each.prefill(spans, kind is not TrtllmMha)
    return each


@pytest.mark.parametrize(("kind", "page", "masks", "phase"), CASES, ids=IDS)
def test_eager(
    kind: type[AttentionBackend], page: int, masks: list[LayerMask], phase: Phase
) -> None:
    each = filled(kind, page, masks, phase)
    for width in (1,) if phase is Phase.DECODE else (1, 5, 16):
        each.step(FIRST, width)
        each.step(SECOND, width)


@pytest.mark.parametrize("kind", [FlashInfer, TrtllmMha])
@pytest.mark.parametrize("width", [7, 16])
def test_trees(kind: type[AttentionBackend], width: int) -> None:
    each = filled(kind, 64, [CAUSAL])
    if not each.subject.why_not(_with_trees(each)):
        for starts in (FIRST, SECOND, [0, 1, 5]):
            each.step(starts, width, trees(width, each.device))
    else:
        pytest.skip("no tree masks on this GPU")


def _with_trees(each: Pair) -> AttentionNeed:
    return replace(each.subject.need, masks=frozenset({LayerMask(Mask.CUSTOM)}))


@pytest.mark.parametrize("kind", [FlashInfer, FlashInferMla, TrtllmMha])
@pytest.mark.parametrize("width", [1, 5])
def test_captured(kind: type[AttentionBackend], width: int) -> None:
    """One graph of plan, write and attend: right after lengths changed, if it was prepared."""
    each = filled(kind, 64, [CAUSAL])
    spec, count = each.spec(CAUSAL), width * (REQUESTS + 1)
    q = each.normal(count, each.sizes.heads, each.sizes.dim)
    k, v = (each.normal(count, each.sizes.kv_heads, each.sizes.dim) for _ in range(2))
    batch = each.batch([0, 0, 0], width)
    buffers = each.prepared(FIRST, width, None)

    def write(backend: AttentionBackend, plan: object) -> None:
        if each.sizes.latent:
            backend.write_latent(plan, 0, k.squeeze(1))  # type: ignore[arg-type]
        else:
            backend.write(plan, 0, k, v)  # type: ignore[arg-type]

    def step() -> Tensor:
        ctx = each.attention.context(batch, buffers)
        write(ctx.backend, ctx.plan)
        return each.run(ctx.backend)(ctx.plan, 0, spec, q)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for starts in (FIRST, SECOND, [5, 240, 66]):
        for mine, its in zip(
            each.subject.pools.paged.values(), each.plain.pools.paged.values(), strict=True
        ):
            mine.normal_()
            its.copy_(mine)
        batch.start[:REQUESTS].copy_(torch.tensor(starts, dtype=torch.int32))
        each.prepared(starts, width, None)
        graph.replay()
        plan = each.plain.plan(batch)
        write(each.plain, plan)
        want = each.run(each.plain)(plan, 0, spec, q.float())
        each.close(out[: width * REQUESTS], want[: width * REQUESTS])


def test_sinks() -> None:
    each = filled(TrtllmMha, 64, [CAUSAL])
    each.sinks = torch.linspace(-1, 2, DENSE.heads, device=each.device)
    for width in (1, 5):
        each.step(FIRST, width)
