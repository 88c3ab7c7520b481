"""Short prompts padded to a bucket of tokens, as captured prefill runs them, without a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from forerun import LLM
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.cuda import CudaGraphSteps
from forerun.executor.graphs.steps import EagerSteps
from forerun.executor.step.inputs import PrefillBatch, PrefillTokens, StepShape
from tests.golden_engine import CASES, golden_llm

BUCKET = 64
PROMPTS = [
    case["prompt"][:length] for case, length in zip(CASES, (1, 15, 16, 40, 64), strict=False)
]
PARAMS = [
    {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1, "max_new_tokens": 20},
]


class PaddedSteps(EagerSteps):
    """What `CudaGraphSteps.prefill` replays, for one request at a time."""

    padded = 0

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        (chunk,) = batch.chunks
        if not chunk.last or chunk.num_tokens > BUCKET:
            return super().prefill(batch)
        self.padded += 1
        tables = self.step.tables
        slots = tables.upload([chunk.slot], torch.int64)
        counts = tables.upload([chunk.num_tokens], torch.int32)
        bound = tables.history.shape[1]
        out = self.step.prefill_padded(slots, counts, StepShape(BUCKET, bound, batch.flags))
        self.step.observe_prefill(out)
        return PrefillTokens(out.sampled)


@pytest.mark.covering(0, 2)
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
    name: str | None, window: int | None, chain_llm: Callable[..., LLM]
) -> None:
    make = chain_llm if name in ("EAGLE3", "STANDALONE") else golden_llm
    seen = []
    for padded in (False, True):
        settings = {"page_size": 16, "speculative_draft_window_size": window}
        with make(name, max_running_requests=2, **settings) as llm:
            assert llm.engine.limits.window == (window or 0)
            executor = llm.engine.executor
            assert isinstance(executor, DeviceExecutor)
            steps = PaddedSteps(executor.step)
            if padded:
                executor.steps = steps
            outs = [
                llm.generate(input_ids=prompt, sampling_params=params)
                for prompt in PROMPTS
                for params in PARAMS  # the second time with a prefix hit
            ]
            llm.engine.check()
        seen.append([(out.output_ids, out.meta_info["spec_accept_lengths"]) for out in outs])
        assert steps.padded == (len(outs) if padded else 0)
    assert seen[0] == seen[1]


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
