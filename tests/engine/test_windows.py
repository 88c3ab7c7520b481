"""Windowed pools: models that attend to a window keep its K/V only, and give the same output.

References keep all K/V: the same models with pools that are not windowed.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.plan import Limits
from forerun.core.sampling_params import SamplingParams
from forerun.executor import attention_setup, memory
from forerun.executor.device_executor import device_step
from forerun.executor.memory import KVBudget, KVDemand, ProfilingRun, kv_budget
from forerun.kvcache.layouts import ModelLayout
from tests.engine.test_matrix import GREEDY, SEEDED, hold, params, prompts
from tests.engine_runs import hold_prompt_logprobs
from tests.golden_engine import CASES, GOLDEN, golden_llm
from tests.ragged import SETTINGS, divide_at_random
from tests.toy_backends import NAME, registered

WINDOW = 24
LONG = [case for case in CASES if len(case["prompt"]) > 90][:6]
SIZES = {"page_size": 16, "chunked_prefill_size": 16}


@cache
def windowed_target() -> Path:
    """The golden target with a sliding window in every layer."""
    folder = Path(mkdtemp(prefix="forerun-windows-")) / "target"
    shutil.copytree(GOLDEN / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def reference(page_size: int, tight: bool, sampled: bool) -> list[list[int]]:
    """Plain decoding of the windowed target with all K/V, one prompt at a time, nothing cached."""
    kind = SEEDED if sampled else GREEDY
    with pytest.MonkeyPatch.context() as patch:
        keep_all(patch)
        with golden_llm(target=windowed_target(), disable_radix_cache=True) as llm:
            assert llm.engine.limits.window == 0
            return [
                llm.generate(input_ids=p, sampling_params=params(kind, i)).output_ids
                for i, p in enumerate(prompts(page_size, tight))
            ]


def keep_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_setup, "_window", lambda masks: None)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (16, 4)])
@pytest.mark.parametrize(
    ("algorithm", "models"),
    [
        (None, "target"),
        ("NGRAM", "target"),
        ("DFLASH", "target"),
        ("DFLASH", "draft"),
        ("DFLASH", "target draft"),
        ("DDTREE", "target draft"),
    ],
)
def test_output_equals_plain_decoding(
    algorithm: str | None,
    models: str,
    page_size: int,
    chunk: int,
    tight: bool,
    overlap_depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tight:  # and no more window pages than one request needs
        monkeypatch.setattr(memory, "_wanted_window_pages", lambda demand: demand.min_window_pages)
    hold(algorithm, page_size, chunk, overlap_depth, tight, **windowed(models, algorithm))


@pytest.mark.exhaustive
@pytest.mark.covering(0)
@pytest.mark.parametrize("models", ["target", "draft", "target draft"])
def test_output_of_ragged_passes(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide_at_random(monkeypatch)
    hold("DFLASH", 1, 4, 1, True, **windowed(models, "DFLASH"), **SETTINGS)
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.parametrize("models", ["target", "draft", "target draft"])
def test_prompt_logprobs_with_a_cached_prefix(models: str) -> None:
    """The window before `logprob_start_len` must be cached as well."""
    settings = windowed(models, "DFLASH")
    settings.pop("wanted", None)
    with golden_llm("DFLASH", **SIZES, **settings) as llm:
        hold_prompt_logprobs(llm, LONG[0]["prompt"][:90], (40, 40, 80, 0))


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("algorithm", "adaptive"), [(None, False), ("DFLASH", False), ("DFLASH", True)]
)
def test_backends_may_read_window_pages_on_the_host(algorithm: str | None, adaptive: bool) -> None:
    """Adaptive width measures steps of padding slots, with window pages as well."""
    with registered():
        settings = windowed("target", algorithm) | {"attention_backend": NAME}
        settings["speculative_adaptive"] = adaptive
        hold(algorithm, 1, 4, 1, True, **settings)


@pytest.mark.gpu
@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (16, 4), (256, 512)])
@pytest.mark.parametrize("models", ["target", "draft", "target draft"])
def test_output_on_a_gpu(models: str, page_size: int, chunk: int, tight: bool, graph: bool) -> None:
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    hold("DFLASH", page_size, chunk, 1, tight, **windowed(models, "DFLASH"), **own)


def windowed(models: str, algorithm: str | None) -> dict[str, Any]:
    """Settings for `hold`."""
    settings: dict[str, Any] = {}
    if algorithm == "DDTREE":
        settings["speculative_ddtree_budget"] = 9
    if "draft" in models:
        settings["speculative_draft_window_size"] = 16
    if "target" in models:
        settings |= {"target": windowed_target(), "wanted": reference}
    return settings


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("pool", ["target", "draft"])
def test_drafts_are_accepted_as_with_all_kv(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept lengths too, whether the prompt is in the prefix cache or not."""
    settings = {"speculative_draft_window_size": 16} if pool == "draft" else {}
    if pool == "target":
        settings["target"] = windowed_target()

    def run() -> list[Any]:
        found = []
        with golden_llm("DFLASH", **SIZES, **settings) as llm:
            windowed = llm.engine.limits.window
            for _ in range(2):
                outs = llm.generate(
                    input_ids=[case["prompt"] for case in LONG],
                    sampling_params={**GREEDY, "max_new_tokens": 48, "ignore_eos": True},
                )
                found += [(o.output_ids, o.meta_info["spec_accept_lengths"]) for o in outs]
            assert sum(o.meta_info["cached_tokens"] for o in outs) > 0.9 * sum(
                len(case["prompt"]) for case in LONG
            ) - 16 * len(LONG)
            llm.engine.check()
        return [windowed, found]

    windowed, found = run()
    assert windowed == (16 if pool == "draft" else WINDOW)
    keep_all(monkeypatch)
    windowed, want = run()
    assert windowed == 0 and found == want


def test_long_texts_need_few_window_pages() -> None:
    """A text of many windows fits, and the pages behind the window are free again."""
    with golden_llm(
        target=windowed_target(), max_running_requests=1, disable_radix_cache=True, **SIZES
    ) as llm:
        windows = llm.engine.scheduler.windows
        assert windows.pages is not None
        most = 0
        params = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
        request = llm.engine.make_request(CASES[0]["prompt"], params)
        llm.engine.submit(request)
        while llm.engine.has_work:
            llm.engine.step()
            most = max(most, windows.num_owned)
        assert len(request.output) == 300
        assert most <= llm.engine.limits.prompt_window_pages < 300 / 16
        llm.engine.close_request(request)
        llm.engine.check()
        assert windows.pages.num_free == windows.pages.capacity
        pools = device_step(llm.engine.executor).attention.pools
        assert pools.windowed and pools.shape.num_pages == windows.pages.capacity + 1


# --- memory -------------------------------------------------------------------------------------

GIB = 2**30
TARGET = ModelLayout.dense(36, 8, 128, torch.bfloat16)
DRAFT = ModelLayout.dense(5, 8, 128, torch.bfloat16)


def demand(
    layouts: list[ModelLayout], windowed: list[ModelLayout], window: int, slots: int = 256
) -> KVDemand:
    limits = Limits(slots, 64, 16, 16, 8192, 32768, 1, window=window)
    return KVDemand(
        layouts,
        page_size=64,
        max_tokens=slots * 32768,
        min_tokens=17,
        num_slots=slots + 1,
        window_layouts=windowed,
        slot_window_pages=limits.decode_window_pages,
        min_window_pages=limits.max_window_pages,
    )


def divide(wanted: KVDemand, budget: int, monkeypatch: pytest.MonkeyPatch) -> KVBudget:
    monkeypatch.setattr(memory, "memory", lambda device: (2 * budget, 2 * budget))
    monkeypatch.setattr(memory, "MAX_CPU_KV_BYTES", budget)
    got = kv_budget(
        EngineConfig(mem_fraction_static=0.5), wanted, torch.device("cpu"), ProfilingRun()
    )
    used = got.num_pages * got.token_bytes + got.num_window_pages * got.window_token_bytes
    assert used * 64 <= budget
    assert wanted.min_window_pages < got.num_window_pages <= got.num_pages
    return got


def test_a_draft_window_makes_room_for_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = 100 * GIB // (TARGET.token_bytes + DRAFT.token_bytes)
    for slots, growth in ((256, 1.05), (32, 1.12)):
        got = divide(demand([TARGET], [DRAFT], 1024, slots), 100 * GIB, monkeypatch)
        assert got.num_pages * 64 > growth * whole
        assert got.num_window_pages * 64 > slots * 1024  # no slot waits for its window
        assert f"of windowed layers {(got.num_window_pages - 1) * 64} tokens" in got.describe(64)


def test_a_windowed_target_runs_many_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """All K/V of a Mistral of 32 layers: 25 requests of 32,768 tokens in 100 GiB."""
    mistral = ModelLayout.dense(32, 8, 128, torch.bfloat16)
    alone = divide(demand([], [mistral], 4096), 100 * GIB, monkeypatch)
    assert alone.num_pages - 1 == 256 * 32768 // 64  # every slot at full context
    assert alone.num_window_pages * 64 > 190 * 4096
    eagle = ModelLayout.dense(1, 8, 128, torch.bfloat16)
    drafting = divide(demand([eagle], [mistral], 4096), 100 * GIB, monkeypatch)
    assert drafting.num_pages * 64 > 140 * 32768
    assert drafting.num_window_pages * 64 > 140 * 4096


@pytest.mark.parametrize("full", [[TARGET], []], ids=["draft", "all"])
def test_little_memory_is_divided_as_without_windows(
    full: list[ModelLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it holds less than the window and the chunk of one request."""
    wanted = demand(full, [DRAFT], 1024)
    whole = 100 * 64 * (wanted.token_bytes + wanted.window_token_bytes)
    monkeypatch.setattr(memory, "memory", lambda device: (2 * whole, 2 * whole))
    got = kv_budget(
        EngineConfig(mem_fraction_static=0.5), wanted, torch.device("cpu"), ProfilingRun()
    )
    assert wanted.min_window_pages > 100
    assert got.num_pages == got.num_window_pages == 100


def test_windows_as_long_as_the_context_are_not_windowed_pools() -> None:
    with golden_llm("DFLASH", speculative_draft_window_size=100, context_length=100) as llm:
        assert llm.explain()["kv_window"] == 0
    with golden_llm("DFLASH", speculative_draft_window_size=16, page_size=16) as llm:
        chosen = llm.explain()
        assert chosen["kv_window"] == 16
        assert "of windowed layers" in chosen["kv"]
        sizes = chosen["memory_bytes"]
        draft = device_step(llm.engine.executor).draft_attention
        assert draft is not None
        assert sizes["kv_draft"] == draft.pools.dense.nbytes
