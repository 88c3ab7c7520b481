"""Simulated acceptance has the given mean accept length."""

from __future__ import annotations

import pytest

from forerun.core.errors import ConfigError
from tests.golden_engine import CASES, golden_llm


@pytest.mark.parametrize(
    "mean", [1.2, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1.0, 3.0, 6.5, 10.0))]
)
def test_the_mean_accept_length(mean: float) -> None:
    with golden_llm("DFLASH", speculative_simulate_accept_length=mean) as llm:
        params = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}
        outs = llm.generate(input_ids=[c["prompt"] for c in CASES[:3]], sampling_params=params)
        for out in outs:
            lengths = out.meta_info["spec_accept_lengths"][
                :-1
            ]  # the last step may be cut at the end
            assert abs(sum(lengths) / len(lengths) - mean) <= 1 / len(lengths) + 1e-9
            assert max(lengths) - min(lengths) <= 1
        llm.engine.check()


@pytest.mark.parametrize("mean", [0.5, 10.5])
def test_impossible_means_are_refused(mean: float) -> None:
    with pytest.raises(ConfigError, match="between 1 and the 10 tokens"):
        golden_llm("DFLASH", speculative_simulate_accept_length=mean)
