"""Engines with the golden pair; slots and pages are poisoned on release."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

import torch

from forerun import LLM
from forerun.core.request import Request
from forerun.executor.device_executor import DeviceExecutor
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.pools import ModelPools

GOLDEN = Path(__file__).resolve().parent / "golden" / "zlab-llama-b10"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
POISON = 3e4  # finite, because masked K/V is multiplied by 0


def golden_llm(
    algorithm: str | None = None, target: Path = GOLDEN / "target", **settings: Any
) -> LLM:
    """The golden target in float32, with token ids as input and output."""
    if algorithm in ("DFLASH", "DDTREE", "DFLASH,SUFFIX"):
        settings.setdefault("speculative_draft_model_path", str(GOLDEN / "draft"))
    settings.setdefault("speculative_adaptive", False)  # a fixed width, independent of timing
    settings = {"dtype": "float32", "skip_tokenizer_init": True, **settings}
    llm = LLM(target, speculative_algorithm=algorithm, **settings)
    poison_on_release(llm)
    return llm


def without_layout_check(llm: LLM) -> LLM:
    """The same without drafts beside those of the first steps, for tests that watch drafts."""
    assert isinstance(llm.engine.executor, DeviceExecutor)
    llm.engine.executor.layout_check = None
    return llm


def poison_on_release(llm: LLM) -> None:
    """Overwrites released slots and pages with values that would change the output if read.

    The replaced methods hold weak references: a reference cycle would keep K/V memory alive.
    """
    scheduler, executor = llm.engine.scheduler, llm.engine.executor
    assert isinstance(executor, DeviceExecutor)
    step, tables = executor.step, executor.tables
    release = partial(type(scheduler)._release, proxy(scheduler))
    pools = [step.attention.pools]
    if step.draft_attention is not None:
        pools.append(step.draft_attention.pools)

    @torch.inference_mode()  # an engine built under it has inference tensors
    def poisoned_release(request: Request) -> None:
        slot = request.slot
        release(request)
        tables.kv_len[slot] = 2**30
        tables.last_token[slot] = 2**30
        tables.history[slot] = 2**30
        tables.tenants[slot] = 2**30
        tables.page_table[slot] = 2**30
        tables.window_table[slot] = 2**30
        for state in tables.states:
            state[slot] = 2**30
        for pool in step.attention.pools.states:
            for kept in (*pool.state.values(), *pool.updates.values()):
                kept[:, slot] = torch.nan
        step.attention.pools.num_pending[slot] = 2**30
        step.attention.pools.num_passes[slot] += 1
        if step.deferred is not None:
            for kept in (step.deferred.hidden_states, step.deferred.aux_hidden_states):
                if kept is not None:
                    kept[slot] = torch.nan

    scheduler._release = poisoned_release  # type: ignore[method-assign]
    poison_freed_pages(scheduler.allocator, [pool for pool in pools if not pool.windowed])
    if scheduler.windows.pages is not None:
        allocator = scheduler.windows.pages.allocator
        poison_freed_pages(allocator, [pool for pool in pools if pool.windowed])


def poison_freed_pages(allocator: PageAllocator, pools: list[ModelPools]) -> None:
    """Overwrites pages of `pools` when `allocator` takes them back."""
    free = partial(type(allocator).free, proxy(allocator))

    @torch.inference_mode()
    def poisoned_free(pages: Iterable[int]) -> None:
        freed = list(pages)
        free(freed)
        for pool in pools:
            for data in pool.paged.values():
                data[:, :, freed] = min(POISON, torch.finfo(data.dtype).max)

    allocator.free = poisoned_free  # type: ignore[method-assign]
