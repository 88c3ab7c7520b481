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


@pytest.mark.parametrize("method", ["even", "chance"])
def test_requests_with_accept_lengths_of_their_own(method: str) -> None:
    settings = {"speculative_simulate_accept_length": "1,5", "speculative_adaptive": False}
    with golden_llm("DFLASH", **settings, speculative_simulate_accept_method=method) as llm:
        params = {"temperature": 0.0, "max_new_tokens": 100, "ignore_eos": True}
        outs = llm.generate(input_ids=[c["prompt"] for c in CASES[:2]], sampling_params=params)
    lengths = sorted((out.meta_info["spec_accept_lengths"][:-1] for out in outs), key=max)
    assert set(lengths[0]) == {1}
    assert (set(lengths[1]) == {5}) == (method == "even")
    assert 3 < sum(lengths[1]) / len(lengths[1]) < 7


def test_what_is_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"several as in 1\.3,5; got '1\.3;5'"):
        golden_llm("DFLASH", speculative_simulate_accept_length="1.3;5")
