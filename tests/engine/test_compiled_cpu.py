"""`cpu_graph`: compiled steps equal eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.executor.compiled_cpu import CompiledCpuSteps, check_usable
from tests.golden_engine import CASES, golden_llm

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 5}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # compilation takes long on a busy machine
@pytest.mark.usefixtures("without_cpu_kernels")
@pytest.mark.parametrize("algorithm", ["NGRAM", "DFLASH"])
def test_output_of_the_golden_target(algorithm: str) -> None:
    """Compiles a single step: batch size 1, greedy. Without a draft model that is quicker."""
    case = CASES[1]
    params = {**GREEDY, "max_new_tokens": case["max_new_tokens"]}
    lengths = []
    for compiled in (False, True):
        with golden_llm(algorithm, cpu_graph=compiled) as llm:
            out = llm.generate(input_ids=case["prompt"], sampling_params=params)
            llm.engine.check()
            steps = llm.engine.executor.steps
            assert isinstance(steps, CompiledCpuSteps) == compiled
            assert not isinstance(steps, CompiledCpuSteps) or len(steps._steps) == 1
        assert out.output_ids == case["output"]
        lengths.append(out.meta_info["spec_accept_lengths"])
    assert lengths[0] == lengths[1] and max(lengths[0]) > 1


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
@pytest.mark.usefixtures("without_cpu_kernels")
def test_output_of_the_bundled_pair_equals_eager_steps(algorithm: str | None) -> None:
    prompts = ["A box holds 6 pens. Tom has 3 boxes.", "def add(a, b):"]
    got, lengths = [], []
    for compiled in (False, True):
        settings = {"dtype": "float32", "speculative_adaptive": False, "cpu_graph": compiled}
        with LLM(speculative_algorithm=algorithm, **settings) as llm:
            steps = llm.engine.executor.steps
            assert isinstance(steps, CompiledCpuSteps) == compiled
            outs = [llm.generate(prompts[0], GREEDY), *llm.generate(prompts, [SEEDED, GREEDY])]
            llm.engine.check()
            if isinstance(steps, CompiledCpuSteps):
                assert {key.batch for key in steps._steps} == {1, 2}  # exact batch sizes
        got.append([out.output_ids for out in outs])
        lengths.append([out.meta_info["spec_accept_lengths"] for out in outs])
    assert got[0] == got[1]
    assert lengths[0] == lengths[1]


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="for a CPU, and this is cuda:0; drop it"):
        check_usable(torch.device("cuda", 0))


def test_a_missing_compiler_is_refused_at_start() -> None:
    with (
        inductor.patch({"cpp.cxx": ("/no/such/compiler",)}),
        pytest.raises(ConfigError, match=r"needs a working C\+\+ compiler .* install g\+\+") as e,
    ):
        golden_llm(cpu_graph=True)
    assert "\n" not in str(e.value)
