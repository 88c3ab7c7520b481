"""FlashAttention 4, written in CuTe DSL (package flash-attn-4): Hopper and Blackwell.

What it can do differs by architecture. On Hopper it does not split K/V over CTAs, so that a long
context of few requests is slow: it serves prefill there, and everything on Blackwell. Kernels are
compiled when a shape is first met, that is in the warm-up run before a capture.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from forerun.attention.capabilities import AttentionNeed, Capabilities, Mask, Phase
from forerun.attention.flash import FlashBackend, FlashInput, FlashLibrary, FlashMask, UnpagedInput
from forerun.attention.packages import Package
from forerun.attention.paged import LATENT_ROW, PagedTokens

ARCHS = frozenset({"sm_90", "sm_100"})


class CuteFlash(FlashLibrary):
    """`flash_attn.cute.interface`."""

    name = "flash-attn-4"
    has_sinks = True

    def __init__(self, module: Any, num_splits: int) -> None:
        """`module`: has `flash_attn_varlen_func`. `num_splits` 0: chosen by it."""
        self.module, self.num_splits = module, num_splits

    def schedule(self, x: FlashInput, tokens: PagedTokens, mask: FlashMask) -> None:
        return None  # it makes its own

    def attend(
        self, x: FlashInput, tokens: PagedTokens, mask: FlashMask, scale: float, schedule: None
    ) -> Tensor:
        out, _ = self.module.flash_attn_varlen_func(
            x.q,
            x.k,
            x.v,
            qv=x.qv,
            cu_seqlens_q=tokens.cu_q_lens,
            max_seqlen_q=tokens.max_q_len,
            seqused_k=tokens.kv_lens,
            page_table=tokens.page_table,
            softmax_scale=scale,
            causal=mask.causal,
            window_size=_window(mask),
            learnable_sink=x.sinks,
            num_splits=self.num_splits,
        )
        return out  # type: ignore[no-any-return]

    def attend_unpaged(self, x: UnpagedInput, mask: FlashMask, scale: float) -> Tensor:
        out, _ = self.module.flash_attn_varlen_func(
            x.q,
            x.k,
            x.v,
            cu_seqlens_q=x.cu_q_lens,
            cu_seqlens_k=x.cu_kv_lens,
            max_seqlen_q=x.max_q_len,
            max_seqlen_k=x.max_kv_len,
            softmax_scale=scale,
            causal=mask.causal,
            window_size=_window(mask),
        )
        return out  # type: ignore[no-any-return]


def _window(mask: FlashMask) -> tuple[int | None, ...]:
    """None: all."""
    return tuple(None if side < 0 else side for side in mask.window)


class Fa4(FlashBackend):
    name = "fa4"
    package = Package("flash_attn", "flash-attn-4", "cute/interface.py")
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=ARCHS,
        masks=frozenset({Mask.CAUSAL, Mask.BLOCK, Mask.SLIDING_BLOCK}),
        windows=frozenset({Mask.CAUSAL, Mask.SLIDING_BLOCK}),
        dtypes=(torch.float16, torch.bfloat16),
        page_sizes=(64, 128),
        mla=True,
        latent_row=LATENT_ROW,
        sinks=True,
    )

    @classmethod
    def load(cls, need: AttentionNeed) -> FlashLibrary:
        module = importlib.import_module("flash_attn.cute.interface")
        return CuteFlash(module, num_splits=1 if need.arch == "sm_90" else 0)

    @classmethod
    def phases_on(cls, arch: str | None) -> frozenset[Phase]:
        return frozenset({Phase.PREFILL}) if arch == "sm_90" else cls.capabilities.phases

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_unfit(need)
        if need.phase not in cls.phases_on(need.arch):
            reasons.append("it does not split K/V over CTAs on sm_90: prefill only")
        if need.arch == "sm_90" and need.mla:
            reasons.append("it has no latent (MLA) attention on sm_90")
        if need.arch == "sm_100" and not need.mla and need.head_dim > 128:
            reasons.append(f"head dim {need.head_dim} is more than 128 on sm_100")
        return reasons

    @classmethod
    def preferred_page_size(cls, need: AttentionNeed) -> int:
        return 128  # a whole tile of keys: loaded by TMA
