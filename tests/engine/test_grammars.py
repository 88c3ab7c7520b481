"""Structured output: that of plain decoding under the same grammar, with any drafter."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import RequestError
from forerun.core.grammar import Grammar
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.ranks.executor import RanksExecutor
from forerun.executor.step import grammar_masks, token_sampler
from forerun.executor.step.grammar_masks import DraftCopy
from forerun.grammar import state as state_module
from forerun.grammar.state import GrammarState
from forerun.llm.bundled import bundled
from forerun.scheduler.adaptive_width import WidthChoice
from forerun.speculative.registry import all_options
from tests.engine.test_logits import SplitSteps
from tests.engine_runs import run_together
from tests.golden_engine import golden_llm, poison_on_release
from tests.toy_algorithms import OracleTrees, register_toys

xgrammar = pytest.importorskip("xgrammar")

from tests.grammar.vocab import EOS, VOCAB_SIZE, new_compiler, tokenizer  # noqa: E402

register_toys()
strict = cache(partial(new_compiler, any_whitespace=False))
NEW = 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
CONTENT = {"type": "regex", "pattern": "[a-z]{2,9}"}
TAG = {"format": {"type": "tag", "begin": "<t>", "content": CONTENT, "end": "</t>"}}
KINDS: list[dict[str, Any]] = [
    {"json_schema": PERSON, "temperature": 0.0},
    {"regex": r"[a-z ]{4,40}\.", "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.8},
    {"ebnf": 'root ::= "(" root ")" root | [a-f]*', "temperature": 0.7, "min_new_tokens": 6},
    {"structural_tag": TAG, "temperature": 0.9, "logit_bias": {"40": 2.0}},
    {"json_object": True, "temperature": 0.9, "ignore_eos": True, "min_p": 0.02},
    {"regex": "(yes|no|maybe)", "temperature": 0.0, "min_new_tokens": 30},
]
PROMPTS = [
    "Who is it? Answer in JSON:\n",
    "Once upon a time, there was",
    "def add(a, b):\n    return",
    "Once upon a time, there was",
    "Who is it? Answer in JSON:\nName: Ann. Age: 31.",
    "Who is it? Answer in JSON:\n",
    "Is the sky blue?",
]


def bundled_llm(algorithm: str | None = None, **settings: Any) -> LLM:
    """JSON without free whitespace: small models never stop writing it."""
    settings = {"speculative_adaptive": False, "dtype": "float32", "page_size": 16, **settings}
    settings.setdefault("constrained_json_disable_any_whitespace", True)
    llm = LLM(speculative_algorithm=algorithm, **settings)
    poison_on_release(llm)
    return llm


def params(index: int) -> SamplingParams:
    return SamplingParams.of({**KINDS[index], "sampling_seed": index, "max_new_tokens": NEW})


def run(llm: LLM, preempts: bool = False, which: range = range(len(KINDS))) -> list[list[int]]:
    """All requests in one batch; `preempts`: every third step preempts the youngest."""
    engine = llm.engine
    requests = [engine.make_request(tokenizer()(PROMPTS[i])["input_ids"], params(i)) for i in which]
    run_together(engine, requests, preempts)
    return [follows(request) for request in requests]


def follows(request: Request) -> list[int]:
    """The output, checked with a fresh matcher: complete at EOS, and a prefix at the limit."""
    assert request.finish is not None and request.finish.type in ("stop", "length"), request.finish
    if request.params.grammar is not None:
        matcher = xgrammar.GrammarMatcher(strict().compile(request.params.grammar))
        assert all(matcher.accept_token(token) for token in request.output)
        assert matcher.is_terminated() == (request.finish.type == "stop")
        assert (request.output[-1] in EOS) == (request.finish.type == "stop")
    return request.output


@cache
def reference() -> list[list[int]]:
    """Plain decoding on the CPU, one request at a time."""
    with bundled_llm(disable_radix_cache=True, device="cpu") as llm:
        outputs = [run(llm, which=range(i, i + 1))[0] for i in range(len(KINDS))]
    assert sum(output[-1] in EOS for output in outputs) >= 5
    for kind, output in zip(KINDS, outputs, strict=True):
        text = tokenizer().decode(output, skip_special_tokens=True)
        if output[-1] in EOS and kind.get("json_schema"):
            assert set(json.loads(text)) == {"name", "age", "tags"}
    return outputs


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize(
    "algorithm", [None, "NGRAM", "DFLASH", "EAGLE3", "DDTREE", "TOY-EAGER-TREES"]
)
def test_any_drafter_gives_the_outputs_of_plain_decoding(
    algorithm: str | None, chunk: int, overlap_depth: int, tight: bool
) -> None:
    settings: dict[str, Any] = {"chunked_prefill_size": chunk, "overlap_depth": overlap_depth}
    if algorithm == "DDTREE":
        settings["speculative_ddtree_budget"] = 12
    if tight:
        settings["max_total_tokens"] = 160
    with bundled_llm(algorithm, **settings) as llm:
        assert run(llm, preempts=tight) == reference()
        llm.engine.check()
        if algorithm in ("DFLASH", "EAGLE3", "DDTREE"):
            assert llm.stats()["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("why", ["slow", "late"])
@pytest.mark.parametrize("overlap_depth", [1, 0], ids=["overlap", "sync"])
@pytest.mark.parametrize("algorithm", ["DFLASH", None, "NGRAM", "DDTREE"])
def test_requests_that_wait_for_their_masks_outside_of_the_batch(
    algorithm: str | None, overlap_depth: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: they leave it after every step. Late: a step does not wait for them, so its tokens do
    not count."""
    if why == "slow":
        monkeypatch.setattr(state_module, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(grammar_masks, "PATIENCE", 60.0 if why == "slow" else 0.0)
    with bundled_llm(algorithm, overlap_depth=overlap_depth) as llm:
        engine, held = llm.engine, 0
        hold = engine.scheduler._hold

        def count(request: Request) -> None:
            nonlocal held
            held += 1
            hold(request)

        monkeypatch.setattr(engine.scheduler, "_hold", count)
        assert run(llm) == reference()
        assert held >= (50 if why == "slow" else 10)
        engine.check()


@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_log_probabilities_of_requests_whose_masks_are_late(
    algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that a prompt's last chunk sampled without its mask has none, as it is dropped."""
    outputs = []
    for patience in (60.0, 0.0):
        monkeypatch.setattr(grammar_masks, "PATIENCE", patience)
        with bundled_llm(algorithm) as llm:
            outputs.append(
                llm.generate(
                    PROMPTS[:2],
                    {"regex": "[a-z ]{6,}", "temperature": 0.0, "max_new_tokens": 6},
                    return_logprob=True,
                    logprob_start_len=[-1, 0],
                    top_logprobs_num=2,
                )
            )
            llm.engine.check()
    patient, late = ([(o.text, _logprobs(o.meta_info)) for o in each] for each in outputs)
    assert late == patient


def _logprobs(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name.endswith("logprobs")}


def test_a_mask_that_never_ends_stops_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends, the others do not wait for it."""
    monkeypatch.setattr(state_module, "STUCK_SECONDS", 0.2)
    go, fill = threading.Event(), GrammarState._fill

    def stuck(self: GrammarState, bitmask: torch.Tensor, row: int, depth: int) -> bool:
        if self.params.grammar.text == "(stuck){3}" and self.num_tokens:
            go.wait(60)
        return fill(self, bitmask, row, depth)

    monkeypatch.setattr(GrammarState, "_fill", stuck)
    with bundled_llm("DFLASH") as llm:
        asked = [{"regex": "(stuck){3}"}, *KINDS[:3]]
        each = [
            {**kind, "sampling_seed": i - 1, "max_new_tokens": NEW} for i, kind in enumerate(asked)
        ]
        failed, *others = llm.generate(["s", *PROMPTS[:3]], each)
        assert failed.finish_reason["err_type"] == "grammar"
        assert "takes too long to follow" in failed.finish_reason["message"]
        assert [other.output_ids for other in others] == reference()[:3]
        go.set()
        llm.engine.check()


def test_long_paths_of_trees_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that hold the answer beside wrong tokens, up to its end."""
    prompts = [tuple(tokenizer()(text)["input_ids"]) for text in PROMPTS]
    for i in (0, 4):
        monkeypatch.setattr(OracleTrees, "answers", {prompts[i]: reference()[i]})
        with bundled_llm("TOY-ORACLE-TREES") as llm:
            assert run(llm, which=range(i, i + 1)) == [reference()[i]]
            accepted = llm.stats()["spec_decode_num_accepted_tokens"]
        assert accepted >= 0.6 * len(reference()[i])


@pytest.mark.exhaustive
def test_logits_of_a_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of requests has its own rows of the masks."""
    monkeypatch.setattr(token_sampler, "GROUP_BYTES", 1)
    with bundled_llm("DFLASH") as llm:
        assert run(llm) == reference()


@pytest.mark.exhaustive
def test_widths_and_deferred_observes() -> None:
    """The width changes from step to step, and plain steps are observed later."""
    with bundled_llm("DFLASH", speculative_adaptive=True) as llm:
        widths = itertools.cycle(llm.engine.info.verify_widths)
        llm.engine.scheduler.widths.choose = lambda _: WidthChoice(next(widths))  # type: ignore[method-assign]
        assert run(llm) == reference()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["TOY-EAGER-TREES", "DFLASH", None, "TOY-TREES"])
@pytest.mark.parametrize("overlap_depth", [1, 0], ids=["overlap", "sync"])
@pytest.mark.covering(0, 2)
@pytest.mark.usefixtures("without_cpu_kernels")
def test_steps_captured_in_two_parts(name: str | None, overlap_depth: int) -> None:
    with bundled_llm(name, overlap_depth=overlap_depth, max_running_requests=4) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        executor.steps = steps = SplitSteps(executor.step, llm.engine.info.verify_widths)
        assert run(llm, which=range(3)) == reference()[:3]  # filled up with padding
        assert run(llm, which=range(3, 7)) == reference()[3:]
        assert steps.stand_in.replayed > 20
        llm.engine.check()


@pytest.mark.exhaustive
def test_an_executor_in_another_process() -> None:
    with remote_engine() as engine:
        requests = [
            engine.make_request(tokenizer()(PROMPTS[i])["input_ids"], params(i)) for i in (0, 1, 2)
        ]
        with pytest.raises(RequestError, match="regex is invalid"):
            engine.make_request([5], SamplingParams(regex="("))
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        assert [follows(request) for request in requests] == reference()[:3]


@contextmanager
def remote_engine() -> Iterator[Engine]:
    options = {option.name: option.default for option in all_options()}
    settings = EngineConfig.of(
        {
            "dtype": "float32",
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(bundled("draft")),
            "constrained_json_disable_any_whitespace": True,
        },
        options,
    )
    executor = RanksExecutor.start(settings, bundled("target"), 1)
    try:
        yield Engine(settings, executor)
    finally:
        executor.close()


# --- an oracle that shares nothing with the engine but the kernels of sampling -------------------


@torch.inference_mode()
def test_greedy_output_is_the_argmax_of_what_is_allowed() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled("target"), dtype=torch.float32).eval()
    ids = tokenizer()(PROMPTS[0])["input_ids"]
    chosen = SamplingParams(json_schema=json.dumps(PERSON)).grammar
    assert chosen is not None
    matcher = xgrammar.GrammarMatcher(strict().compile(chosen))
    output: list[int] = []
    while not matcher.is_terminated() and len(output) < NEW:
        bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
        matcher.fill_next_token_bitmask(bitmask)
        logits = model(torch.tensor([[*ids, *output]])).logits[:, -1].float()
        xgrammar.apply_token_bitmask_inplace(logits, bitmask)
        output.append(int(logits.argmax()))
        assert matcher.accept_token(output[-1])
    assert output == reference()[0]


# --- ends ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with bundled_llm("DFLASH") as llm:
        yield llm


def test_stop_strings_and_stop_ids_end_earlier(llm: LLM) -> None:
    base = {"regex": "(ab){20}", "temperature": 0.0}
    whole = llm.generate("x", base)
    assert whole.text == "ab" * 20 and whole.meta_info["finish_reason"]["matched"] in EOS
    cut = llm.generate("x", {**base, "stop": "ba"})
    assert cut.text == "a" and cut.meta_info["finish_reason"]["matched"] == "ba"
    token = whole.output_ids[2]
    stopped = llm.generate("x", {**base, "stop_token_ids": [token]})
    assert stopped.output_ids == whole.output_ids[: whole.output_ids.index(token) + 1]


def test_the_length_limit_cuts(llm: LLM) -> None:
    out = llm.generate("x", {"regex": "(ab){20}", "temperature": 0.0, "max_new_tokens": 3})
    assert out.meta_info["finish_reason"]["type"] == "length" and out.text != "ab" * 20


@pytest.mark.parametrize("late", [{"ignore_eos": True}, {"min_new_tokens": 12}])
def test_the_end_is_delayed_as_long_as_possible(llm: LLM, late: dict[str, Any]) -> None:
    out = llm.generate("x", {"regex": "a{1,9}", "temperature": 0.0, **late})
    assert out.text == "a" * 9 and out.meta_info["finish_reason"]["type"] == "stop"
    unlimited = llm.generate("x", {"regex": "[ab]+", "max_new_tokens": 30, **late})
    assert len(unlimited.output_ids) == 30 or "ignore_eos" not in late
    assert len(unlimited.output_ids) > 12


def test_samples_and_streams(llm: LLM) -> None:
    base = {"json_schema": PERSON, "sampling_seed": 7, "max_new_tokens": 80}
    several = llm.generate(PROMPTS[0], {**base, "n": 3})
    assert len({out.text for out in several}) > 1
    for out in several:
        assert out.meta_info["finish_reason"]["type"] == "length" or json.loads(out.text)
    last = [*llm.generate(PROMPTS[0], base, stream=True)][-1]
    assert last.text == several[0].text


# --- failures ------------------------------------------------------------------------------------


def test_a_grammar_without_continuation_ends_its_request_alone(llm: LLM) -> None:
    stuck = {"ebnf": 'root ::= "a" tail\ntail ::= tail', "temperature": 0.0}
    prompt, plain = PROMPTS[2], {"temperature": 0.0, "max_new_tokens": 20}
    alone = llm.generate(prompt, plain)
    failed, other = llm.generate([prompt, prompt], [stuck, plain])
    reason = failed.meta_info["finish_reason"]
    assert reason["type"] == "abort" and failed.text == "a"
    assert "Output token 2: no token of the vocabulary continues the output" in reason["message"]
    assert other.output_ids == alone.output_ids
    assert other.meta_info["spec_accept_lengths"] == alone.meta_info["spec_accept_lengths"]


def test_a_grammar_that_takes_too_long_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(state_module, "MAX_STEP_SECONDS", 0.0)
    ambiguous = {"ebnf": 'root ::= root root root | root root | "a" | ""', "ignore_eos": True}
    plain = {"temperature": 0.0, "max_new_tokens": 20}
    failed, other = llm.generate(["a", PROMPTS[2]], [{**ambiguous, "max_new_tokens": 400}, plain])
    reason = failed.meta_info["finish_reason"]
    assert reason["type"] == "abort" and "its grammar takes too long" in reason["message"]
    assert set(failed.text) == {"a"} and len(failed.output_ids) < 200
    assert other.output_ids == llm.generate(PROMPTS[2], plain).output_ids


def test_a_call_is_refused_as_a_whole(llm: LLM) -> None:
    with pytest.raises(RequestError, match="regex is invalid"):
        llm.generate(["a", "b"], [{"max_new_tokens": 5}, {"regex": "(["}])
    assert not llm.engine.has_work


def test_a_grammar_that_was_evicted_is_compiled_again(llm: LLM) -> None:
    executor = llm.engine.executor
    assert isinstance(executor, DeviceExecutor) and executor.grammars is not None
    asked = SamplingParams(regex="(again){2}", temperature=0.0)
    request = llm.engine.make_request([5, 6], asked)
    with executor.grammars._lock:
        executor.grammars._compiled.clear()
    llm.engine.submit(request)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.close_request(request)
    assert tokenizer().decode(follows(request), skip_special_tokens=True) == "againagain"


def test_a_grammar_that_cannot_be_compiled_again_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow(*args: Any) -> GrammarState:
        raise RequestError("Compiling the regex takes longer than 10 s; simplify it.")

    monkeypatch.setattr(GrammarState, "of", too_slow)
    failed, other = llm.generate(["a", "b"], [{"regex": "x"}, {"max_new_tokens": 5}])
    reason = failed.meta_info["finish_reason"]
    assert reason["type"] == "abort" and "takes longer than 10 s" in reason["message"]
    assert len(other.output_ids) == 5
    llm.engine.check()


def test_the_engine_runs_while_a_grammar_is_compiled(llm: LLM) -> None:
    executor = llm.engine.executor
    assert isinstance(executor, DeviceExecutor) and executor.grammars is not None
    go, compile_one = threading.Event(), executor.grammars._compile

    def slow(grammar: Grammar) -> Any:
        assert go.wait(60)
        return compile_one(grammar)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(executor.grammars, "_compile", slow)
        waiting = pool.submit(llm.generate, "a", {"regex": "(slow)+x", "max_new_tokens": 5})
        assert len(llm.generate("a", {"max_new_tokens": 5, "ignore_eos": True}).output_ids) == 5
        assert not waiting.done()
        go.set()
        assert waiting.result().text.startswith("slow")


def test_models_without_a_tokenizer_and_simulated_acceptance_refuse() -> None:
    with golden_llm() as llm, pytest.raises(RequestError, match="A grammar needs a tokenizer"):
        llm.generate(input_ids=[5], sampling_params={"regex": "a"})
    with (
        bundled_llm("DFLASH", speculative_simulate_accept_length=3.0) as llm,
        pytest.raises(RequestError, match="speculative_simulate_accept_length"),
    ):
        llm.generate("a", {"regex": "a"})


# --- on a GPU ------------------------------------------------------------------------------------

GPU = {"device": "cuda", "max_running_requests": 8, "max_total_tokens": 8192}


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "algorithm", [None, "NGRAM", "DFLASH", "EAGLE3", "DDTREE", "TOY-TREES", "TOY-EAGER-TREES"]
)
def test_outputs_on_a_gpu(algorithm: str | None, graph: bool, overlap_depth: int) -> None:
    """The reference is the CPU's."""
    settings = {"disable_cuda_graph": not graph, "overlap_depth": overlap_depth, **GPU}
    with bundled_llm(algorithm, **settings) as llm:
        for _ in ("captured", "replayed"):
            assert run(llm) == reference()
            assert run(llm, preempts=True) == reference()
        llm.engine.check()


@pytest.mark.gpu
def test_masks_are_computed_while_the_gpu_runs_the_forward() -> None:
    """The drafts arrive before the forward has ended: their copy is inside of the graph."""
    with bundled_llm("DFLASH", **GPU) as llm:
        assert run(llm) == reference()  # captures
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        early: list[bool] = []
        wait = DraftCopy.wait

        def waited(copy: DraftCopy) -> Any:
            end = torch.cuda.Event()
            end.record()  # after the forward
            result = wait(copy)
            early.append(not end.query())
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftCopy, "wait", waited)
            assert run(llm) == reference()
    assert sum(early) > len(early) / 2
