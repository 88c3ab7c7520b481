"""Prefill in captured pieces on a GPU: used, exact, without host syncs, accounted for."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.executor import build, memory
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.memory import RESERVED_BYTES, ProfilingRun
from forerun.executor.piecewise import PiecewiseForward
from tests.engine.test_support import folders_of, small
from tests.golden_engine import CASES, golden_llm, poison_on_release
from tests.toy_algorithms import register_toys

pytestmark = pytest.mark.gpu
register_toys()
PROMPTS = [case["prompt"] for case in CASES]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
CHAINS = ("EAGLE3", "NEXTN", "STANDALONE")
ON_GPU = {"device": "cuda", "max_running_requests": 8, "page_size": 16}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of tokens of the prefills that ran in pieces."""
    seen: list[int] = []
    replay = PiecewiseForward.__call__

    def counted(self: PiecewiseForward, ids: Any, positions: Any, ctx: Any) -> Any:
        seen.append(len(ids))
        return replay(self, ids, positions, ctx)

    monkeypatch.setattr(PiecewiseForward, "__call__", counted)
    yield seen


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Of all prompts at once, greedy and sampled; the second time with prefix hits."""
    out = []
    for params in (GREEDY, SEEDED):
        rules = [{**params, "sampling_seed": i} for i in range(len(prompts))]
        out += llm.generate(input_ids=prompts, sampling_params=rules)
    llm.engine.check()
    return [o.output_ids for o in out]


def hold(make: Callable[..., LLM], prompts: list[list[int]], replays: list[int]) -> None:
    """Texts in pieces and eagerly, in chunks of up to 100 tokens."""
    with make(disable_piecewise_cuda_graph=True) as llm:
        assert llm.explain()["piecewise_cuda_graph_tokens"] == []
        want = answers(llm, prompts)
    assert replays == []
    with make(piecewise_cuda_graph_max_tokens=64) as llm:
        assert llm.explain()["piecewise_cuda_graph_tokens"] == [32, 64]
        replays.clear()
        assert answers(llm, prompts) == want
    assert replays and max(replays) <= 64  # larger ones ran eagerly
    with make(piecewise_cuda_graph_max_tokens=4096) as llm:
        assert llm.explain()["piecewise_cuda_graph_tokens"] == [32, 64, 96, 100]
        replays.clear()
        assert answers(llm, prompts) == want
    assert {100} < set(replays)


@pytest.mark.parametrize(
    "name", [None, "DFLASH", "DDTREE", "NGRAM", "TOY-EAGER", "TOY-EAGER-TREES", *CHAINS], ids=str
)
def test_texts_are_those_of_the_eager_prefill(
    name: str | None, replays: list[int], chain_llm: Callable[..., LLM]
) -> None:
    def make(**settings: Any) -> LLM:
        own = {**ON_GPU, "chunked_prefill_size": 100}
        return (chain_llm if name in CHAINS else golden_llm)(name, **own, **settings)

    hold(make, PROMPTS, replays)


@pytest.mark.parametrize("label", ["Mistral-7B-v0.1", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_windows_experts_and_latent_rows(label: str, replays: list[int], tmp_path: Path) -> None:
    folder, _ = folders_of(tmp_path, small(label), "NGRAM")
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 90) for _ in range(n)] for n in (60, 150, 7, 33)]

    def make(**settings: Any) -> LLM:
        own = {"load_format": "dummy_normal", "dtype": "float32", "skip_tokenizer_init": True}
        own |= {"speculative_algorithm": "NGRAM", "speculative_adaptive": False}
        llm = LLM(folder, chunked_prefill_size=100, **own, **ON_GPU, **settings)
        poison_on_release(llm)
        return llm

    hold(make, prompts, replays)


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "NGRAM"])
def test_launching_does_not_synchronize(algorithm: str | None, replays: list[int]) -> None:
    settings = {**ON_GPU, "piecewise_cuda_graph_max_tokens": 512}
    with golden_llm(algorithm, **settings) as llm:
        executor = llm.engine.executor
        launch = executor.launch

        def strict(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        executor.launch = strict  # type: ignore[method-assign]
        replays.clear()
        rules = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4}
        outs = llm.generate(input_ids=PROMPTS[:6], sampling_params=[rules] * 6)
        assert [o.output_ids for o in outs] == [case["output"][:4] for case in CASES[:6]]
        assert replays


def test_small_models_are_captured_by_default(replays: list[int]) -> None:
    """Launching their kernels takes longer than running them."""
    with golden_llm("DFLASH", dtype="bfloat16", **ON_GPU) as llm:
        assert max(llm.explain()["piecewise_cuda_graph_tokens"]) >= 512
        replays.clear()
        answers(llm, PROMPTS)
        assert replays


def test_pieces_share_memory() -> None:
    """What attention reads is borrowed: the inputs of all layers of a piece take no memory each."""
    sizes = []
    for most in (64, 2048):
        with golden_llm("DFLASH", piecewise_cuda_graph_max_tokens=most, **ON_GPU) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, DeviceExecutor)
            sizes.append(llm.explain()["memory_bytes"]["graphs"])
    print("graphs, MiB:", [size >> 20 for size in sizes])
    assert sizes[1] - sizes[0] < 256 << 20


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="measures memory; run without -n")
def test_their_memory_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProfilingRun] = []

    def spy(*args: Any) -> ProfilingRun:
        seen.append(memory.profile_run(*args))
        return seen[-1]

    monkeypatch.setattr(build, "profile_run", spy)
    with golden_llm("DFLASH", piecewise_cuda_graph_max_tokens=2048, **ON_GPU) as llm:
        graphs = llm.explain()["memory_bytes"]["graphs"]
    assert graphs - RESERVED_BYTES < seen[0].graphs < 2 * graphs + RESERVED_BYTES
