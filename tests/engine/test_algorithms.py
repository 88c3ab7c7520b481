"""Custom algorithms: trees, host tokens, state per slot, eager and captured ones, and failures.

Whatever they propose, the output is that of plain decoding.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import SamplingParams
from forerun.core.errors import ConfigError
from forerun.executor.step.safe_algorithm import SafeAlgorithm
from forerun.speculative.base import Draft, ProposeInput
from tests.golden_engine import CASES, golden_llm
from tests.toy_algorithms import DRAFTS, Faulty, Oracle, Toy, register_toys

register_toys()
PROMPTS = [c["prompt"] for c in CASES[:5]]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "max_new_tokens": 24}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24}


def rules(sampled: bool) -> list[dict[str, Any]]:
    if not sampled:
        return [GREEDY] * len(PROMPTS)
    return [{**SEEDED, "sampling_seed": i} for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    with golden_llm() as llm:
        runs = [llm.generate(input_ids=PROMPTS, sampling_params=rules(s)) for s in (False, True)]
    return [[out.output_ids for out in run] for run in runs]


@pytest.fixture
def oracle(plain: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    known = {tuple(p): o for outs in plain for p, o in zip(PROMPTS, outs, strict=True)}
    monkeypatch.setattr(Oracle, "answers", known)


@pytest.mark.covering(0)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "name",
    [
        *("TOY-TREES", "TOY-ORACLE", "TOY-ORACLE-TREES", "TOY-LEARNER", "TOY-SAMPLER"),
        *("TOY-EAGER", "TOY-EAGER-TREES"),
    ],
)
def test_output_equals_plain_decoding(
    name: str, page_size: int, overlap_depth: int, plain: list[list[list[int]]], oracle: None
) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": 16}
    with golden_llm(name, overlap_depth=overlap_depth, max_running_requests=4, **settings) as llm:
        if "ORACLE" in name:
            assert llm.engine.limits.overlap_depth == 0  # needs host tokens
        for sampled in (False, True):
            for _ in ("cold", "warm"):
                outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
                assert [o.output_ids for o in outs] == plain[sampled]
            if "ORACLE" in name and sampled:  # its answers are the sampled ones
                best = 4 if "TREES" in name else DRAFTS + 1
                steps = [n for o in outs for n in o.meta_info["spec_accept_lengths"][:-1]]
                assert set(steps) == {best}
        llm.engine.check()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "fault", ["raise", "exit", "shape", "dtype", "kind", "tree", "meta", "sparse"]
)
@pytest.mark.parametrize("fallback", [False, True])
def test_an_algorithm_that_fails(
    fault: str, fallback: bool, plain: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    kinds = [{**k, "speculative": i > 1} for i, k in enumerate(rules(False))]
    own = {"speculative_fallback": fallback, "disable_cuda_graph": True}
    with golden_llm("TOY-FAULTY", **own) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=kinds)
        for i, (out, want) in enumerate(zip(outs, plain[0], strict=True)):
            if fallback or i <= 1:  # the first two asked for no drafts
                assert out.output_ids == want
            else:
                assert out.finish_reason["type"] == "abort"
                assert "Faulty.propose" in out.finish_reason["message"]
                assert out.output_ids == want[: len(out.output_ids)]
        if fallback:
            assert set(llm.engine.scheduler.widths.chosen) == {1}
        again = llm.generate(input_ids=PROMPTS[0], sampling_params=kinds[0])
        assert again.output_ids == plain[0][0]
        llm.engine.check()


@pytest.mark.parametrize("harmless", ["range", "strides"])
def test_draft_ids_outside_the_vocabulary_and_strides_are_harmless(
    harmless: str, plain: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "fault", harmless)
    with golden_llm("TOY-FAULTY", disable_cuda_graph=True) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(False))
    assert [o.output_ids for o in outs] == plain[0]


def test_the_verify_pass_gets_the_ids_of_a_request_side_by_side() -> None:
    """Kernels take any stride between requests, and 1 between the drafts of one."""
    drafts = torch.arange(12).view(4, 3).t()  # [3, 4]

    class Strided(Toy):
        def propose(self, step: ProposeInput) -> Draft:
            return Draft(drafts, torch.zeros(1, 1, dtype=torch.int64).expand(3, 4))

    algorithm = Strided()
    step = SimpleNamespace(slots=torch.arange(3), num_verify_tokens=5)
    got = SafeAlgorithm(algorithm, trees=True).propose(step)  # type: ignore[arg-type]
    assert got.parents is not None
    assert got.tokens.tolist() == drafts.tolist() and got.parents.tolist() == [[0] * 4] * 3
    assert got.tokens.stride() == got.parents.stride() == (4, 1)


@pytest.mark.parametrize(
    "given", [torch.rand(3, 3), torch.rand(3, 4).double(), [0.5], None, torch.rand(3, 4)]
)
def test_confidences_are_checked(given: Any) -> None:
    """A wrong one fails like a wrong draft: the step goes on with others."""
    drafts = torch.arange(12).view(3, 4)

    class Confident(Toy):
        def propose(self, step: ProposeInput) -> Draft:
            return Draft(drafts, confidence=given)

    step: Any = SimpleNamespace(
        slots=torch.arange(3), num_verify_tokens=5, last_token=torch.zeros(3, dtype=torch.int64)
    )
    safe = SafeAlgorithm(Confident(), trees=False)
    got = safe.propose(step)
    right = given is None or (isinstance(given, torch.Tensor) and given.shape == (3, 4))
    if right and (given is None or given.dtype == torch.float32):
        assert got.confidence is given and torch.equal(got.tokens, drafts)
    else:
        assert got.confidence is None and "confidence" in str(safe.take_error())


@pytest.mark.parametrize(
    ("fault", "says"),
    [("kind", "propose must return a Draft, got Tensor"), ("shape", "Draft.tokens must be (1, 5)")],
)
def test_of_two_algorithms_the_one_that_fails_is_named(
    fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    with golden_llm("NGRAM,TOY-FAULTY", disable_cuda_graph=True) as llm:
        out = llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    where = "NgramAndFaulty.propose: TypeError: Faulty: "
    assert out.finish_reason["message"].startswith(where + says)


@pytest.mark.parametrize(
    ("member", "value", "says"),
    [
        ("caps", None, "Faulty.resolve must return SpecCaps"),
        ("caps", replace(Toy.caps, kv_reserve=1), "Faulty.resolve: kv_reserve must be"),
        ("load", lambda self, ctx: {}["phrase"], "Faulty.load failed: KeyError: 'phrase'"),
        ("create_future_map", lambda self, ctx: None, "Faulty.create_future_map must return"),
    ],
)
def test_each_of_two_algorithms_is_checked_at_start(
    member: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, member, value)
    with pytest.raises(ConfigError) as refused:
        golden_llm("NGRAM,TOY-FAULTY")
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "given",
    [None, [[1]], torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 3, 0, dtype=torch.int64)],
)
def test_row_layouts_are_checked(given: Any) -> None:
    """What counts them runs outside of the algorithm's methods, and would end every request."""

    class Layouts(Toy):
        def propose_row_layouts(self, step: ProposeInput) -> Any:
            return given

    step: Any = SimpleNamespace(slots=torch.arange(3))
    safe = SafeAlgorithm(Layouts(), trees=False)
    assert safe.propose_row_layouts(step) is None
    assert "must return [2, 3, D] torch.int64 on cpu, got" in str(safe.take_error())


def test_a_traceback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with golden_llm("TOY-FAULTY", disable_cuda_graph=True) as llm:
        for _ in range(3):
            outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(False))
            assert all(o.finish_reason["type"] == "abort" for o in outs)
    logged = [r for r in caplog.records if r.exc_info]
    assert [r.getMessage() for r in logged] == ["Faulty.propose failed"]
    assert "somebody else's bug" in caplog.text


def test_an_observer_that_fails(plain: list[list[list[int]]]) -> None:
    with golden_llm("TOY-FAULTY-OBSERVER", disable_cuda_graph=True) as llm:
        out = llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert out.finish_reason["type"] == "abort" and "KeyError" in out.finish_reason["message"]
        llm.engine.check()
    own = {"speculative_fallback": True, "disable_cuda_graph": True}
    with golden_llm("TOY-FAULTY-OBSERVER", **own) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(False))
        assert [o.output_ids for o in outs] == plain[0]


@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM"])
def test_max_draft_tokens_limits_the_drafts_of_a_request(
    algorithm: str, plain: list[list[list[int]]]
) -> None:
    limits = [None, 0, 1, 2, 100]
    kinds = [{**k, "max_draft_tokens": n} for k, n in zip(rules(False), limits, strict=True)]
    with golden_llm(algorithm) as llm:
        drafts = llm.engine.limits.max_verify_tokens - 1
        outs = llm.generate(input_ids=PROMPTS, sampling_params=kinds)
        assert [o.output_ids for o in outs] == plain[0]
        for out, limit in zip(outs, limits, strict=True):
            expected = drafts if limit is None else min(limit, drafts)
            assert max(out.meta_info["spec_accept_lengths"]) <= expected + 1
        no_drafts = outs[1].meta_info
        assert no_drafts["spec_num_proposed_drafts"] == 0 and no_drafts["spec_verify_ct"] == 23
        chosen = llm.engine.scheduler.widths.chosen
        chosen.clear()
        llm.generate(input_ids=PROMPTS[0], sampling_params={**GREEDY, "speculative": False})
        assert set(chosen) == {1}


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM", "TOY-TREES", "TOY-LEARNER"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_the_width_does_not_change_the_output(
    algorithm: str,
    overlap_depth: int,
    plain: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with golden_llm(algorithm, speculative_adaptive=True, overlap_depth=overlap_depth) as llm:
        widths = llm.engine.scheduler.widths
        steps = iter(range(10**6))
        monkeypatch.setattr(
            widths, "_choose", lambda _, max_index: widths.widths[next(steps) % (max_index + 1)]
        )
        for sampled in (False, True):
            for _ in ("cold", "warm"):
                outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
                assert [o.output_ids for o in outs] == plain[sampled]
        assert set(widths.chosen) == set(widths.widths)
        assert len(widths.widths) > 1
        llm.engine.check()


@pytest.mark.usefixtures("without_cpu_kernels")
def test_trees_need_a_backend_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.attention.torch_native import TorchNative

    monkeypatch.setattr(TorchNative, "why_not", classmethod(lambda cls, need: _no_tree(need)))
    with pytest.raises(ConfigError, match="no custom mask"):
        golden_llm("TOY-TREES", device="cpu")
    with pytest.raises(ConfigError, match="chains, not trees"):
        monkeypatch.undo()
        golden_llm("TOY-TREES", speculative_simulate_accept_length=2.0)


def _no_tree(need: Any) -> list[str]:
    return ["no custom mask"] if any(m.mask.value == "custom" for m in need.masks) else []


def test_draft_parameters_of_requests_are_validated() -> None:
    for bad in ({"speculative": 1}, {"max_draft_tokens": -1}, {"max_draft_tokens": True}):
        with pytest.raises(ValueError, match=r"speculative|max_draft_tokens"):
            SamplingParams.of(bad)
