"""A recurrent and a latent-KV target, defined by the tests, in the equality matrix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.executor.device_executor import device_step
from forerun.models import registry
from tests.engine.test_matrix import GREEDY, SEEDED, generate, params
from tests.engine_runs import hold_prompt_logprobs
from tests.golden_engine import poison_on_release
from tests.ragged import SETTINGS, divide_at_random
from tests.toy_algorithms import Oracle, register_toys
from tests.toy_models import (
    TOY_MODELS,
    VOCAB,
    ToyLatentForCausalLM,
    ToyModel,
    ToyRecurrentForCausalLM,
    save_toy,
    toy_model,
)

CHAINS = [None, "NGRAM", "TOY-ORACLE", "TOY-LEARNER", "TOY-SAMPLER"]
TREES = ["TOY-TREES", "TOY-ORACLE-TREES"]
CASES = [
    *((ToyRecurrentForCausalLM, name) for name in CHAINS),
    *((ToyLatentForCausalLM, name) for name in CHAINS + TREES),
]


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    register_toys()
    made = tmp_path_factory.mktemp("toys")
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in TOY_MODELS.items():
            patch.setitem(registry.ARCHITECTURES, name, kind)
            FOLDERS[kind] = save_toy(kind, made / name)
        yield


FOLDERS: dict[type[ToyModel], Path] = {}


def toy_llm(kind: type[ToyModel], algorithm: str | None = None, **settings: Any) -> LLM:
    settings = {"speculative_adaptive": False, **settings}
    settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(FOLDERS[kind], speculative_algorithm=algorithm, **settings)
    poison_on_release(llm)
    return llm


def test_rows_of_an_lm_head_of_another_kind_are_refused() -> None:
    with toy_llm(ToyRecurrentForCausalLM) as llm:
        model = device_step(llm.engine.executor).model
        with pytest.raises(ConfigError, match="this target has none of ours"):
            model.head_logits(torch.zeros(1, 8))


def test_bits_of_other_packages_models_are_not_promised() -> None:
    with toy_llm(ToyRecurrentForCausalLM) as llm:
        said = llm.explain()
    why = "ToyRecurrentForCausalLM is not one of Forerun's models"
    assert not said["deterministic_inference"] and why in said["same_text"]
    assert not said["threads"]["tuned"]  # times of steps would decide about bits
    with pytest.raises(ConfigError, match=why):
        toy_llm(ToyRecurrentForCausalLM, enable_deterministic_inference=True)


@cache
def prompts() -> list[list[int]]:
    """Three prompts with a common prefix of some pages, and two short ones."""
    draw = random.Random(3)
    stem = [draw.randrange(VOCAB) for _ in range(60)]
    return [stem[:54], stem[:37], stem[:50], stem[5:8], stem[9:10]]


@cache
def reference(kind: type[ToyModel], sampled: bool) -> list[list[int]]:
    """Plain decoding, one prompt at a time, without prefix cache."""
    with toy_llm(kind, disable_radix_cache=True) as llm:
        chosen = SEEDED if sampled else GREEDY
        return [
            llm.generate(input_ids=p, sampling_params=params(chosen, i)).output_ids
            for i, p in enumerate(prompts())
        ]


@pytest.mark.parametrize("kind", TOY_MODELS.values())
def test_plain_decoding_equals_the_reference(kind: type[ToyModel]) -> None:
    model, outputs = toy_model(kind, FOLDERS[kind]), reference(kind, False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output == model.oracle(prompt, len(output))
    assert len({token for output in outputs for token in output}) > 10  # a text, not one token


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_output_equals_plain_decoding(
    kind: type[ToyModel],
    algorithm: str | None,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    tight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk}
    if tight:
        settings["max_total_tokens"] = 96
    with toy_llm(kind, algorithm, overlap_depth=overlap_depth, **settings) as llm:
        preempted = 0
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            want, asked = reference(kind, bool(sampled)), prompts()
            answers = {tuple(p): o for p, o in zip(asked, want, strict=True)}
            monkeypatch.setattr(Oracle, "answers", answers)
            kinds = [params(chosen, i) for i in range(len(asked))]
            llm.engine.flush_cache()
            for warm in (False, True):
                got = generate(llm, asked, kinds, tight)
                assert [o[0] for o in got] == want
                preempted += sum(o[1] for o in got)
                if warm and not tight:
                    assert all(o[2] >= len(p) - page_size for o, p in zip(got, asked, strict=True))
        assert (preempted > 0) == tight
        llm.engine.check()


def test_long_paths_are_accepted() -> None:
    """Otherwise the matrix would pass with drafts that are never accepted."""
    for kind, algorithm in (
        (ToyRecurrentForCausalLM, "TOY-ORACLE"),
        (ToyLatentForCausalLM, TREES[1]),
    ):
        want = reference(kind, False)
        Oracle.answers = {tuple(p): o for p, o in zip(prompts(), want, strict=True)}
        with toy_llm(kind, algorithm) as llm:
            out = llm.generate(input_ids=prompts()[0], sampling_params=params(GREEDY, 0))
            assert out.output_ids == want[0]
            assert out.meta_info["spec_accept_length"] > 2.5
    Oracle.answers = {}


# --- what only recurrent models have --------------------------------------------------------------


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_a_recurrent_layer_in_ragged_passes(
    overlap_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, division = ToyRecurrentForCausalLM, divide_at_random(monkeypatch)
    want = reference(kind, False)
    monkeypatch.setattr(
        Oracle, "answers", {tuple(p): o for p, o in zip(prompts(), want, strict=True)}
    )
    settings = {**SETTINGS, "overlap_depth": overlap_depth}
    with toy_llm(kind, "TOY-ORACLE", **settings) as llm:
        for _ in range(2):  # prefix hits
            got = generate(llm, prompts(), [params(GREEDY, i) for i in range(5)], False)
            assert [o[0] for o in got] == want
    assert any(len(set(widths)) > 1 for widths in division.seen)


def run(llm: LLM, tokens: list[int]) -> tuple[list[int], int]:
    """(output, cached tokens)."""
    out = generate(llm, [tokens], [params(GREEDY, 0)], False)[0]
    return out[0], out[2]


def test_a_cached_prefix_ends_at_a_snapshot() -> None:
    kind, stem = ToyRecurrentForCausalLM, prompts()[0]
    with toy_llm(kind, page_size=16) as llm, toy_llm(kind, disable_radix_cache=True) as plain:
        assert run(llm, stem[:40]) == (run(plain, stem[:40])[0], 0)
        # K/V of 48 tokens is cached; the state is known at 32 alone.
        assert run(llm, stem[:31])[1] == 0
        got = run(llm, stem[:54])
        assert got == (run(plain, stem[:54])[0], 32)
        assert run(llm, stem[:54]) == (got[0], 48)
        assert llm.explain()["state_snapshots"] == 128
        llm.engine.check()


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("chunk", [4, 512])
def test_a_snapshot_is_kept_where_prompts_branch_off(chunk: int) -> None:
    """Such as after a system prompt: the third prompt finds the state that the second saved."""
    kind, stem = ToyRecurrentForCausalLM, prompts()[0]
    asked = [stem[:21] + [token] * 20 for token in (1, 2, 3, 4)]
    with (
        toy_llm(kind, page_size=16, chunked_prefill_size=chunk) as llm,
        toy_llm(kind, disable_radix_cache=True) as plain,
    ):
        for prompt, cached in zip(asked, (0, 0, 16, 16), strict=True):
            assert run(llm, prompt) == (run(plain, prompt)[0], cached)
        # A longer prompt that continues a cached one branches off nowhere.
        longer = asked[0] + run(llm, asked[0])[0] + [5] * 9
        assert run(llm, longer) == (run(plain, longer)[0], 32)
        llm.engine.check()


@pytest.mark.parametrize("kind", list(TOY_MODELS.values()))
def test_prompt_logprobs_with_a_cached_prefix(kind: type[ToyModel]) -> None:
    """A prefix is used as far as a snapshot before `logprob_start_len` goes."""
    tokens = (prompts()[0] * 3)[:60]
    with toy_llm(kind, "NGRAM", page_size=16, chunked_prefill_size=24) as llm:
        hold_prompt_logprobs(llm, tokens, (20, 20, 50, 0))


@pytest.mark.exhaustive
@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("algorithm", CHAINS)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "interval"), [(16, 16), (1, 12), (1, 1)])
def test_three_turns_of_a_chat(
    page_size: int,
    interval: int,
    overlap_depth: int,
    algorithm: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Aborts and preemptions in between leave states that are right, or none."""
    kind, chats = ToyRecurrentForCausalLM, [list(prompt) for prompt in prompts()]
    settings = {"page_size": page_size, "mamba_track_interval": interval}
    with (
        toy_llm(kind, algorithm, overlap_depth=overlap_depth, **settings) as llm,
        toy_llm(kind, disable_radix_cache=True) as plain,
    ):
        for turn in range(3):
            how = [params(SEEDED if i % 2 else GREEDY, i) for i in range(len(chats))]
            want = [o[0] for o in generate(plain, chats, how, False)]
            answers = {tuple(p): o for p, o in zip(chats, want, strict=True)}
            monkeypatch.setattr(Oracle, "answers", answers)
            for chat in chats[:2]:
                abort_after(llm, chat, 3 + turn)
            got = generate(llm, chats, how, turn == 1)
            assert [o[0] for o in got] == want
            for (_, _, cached), chat in zip(got, chats, strict=True):
                if turn and interval > 1:
                    assert cached >= (len(chat) - len(ASKED) - 1) // interval * interval > 0
            chats = [[*chat, *text, *ASKED] for chat, text in zip(chats, want, strict=True)]
        assert llm.engine.metrics().tracked_states > 3 * len(chats)
        llm.engine.check()


ASKED = [1, 2, 3]  # what comes after an answer


def abort_after(llm: LLM, tokens: list[int], steps: int) -> None:
    request = llm.engine.make_request(tokens, SamplingParams.of(params(GREEDY, 0)))
    llm.engine.submit(request)
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(request.rid)
    llm.engine.drain()
    llm.engine.close_request(request)


def test_snapshots_have_a_budget() -> None:
    kind, stem = ToyRecurrentForCausalLM, prompts()[0]
    with toy_llm(kind, page_size=16, max_mamba_cache_size=34) as llm:
        for length in (20, 36, 54):
            run(llm, stem[:length])
        assert llm.explain()["state_snapshots"] == 2
        assert run(llm, stem[:54])[1] == 48  # the two last ones are there
        assert run(llm, stem[:36])[1] == 32
        assert run(llm, stem[:20])[1] == 0  # the oldest had to go
        llm.engine.check()
    with toy_llm(kind, page_size=16, mamba_full_memory_ratio=1e-5) as llm:
        assert llm.explain()["state_snapshots"] in range(1, 128)
    for none in ({"max_mamba_cache_size": 32}, {"mamba_full_memory_ratio": 0.0}):
        check_no_snapshots(**none)
    with pytest.raises(ConfigError, match=r"max_mamba_cache_size 31 .* max_running_requests 32"):
        toy_llm(kind, max_mamba_cache_size=31)
    with pytest.raises(
        ConfigError, match=r"mamba_track_interval 24 is no multiple of page_size 16"
    ):
        toy_llm(kind, page_size=16, mamba_track_interval=24)


def check_no_snapshots(**settings: Any) -> None:
    kind, stem = ToyRecurrentForCausalLM, prompts()[0]
    with toy_llm(kind, page_size=16, **settings) as llm:
        first = run(llm, stem[:40])
        assert run(llm, stem[:40]) == first == (first[0], 0)
        llm.engine.check()


def test_trees_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"drafts trees, and ToyRecurrentForCausalLM has recurrent"
    ):
        toy_llm(ToyRecurrentForCausalLM, "TOY-TREES")


def test_states_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.executor import memory

    monkeypatch.setattr(memory, "memory", lambda device: (100_000, 2**40))
    with pytest.raises(ConfigError, match=r"states of 32 requests .* lower max_running_requests"):
        toy_llm(ToyRecurrentForCausalLM)


# --- what only latent models have -----------------------------------------------------------------


def test_what_is_kept_per_token_and_who_attends() -> None:
    with pytest.raises(ConfigError, match=r"triton cannot serve .* needs an NVIDIA or AMD GPU"):
        toy_llm(ToyLatentForCausalLM, attention_backend="triton")
    with toy_llm(ToyLatentForCausalLM, prefill_attention_backend="torch_native") as llm:
        chosen = llm.explain()["attention"]
        assert chosen["prefill"] == "torch_native: chosen"
        assert chosen["decode"].startswith(("cpu: chosen", "torch_native: chosen"))
        assert llm.explain()["kv_bytes_per_token"] == 2 * (12 + 4) * 4
