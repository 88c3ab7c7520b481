"""The engine on a GPU: the golden pair in float32, graphs on and off, overlap on and off."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from forerun import LLM
from forerun.kernels.gemm import gemm_sm90
from forerun.kernels.runtime import nvrtc
from tests.golden_engine import CASES, golden_llm

pytestmark = pytest.mark.gpu

SEEDED = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 48, "ignore_eos": True}


def greedy(case: dict[str, Any]) -> dict[str, Any]:
    keys = ("max_new_tokens", "stop_token_ids")
    return {"temperature": 0.0, "ignore_eos": True, **{k: case[k] for k in keys}}


@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "NGRAM"])
def test_golden_outputs(algorithm: str | None, graph: bool, overlap_depth: int) -> None:
    with golden_llm(
        algorithm,
        device="cuda",
        disable_cuda_graph=not graph,
        max_running_requests=8,
        max_total_tokens=8192,
        overlap_depth=overlap_depth,
    ) as llm:
        for _ in ("cold", "warm"):
            outs = llm.generate(
                input_ids=[c["prompt"] for c in CASES], sampling_params=[greedy(c) for c in CASES]
            )
            assert [o.output_ids for o in outs] == [c["output"] for c in CASES]
        llm.engine.check()


def test_seeded_output_equals_plain_decoding() -> None:
    texts = []
    for algorithm in (None, "DFLASH", "NGRAM"):
        with golden_llm(algorithm, device="cuda", max_running_requests=8) as llm:
            outs = llm.generate(
                input_ids=[c["prompt"] for c in CASES],
                sampling_params=[{**SEEDED, "sampling_seed": i} for i in range(len(CASES))],
            )
            texts.append([o.output_ids for o in outs])
    assert texts[0] == texts[1] == texts[2]


def test_launching_a_step_does_not_synchronize() -> None:
    with golden_llm("DFLASH", device="cuda", max_running_requests=4) as llm:
        engine = llm.engine
        launch = engine.executor.launch

        def strict(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine.executor.launch = strict  # type: ignore[method-assign]
        out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=greedy(CASES[0]))
        assert out.output_ids == CASES[0]["output"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of kernels compiled or loaded from disk, after in-memory caches are cleared."""
    triton = pytest.importorskip("triton")
    names: list[str] = []

    def hook(**info: Any) -> None:
        names.append(info["fn"].name)

    load = nvrtc.load_kernel

    def loading(*args: Any) -> nvrtc.CudaKernel:
        names.append("gemm_sm90_kernel")
        return load(*args)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    monkeypatch.setattr(nvrtc, "load_kernel", loading)
    cast(Any, gemm_sm90._load_kernel).cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("forerun.kernels"):
            for value in list(vars(module).values()):
                if isinstance(value, triton.JITFunction):
                    value.device_caches.clear()
    yield names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE3", "NGRAM"])
def test_no_kernel_is_compiled_after_the_start(
    algorithm: str | None, dtype: str, compiled: list[str]
) -> None:
    """Otherwise the first requests, or the first of a length, would wait for a compiler."""
    rng = random.Random(0)
    with LLM(speculative_algorithm=algorithm, dtype=dtype, max_running_requests=8) as llm:
        assert "_build_decode_inputs" in compiled
        compiled.clear()

        def run(lengths: list[int], new: int = 20, **params: Any) -> None:
            ids = [[rng.randrange(3, 1000) for _ in range(n)] for n in lengths]
            rules = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True, **params}
            llm.generate(input_ids=ids, sampling_params=rules)
            assert compiled == [], (lengths, params)

        for lengths in ([1], [2], [16], [17], [64], [100], [130], [33, 65, 129], [15] * 8):
            run(lengths)
        run([200, 130, 3, 250, 40, 1, 16, 77], new=150)
        for params in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_new_tokens": 5}):
            run([30, 9, 4], **{"temperature": 0.8, **params})
        run([30, 40, 50], frequency_penalty=0.5)
        run([30, 40, 50], logit_bias={5: 1.0}, temperature=0.8, top_p=0.9)
        run([30, 40], speculative=False)
