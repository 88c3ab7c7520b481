"""Prefill in captured pieces on a GPU: used, exact, without host syncs, accounted for."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.engine.engine import Engine
from forerun.executor import build, memory
from forerun.executor.graphs import cuda
from forerun.executor.graphs.piecewise import (
    DEFAULT_MAX_TOKENS,
    CudaGraphRecorder,
    PiecewiseForward,
    PiecewisePrefill,
    token_buckets,
)
from forerun.executor.memory import RESERVED_BYTES, ProfilingRun
from tests.engine.test_support import folders_of, small
from tests.golden_engine import CASES, golden_llm, poison_on_release
from tests.toy_algorithms import register_toys

pytestmark = pytest.mark.gpu
register_toys()
PROMPTS = [case["prompt"] for case in CASES]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_p": 0.9}
ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "enable_piecewise_cuda_graph": True,
    "max_running_requests": 4,
    "page_size": 16,
}
CHUNKED: dict[str, Any] = {  # steps of up to 100 tokens, all of which run in pieces
    **ON_GPU,
    "chunked_prefill_size": 100,
    "piecewise_cuda_graph_max_tokens": 4096,
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the prefills that ran in pieces: all of several prompts."""
    monkeypatch.setattr(cuda, "PROMPT_BATCHES", ())
    seen: list[int] = []
    replay = PiecewiseForward.__call__

    def counted(self: PiecewiseForward, ids: Any, positions: Any, ctx: Any) -> Any:
        seen.append(len(ids))
        return replay(self, ids, positions, ctx)

    monkeypatch.setattr(PiecewiseForward, "__call__", counted)
    return seen


def eagerly(llm: LLM, run: Callable[[], Any]) -> Any:
    """What `run` returns if nothing is replayed in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PiecewisePrefill, "forward", lambda self, count: None)
        got = run()
    llm.engine.flush_cache()
    return got


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Of all prompts at once, greedy and sampled; the second time with prefix hits."""
    out = []
    for params in (GREEDY, SEEDED):
        rules = [{**params, "sampling_seed": i} for i in range(len(prompts))]
        out += llm.generate(input_ids=prompts, sampling_params=rules)
    llm.engine.check()
    return [o.output_ids for o in out]


def hold(llm: LLM, prompts: list[list[int]], replays: list[int]) -> None:
    """Texts in pieces are those of the eager prefill."""
    assert llm.explain()["piecewise_cuda_graph_tokens"] == [32, 64, 96, 100]
    replays.clear()
    want = eagerly(llm, lambda: answers(llm, prompts))
    assert replays == []
    assert answers(llm, prompts) == want
    assert {100} < set(replays)  # a whole bucket, and padded ones


@pytest.mark.parametrize("name", [None, "DFLASH", "NGRAM", "TOY-EAGER-TREES", "EAGLE3"], ids=str)
def test_texts_are_those_of_the_eager_prefill(
    name: str | None, replays: list[int], chain_llm: Callable[..., LLM]
) -> None:
    with (chain_llm if name == "EAGLE3" else golden_llm)(name, **CHUNKED) as llm:
        hold(llm, PROMPTS, replays)


@pytest.mark.parametrize("label", ["Mistral-7B-v0.1", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_windows_experts_and_latent_rows(label: str, replays: list[int], tmp_path: Path) -> None:
    folder, _ = folders_of(tmp_path, small(label), "NGRAM")
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 90) for _ in range(n)] for n in (60, 150, 7, 33)]
    own = {"load_format": "dummy_normal", "dtype": "float32", "skip_tokenizer_init": True}
    own |= {"speculative_algorithm": "NGRAM", "speculative_adaptive": False}
    with LLM(folder, **own, **CHUNKED) as llm:
        poison_on_release(llm)
        hold(llm, prompts, replays)


def texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy; all prompts are prefilled in one step."""
    params = SamplingParams(**GREEDY)
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    out = [list(request.output) for request in requests]
    for request in requests:
        engine.close_request(request)
    return out


def test_a_whole_bucket_is_exact_in_bfloat16(replays: list[int]) -> None:
    """The same kernels run on the same number of tokens."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 300) for _ in range(32)] for _ in range(2)]
    settings = {**CHUNKED, "piecewise_cuda_graph_max_tokens": 64}
    with golden_llm("DFLASH", dtype="bfloat16", **settings) as llm:
        replays.clear()
        want = eagerly(llm, lambda: texts(llm.engine, prompts))
        assert replays == []
        assert texts(llm.engine, prompts) == want
        assert replays == [64]


def test_larger_steps_run_eagerly_and_launching_does_not_synchronize(replays: list[int]) -> None:
    settings = {**CHUNKED, "piecewise_cuda_graph_max_tokens": 64}
    with golden_llm("DFLASH", **settings) as llm:
        assert llm.explain()["piecewise_cuda_graph_tokens"] == [32, 64]
        executor = llm.engine.executor
        launch = executor.launch
        prefills: list[int] = []  # tokens of each step

        def strict(plan: Any) -> Any:
            prefills.append(sum(chunk.num_tokens for chunk in plan.prefill))
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        executor.launch = strict  # type: ignore[method-assign]
        replays.clear()
        wanted = [case["output"][:4] for case in CASES]
        rules = [{**GREEDY, "max_new_tokens": len(output)} for output in wanted]
        outs = llm.generate(input_ids=PROMPTS, sampling_params=rules)
        assert [o.output_ids for o in outs] == wanted
        assert replays and max(replays) <= 64 < max(prefills)


def test_what_the_host_is_slower_to_launch_is_captured_by_default(replays: list[int]) -> None:
    with golden_llm(device="cuda", max_running_requests=4) as llm:
        found = llm.explain()["piecewise_cuda_graph_tokens"]
        assert found and found == token_buckets(DEFAULT_MAX_TOKENS)[: len(found)]
        llm.generate(input_ids=PROMPTS, sampling_params=[GREEDY] * len(PROMPTS))
    assert replays


def test_nothing_is_captured_in_pieces_if_turned_off(replays: list[int]) -> None:
    off = {"max_running_requests": 4, "enable_piecewise_cuda_graph": False}
    with golden_llm(device="cuda", **off) as llm:
        assert llm.explain()["piecewise_cuda_graph_tokens"] == []
        llm.generate(input_ids=PROMPTS, sampling_params=[GREEDY] * len(PROMPTS))
    assert replays == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_borrowed_memory_is_that_of_the_graph_and_used_again(dtype: torch.dtype) -> None:
    recorder, stream = CudaGraphRecorder(torch.cuda.graph_pool_handle()), torch.cuda.Stream()
    x = torch.arange(24.0, device="cuda").view(4, 6)
    warm = [(x + 1).to(dtype), (x + 2).to(dtype)]  # loads kernels
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        recorder.begin()
        y = (x + 1).to(dtype)
        first = recorder.end()
        part, address = recorder.borrow(y[1:, 2:4]), y.data_ptr()
        assert (part.dtype, part.shape, part.stride()) == (dtype, (3, 2), y.stride())
        del y
        recorder.begin()
        z = (x + 2).to(dtype)
        second = recorder.end()
        assert z.data_ptr() == address
        for replay, want in ((first, warm[0]), (second, warm[1])):
            replay()
            assert torch.equal(part.float(), want[1:, 2:4].float())


def test_an_error_ends_the_capture() -> None:
    """Otherwise nothing could be captured or allocated in this process any more."""
    ids = torch.zeros(4, dtype=torch.int64, device="cuda").add_(1)  # loads the kernel
    context = Mock(spec_set=["backend", "plan", "batch"])
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):  # a pool ends with its last graph
            recorder = CudaGraphRecorder(torch.cuda.graph_pool_handle())
            pieces = PiecewiseForward(_failing, recorder, outputs=None)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="the model's"):
                pieces.capture(ids, ids.int(), context)
            assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    assert torch.rand(4, device="cuda").min().item() >= 0


def _failing(ids: Any, positions: Any, ctx: Any) -> Any:
    ids.add_(1)
    raise ValueError("the model's")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="measures memory; run without -n")
def test_their_memory_is_shared_and_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProfilingRun] = []

    def spy(*args: Any) -> ProfilingRun:
        seen.append(memory.profile_run(*args))
        return seen[-1]

    monkeypatch.setattr(build, "profile_run", spy)
    graphs, buckets = [], []
    for most in (64, 2048, None):
        with golden_llm("DFLASH", piecewise_cuda_graph_max_tokens=most, **ON_GPU) as llm:
            graphs.append(llm.explain()["memory_bytes"]["graphs"])
            buckets.append(llm.explain()["piecewise_cuda_graph_tokens"])
    assert max(buckets[2]) >= 512  # launching a small model's kernels takes longer than running
    assert graphs[1] - graphs[0] < 256 << 20
    assert graphs[1] - RESERVED_BYTES < seen[1].graphs < 2 * graphs[1] + RESERVED_BYTES
