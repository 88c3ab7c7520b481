"""Counters of speculation are consistent with the `meta_info` of requests."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.engine.stats import NAMES
from tests.golden_engine import CASES, golden_llm
from tests.toy_algorithms import Faulty, register_toys

register_toys()
PROMPTS = [c["prompt"] for c in CASES[:5]]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 21}


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM", "TOY-TREES", None])
@pytest.mark.parametrize("adaptive", [False, True])
def test_counters_add_up(algorithm: str | None, overlap_depth: int, adaptive: bool) -> None:
    limits = [None, 2, 0, None, 100]
    kinds = [{**GREEDY, "max_draft_tokens": n} for n in limits]
    settings = {"speculative_adaptive": adaptive, "max_running_requests": 3}
    with golden_llm(algorithm, overlap_depth=overlap_depth, **settings) as llm:
        assert llm.stats()["decode_steps"] == 0
        assert llm.stats()["spec_accept_length"] is llm.stats()["spec_accept_rate"] is None
        infos = [o.meta_info for o in llm.generate(input_ids=PROMPTS, sampling_params=kinds)] + [
            o.meta_info for o in llm.generate(input_ids=PROMPTS[:1] * 2, sampling_params=GREEDY)
        ]
        stats = llm.stats()
    assert stats["algorithm"] == (algorithm or "NONE")
    assert stats["spec_decode_num_draft_tokens"] == sum(
        i["spec_num_proposed_drafts"] for i in infos
    )
    steps = sum(i["spec_verify_ct"] for i in infos)
    assert stats["spec_accept_length"] == stats["decode_tokens"] / steps
    # The last step of a request may accept drafts past its end.
    correct = sum(i["spec_num_correct_drafts"] for i in infos)
    assert correct <= stats["spec_decode_num_accepted_tokens"] <= correct + 15 * len(infos)
    per_position = stats["spec_decode_num_accepted_tokens_per_pos"]
    assert sum(per_position) == stats["spec_decode_num_accepted_tokens"]
    assert per_position == sorted(per_position, reverse=True)
    assert len(per_position) == llm.engine.limits.max_verify_tokens - 1
    assert stats["decode_tokens"] == steps + stats["spec_decode_num_accepted_tokens"]
    assert sum(stats["width"]["steps_by_width"].values()) >= stats["decode_steps"]
    assert stats["width"]["adaptive"] == (adaptive and algorithm is not None)
    assert set(NAMES) <= set(stats)


def test_counters_per_position() -> None:
    """Without a stop in between, the counters are those of the request."""
    kind: dict[str, Any] = {**GREEDY, "max_new_tokens": 40}
    with golden_llm("DFLASH") as llm:
        info = llm.generate(input_ids=PROMPTS[0], sampling_params=kind).meta_info
        stats = llm.stats()
    lengths = info["spec_accept_lengths"][:-1]  # the last may be cut
    for k, count in enumerate(stats["spec_decode_num_accepted_tokens_per_pos"], 1):
        assert count - sum(n > k for n in lengths) in (0, 1)
    assert stats["spec_decode_num_drafts"] == info["spec_verify_ct"]


def test_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", "raise")
    own = {"speculative_fallback": True, "disable_cuda_graph": True}
    with golden_llm("TOY-FAULTY", **own) as llm:
        llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert llm.stats()["algorithm_failures"] == 1
