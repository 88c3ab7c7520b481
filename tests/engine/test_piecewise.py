"""Prefill in captured pieces: the engine's texts are those of the eager prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.executor.device_executor import DeviceExecutor, device_step
from forerun.executor.graphs import piecewise
from forerun.executor.graphs.piecewise import PiecewisePrefill, token_buckets
from forerun.executor.graphs.steps import EagerSteps
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import PrefillBatch, PrefillTokens
from forerun.models import registry
from tests.engine.test_support import folders_of, small
from tests.golden_engine import CASES, golden_llm, poison_on_release
from tests.stand_in_graphs import StandInRecorder
from tests.toy_models import TOY_MODELS, save_toy

PROMPTS = [case["prompt"] for case in CASES[:4]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1, "max_new_tokens": 16},
]
SEVERAL = {"max_running_requests": 8, "chunked_prefill_size": 24, "page_size": 16}
CHAINS = ("EAGLE3", "NEXTN", "STANDALONE")


class PiecewiseSteps(EagerSteps):
    """What `CudaGraphSteps.prefill` does with prefills that are not captured whole."""

    def __init__(self, step: DeviceStep, buckets: Sequence[int]) -> None:
        super().__init__(step)
        self.piecewise, self.recorder = PiecewisePrefill(step, buckets), StandInRecorder()
        self.tokens: list[int] = []  # of each prefill
        with torch.inference_mode(), step.dummy_steps():
            for count in reversed(buckets):
                self.piecewise.capture(self.recorder, count)
        assert step.tables.kv_len[step.tables.padding_slot] == 0
        self.recorder.replayed = 0

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        self.tokens.append(batch.num_tokens)
        return self.step.prefill(batch, self.piecewise.forward(batch.num_tokens))


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Of all prompts at once, greedy and sampled; the second time with prefix hits."""
    outs = [
        out
        for params in PARAMS
        for out in llm.generate(input_ids=prompts, sampling_params=[params] * len(prompts))
    ]
    llm.engine.check()
    return [(out.output_ids, out.meta_info["spec_accept_lengths"]) for out in outs]


def hold(make: Callable[[], LLM], prompts: list[list[int]], layers: int) -> None:
    """Texts and accept lengths with pieces and without."""
    buckets = [8, 16, 24]
    with make() as llm:
        want = answers(llm, prompts)
    with make() as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        executor.steps = steps = PiecewiseSteps(executor.step, buckets)
        assert answers(llm, prompts) == want
    assert steps.recorder.replayed == (layers + 1) * len(steps.tokens)
    assert max(steps.tokens) == SEVERAL["chunked_prefill_size"]  # chunks, several prompts
    assert set(steps.tokens) - set(buckets)  # padded


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "window"),
    [
        (None, None),
        ("DFLASH", 16),
        *(
            pytest.param(n, None, marks=pytest.mark.exhaustive)
            for n in ("DFLASH", "NGRAM", *CHAINS)
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("without_cpu_kernels")
def test_text_and_accept_lengths_do_not_change(
    name: str | None, window: int | None, chain_llm: Callable[..., LLM]
) -> None:
    make = chain_llm if name in CHAINS else golden_llm
    settings = {**SEVERAL, "speculative_draft_window_size": window}
    hold(lambda: make(name, **settings), PROMPTS, layers=6)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("label", ["Mistral-7B-v0.1", "Qwen3-30B-A3B", "DeepSeek-V3"])
@pytest.mark.usefixtures("without_cpu_kernels")
def test_windows_experts_and_latent_rows(label: str, tmp_path: Path) -> None:
    folder, draft = folders_of(tmp_path, small(label), "NGRAM")
    assert draft is None

    def make() -> LLM:
        llm = LLM(
            folder,
            load_format="dummy_normal",
            dtype="float32",
            skip_tokenizer_init=True,
            speculative_algorithm="NGRAM",
            speculative_adaptive=False,
            **SEVERAL,
        )
        poison_on_release(llm)
        return llm

    hold(make, [[3 + i * j % 80 for j in range(5, 60)] for i in (1, 3, 7)], layers=3)


@pytest.mark.usefixtures("without_cpu_kernels")
def test_steps_of_more_tokens_run_eagerly() -> None:
    with golden_llm(**SEVERAL) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        executor.steps = steps = PiecewiseSteps(executor.step, [8])
        out = llm.generate(input_ids=CASES[2]["prompt"][:30], sampling_params=PARAMS[0])
        assert out.meta_info["completion_tokens"] == 16
        assert steps.tokens == [24, 6]
        assert steps.recorder.replayed == 7


def test_models_with_attention_of_their_own_or_recurrent_state_are_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with golden_llm() as llm:
        assert device_step(llm.engine.executor).captures_pieces
    for name, kind in TOY_MODELS.items():
        monkeypatch.setitem(registry.ARCHITECTURES, name, kind)
        folder = save_toy(kind, tmp_path / name)
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True) as llm:
            assert not device_step(llm.engine.executor).captures_pieces


def test_a_cpu_is_refused() -> None:
    for asked in ({"enable_piecewise_cuda_graph": True}, {"piecewise_cuda_graph_max_tokens": 64}):
        with pytest.raises(ConfigError, match="captures prefills on a GPU, and this is cpu; drop"):
            golden_llm(device="cpu", **asked)
    with pytest.raises(ConfigError, match=r"max_tokens .* and disable_cuda_graph is set; drop"):
        golden_llm(piecewise_cuda_graph_max_tokens=64, disable_cuda_graph=True)


@pytest.mark.parametrize("largest", [0, 32, 300, 512, 2048, 4096])
def test_buckets_are_measured_with_few_prefills(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the largest number of tokens whose launch takes longer."""
    measured: list[int] = []

    def is_host_bound(step: DeviceStep, count: int) -> bool:
        measured.append(count)
        return count <= largest

    monkeypatch.setattr(piecewise, "_is_host_bound", is_host_bound)
    buckets = token_buckets(2048)
    with golden_llm() as llm:
        step = device_step(llm.engine.executor)
        found = piecewise.host_bound_buckets(step, buckets)
    assert found == [count for count in buckets if count <= largest]
    assert len(set(measured)) == len(measured) <= 4


def test_buckets() -> None:
    assert token_buckets(2048) == [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    assert token_buckets(500) == [32, 64, 96, 128, 192, 256, 384, 500]
    assert token_buckets(32) == [32]
    assert token_buckets(4) == [4]
