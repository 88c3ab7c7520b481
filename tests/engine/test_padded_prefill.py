"""Short prompts, alone and together, as captured prefill runs them: padded, on static tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.cuda import CudaGraphSteps, captured_prompts
from forerun.executor.graphs.steps import DecodeBatch, EagerSteps
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import DecodeOutput, PrefillBatch, PrefillTokens
from forerun.sampling.sampler import GREEDY, SAMPLED
from tests.golden_engine import CASES, golden_llm

LENGTHS = (1, 15, 16, 40, 64)
PROMPTS = [case["prompt"][:length] for case, length in zip(CASES, LENGTHS, strict=False)]
PARAMS = [
    {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1, "max_new_tokens": 20},
]


class StandInGraph:
    """What a graph is to `CudaGraphSteps`: it runs the same on the same tensors.

    Kernels of a CPU are called without PyTorch's dispatcher, so `StandInRecorder` misses them.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self.output = run, run()

    def replay(self) -> None:
        vars(self.output).update(vars(self._run()))


class PrefillGraphs(CudaGraphSteps):
    """Captured prefills on a CPU. Decode steps run eagerly."""

    def __init__(self, step: DeviceStep, largest: int) -> None:
        super().__init__(step, step.tables.history.shape[1], largest, widths=(1,))
        self.replayed: list[int] = []  # prompts of each prefill
        self._eagerly = EagerSteps(step)
        with torch.inference_mode(), step.dummy_steps():
            for prompts in self.prompts:
                self._prefill[prompts] = self._capture_prefill(prompts)
        assert step.tables.kv_len[step.tables.padding_slot] == 0

    def _captured(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        graph = StandInGraph(run)
        return graph, graph.output

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        return self._eagerly.decode(batch)

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        if self._prefill_graph(batch.chunks, batch.flags) is not None:
            self.replayed.append(len(batch.chunks))
        return super().prefill(batch)


def answers(llm: LLM, together: bool) -> list[Any]:
    """Greedy and sampled; the second time with prefix hits."""
    if together:
        mixed = [params for params in PARAMS for _ in PROMPTS]
        outs = llm.generate(input_ids=PROMPTS * len(PARAMS), sampling_params=mixed)
        outs += llm.generate(input_ids=PROMPTS * len(PARAMS), sampling_params=mixed)
    else:
        outs = [
            llm.generate(input_ids=prompt, sampling_params=params)
            for prompt in PROMPTS
            for params in PARAMS
        ]
    llm.engine.check()
    return [(out.output_ids, out.meta_info["spec_accept_lengths"]) for out in outs]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, None) for name in (None, "EAGLE3")),
        ("DFLASH", 16),
        *(
            pytest.param(name, None, marks=pytest.mark.exhaustive)
            for name in ("DFLASH", "NGRAM", "STANDALONE")
        ),
    ],
    ids=str,
)
def test_text_and_accept_lengths_do_not_change(
    name: str | None, window: int | None, together: bool, chain_llm: Callable[..., LLM]
) -> None:
    make = chain_llm if name in ("EAGLE3", "STANDALONE") else golden_llm
    seen, largest = [], 8
    for captured in (False, True):
        settings = {"page_size": 16, "speculative_draft_window_size": window}
        with make(name, max_running_requests=largest, **settings) as llm:
            assert llm.engine.limits.window == (window or 0)
            executor = llm.engine.executor
            assert isinstance(executor, DeviceExecutor)
            if captured:
                executor.steps = steps = PrefillGraphs(executor.step, largest)
            seen.append(answers(llm, together))
    assert seen[0] == seen[1]
    counts = set(steps.replayed)
    assert max(counts) > 2 if together else counts == {1} and len(steps.replayed) == len(seen[0])


def test_prompts_that_are_captured() -> None:
    both = (GREEDY, SAMPLED)
    alone = captured_prompts(largest=1, longest=100, flags=both)
    assert alone == [(1, tokens, flags) for tokens in (16, 32, 64) for flags in both]
    some = captured_prompts(largest=64, longest=10_000, flags=both)
    assert {count for count, _, flags in some if flags == SAMPLED} == {1, 2, 4, 8, 16}
    assert {count for count, _, flags in some if flags == GREEDY} == {1}
    assert [prompts.num_tokens for prompts in some] == sorted(c * tokens for c, tokens, _ in some)
    assert some[-1].num_tokens == 1024 and (8, 256, SAMPLED) not in some


def test_padding_of_captured_prompts_stays_within_a_request() -> None:
    """Buckets that a request has no KV slots for are not captured."""
    with golden_llm(None, context_length=100, max_running_requests=1) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        bound = executor.step.tables.history.shape[1]
        assert 64 < bound < 128
        graphs = CudaGraphSteps(executor.step, bound, largest=1, widths=(1,))
        greedy_and_sampled = 2
        assert graphs.count == greedy_and_sampled * (1 + len([16, 32, 64]))
