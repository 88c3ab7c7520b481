"""Penalties, biases and log-probabilities: those of plain decoding, with any drafter."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.request import Request
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.cuda import CudaGraphSteps, PassShape
from forerun.executor.graphs.steps import DecodeBatch, DeferredBatch
from forerun.executor.step import token_sampler
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import DecodeOutput, PrefillTokens
from forerun.kernels.cpu import library
from forerun.scheduler.adaptive_width import WidthChoice
from tests.engine_runs import run_together
from tests.golden_engine import CASES, GOLDEN, golden_llm
from tests.stand_in_graphs import StandInRecorder
from tests.toy_algorithms import register_toys

register_toys()
NEW = 24
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.4, "presence_penalty": 0.3}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.1, **PENALTIES},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.7, "logit_bias": {5: 3.0, 32: -2.0}},
    {"temperature": 0.0, "frequency_penalty": 1.8},
    {"temperature": 0.0},
    {"temperature": 0.9, "repetition_penalty": 0.8, "logit_bias": {101: 2.5}, "top_n_sigma": 1.5},
    {"temperature": 0.0, "presence_penalty": -0.5, "min_new_tokens": 8},
]
LOGPROBS = [
    LogprobParams(start_len=0, top=3, token_ids=(3, 4)),
    LogprobParams(),
    None,
    LogprobParams(top=20),
    LogprobParams(start_len=20, top=1),
    LogprobParams(start_len=47, token_ids=(9,)),
]
Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


@cache
def prompts() -> list[list[int]]:
    """Three share a prefix."""
    texts = sorted((c["prompt"] for c in CASES), key=len, reverse=True)
    stem = (texts[0] + texts[1][1:])[:200]
    return [stem[:70], stem[:50], texts[4], texts[-1], stem[:67], texts[3][:60]]


def params(index: int) -> SamplingParams:
    seed = {"sampling_seed": 100 + index}
    stops = {"stop_token_ids": [32], "ignore_eos": True}
    return SamplingParams(**KINDS[index], **seed, **stops, max_new_tokens=NEW)


def run(llm: LLM, preempts: bool = False, which: range = range(len(KINDS))) -> list[Answer]:
    """All requests in one batch; `preempts`: every third step preempts the youngest."""
    engine = llm.engine
    requests = [engine.make_request(prompts()[i], params(i), logprobs=LOGPROBS[i]) for i in which]
    run_together(engine, requests, preempts)
    return [(r.output, r.output_logprobs, r.prompt_logprobs) for r in requests]


def reference(device: str = "cpu") -> list[Answer]:
    """Plain decoding, one request at a time, nothing captured; with kernels in C++ if a test has
    them, since PyTorch's bits are others.
    """
    return _reference(device, library.library() is not None)


@cache
def _reference(device: str, with_kernels: bool) -> list[Answer]:
    eager = {"disable_radix_cache": True, "disable_cuda_graph": True}
    with golden_llm(device=device, **eager) as llm:
        return [run(llm, which=range(i, i + 1))[0] for i in range(len(KINDS))]


def compare(got: list[Answer], want: list[Answer], on_gpu: bool = False) -> None:
    """Log-probabilities too, bit for bit where a CPU has our kernels."""
    exact = not on_gpu and library.library() is not None
    assert [answer[0] for answer in got] == [answer[0] for answer in want]
    for (output, *ours), (_, *theirs) in zip(got, want, strict=True):
        assert len(ours[0]) in (0, len(output))
        for mine, other in zip(ours, theirs, strict=True):
            assert [[token for _, token in each.top] for each in mine] == [
                [token for _, token in each.top] for each in other
            ]
            assert values(mine) == (
                values(other) if exact else pytest.approx(values(other), abs=1e-4)
            )


def values(logprobs: list[TokenLogprobs]) -> list[float]:
    return [
        value
        for each in logprobs
        for value in (each.logprob, *(value for value, _ in each.top), *each.of_ids)
    ]


def test_stop_ids_are_masked_before_rows_are_looked_at() -> None:
    """Of the largest logit alone, a stop id that may not come yet would leave no token."""
    stop, bias = 32, {"logit_bias": {32: 100.0}}
    asked = SamplingParams(
        temperature=1.0, sampling_seed=3, stop_token_ids=[stop], ignore_eos=True,  # type: ignore[arg-type]
        min_new_tokens=5, max_new_tokens=9, top_n_sigma=1e-3, **bias,  # type: ignore[arg-type]
    )  # fmt: skip
    with golden_llm("DFLASH") as llm:
        request = llm.engine.make_request(prompts()[0], asked)
        run_together(llm.engine, [request], False)
    assert request.finish is not None and request.finish.type == "stop"
    assert len(request.output) == 6 and stop not in request.output[:5]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [6, 512])
@pytest.mark.parametrize(
    "algorithm", [None, "NGRAM", "DFLASH", "EAGLE3", "DDTREE", "TOY-TREES", "TOY-EAGER-TREES"]
)
def test_any_drafter_gives_the_answers_of_plain_decoding(
    algorithm: str | None,
    chunk: int,
    overlap_depth: int,
    tight: bool,
    chain_llm: Callable[..., LLM],
) -> None:
    make = chain_llm if algorithm == "EAGLE3" else golden_llm
    settings = {"page_size": 16, "chunked_prefill_size": chunk, "overlap_depth": overlap_depth}
    if algorithm == "DDTREE":
        settings["speculative_ddtree_budget"] = 12
    if tight:
        settings["max_total_tokens"] = 240
    with make(algorithm, **settings) as llm:
        for _ in ("cold", "warm"):
            compare(run(llm, preempts=tight), reference())
        llm.engine.check()


def test_memory_is_bounded_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits of one request at a time, and of one prompt token."""
    monkeypatch.setattr(token_sampler, "GROUP_BYTES", 1)
    with golden_llm("DFLASH") as llm:
        compare(run(llm), reference())


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ["DFLASH", "TOY-TREES"])
def test_widths_and_deferred_observes(name: str) -> None:
    """The width changes from step to step, and plain steps are observed later."""
    with golden_llm(name, speculative_adaptive=True) as llm:
        widths = itertools.cycle(llm.engine.info.verify_widths)
        llm.engine.scheduler.widths.choose = lambda _: WidthChoice(next(widths))  # type: ignore[method-assign]
        compare(run(llm), reference())


def copied(out: DecodeOutput) -> DecodeOutput:
    """As on a GPU before the next replay overwrites it."""
    path, widths = (None if x is None else x.clone() for x in (out.path, out.widths))
    tokens = out.sampled.clone(), out.num_committed.clone()
    return DecodeOutput(*tokens, path=path, logprobs=out.logprobs, widths=widths)


class SplitSteps(CudaGraphSteps):
    """Steps in two parts as on a GPU, of batches with penalties or log-probabilities."""

    def __init__(self, step: DeviceStep, widths: tuple[float, ...]) -> None:
        super().__init__(step, step.tables.history.shape[1], 4, widths)
        self.stand_in = StandInRecorder()

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        if not batch.shape.edits_logits:
            return self._eager.decode(batch)
        return copied(super().decode(batch))

    def prefill(self, *prompts: Any) -> PrefillTokens:
        return self._eager.prefill(*prompts)

    def observe_deferred(self, batch: DeferredBatch) -> None:
        self._eager.observe_deferred(batch)

    def _recorder(self) -> StandInRecorder:
        return self.stand_in

    @contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        yield


class CapturedSteps(SplitSteps):
    """All decode steps as on a GPU, of greedy and of other batches."""

    def __init__(self, step: DeviceStep, widths: tuple[float, ...]) -> None:
        super().__init__(step, widths)
        self.replays: Counter[PassShape] = Counter()

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        key = self._graph_of(batch, len(self._padded(batch.slots)))
        if not batch.shape.edits_logits and key not in self._decode:
            with self.step.dummy_steps():
                self._decode[key] = self._capture_decode(*key)
        self.replays[key[0]] += 1
        return copied(CudaGraphSteps.decode(self, batch))

    def _captured(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        recorder = StandInRecorder()
        run()
        recorder.begin()
        output = run()
        return SimpleNamespace(replay=recorder.end()), output


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "adaptive"),
    [
        (None, False),
        ("DFLASH", True),
        ("DDTREE", False),
        ("NGRAM", False),
        ("TOY-EAGER-TREES", False),
        ("EAGLE3", False),
    ],
)
@pytest.mark.usefixtures("without_cpu_kernels")
def test_steps_in_two_captured_parts(
    name: str | None, adaptive: bool, chain_llm: Callable[..., LLM]
) -> None:
    make = partial(chain_llm, speculative_eagle_topk=3) if name == "EAGLE3" else golden_llm
    with make(name, overlap_depth=1, speculative_adaptive=adaptive) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        executor.steps = steps = SplitSteps(executor.step, llm.engine.info.verify_widths)
        if adaptive:
            widths = itertools.cycle(llm.engine.info.verify_widths)
            llm.engine.scheduler.widths.choose = lambda _: WidthChoice(next(widths))  # type: ignore[method-assign]
        for _ in ("captured", "replayed"):
            compare(run(llm, which=range(3)), reference()[:3])  # filled up with padding
        compare(run(llm, which=range(5, 6)), reference()[5:])
        assert steps.stand_in.replayed > 20
        llm.engine.check()


def test_neighbours_without_penalties_are_not_affected() -> None:
    plain: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    with golden_llm("DFLASH", disable_radix_cache=True) as llm:
        alone = llm.generate(input_ids=prompts()[0], sampling_params=plain)
        together = llm.generate(
            input_ids=[prompts()[0], *prompts()],
            sampling_params=[plain, *map(params, range(len(KINDS)))],
        )
    assert together[0].output_ids == alone.output_ids
    accepted = "spec_accept_lengths"
    assert together[0].meta_info[accepted] == alone.meta_info[accepted]


# --- an oracle that shares no code with the engine -----------------------------------------------


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(oracle: Any, tokens: list[int]) -> torch.Tensor:
    return oracle(torch.tensor([tokens])).logits[0].float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_greedy_answers_equal_those_of_transformers(oracle: Any, algorithm: str | None) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, bias = prompts()[1], {32: 1.5, 101: -3.0}
    with golden_llm(algorithm) as llm:
        sampling = {
            "temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, "logit_bias": bias,
            "repetition_penalty": 1.15, **PENALTIES,
        }  # fmt: skip
        out = llm.generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=2
        )
    processor = RepetitionPenaltyLogitsProcessor(1.15)
    output: list[int] = []
    for token, entry, top in zip(
        out.output_ids,
        out.meta_info["output_token_logprobs"],
        out.meta_info["output_top_logprobs"],
        strict=True,
    ):
        raw = logits_of(oracle, prompt + output)[-1]
        scores = raw.clone()
        for biased, value in bias.items():
            scores[biased] += value
        scores = processor(torch.tensor([prompt + output]), scores[None])[0]
        for seen, count in Counter(output).items():
            scores[seen] -= 0.4 * count + 0.3
        assert token == int(scores.argmax())
        logprobs = raw.log_softmax(-1)  # of the raw logits
        assert entry == (pytest.approx(float(logprobs[token]), abs=1e-4), token, None)
        best = logprobs.topk(2)
        assert [each[1] for each in top] == best.indices.tolist()
        assert [each[0] for each in top] == pytest.approx(best.values.tolist(), abs=1e-4)
        output.append(token)


@pytest.mark.parametrize("chunk", [6, 512])
@pytest.mark.parametrize("start", [0, 20, -1])
def test_prompt_logprobs_equal_those_of_transformers(oracle: Any, start: int, chunk: int) -> None:
    """With prefix hits too: tokens after `start` are computed again."""
    prompt = prompts()[1]
    first = len(prompt) - 1 if start == -1 else start
    logprobs = logits_of(oracle, prompt).log_softmax(-1)
    want = [float(logprobs[i - 1, prompt[i]]) for i in range(first + 1, len(prompt))]
    asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
    with golden_llm("DFLASH", page_size=16, chunked_prefill_size=chunk) as llm:
        for cached in (0, first // 16 * 16):
            out = llm.generate(
                input_ids=prompt, sampling_params={"max_new_tokens": 2}, **asked, stream=False
            )
            info = out.meta_info
            assert info["cached_tokens"] == cached
            (none, token, _), *entries = info["input_token_logprobs"]
            assert (none, token) == (None, prompt[first])
            assert [each[1] for each in entries] == prompt[first + 1 :]
            assert [each[0] for each in entries] == pytest.approx(want, abs=1e-4)
            assert info["input_top_logprobs"][0] is None
            tops = [max(each)[0] for each in info["input_top_logprobs"][1:]]
            best = logprobs[first : len(prompt) - 1].amax(-1).tolist()
            assert tops == pytest.approx(best, abs=1e-4)
        llm.engine.check()


# --- the Python API ------------------------------------------------------------------------------


def test_keywords_are_for_all_prompts_or_one_per_prompt() -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    with golden_llm() as llm:
        one = llm.generate(
            input_ids=[1, 2, 3], sampling_params=sampling, return_logprob=True,
            token_ids_logprob=[7, 8],
        )  # fmt: skip
        outs = llm.generate(
            input_ids=[[1, 2, 3], [1, 2, 3], [4, 5]], sampling_params=sampling,
            return_logprob=[True, False, True], top_logprobs_num=[0, 0, 2],
            token_ids_logprob=[[7, 8], None, None],
        )  # fmt: skip
        with pytest.raises(ValueError, match="2 values of return_logprob for 1 prompts"):
            llm.generate(input_ids=[[1]], return_logprob=[True, True])
    keys = [{key for key in out.meta_info if "logprobs" in key} for out in outs]
    tokens, ids = (
        {f"{side}_{kind}" for side in ("input", "output")}
        for kind in ("token_logprobs", "token_ids_logprobs")
    )
    assert keys == [tokens | ids, set(), tokens | {"input_top_logprobs", "output_top_logprobs"}]
    assert [each[1] for each in one.meta_info["output_token_logprobs"]] == one.output_ids
    assert one.meta_info["input_token_logprobs"] == [(None, 3, None)]
    assert [[each[1] for each in row] for row in one.meta_info["output_token_ids_logprobs"]] == [
        [7, 8]
    ] * 3
    assert [len(each) for each in outs[2].meta_info["output_top_logprobs"]] == [2] * 3


@pytest.mark.exhaustive
def test_stop_strings_cut_logprobs_too() -> None:
    """And streams show as many entries as tokens."""
    sampling = {"temperature": 0.0, "max_new_tokens": 40, "stop": ["\n    "], **PENALTIES}
    prompt = "def add(a, b):\n"
    seen = []
    for algorithm in (None, "DFLASH"):
        with LLM(speculative_algorithm=algorithm, dtype="float32") as llm:
            sampling["stop"] = []
            free = llm.generate(prompt, sampling, return_logprob=True)
            sampling["stop"] = [free.text[5:9]]
            out = llm.generate(prompt, sampling, return_logprob=True)
            assert out.finish_reason["type"] == "stop"
            entries = out.meta_info["output_token_logprobs"]
            assert len(entries) == len(out.output_ids) < len(free.output_ids)
            for part in llm.generate(prompt, sampling, return_logprob=True, stream=True):
                shown = part.meta_info["output_token_logprobs"]
                assert [each[1] for each in shown] == part.output_ids
            seen.append((out.output_ids, free.output_ids, [each[0] for each in entries]))
    assert seen[0][:2] == seen[1][:2]
    assert seen[0][2] == pytest.approx(seen[1][2], abs=1e-4)


def test_trimming_a_request_cuts_its_logprobs() -> None:
    request = Request("r", (1,), SamplingParams(), 0, frozenset())
    request.output, request.output_logprobs = [1, 2, 3], [TokenLogprobs(-0.5)] * 3
    request.trim(1)
    assert (request.output, len(request.output_logprobs)) == ([1], 1)


# --- on a GPU ------------------------------------------------------------------------------------

GPU = {"device": "cuda", "max_running_requests": 8, "max_total_tokens": 8192}


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "widths"])
@pytest.mark.parametrize(
    "algorithm", [None, "NGRAM", "DFLASH", "EAGLE3", "DDTREE", "TOY-TREES", "TOY-EAGER-TREES"]
)
def test_answers_on_a_gpu(
    algorithm: str | None,
    adaptive: bool,
    graph: bool,
    overlap_depth: int,
    chain_llm: Callable[..., LLM],
) -> None:
    make = chain_llm if algorithm == "EAGLE3" else golden_llm
    switches = {"disable_cuda_graph": not graph, "speculative_adaptive": adaptive}
    with make(algorithm, overlap_depth=overlap_depth, **switches, **GPU) as llm:
        if adaptive:
            widths = itertools.cycle(llm.engine.info.verify_widths)
            llm.engine.scheduler.widths.choose = lambda _: WidthChoice(next(widths))  # type: ignore[method-assign]
        for _ in ("captured", "replayed"):
            got = run(llm)
            compare(got, reference("cuda"), on_gpu=True)
            assert [answer[0] for answer in got] == [answer[0] for answer in reference()]
            compare(run(llm, preempts=True), reference("cuda"), on_gpu=True)
        llm.engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "NGRAM"])
def test_launching_does_not_synchronize(algorithm: str | None) -> None:
    """The first run captures its steps."""
    with golden_llm(algorithm, **GPU) as llm:
        compare(run(llm), reference("cuda"), on_gpu=True)
        engine = llm.engine
        launch = engine.executor.launch

        def strict(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine.executor.launch = strict  # type: ignore[method-assign]
        compare(run(llm), reference("cuda"), on_gpu=True)


@pytest.mark.gpu
def test_steps_without_penalties_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    with golden_llm("DFLASH", **GPU) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        steps = executor.steps
        assert isinstance(steps, CudaGraphSteps)
        llm.generate(input_ids=prompts(), sampling_params=plain)
        assert steps._split == {}
        run(llm)
        assert steps._split and None not in steps._split.values()
