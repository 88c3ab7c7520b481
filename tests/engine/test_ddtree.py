"""DDTREE in the engine: output, budgets, block sizes and refused settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.evals.acceptance import Acceptance
from forerun.evals.prompts import held_out
from forerun.evals.word_problems import problems
from forerun.executor import build
from forerun.scheduler.adaptive_width import AdaptiveWidth, VerifyOutcome
from tests.engine.test_dflash import edited_draft, speculators
from tests.engine.test_matrix import hold
from tests.golden_engine import CASES, golden_llm

SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True}


def greedy(case: dict[str, Any]) -> dict[str, Any]:
    keys = ("max_new_tokens", "stop_token_ids")
    return {"temperature": 0.0, "ignore_eos": True, **{k: case[k] for k in keys}}


def run(algorithm: str = "DDTREE", **settings: Any) -> list[Any]:
    with golden_llm(algorithm, **settings) as llm:
        outs: list[Any] = llm.generate(
            input_ids=[c["prompt"] for c in CASES], sampling_params=[greedy(c) for c in CASES]
        )
        llm.engine.check()
    assert [o.output_ids for o in outs] == [c["output"] for c in CASES]
    return outs


def total(outs: list[Any]) -> Acceptance:
    return Acceptance.total(Acceptance.of(out.meta_info) for out in outs)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512), (256, 512)])
def test_output_equals_plain_decoding(
    page_size: int, chunk: int, tight: bool, overlap_depth: int
) -> None:
    budget = {"speculative_ddtree_budget": 12}  # small enough for the tight pool
    hold("DDTREE", page_size, chunk, overlap_depth, tight, **budget)


@pytest.mark.exhaustive
def test_a_tree_accepts_more_than_a_chain() -> None:
    chain, tree = total(run("DFLASH")), total(run())
    assert tree.proposed == 32 * tree.verify_ct
    assert tree.correct / tree.verify_ct > 1.1 * chain.correct / chain.verify_ct


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("settings", "drafts"),
    [
        ({"speculative_ddtree_budget": 1}, 1),
        ({"speculative_ddtree_budget": 5}, 5),
        pytest.param({"speculative_ddtree_budget": 63}, 63, marks=pytest.mark.exhaustive),
        ({"speculative_ddtree_budget": 100}, 100),
        pytest.param({"speculative_dflash_block_size": 2}, 32, marks=pytest.mark.exhaustive),
        ({"speculative_draft_window_size": 16}, 32),
    ],
)
def test_budgets_blocks_and_windows_do_not_change_the_output(
    settings: dict[str, Any], drafts: int
) -> None:
    whole = total(run(**settings))
    assert whole.proposed == drafts * whole.verify_ct
    if "speculative_dflash_block_size" in settings:
        assert len(whole.histogram) <= 2


@pytest.mark.exhaustive
def test_sampling_from_the_anchor(tmp_path: Path) -> None:
    run(speculative_draft_model_path=edited_draft(tmp_path, speculators(anchor=True)))


def test_max_draft_tokens_limits_the_tree_depth() -> None:
    limits = [None, 0, 1, 2, 100]
    kinds = [{**greedy(c), "max_draft_tokens": n} for c, n in zip(CASES, limits, strict=False)]
    with golden_llm("DDTREE") as llm:
        outs = llm.generate(input_ids=[c["prompt"] for c in CASES[:5]], sampling_params=kinds)
    assert [o.output_ids for o in outs] == [c["output"] for c in CASES[:5]]
    for out, limit in zip(outs, limits, strict=True):
        assert max(out.meta_info["spec_accept_lengths"]) <= (9 if limit is None else limit) + 1


def hold_at_every_width(name: str, **settings: Any) -> None:
    """The output is plain decoding's while the width changes from step to step.

    The policy learns which nodes were accepted: within the step's, ascending.
    """
    kinds = [{**SEEDED, "sampling_seed": i, "max_new_tokens": 24} for i in range(5)]
    prompts = [c["prompt"] for c in CASES[:5]]
    with golden_llm() as llm:
        want = [o.output_ids for o in llm.generate(input_ids=prompts, sampling_params=kinds)]
    with golden_llm(name, speculative_adaptive=True, **settings) as llm:
        policy = llm.engine.scheduler.widths
        assert isinstance(policy, AdaptiveWidth) and len(policy.widths) > 3
        choices = itertools.cycle(policy.widths)
        record, branched = policy.record_outcomes, set()

        def recorded(outcomes: Sequence[VerifyOutcome]) -> None:
            for _, num_drafts, num_accepted, nodes in outcomes:
                assert (nodes is None) == (num_drafts == 0)
                if nodes is not None:
                    assert len(nodes) == num_accepted
                    assert sorted({*nodes}) == nodes and max(nodes, default=0) <= num_drafts
                    branched.add(nodes != list(range(1, num_accepted + 1)))
            record(outcomes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "record_outcomes", recorded)
            patch.setattr(policy, "_choose", lambda *_: next(choices))
            for _ in ("cold", "warm"):
                outs = llm.generate(input_ids=prompts, sampling_params=kinds)
                assert [o.output_ids for o in outs] == want
        assert set(policy.chosen) == set(policy.widths) and branched == {False, True}
        llm.engine.check()


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_the_width_does_not_change_the_output(overlap_depth: int) -> None:
    hold_at_every_width("DDTREE", overlap_depth=overlap_depth)


@pytest.mark.parametrize(
    ("costs", "want"),
    [((1.0,) * 6, {8, 16, 33}), ((1.0, 1.1, 1.2, 9.0, 9.0, 9.0), {4}), ((1.0, *[9.0] * 5), {1})],
)
def test_the_budget_follows_the_measured_costs(
    costs: tuple[float, ...], want: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "measure_step_costs", lambda *_: {1: list(costs)})
    monkeypatch.setattr(AdaptiveWidth, "record_step_time", lambda *_: None)
    case = CASES[0]
    with golden_llm("DDTREE", speculative_adaptive=True) as llm:
        out = llm.generate(input_ids=case["prompt"], sampling_params=greedy(case))
        assert llm.engine.scheduler.widths.chosen.most_common(1)[0][0] in want
    assert out.output_ids == case["output"]


@pytest.mark.exhaustive
def test_the_bundled_pair() -> None:
    """The output of plain decoding, and a higher accept length than the chain's."""
    words = [p.question for p in problems(6)]
    python = [row["prompt"] for row in held_out()[:6]]
    seeds = [{**SEEDED, "sampling_seed": i} if i % 2 else {"temperature": 0} for i in range(6)]
    ids: dict[str, list[list[int]]] = {}
    whole: dict[str, Acceptance] = {}
    for name in ("NONE", "DFLASH", "DDTREE"):
        with LLM(speculative_algorithm=name, dtype="float32", speculative_adaptive=False) as llm:
            chats = [[{"role": "user", "content": text}] for text in words]
            outs = llm.chat(chats, {"temperature": 0, "max_new_tokens": 96})
            outs += llm.generate(python, [{**kind, "max_new_tokens": 48} for kind in seeds])
        ids[name] = [o.output_ids for o in outs]
        whole[name] = total(outs)
    assert ids["NONE"] == ids["DFLASH"] == ids["DDTREE"]
    chain, tree = whole["DFLASH"].accept_length, whole["DDTREE"].accept_length
    assert chain is not None and tree is not None and tree >= 1.15 * chain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_ddtree_budget": 0}, "must be 1 to 255, got 0"),
        ({"speculative_ddtree_budget": 256}, "must be 1 to 255, got 256"),
        ({"speculative_ddtree_budget": "abc"}, "must be an integer, got 'abc'"),
        ({"speculative_ddtree_budget": True}, "must be an integer, got True"),
        ({"speculative_num_draft_tokens": 16}, "set speculative_ddtree_budget"),
        ({"speculative_simulate_accept_length": 2.0}, "chains, not trees"),
        ({"speculative_dflash_block_size": 11}, "trained at 10"),
        ({"speculative_draft_window_size": 9}, "below the block size 10"),
        ({"speculative_draft_model_path": "/no/such/folder"}, "not a folder"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        golden_llm("DDTREE", **settings)
