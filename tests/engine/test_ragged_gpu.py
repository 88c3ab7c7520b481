"""Ragged passes on a GPU: the text of plain decoding, captured and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.executor import resolve
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs import cuda
from forerun.executor.graphs.cuda import CudaGraphSteps
from tests.engine import test_golden_hybrid, test_logits
from tests.engine.test_matrix import GREEDY, WIDTHS, generate, hold, params, prompts
from tests.golden_engine import golden_llm
from tests.ragged import SETTINGS, choose_at_random

pytestmark = pytest.mark.gpu
OWN: dict[str, dict[str, Any]] = {**WIDTHS, "DDTREE": {"speculative_ddtree_budget": 12}}


@pytest.fixture(autouse=True)
def _random_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided as in service: captured steps have no hook. Small batches are divided, too, and draft
    for some.
    """
    choose_at_random(monkeypatch)
    monkeypatch.setattr(cuda, "DRAFTING_BATCH", 2)
    monkeypatch.setattr(resolve, "FINE_TOKENS", 0)


@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM", "SUFFIX", "DFLASH,SUFFIX", "DDTREE"])
def test_output_equals_plain_decoding(
    algorithm: str, page_size: int, overlap_depth: int, tight: bool, graph: bool
) -> None:
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    own |= OWN.get(algorithm, {}) | SETTINGS
    hold(algorithm, page_size, 512, overlap_depth, tight, **own)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_recurrent_layers(algorithm: str, graph: bool) -> None:
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 8}
    test_golden_hybrid.hold_ragged(algorithm, page_size=16, max_mamba_cache_size=72, **own)


@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM", "DDTREE"])
def test_penalties_and_logprobs(algorithm: str) -> None:
    """Steps in two captured parts."""
    own = OWN.get(algorithm, {}) | SETTINGS
    with golden_llm(algorithm, device="cuda", max_running_requests=6, **own) as llm:
        for preempts in (False, True):
            got = test_logits.run(llm, preempts)
            test_logits.compare(got, test_logits.reference("cuda"), on_gpu=True)
        llm.engine.check()


@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM"])
def test_launching_does_not_synchronize(algorithm: str) -> None:
    with golden_llm(algorithm, device="cuda", max_running_requests=6, **SETTINGS) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor) and isinstance(executor.steps, CudaGraphSteps)
        launch, rows = executor.launch, []

        def strict(plan: Any) -> Any:
            rows.append(plan.num_rows)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        executor.launch = strict  # type: ignore[method-assign]
        asked = prompts(16, False)
        generate(llm, asked, [params(GREEDY, i) for i in range(len(asked))], False)
        assert any(rows)
