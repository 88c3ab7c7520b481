"""The engine on a GPU: the golden pair in float32, graphs on and off, overlap on and off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden_engine import CASES, golden_llm

pytestmark = pytest.mark.gpu

SEEDED = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 48, "ignore_eos": True}


def greedy(case: dict[str, Any]) -> dict[str, Any]:
    keys = ("max_new_tokens", "stop_token_ids")
    return {"temperature": 0.0, "ignore_eos": True, **{k: case[k] for k in keys}}


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "NGRAM"])
def test_golden_outputs(algorithm: str | None, graph: bool, depth: int) -> None:
    with golden_llm(
        algorithm,
        device="cuda",
        disable_cuda_graph=not graph,
        max_running_requests=8,
        max_total_tokens=8192,
        overlap_depth=depth,
    ) as llm:
        for _ in ("cold", "warm"):
            outs = llm.generate(
                input_ids=[c["prompt"] for c in CASES], sampling_params=[greedy(c) for c in CASES]
            )
            assert [o.output_ids for o in outs] == [c["output"] for c in CASES]
        llm.engine.check()


def test_seeded_text_is_that_of_plain_decoding() -> None:
    texts = []
    for algorithm in (None, "DFLASH", "NGRAM"):
        with golden_llm(algorithm, device="cuda", max_running_requests=8) as llm:
            outs = llm.generate(
                input_ids=[c["prompt"] for c in CASES],
                sampling_params=[{**SEEDED, "sampling_seed": i} for i in range(len(CASES))],
            )
            texts.append([o.output_ids for o in outs])
    assert texts[0] == texts[1] == texts[2]


def test_a_step_never_waits_for_the_device() -> None:
    with golden_llm("DFLASH", device="cuda", max_running_requests=4) as llm:
        engine = llm.engine
        launch = engine._runner.launch

        def strict(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine._runner.launch = strict  # type: ignore[method-assign]
        out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=greedy(CASES[0]))
        assert out.output_ids == CASES[0]["output"]
