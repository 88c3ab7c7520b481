"""Two ranks on two GPUs give what one gives: families, algorithms, quantized weights, experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.executor.build import build_executor
from forerun.executor.ranks.executor import RanksExecutor
from tests.engine import test_tensor_parallel as ranks
from tests.engine.test_quality import FORMATS, gpt_oss, log_probs, three_models, vocab_size
from tests.engine_runs import run_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks.folder.cache_clear()
    ranks.FOLDERS["root"] = tmp_path_factory.mktemp("gpus")


@contextmanager
def engine_of(settings: EngineConfig) -> Iterator[Engine]:
    """Captured steps with overlap, where the algorithm has them."""
    path = Path(str(settings.model_path))
    make = build_executor if settings.tp_size == 1 else RanksExecutor.start
    engine = Engine(settings, make(settings, path))
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "algorithm", "settings"),
    [
        ("dense", "DFLASH", {"speculative_adaptive": True}),
        ("dense", "EAGLE3", {}),
        ("moe", "DDTREE", {}),
        ("moe", None, {"ep_size": 2}),
        ("gpt-oss", "NGRAM", {"ep_size": 2}),
        ("gemma4-moe", "NGRAM", {"ep_size": 2}),
        ("moe", "STANDALONE", {"speculative_draft_tp_size": 2}),
        ("moe", "DFLASH", {"speculative_draft_tp_size": 2}),
        ("dense", "EAGLE3", {"speculative_draft_tp_size": 2}),
        ("mla", "NEXTN", {}),
        ("mla", "NEXTN", {"speculative_draft_tp_size": 2}),
        ("hybrid", "NEXTN", {}),
        ("blocks", "NGRAM", {}),
        ("gpt-oss", "STANDALONE", {}),
        ("gemma4", "NGRAM", {}),
        ("olmo3", "NGRAM", {}),
    ],
)
def test_text(kind: str, algorithm: str | None, settings: dict[str, Any]) -> None:
    """Greedy and sampled, in float32."""
    with engine_of(ranks.config(kind, None, device="cuda")) as engine:
        want = ranks.run(engine, kind)
    settings = {**settings, "device": "cuda", "tp_size": 2, "page_size": 16}
    with engine_of(ranks.config(kind, algorithm, **settings)) as engine:
        assert ranks.run(engine, kind) == want


@pytest.mark.parametrize(
    "params",
    [
        [{"temperature": 0.9}, {"temperature": 1.1, "min_p": 0.05, "min_new_tokens": 6}],
        [{"temperature": 0.0}, {"temperature": 1.2, "top_k": 20, "top_p": 0.8}, {"temperature": 1}],
        [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 100}],
    ],
    ids=["temperature", "top-k", "whole rows"],
)
@pytest.mark.parametrize("algorithm", [None, "DFLASH"], ids=str)
def test_sampled_text_of_a_large_batch(algorithm: str | None, params: list[dict[str, Any]]) -> None:
    """Ranks sample from their own logits, or divide the rows; small batches gather the logits."""

    def run(engine: Engine) -> list[list[int]]:
        requests = []
        for i in range(20):
            asked = {**params[i % len(params)], "sampling_seed": i, "ignore_eos": True}
            prompt = ranks.prompts("dense")[i % 4][: 40 + i]
            asked["max_new_tokens"] = 12
            requests.append(engine.make_request(list(prompt), SamplingParams.of(asked)))
        run_together(engine, requests)
        return [request.output for request in requests]

    common: dict[str, Any] = {"device": "cuda", "max_running_requests": 20}
    with engine_of(ranks.config("dense", None, **common)) as engine:
        want = run(engine)
    with engine_of(ranks.config("dense", algorithm, tp_size=2, **common)) as engine:
        assert run(engine) == want


@pytest.mark.parametrize("form", [*FORMATS, "mxfp4"])
def test_quantized_weights(form: str, tmp_path: Path) -> None:
    """With our kernels over a rank's part: no less exact than weights in bfloat16 on one GPU."""
    if form == "mxfp4":
        plain, quantized = gpt_oss(tmp_path)
        rounded = plain
    else:
        plain, quantized, rounded = three_models(tmp_path, "small", form)
    ids = torch.randint(5, vocab_size(plain), (100,)).tolist()
    exact = log_probs(ids, model_path=str(rounded), dtype="float32")
    reference = log_probs(ids, model_path=str(rounded), dtype="bfloat16")
    got = log_probs(ids, model_path=str(quantized), dtype="bfloat16", tp_size=2)
    assert 0 < (got - exact).norm() <= 1.3 * (reference - exact).norm()
