"""TensorRT-LLM's decode kernels, as FlashInfer calls them: XQA on Hopper, TRTLLM-gen on Blackwell.

One kernel serves decode, verification and draft extend: W query tokens per request over paged K/V.
Lengths and page tables are read on the device. Chunks of prompts go to another backend.

XQA takes a bit mask over the W tokens of a step, so it has blocks and trees too; its window is
that of the last token, for all of them. TRTLLM-gen is causal only.
(flashinfer.decode.trtllm_batch_decode_with_kv_cache, flashinfer-python 0.6.15.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionSpec, Buffers, Plan
from forerun.attention.capabilities import PER_STEP, AttentionNeed, Capabilities, Mask, Phase
from forerun.attention.packages import FLASHINFER
from forerun.attention.paged import LibraryBackend, PagedPlan, PagedTokens
from forerun.kvcache.pools import ModelPools

XQA_ARCHS = frozenset({"sm_90"})
GEN_ARCHS = frozenset({"sm_100", "sm_103"})
WORKSPACE_BYTES = 256 << 20
WORD_BITS = 16  # of the mask's words


@dataclass
class TrtllmPlan(PagedPlan):
    tree: Tensor | None = None  # mask of `pack_tree`, which replaces that of causal layers


class TrtllmMha(LibraryBackend):
    name = "trtllm_mha"
    package = FLASHINFER
    module = "flashinfer.decode"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=XQA_ARCHS | GEN_ARCHS,
        phases=frozenset(PER_STEP),
        windows=frozenset({Mask.CAUSAL}),
        head_dims=range(16, 257, 16),
        dtypes=(torch.bfloat16, torch.float16),
        page_sizes=(16, 32, 64, 128),
        sinks=True,
    )

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_unfit(need)
        if need.arch in GEN_ARCHS:
            others = sorted({m.mask.value for m in need.masks if m.mask is not Mask.CAUSAL})
            reasons += [
                f"TRTLLM-gen ({need.arch}) is causal only: no {mask} mask" for mask in others
            ]
        elif need.phase is not Phase.DECODE and any(m.window is not None for m in need.masks):
            reasons.append("XQA's window is the same for all tokens of a step, so W > 1 has none")
        return reasons

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        super().__init__(need, pools)
        # Its head holds semaphores: zeroed once, the kernels leave them zero.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pools.device)
        self._masks: dict[tuple[Mask, int, int], Tensor] = {}  # by (mask, B, W)

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> TrtllmPlan:
        tree = None if batch.tree is None else pack_tree(batch.tree)
        return TrtllmPlan(PagedTokens.of(batch, self.pools.page_size), tree)

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, TrtllmPlan)
        tokens, window = plan.tokens, spec.mask.window
        out: Any = self.library.trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            (self.pools.k(layer), self.pools.v(layer)),
            self._workspace,
            tokens.page_table,
            tokens.kv_lens.view(torch.uint32),
            tokens.page_table.shape[1] * self.pools.page_size,
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            window_left=-1 if window is None else window - 1,
            sinks=spec.sinks,
            kv_layout="NHD",
            q_len_per_req=tokens.max_q_len,
            mask=self._mask(plan, spec.mask.mask),
        )
        return out.view(q.shape)  # type: ignore[no-any-return]

    def _mask(self, plan: TrtllmPlan, mask: Mask) -> Tensor | None:
        """[B, W, words] uint16; None: one token, or TRTLLM-gen, which knows causal alone."""
        tokens = plan.tokens
        if tokens.max_q_len == 1 or self.need.arch in GEN_ARCHS:
            return None
        if plan.tree is not None and mask is Mask.CAUSAL:
            return plan.tree
        key = (mask, tokens.batch_size, tokens.max_q_len)
        if key not in self._masks:  # before capture: a step is warmed up
            one = pack_mask(mask, tokens.max_q_len, tokens.kv_lens.device)
            self._masks[key] = one.expand(tokens.batch_size, -1, -1).contiguous()
        return self._masks[key]


def pack_mask(mask: Mask, q_len: int, device: torch.device) -> Tensor:
    """Which of a step's tokens each of them sees: [1, W, words] uint16, lowest bit first.

    A token's row of bits fills whole words of 32 bits. CAUSAL: it sees those up to itself. BLOCK:
    all.
    """
    words = 2 * -(-q_len // 32)
    token = torch.arange(q_len, device=device).unsqueeze(1)
    other = torch.arange(words * WORD_BITS, device=device)
    seen = (other < q_len) & ((other <= token) | (mask is Mask.BLOCK))
    shifts = torch.arange(WORD_BITS, device=device)
    packed = (seen.view(1, q_len, words, WORD_BITS) << shifts).sum(-1)
    return packed.to(torch.int16).view(torch.uint16)


def pack_tree(tree: Tensor) -> Tensor:
    """The same for `AttentionBatch.tree` [B, W, n] int64: [B, W, words] uint16."""
    words = 2 * -(-tree.shape[1] // 32)
    return tree.contiguous().view(torch.int16)[..., :words].contiguous().view(torch.uint16)
