"""A backend that plans on the host: stale plans are wrong, prepared ones right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    HostBatch,
    LayerMask,
)
from forerun.attention.model_attention import ModelAttention, StepBuffers
from forerun.attention.torch_native import TorchNative
from forerun.kvcache.layouts import ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from tests.engine.test_matrix import hold
from tests.golden_engine import golden_llm
from tests.toy_algorithms import register_toys
from tests.toy_backends import NAME, HostPlanned, registered

PAGE, WIDTH = 16, 3


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_toys()
    with registered():
        yield


def test_a_replay_without_prepare_is_wrong() -> None:
    need = AttentionNeed("cpu", torch.float32, 8, 4, 2, frozenset({LayerMask()}))
    pools = ModelPools(ModelLayout.dense(1, 2, 8, torch.float32), PoolShape(9, PAGE), need_device())
    pools.dense.normal_(generator=torch.Generator().manual_seed(1))
    host, plain = HostPlanned(need, pools), TorchNative(need, pools)
    attention = ModelAttention.of(host)
    buffers = StepBuffers(batch_size=3, kv_len_ub=64)  # two requests and a padding slot
    pages = [[3, 5, 1, 7], [2, 8, 4, 6]]
    table = torch.tensor([*pages, [0] * 4], dtype=torch.int32)
    q = torch.randn(3 * WIDTH, 4, 8, generator=torch.Generator().manual_seed(2))

    def attend(lengths: list[int], prepare: bool) -> tuple[Tensor, Tensor]:
        if prepare:
            buffers.begin(HostBatch(lengths, pages))
        start = torch.tensor([*lengths, 0], dtype=torch.int32)
        batch = AttentionBatch(table, start, 64, q_len=WIDTH)
        spec = AttentionSpec(LayerMask(), 0.5)
        ctx = attention.context(batch, buffers)
        got = ctx.backend.attend(ctx.plan, 0, spec, q)
        return got[: 2 * WIDTH], plain.attend(plain.plan(batch), 0, spec, q)[: 2 * WIDTH]

    for lengths in ([5, 30], [6, 33]):
        torch.testing.assert_close(*attend(lengths, prepare=True))
    got, want = attend([9, 47], prepare=False)
    assert (got - want).abs().amax() > 0.1


def need_device() -> torch.device:
    return torch.device("cpu")


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512), (16, 4), (256, 512)])
@pytest.mark.parametrize(
    "algorithm", [None, "NGRAM", "TOY-LEARNER", "TOY-TREES", "TOY-ORACLE-TREES", "DFLASH"]
)
def test_output_equals_plain_decoding(
    algorithm: str | None, page_size: int, chunk: int, tight: bool
) -> None:
    # Overlap is asked for, and exact lengths do without.
    hold(algorithm, page_size, chunk, 1, tight, attention_backend=NAME)


@pytest.mark.usefixtures("without_cpu_kernels")
def test_exact_lengths_mean_no_overlap() -> None:
    with golden_llm(decode_attention_backend=NAME, overlap_depth=1, max_total_tokens=256) as llm:
        chosen = llm.explain()
        assert chosen["overlap_depth"] == 0
        assert chosen["attention"]["decode"] == f"{NAME}: chosen"
        assert chosen["attention"]["prefill"].startswith("torch_native: chosen")
    with golden_llm(prefill_attention_backend=NAME, overlap_depth=1, max_total_tokens=256) as llm:
        assert llm.explain()["overlap_depth"] == 1


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_phases_may_have_different_backends(phase: str) -> None:
    hold("NGRAM", 16, 4, 1, True, **{f"{phase}_attention_backend": NAME})
