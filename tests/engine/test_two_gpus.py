"""A device that is not the current one: launches, events and captures go where the engine is."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.engine.engine import Engine
from forerun.executor.build import build_executor
from forerun.executor.ranks.executor import RanksExecutor
from forerun.executor.ranks.host import host_ranks
from tests.engine import test_nodes as nodes
from tests.golden_engine import CASES, GOLDEN, golden_llm
from tests.tp_models import with_a_sixth_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROMPTS = [case["prompt"] for case in CASES[:4]]
WANT = [case["output"] for case in CASES[:4]]
GREEDY: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": len(output), "ignore_eos": True} for output in WANT
]


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH"], ids=str)
def test_text_on_the_second_gpu(algorithm: str | None, graph: bool) -> None:
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    settings = {"device": "cuda:1", "disable_cuda_graph": not graph, "max_running_requests": 4}
    with golden_llm(algorithm, **settings) as llm:
        assert torch.cuda.current_device() == 0
        outs = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert torch.cuda.memory_allocated(0) == before  # nothing of it lies on the first GPU
    assert [out.output_ids for out in outs] == WANT


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH"], ids=str)
def test_text_of_two_ranks(algorithm: str | None, graph: bool, tmp_path: Path) -> None:
    """Through NCCL: the kernel for few tokens is for bfloat16."""
    draft = {"speculative_draft_model_path": str(GOLDEN / "draft")} if algorithm else {}
    settings = {"disable_cuda_graph": not graph, "max_running_requests": 4, "tp_size": 2}
    with LLM(
        with_a_sixth_head(tmp_path),
        speculative_algorithm=algorithm,
        dtype="float32",
        skip_tokenizer_init=True,
        **settings,
        **draft,
    ) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [out.output_ids for out in outs] == WANT


def test_text_of_two_nodes(tmp_path: Path) -> None:
    """A GPU of this machine each. NCCL sums; plans go through TCP."""
    target = with_a_sixth_head(tmp_path)
    alone = EngineConfig(dtype="float32", device="cuda:0", max_running_requests=2)
    engine = Engine(alone, build_executor(alone, target))
    want = nodes.texts(engine)
    engine.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    first, second = (
        nodes.node(address, rank, device=f"cuda:{rank}", dist_timeout=90) for rank in range(2)
    )
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(host_ranks, second, target)
        engine = Engine(first, RanksExecutor.start(first, target))
        try:
            assert nodes.texts(engine) == want
        finally:
            engine.close()
        other.result(30)  # ends with the engine


def test_an_engine_on_each_gpu_in_one_process() -> None:
    got: dict[int, list[list[int]]] = {}
    engines = [golden_llm("DFLASH", device=f"cuda:{i}", max_running_requests=4) for i in range(2)]

    def run(i: int) -> None:
        outs = engines[i].generate(input_ids=PROMPTS, sampling_params=GREEDY)
        got[i] = [out.output_ids for out in outs]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.close()
    assert got == {0: WANT, 1: WANT}
