"""Pooled hidden states: those of transformers, the same however prompts run, beside generation."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from forerun import LLM, SamplingParams
from forerun.core.errors import RequestError
from forerun.core.pooling import POOLINGS, Pooling
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.cuda import CudaGraphSteps
from forerun.executor.graphs.steps import EagerSteps
from forerun.executor.step.inputs import StepShape
from forerun.kernels.cpu import library
from forerun.llm.pooling import NO_TEXT, ResolvedPooling
from tests.engine.test_hybrid_target import config_of
from tests.engine.test_invalid_logits import MESSAGE, make_llm, set_entry, write_target
from tests.engine_runs import run_together
from tests.golden_engine import CASES, GOLDEN, golden_llm
from tests.models.support import _COMMON, FAMILIES, random_hf, save

Vector = NDArray[np.float64]
TEXTS = sorted((list(case["prompt"]) for case in CASES), key=len, reverse=True)
STEM = [token for text in TEXTS for token in text][:61]
PROMPTS = [STEM, TEXTS[1][:33], TEXTS[2][:5], STEM[:40]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
]


def pooled(engine: Engine, prompt: list[int], pooling: Pooling) -> Request:
    return engine.make_request(list(prompt), NO_TEXT, pooling=pooling)


def vector(request: Request) -> NDArray[np.float32]:
    assert request.finish is not None and request.finish.type == "length", request.finish
    assert request.pooling is not None and not request.output
    return ResolvedPooling(request.pooling, False, 10**6).vector(request)


def of_transformers(folder: Path, prompt: list[int]) -> dict[Pooling, Vector]:
    """Its last hidden states in float32, pooled in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0)}


@cache
def expected() -> list[dict[Pooling, Vector]]:
    return [of_transformers(GOLDEN / "target", prompt) for prompt in PROMPTS]


@cache
def alone(device: str = "cpu") -> tuple[list[NDArray[np.float32]], list[list[int]]]:
    """Vectors and texts of requests that run one after another."""
    with golden_llm(device=device, disable_radix_cache=True) as llm:
        vectors = []
        for prompt in PROMPTS:
            for pooling in POOLINGS:
                request = pooled(llm.engine, prompt, pooling)
                run_together(llm.engine, [request])
                vectors.append(vector(request))
        texts = []
        for request in texts_of(llm.engine):
            run_together(llm.engine, [request])
            texts.append(request.output)
    return vectors, texts


def texts_of(engine: Engine) -> list[Request]:
    """Requests that generate."""
    common = {"max_new_tokens": 16, "ignore_eos": True}
    return [
        engine.make_request(list(prompt), SamplingParams.of({**params, **common}))
        for prompt, params in zip(PROMPTS, PARAMS, strict=False)
    ]


def hold(engine: Engine, preempts: bool, on_gpu: bool = False) -> None:
    """All kinds of requests in one batch, twice: the second time with a cached prefix."""
    vectors, texts = alone("cuda" if on_gpu else "cpu")
    for _ in range(2):
        generate = texts_of(engine)
        asked = [pooled(engine, prompt, pooling) for prompt in PROMPTS for pooling in POOLINGS]
        order = [*asked[:5], *generate, *asked[5:]]
        run_together(engine, order, preempts)
        assert [request.output for request in generate] == texts
        got = [vector(request) for request in asked]
        if (
            library.library() is not None and not on_gpu
        ):  # these kernels give one sum whatever the chunks
            assert all(np.array_equal(a, b) for a, b in zip(got, vectors, strict=True))
        for at, each in enumerate(got):
            want = expected()[at // len(POOLINGS)][POOLINGS[at % len(POOLINGS)]]
            assert each == pytest.approx(want, abs=1e-3 if on_gpu else 2e-5)
    cached = {request.pooling: request.cached_tokens for request in asked[:3]}
    assert cached["mean"] == cached["cls"] == 0
    assert cached["last"] > 0 or preempts or engine.config.disable_radix_cache


@pytest.mark.covering(0)
@pytest.mark.parametrize("preempts", [True, False])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("DFLASH", {"page_size": 16, "chunked_prefill_size": 16, "overlap_depth": 0}),
        (None, {}),
        (None, {"page_size": 1, "chunked_prefill_size": 7}),
        ("NGRAM", {"chunked_prefill_size": 1, "overlap_depth": 1}),
        ("DFLASH", {"disable_radix_cache": True, "max_running_requests": 3}),
    ],
    ids=str,
)
def test_vectors_and_texts_do_not_change(
    name: str | None, settings: dict[str, Any], preempts: bool
) -> None:
    with golden_llm(name, **{"max_running_requests": 16, **settings}) as llm:
        hold(llm.engine, preempts)
        llm.engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "DFLASH"])
@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 16}], ids=str)
def test_vectors_on_a_gpu(name: str | None, settings: dict[str, Any]) -> None:
    """One at a time, where prefill of last tokens is captured, and in batches."""
    with golden_llm(name, device="cuda", page_size=16, **settings) as llm:
        for at, prompt in enumerate(PROMPTS):
            for pooling in POOLINGS:
                request = pooled(llm.engine, prompt, pooling)
                run_together(llm.engine, [request])
                assert vector(request) == pytest.approx(expected()[at][pooling], abs=1e-3)
        for preempts in (False, True):
            hold(llm.engine, preempts, on_gpu=True)
        llm.engine.check()


def test_pages_that_a_pooled_prompt_leaves_serve_generation() -> None:
    """With a draft: its K/V of the prefix is there too."""
    with golden_llm("DFLASH", page_size=16) as llm:
        run_together(llm.engine, [pooled(llm.engine, PROMPTS[0], "mean")])
        request = texts_of(llm.engine)[0]
        run_together(llm.engine, [request])
        assert request.cached_tokens == 48 and request.output == alone()[1][0]
        llm.engine.check()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in ("qwen3", "llama-3.1", "gemma2", "qwen3-moe", "deepseek-v3")),
        ("qwen3.5", {}),
        ("olmo2", {"model_impl": "transformers"}),
    ],
)
def test_families(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The final norm is a part of what is pooled, whatever the family; recurrent states too."""
    if kind == "qwen3.5":
        made = config_of(kind)
    else:
        of, changes = FAMILIES[kind]
        made = of(**{**_COMMON, **changes})
    folder = save(random_hf(made), tmp_path / "model")
    prompts = [[(5 * i * i + 3 * i + 7) % 90 + 3 for i in range(n)] for n in (45, 17)]
    want = [of_transformers(folder, prompt) for prompt in prompts]
    common: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu"}
    common |= settings
    with LLM(folder, chunked_prefill_size=16, max_running_requests=8, **common) as llm:
        for _ in range(2):
            asked = [pooled(llm.engine, prompt, each) for prompt in prompts for each in POOLINGS]
            run_together(llm.engine, asked)
            for at, request in enumerate(asked):
                expects = want[at // 3][POOLINGS[at % 3]]
                assert vector(request) == pytest.approx(expects, abs=1e-4)
        llm.engine.check()


@pytest.mark.exhaustive
def test_two_ranks(tmp_path: Path) -> None:
    """In processes: what is pooled crosses their boundaries."""
    of, changes = FAMILIES["qwen3"]
    folder = save(random_hf(of(**{**_COMMON, **changes})), tmp_path / "model")
    prompts = [list(range(3, 48)), [7, 9]]
    common: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu"}
    with LLM(folder, tp_size=2, chunked_prefill_size=16, **common) as llm:
        for pooling in POOLINGS:
            params = {"pooling_type": pooling, "normalize": False}
            for prompt, out in zip(
                prompts, llm.embed(None, params, input_ids=prompts), strict=True
            ):
                want = of_transformers(folder, prompt)[pooling]
                assert out.embedding == pytest.approx(list(want), abs=1e-4)


@pytest.mark.parametrize("name", [None, "DFLASH"])
def test_captured_prefill_pools_last_tokens_alone(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns no other hidden states. What decides is the executor of a GPU."""
    with golden_llm(name, page_size=16, max_running_requests=2) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        step, replayed = executor.step, []

        class Steps(CudaGraphSteps):
            """Runs what is captured, and counts it."""

            def __init__(self) -> None:
                self.step, self.piecewise = step, Mock()
                self.piecewise.forward.return_value = None

            def _prefill_graph(self, chunks: Any, flags: Any) -> Any:
                (chunk,) = chunks
                graph = Mock(slots=torch.zeros(1, dtype=torch.int64))
                graph.counts = torch.zeros(1, dtype=torch.int32)

                def replay() -> None:
                    shape = StepShape(64, step.tables.history.shape[1], flags)
                    replayed.append(chunk)
                    graph.output = step.prefill_padded(graph.slots, graph.counts, shape)

                graph.graph.replay = replay
                return graph

        eager = EagerSteps(step)
        monkeypatch.setattr(eager, "prefill", Steps().prefill)
        executor.steps = eager
        for pooling in POOLINGS:
            for at, prompt in enumerate(PROMPTS):
                request = pooled(llm.engine, prompt, pooling)
                run_together(llm.engine, [request])
                assert vector(request) == pytest.approx(expected()[at][pooling], abs=2e-5)
            assert len(replayed) == len(PROMPTS)  # those of the first kind
        (text, *_) = texts_of(llm.engine)
        run_together(llm.engine, [text])
        assert len(replayed) == len(PROMPTS) + 1 and text.output == alone()[1][0]
        llm.engine.check()


def test_what_is_pooled_is_forgotten_when_a_request_is_preempted() -> None:
    with golden_llm(chunked_prefill_size=8, max_running_requests=2) as llm:
        engine = llm.engine
        request = pooled(engine, PROMPTS[0], "mean")
        engine.submit(request)
        while len(request.pooled) < 3:
            engine.step()
        engine.scheduler._preempt(request)
        while engine.has_work:
            engine.step()
        engine.close_request(request)
        assert request.preemptions == 1 and len(request.pooled) == len(STEM) // 8 + 1
        assert vector(request) == pytest.approx(expected()[0]["mean"], abs=2e-5)


def test_invalid_hidden_states_fail_their_request_alone(tmp_path: Path) -> None:
    target = write_target(
        tmp_path / "target", partial(set_entry, "model.embed_tokens.weight", 250, torch.nan)
    )
    assert 250 not in PROMPTS[2]
    with make_llm(target) as llm:
        bad = pooled(llm.engine, [5, 250, 5], "mean")
        good = pooled(llm.engine, PROMPTS[2], "mean")
        run_together(llm.engine, [bad, good])
        assert bad.finish is not None and bad.finish.message == f"Output token 1: {MESSAGE}"
        assert vector(good) == pytest.approx(expected()[2]["mean"], abs=2e-5)
        with pytest.raises(RequestError, match=r"Prompt 0: .*NaN or infinite"):
            llm.embed(input_ids=[250, 5])


def test_too_long_a_prompt_is_refused_in_words_of_its_own() -> None:
    with golden_llm(context_length=64) as llm:
        with pytest.raises(RequestError, match=r"64 tokens, and the input has 65; .*trunc"):
            pooled(llm.engine, [5] * 65, "last")
        request = pooled(llm.engine, [5] * 64, "last")
        run_together(llm.engine, [request])
        assert len(vector(request)) == llm.engine.info.hidden_size
