"""FlashMLA on Hopper: absorbed MLA for decode and verification, W tokens a request.

It has no prefill kernel for this GPU. Prompts and draft extend go to the backend of prefill, as in
SGLang (PR 24640): `fa3`, else `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionSpec, Buffers, Plan
from forerun.attention.capabilities import AttentionNeed, Capabilities, Mask, Phase
from forerun.attention.packages import Package
from forerun.attention.paged import LATENT_ROW, LatentLibraryBackend, PagedPlan, PagedTokens
from forerun.kvcache.pools import ModelPools

PAGE_SIZE = 64


@dataclass
class FlashMlaPlan(PagedPlan):
    """`schedules`, by causal or not: how work is split over CTAs, for this forward's lengths.

    The library fills an empty one on the device when the first layer runs; the others read it.
    """

    schedules: dict[bool, Any] = field(default_factory=dict)


class FlashMla(LatentLibraryBackend):
    name = "flashmla"
    package = Package("flash_mla", "sgl-flash-mla")
    module = "flash_mla"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm_90"}),
        phases=frozenset({Phase.DECODE, Phase.VERIFY}),
        masks=frozenset({Mask.CAUSAL, Mask.BLOCK}),
        windows=frozenset(),
        dtypes=(torch.bfloat16,),
        page_sizes=(PAGE_SIZE,),
        dense=False,
        mla=True,
        latent_row=LATENT_ROW,
    )

    @classmethod
    def load(cls, need: AttentionNeed) -> Any:
        module = super().load(need)
        if not module.has_legacy():  # where those for Hopper are
            raise ImportError("flash_mla was built without its kernels for Hopper")
        return module

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        super().__init__(need, pools)
        # Written before and after the library's kernels: a launch without PDL. They use PDL
        # themselves, and need not wait as ours do (kernels/runtime/pdl.py).
        self._fence = torch.zeros(1, device=pools.device)

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> FlashMlaPlan:
        return FlashMlaPlan(PagedTokens.of(batch, self.pools.page_size))

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, FlashMlaPlan)
        tokens, causal = plan.tokens, spec.mask.mask is Mask.CAUSAL
        self._fence.fill_(0)
        if causal not in plan.schedules:
            plan.schedules[causal] = self.library.get_mla_metadata()[0]
        out, _ = self.library.flash_mla_with_kvcache(
            q.view(tokens.batch_size, tokens.max_q_len, *q.shape[1:]),
            self.pools.latent(layer).unsqueeze(2),
            tokens.page_table,
            tokens.kv_lens,
            self.latent_sizes(layer)[0],
            plan.schedules[causal],
            softmax_scale=spec.scale,
            causal=causal,
            use_legacy=True,
        )
        self._fence.fill_(0)
        return out.flatten(0, 1)  # type: ignore[no-any-return]
