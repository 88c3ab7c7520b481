"""Validation of requests, streams, several samples, and no leaks after errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, RequestError
from tests.golden_engine import CASES, GOLDEN, golden_llm

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPT = CASES[0]["prompt"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with golden_llm("DFLASH", context_length=256, max_running_requests=4) as made:
        yield made
        made.engine.check()


@pytest.mark.parametrize(
    ("ids", "params", "words"),
    [
        ([], {}, "prompt is empty"),
        ([1, 320], {}, "320 is outside the vocabulary of 320"),
        ([-1], {}, "-1 is outside"),
        ([1] * 300, {}, "shorten the prompt"),
        ([1] * 200, {"max_new_tokens": 100}, "at most 56"),
        ([1], {"temperature": -1}, "temperature must be >= 0"),
        ([1], {"top_p": 0}, "top_p must be in"),
        ([1], {"top_k": -2}, "top_k must be >= 1"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be >= 0"),
        ([1], {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be in"),
        ([1], {"n": 2, "temperature": 0}, "n > 1 with temperature 0"),
        ([1], {"temprature": 0}, "Did you mean 'temperature'"),
        ([1], {"stop": ["x"]}, "need a tokenizer"),
        ([1], {"stop_token_ids": [999]}, "999 is outside"),
        ([1], {"min_new_tokens": 1, "stop_token_ids": list(range(40))}, "at most 16"),
        ([1], {"sampling_seed": 2**64}, "64 bits"),
    ],
)
def test_invalid_requests_are_refused_with_the_fix(
    llm: LLM, ids: list[int], params: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate(input_ids=ids, sampling_params=params)
    assert isinstance(caught.value, ValueError)
    assert not llm.engine.has_work


def test_a_list_is_refused_as_a_whole(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(input_ids=[PROMPT, [999]], sampling_params=GREEDY)
    assert not llm.engine.has_work and not llm.engine._requests


def test_text_without_a_tokenizer_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="input_ids"):
        llm.generate("hello")
    with pytest.raises(RequestError, match="not both"):
        llm.generate("hello", input_ids=[1])


def test_a_stream_ends_with_the_same_output(llm: LLM) -> None:
    whole = llm.generate(input_ids=PROMPT, sampling_params=GREEDY)
    parts = list(llm.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True))
    assert parts[-1].output_ids == whole.output_ids and parts[-1].finished
    assert len(parts) == 1 + whole.meta_info["spec_verify_ct"]
    for before, after in itertools.pairwise(parts):
        assert after.output_ids[: len(before.output_ids)] == before.output_ids


def test_closing_a_stream_releases_the_request(llm: LLM) -> None:
    stream = llm.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
    next(stream)
    stream.close()
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check()
    assert not llm.engine._requests


def test_two_streams_at_once(llm: LLM) -> None:
    alone = [llm.generate(input_ids=c["prompt"], sampling_params=GREEDY) for c in CASES[:2]]
    streams = [
        llm.generate(input_ids=c["prompt"], sampling_params=GREEDY, stream=True) for c in CASES[:2]
    ]
    last: dict[int, list[int]] = {}
    for pair in itertools.zip_longest(*streams):
        for i, out in enumerate(pair):
            if out is not None:
                last[i] = out.output_ids
    assert [last[0], last[1]] == [o.output_ids for o in alone]


def test_a_stream_that_is_never_read_starts_no_request(llm: LLM) -> None:
    llm.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
    assert not llm.engine.has_work and not llm.engine._requests


def test_streamed_outputs_have_prompt_and_sample_indices(llm: LLM) -> None:
    prompts = [c["prompt"] for c in CASES[:3]]
    params = {"temperature": 1.0, "n": 2, "max_new_tokens": 4, "ignore_eos": True}
    stream = llm.generate(input_ids=prompts, sampling_params=params, stream=True)
    done = {(o.prompt_index, o.index): o for o in stream if o.finished}
    assert set(done) == {(p, i) for p in range(3) for i in range(2)}
    assert all(done[p, 0].prompt_token_ids == prompts[p] for p in range(3))


def test_samples_differ_and_are_reproducible(llm: LLM) -> None:
    params = {"temperature": 1.5, "n": 3, "sampling_seed": 2**63 - 2, "max_new_tokens": 16}
    first = llm.generate(input_ids=PROMPT, sampling_params={**params, "ignore_eos": True})
    again = llm.generate(input_ids=PROMPT, sampling_params={**params, "ignore_eos": True})
    assert [o.index for o in first] == [0, 1, 2]
    assert [o.output_ids for o in first] == [o.output_ids for o in again]
    assert len({tuple(o.output_ids) for o in first}) == 3


def test_requests_without_a_seed_get_different_seeds(llm: LLM) -> None:
    params = {"temperature": 1.5, "max_new_tokens": 16, "ignore_eos": True}
    outs = llm.generate(input_ids=[PROMPT] * 3, sampling_params=params)
    assert len({tuple(o.output_ids) for o in outs}) == 3


def test_min_new_tokens_masks_stop_ids_only(llm: LLM) -> None:
    base = {"temperature": 0.0, "max_new_tokens": 20}
    free = llm.generate(input_ids=PROMPT, sampling_params={**base, "ignore_eos": True})
    stop = free.output_ids[3]
    masked = llm.generate(
        input_ids=PROMPT, sampling_params={**base, "stop_token_ids": [stop], "min_new_tokens": 10}
    )
    assert stop not in masked.output_ids[:10]
    with golden_llm(context_length=256) as plain:
        params = {**base, "stop_token_ids": [stop], "min_new_tokens": 10}
        assert (
            plain.generate(input_ids=PROMPT, sampling_params=params).output_ids == masked.output_ids
        )


def test_requests_of_a_batch_are_independent(llm: LLM) -> None:
    """Greedy, seeded, filtered and stopped requests in one batch."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "sampling_seed": 1},
        {"temperature": 0.7, "top_k": 5, "sampling_seed": 2},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.05, "sampling_seed": 3},
        {"temperature": 0.0, "stop_token_ids": [32], "min_new_tokens": 4},
        {"temperature": 1.0, "top_k": 1, "sampling_seed": 4},
    ]
    params = [{**k, "max_new_tokens": 20, "ignore_eos": True} for k in kinds]
    prompts = [c["prompt"][:30] for c in CASES[: len(params)]]
    together = llm.generate(input_ids=prompts, sampling_params=params)
    with golden_llm(context_length=256) as plain:
        for prompt, kind, out in zip(prompts, params, together, strict=True):
            alone = plain.generate(input_ids=prompt, sampling_params=kind)
            assert alone.output_ids == out.output_ids
            assert alone.finish_reason == out.finish_reason


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("algorithm", "overlap_depth", "count"),
    [
        ("DFLASH", 1, 200),
        ("NGRAM", 0, 200),
        *(
            pytest.param(*cell, 200, marks=pytest.mark.exhaustive)
            for cell in ((None, 0), (None, 1), ("DFLASH", 0), ("NGRAM", 1))
        ),
        pytest.param("DFLASH", 1, 2000, marks=pytest.mark.exhaustive),
    ],
)
def test_random_requests_with_aborts_leak_no_pages(
    algorithm: str | None, overlap_depth: int, count: int
) -> None:
    """A random workload on the real engine: at the end all pages are free or cached."""
    rng = random.Random(11)
    with golden_llm(
        algorithm,
        overlap_depth=overlap_depth,
        context_length=64,
        max_total_tokens=400,
        page_size=16,
        max_running_requests=16,
        chunked_prefill_size=48,
    ) as llm:
        engine, alive, made, aborted = llm.engine, [], 0, 0
        stem = [rng.randrange(256) for _ in range(32)]
        while made < count or engine.has_work:
            while made < count and len(alive) < 24:
                prompt = [*stem[: rng.randrange(32)], rng.randrange(256)]
                params = SamplingParams(
                    temperature=rng.choice([0.0, 1.0]), max_new_tokens=rng.randint(1, 6)
                )
                request = engine.make_request(prompt, params)
                engine.submit(request)
                alive.append(request)
                made += 1
            if alive and rng.random() < 0.2:
                engine.abort(rng.choice(alive).rid)
            engine.step()
            for request in [r for r in alive if r.finish is not None]:
                alive.remove(request)
                aborted += request.finish is not None and request.finish.type == "abort"
                engine.close_request(request)
        engine.check()
        assert aborted > 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_algorithm": "DFLSH"}, "Did you mean 'DFLASH'"),
        ({"speculative_algorithm": "DFLASH"}, "speculative_draft_model_path"),
        ({"page_siz": 16}, "Did you mean 'page_size'"),
        ({"page_size": 17}, "page_size must be one of 1, 16"),
        ({"dtype": "fp8"}, "dtype must be one of"),
        ({"mem_fraction_static": 1.5}, "between 0 and 1"),
        ({"context_length": 10**6}, "max_position_embeddings"),
        ({"max_total_tokens": 1, "page_size": 1}, "one request needs"),
        ({"attention_backend": "torch_nativ"}, "Did you mean 'torch_native'"),
        ({"speculative_draft_model_path": "x"}, "without speculative_algorithm"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_window_size": 64},
            "no draft attention",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, "must be >= 2"),
        ({"device": "cuda:99"}, "cuda"),
    ],
)
def test_invalid_settings_are_refused_at_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(GOLDEN / "target", skip_tokenizer_init=True, **settings)


def test_check_and_flush_complete_the_steps_in_flight() -> None:
    with golden_llm("DFLASH", overlap_depth=1) as llm:
        for _ in range(3):
            llm.generate(input_ids=CASES[0]["prompt"], sampling_params=GREEDY)
            llm.engine.flush_cache()  # a step may be in flight for the request that just ended
            llm.engine.check()


@pytest.mark.covering(0)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "NGRAM"])
def test_a_request_that_cannot_be_admitted_ends_alone(
    algorithm: str | None, overlap_depth: int
) -> None:
    """Values that do not fit the device tables, past all checks: no other request is affected."""
    params = [
        GREEDY,
        {**GREEDY, "temperature": 1.0, "sampling_seed": 7},
        {**GREEDY, "max_new_tokens": 30},
    ]
    prompts = [c["prompt"][:20] for c in CASES[:3]]
    with golden_llm(algorithm, overlap_depth=overlap_depth, max_running_requests=4) as llm:
        want = llm.generate(input_ids=prompts, sampling_params=params)
        llm.engine.flush_cache()
        streams = [
            llm.generate(input_ids=p, sampling_params=k, stream=True)
            for p, k in zip(prompts, params, strict=True)
        ]
        first = [next(stream) for stream in streams]  # starts them
        for name, bad in (("top_k", 2**63), ("temperature", "hot"), ("sampling_seed", None)):
            bent = SamplingParams(temperature=1.0, max_new_tokens=5)
            object.__setattr__(bent, name, bad)
            # Of a prompt that another is about to use: its K/V must not be shared.
            out = llm.generate(input_ids=prompts[0], sampling_params=bent)
            assert (out.finish_reason["type"] == "abort") == (name != "sampling_seed")
            assert out.output_ids == [] or name == "sampling_seed"
        rest = [list(stream)[-1] for stream in streams]
        assert [o.output_ids for o in rest] == [o.output_ids for o in want]
        assert all(len(o.output_ids) <= len(r.output_ids) for o, r in zip(first, rest, strict=True))
        again = llm.generate(input_ids=prompts, sampling_params=params)
        assert [o.output_ids for o in again] == [o.output_ids for o in want]
        llm.engine.check()
