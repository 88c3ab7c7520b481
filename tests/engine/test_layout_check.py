"""The check of the first steps: a draft that is served in the wrong row layout is noticed."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.executor import layout_check
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.layout_check import warning
from forerun.speculative.base import ProposeInput
from forerun.speculative.dflash import DFlash
from tests.covering import some_of
from tests.engine.test_golden_heads import HEADS, cases
from tests.golden_engine import CASES, golden_llm

RIGHT = {
    "causal-zlab-mixed-w20-b8": "fill-in",
    "dspark-specforge-rnn-b5": "anchor-first",
    "dspark-speculators-fillin-pruned-b6": "fill-in",
    "domino-zlab-shift-b7": "anchor-first",
}
CELLS = [*product(RIGHT, (True, False))]  # draft, whether steps are recorded
GREEDY = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _as_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests check fewer steps. In all of them every step with drafts is checked."""
    monkeypatch.setattr(layout_check, "CHECKED_STEPS", 64)


def pair(name: str, layout: str | None, algorithm: str = "DFLASH", **settings: Any) -> LLM:
    if layout is not None:
        settings["speculative_draft_layout"] = layout
    folder = str(HEADS / name)
    return golden_llm(algorithm, HEADS / "target", speculative_draft_model_path=folder, **settings)


def texts(llm: LLM, name: str) -> list[list[int]]:
    """Long enough for the check."""
    prompts = [case["prompt"] for case in cases(name)] * 3
    return [out.output_ids for out in llm.generate(input_ids=prompts, sampling_params=GREEDY)]


def check_of(llm: LLM) -> Any:
    assert isinstance(llm.engine.executor, DeviceExecutor)
    return llm.engine.executor.layout_check


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "graphs"), CELLS)
def test_the_wrong_layout_warns(name: str, graphs: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once, in the log and in the statistics; the right layout does not. The texts are equal."""
    right, (wrong,) = RIGHT[name], {"fill-in", "anchor-first"} - {RIGHT[name]}
    found = []
    for layout in (None, wrong):
        caplog.clear()
        with pair(name, layout, disable_cuda_graph=not graphs) as llm:
            assert f"{layout or right} blocks of" in llm.explain()["draft"]
            found.append(texts(llm, name))
            assert check_of(llm) is None
            warnings = llm.stats()["warnings"]
            llm.engine.check()
        logged = [r.message for r in caplog.records if "misread" in r.message]
        assert logged == warnings
        if layout is None:
            assert not warnings
            continue
        (said,) = warnings
        assert f"would have been with --speculative-draft-layout {right}. Set that." in said
    assert found[0] == found[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", some_of([("DDTREE",), ("DFLASH,SUFFIX",)], 1))
def test_trees_and_joined_drafts_are_checked(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_check, "CHECKED_STEPS", 40)
    monkeypatch.setattr(layout_check, "SIGNIFICANT", 2.0)
    name = "causal-zlab-mixed-w20-b8"
    settings = {"speculative_suffix_max_cached_requests": 0} if "," in algorithm else {}
    for layout, count in ((None, 0), ("anchor-first", 1)):
        with pair(name, layout, algorithm, **settings) as llm:
            texts(llm, name)
            assert check_of(llm) is None and len(llm.stats()["warnings"]) == count


def test_counts_are_those_of_the_committed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against drafts of both row layouts and the text, counted as loops."""
    monkeypatch.setattr(layout_check, "CHECKED_STEPS", 8)
    name, seen = "dspark-speculators-fillin-pruned-b6", []
    propose = DFlash.propose_row_layouts

    def watched(self: DFlash, step: ProposeInput) -> torch.Tensor:
        drafts = propose(self, step)
        if int(step.slots[0]) != len(step.history) - 1:
            seen.append((int(step.start[0]), drafts[:, 0].tolist()))
        return drafts

    monkeypatch.setattr(DFlash, "propose_row_layouts", watched)
    case = cases(name)[0]
    counts: list[torch.Tensor] = []
    with pair(name, None) as llm:
        check = check_of(llm)
        after = check.after
        monkeypatch.setattr(check, "after", lambda: counts.append(check._counts) or after())
        kind = {**GREEDY, "max_new_tokens": 100}
        out = llm.generate(input_ids=case["prompt"], sampling_params=kind)
    text = case["prompt"] + out.output_ids
    assert len(seen) == 8
    want = [0, 0, 0, 0]
    for (start, drafts), accepted in zip(seen, out.meta_info["spec_accept_lengths"], strict=False):
        lengths = []
        for served in drafts:
            known = text[start + 1 : start + 1 + accepted]
            equal = [a == b for a, b in zip(served, known, strict=False)]
            lengths.append(equal.index(False) if False in equal else len(equal))
        assert lengths[0] == min(accepted - 1, len(drafts[0]))
        own, other = lengths
        want = [a + b for a, b in zip(want, (own, other, own > other, other > own), strict=True)]
    assert counts[-1].tolist() == want


def test_it_ends_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others lie between them."""
    every = 3
    monkeypatch.setattr(layout_check, "CHECKED_STEPS", 4)
    monkeypatch.setattr(layout_check, "EVERY", every)
    calls: list[int] = []
    propose = DFlash.propose_row_layouts

    def counted(self: DFlash, step: ProposeInput) -> torch.Tensor:
        calls.append(len(step.slots))
        return propose(self, step)

    monkeypatch.setattr(DFlash, "propose_row_layouts", counted)
    with golden_llm("DFLASH") as llm:
        calls.clear()  # those at start, for their kernels
        check, asked = check_of(llm), []
        is_due = check.is_due
        monkeypatch.setattr(check, "is_due", lambda: asked.append(len(calls)) or is_due())
        llm.generate(input_ids=[case["prompt"] for case in CASES], sampling_params=GREEDY)
        assert check_of(llm) is None and not llm.stats()["warnings"]
    assert calls == [1] * 4
    assert asked == [0] + [1] * every + [2] * every + [3] * every


def test_an_error_in_it_is_one_of_the_algorithm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: DFlash, step: ProposeInput) -> torch.Tensor:
        raise RuntimeError("out of order")

    monkeypatch.setattr(DFlash, "propose_row_layouts", failing)
    prompt = CASES[0]["prompt"]
    with golden_llm() as llm:
        plain = llm.generate(input_ids=prompt, sampling_params=GREEDY).output_ids
    with golden_llm("DFLASH", speculative_fallback=True) as llm, caplog.at_level(logging.ERROR):
        assert llm.generate(input_ids=prompt, sampling_params=GREEDY).output_ids == plain
        assert llm.stats()["algorithm_failures"] == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dflash2-zlab-b8", {}),  # its head has one layout only
        ("causal-zlab-full-b8", {"load_format": "dummy"}),
        ("causal-zlab-full-b8", {"speculative_simulate_accept_length": 2.0}),
    ],
    ids=["one-layout", "dummy", "simulated"],
)
def test_where_there_is_nothing_to_check(name: str, settings: dict[str, Any]) -> None:
    with pair(name, None, **settings) as llm:
        assert check_of(llm) is None


@pytest.mark.parametrize(
    ("counts", "warns"),
    [
        ((0, 0, 0, 0), False),
        ((60, 60, 5, 5), False),
        ((0, 8, 0, 8), False),  # less than three standard deviations
        ((0, 9, 0, 9), True),
        ((90, 40, 30, 2), False),
        ((20, 60, 4, 20), True),
        ((20, 60, 10, 20), False),
    ],
)
def test_chance_does_not_warn(counts: tuple[int, ...], warns: bool) -> None:
    said = warning(torch.tensor(counts), "--other")
    assert (said is not None) == warns
    if said is not None:
        assert f"{counts[0]} of its drafts were right" in said and "--other" in said


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", RIGHT)
def test_on_a_gpu(name: str, graph: bool) -> None:
    """The wrong layout warns, the right one does not, and no launch waits for the device."""
    (wrong,) = {"fill-in", "anchor-first"} - {RIGHT[name]}
    for layout, count in ((None, 0), (wrong, 1)):
        own = {"device": "cuda", "max_running_requests": 4, "disable_cuda_graph": not graph}
        with pair(name, layout, **own) as llm:
            check = check_of(llm)
            before = check.before

            def strict(*given: Any, before: Any = before) -> None:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    before(*given)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            check.before = strict
            texts(llm, name)
            assert len(llm.stats()["warnings"]) == count
