"""FlashAttention 3 (Shah et al. 2024, arXiv 2407.08608) on Hopper, from whichever package has it.

Three builds of it are in use: upstream's own module, vLLM's (only its operators are loaded, not
vLLM) and SGLang's kernel package. They differ in how they are called, not in what they compute.
"""

from __future__ import annotations

import importlib
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.attention.capabilities import AttentionNeed, Capabilities, Mask
from forerun.attention.flash import FlashBackend, FlashInput, FlashLibrary, FlashMask, UnpagedInput
from forerun.attention.packages import Package
from forerun.attention.paged import LATENT_ROW, PagedTokens
from forerun.core.errors import ConfigError

LIBRARY_VARIABLE = "FORERUN_FA3_LIBRARY"  # path of vLLM's _vllm_fa3_C.abi3.so, without vLLM


# The operators' arguments that are left alone: they have no defaults of their own.
FORWARD_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("k_new", "v_new", "q_v", "out", "kv_batch_idx", "leftpad_k", "page_table")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k")),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "scheduler_metadata", "s_aux", "pack_gqa")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary")),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale", "cp_tot_seqused_k")),
    "is_rotary_interleaved": True,
    "softcap": 0.0,
    "num_splits": 0,  # it chooses
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
SCHEDULE_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k")),
    "max_seqlen_k_new": 0,
    "has_softcap": False,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
}


class Fa3Library(FlashLibrary):
    """One of the builds."""

    package: ClassVar[Package]

    @classmethod
    def find(cls) -> Path | None:
        """Returns what the installed build has, without importing it; None: not installed."""
        return cls.package.find()

    @classmethod
    @abstractmethod
    def load(cls, found: Path) -> Fa3Library:
        """`found`: from `find`."""


class VllmFa3(Fa3Library):
    """The operators that vLLM registers; a shared library that needs torch alone."""

    name = "vllm"
    package = Package("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so")
    has_sinks = True

    def __init__(self, ops: Any) -> None:
        """`ops`: has `fwd` and `get_scheduler_metadata`."""
        self.ops = ops

    @classmethod
    def find(cls) -> Path | None:
        named = os.environ.get(LIBRARY_VARIABLE)
        if named is None:
            return super().find()
        if not Path(named).is_file():
            raise ConfigError(f"{LIBRARY_VARIABLE} names {named}, which is not a file.")
        return Path(named)

    @classmethod
    def load(cls, found: Path) -> VllmFa3:
        torch.ops.load_library(str(found))
        return cls(torch.ops._vllm_fa3_C)

    def schedule(self, x: FlashInput, tokens: PagedTokens, mask: FlashMask) -> Tensor | None:
        if tokens.cu_q_lens is not None:
            return None
        schedule: Tensor = self.ops.get_scheduler_metadata(
            **SCHEDULE_DEFAULTS
            | {
                "batch_size": tokens.batch_size,
                "max_seqlen_q": tokens.max_q_len,
                "max_seqlen_k": _max_kv_len(x, tokens),
                "num_heads": x.q.shape[-2],
                "num_heads_k": x.k.shape[2],
                "headdim": x.k.shape[3],
                "headdim_v": x.v.shape[3],
                "qkv_dtype": x.q.dtype,
                "seqused_k": tokens.kv_lens,
                "page_size": x.k.shape[1],
            }
            | _masked(mask)
        )
        return schedule

    def attend(
        self, x: FlashInput, tokens: PagedTokens, mask: FlashMask, scale: float, schedule: Any
    ) -> Tensor:
        asked = {
            "q": x.q,
            "k": x.k,
            "v": x.v,
            "q_v": x.qv,
            "cu_seqlens_q": tokens.cu_q_lens,
            "seqused_k": tokens.kv_lens,
            "max_seqlen_q": _max_q_len(tokens),
            "page_table": tokens.page_table,
            "softmax_scale": scale,
            "scheduler_metadata": schedule,
            "s_aux": x.sinks,
        }
        return self._forward(asked | _masked(mask))

    def attend_unpaged(self, x: UnpagedInput, mask: FlashMask, scale: float) -> Tensor:
        asked = {
            "q": x.q,
            "k": x.k,
            "v": x.v,
            "cu_seqlens_q": x.cu_q_lens,
            "cu_seqlens_k": x.cu_kv_lens,
            "max_seqlen_q": x.max_q_len,
            "max_seqlen_k": x.max_kv_len,
            "softmax_scale": scale,
        }
        return self._forward(asked | _masked(mask))

    def _forward(self, asked: dict[str, Any]) -> Tensor:
        out: Tensor = self.ops.fwd(**FORWARD_DEFAULTS | asked)[0]
        return out


def _masked(mask: FlashMask) -> dict[str, Any]:
    left, right = mask.window
    return {"is_causal": mask.causal, "window_size_left": left, "window_size_right": right}


class UpstreamFa3(Fa3Library):
    """`flash_attn_interface`, built from the `hopper` folder of the FlashAttention repository."""

    name = "flash_attn_interface"
    package = Package("flash_attn_interface", "flash_attn_3")

    def __init__(self, module: Any) -> None:
        """`module`: has the three functions that are called here."""
        self.module = module

    @classmethod
    def load(cls, found: Path) -> UpstreamFa3:
        return cls(importlib.import_module("flash_attn_interface"))

    def schedule(self, x: FlashInput, tokens: PagedTokens, mask: FlashMask) -> Tensor | None:
        if tokens.cu_q_lens is not None:
            return None
        schedule: Tensor = self.module.get_scheduler_metadata(
            tokens.batch_size,
            tokens.max_q_len,
            _max_kv_len(x, tokens),
            x.q.shape[-2],
            x.k.shape[2],
            x.k.shape[3],
            tokens.kv_lens,
            x.q.dtype,
            headdim_v=x.v.shape[3],
            page_size=x.k.shape[1],
            causal=mask.causal,
            window_size=mask.window,
        )
        return schedule

    def attend(
        self, x: FlashInput, tokens: PagedTokens, mask: FlashMask, scale: float, schedule: Any
    ) -> Tensor:
        out: Tensor = self.module.flash_attn_with_kvcache(
            x.q,
            x.k,
            x.v,
            qv=x.qv,
            cache_seqlens=tokens.kv_lens,
            page_table=tokens.page_table,
            cu_seqlens_q=tokens.cu_q_lens,
            max_seqlen_q=_max_q_len(tokens),
            softmax_scale=scale,
            causal=mask.causal,
            window_size=mask.window,
            scheduler_metadata=schedule,
            **self._more(x),
        )
        return out

    def attend_unpaged(self, x: UnpagedInput, mask: FlashMask, scale: float) -> Tensor:
        out: Any = self.module.flash_attn_varlen_func(
            x.q,
            x.k,
            x.v,
            x.cu_q_lens,
            x.cu_kv_lens,
            x.max_q_len,
            x.max_kv_len,
            softmax_scale=scale,
            causal=mask.causal,
            window_size=mask.window,
        )
        # Older builds always return the log-sum-exp as well.
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    def _more(self, x: FlashInput) -> dict[str, Any]:
        """Arguments that other builds do not have."""
        return {}


class SglFa3(UpstreamFa3):
    """SGLang's kernel package: upstream's functions, and sinks."""

    name = "sgl_kernel"
    package = Package("sgl_kernel", "sglang-kernel", "flash_attn.py")
    has_sinks = True

    @classmethod
    def load(cls, found: Path) -> SglFa3:
        return cls(importlib.import_module("sgl_kernel.flash_attn"))

    def _more(self, x: FlashInput) -> dict[str, Any]:
        return {"sinks": x.sinks}


LIBRARIES: tuple[type[Fa3Library], ...] = (UpstreamFa3, VllmFa3, SglFa3)


class Fa3(FlashBackend):
    name = "fa3"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm_90"}),
        masks=frozenset({Mask.CAUSAL, Mask.BLOCK, Mask.SLIDING_BLOCK}),
        # Its window moves with the token; that before a block does not.
        windows=frozenset({Mask.CAUSAL, Mask.SLIDING_BLOCK}),
        dtypes=(torch.float16, torch.bfloat16),
        page_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
        mla=True,
        latent_row=LATENT_ROW,
        sinks=True,
    )

    @classmethod
    def find(cls) -> type[Fa3Library] | None:
        """The build to use, by name in the environment or the first that is installed."""
        named = LIBRARY_VARIABLE in os.environ
        order: tuple[type[Fa3Library], ...] = (VllmFa3,) if named else LIBRARIES
        return next((library for library in order if library.find() is not None), None)

    @classmethod
    def load(cls, need: AttentionNeed) -> FlashLibrary:
        library = cls.find()
        path = None if library is None else library.find()
        if library is None or path is None:
            raise ImportError("no FlashAttention 3 is installed")
        return library.load(path)

    @classmethod
    def why_missing(cls) -> list[str]:
        if cls.find() is not None:
            return []
        how = f"pip install vllm, or sglang-kernel; or set {LIBRARY_VARIABLE}"
        return [f"FlashAttention 3 is not installed ({how})"]

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons, library = super().why_unfit(need), cls.find()
        if need.sinks and library is not None and not library.has_sinks:
            reasons.append(f"{library.name} has no attention sinks")
        return reasons

    @classmethod
    def preferred_page_size(cls, need: AttentionNeed) -> int:
        # 128 are a whole tile of keys: loaded by TMA, 3 to 8 % faster in prefill.
        return 64 if need.mla else 128


def _max_q_len(tokens: PagedTokens) -> int | None:
    """Asked for with ragged tokens only."""
    return None if tokens.cu_q_lens is None else tokens.max_q_len


def _max_kv_len(x: FlashInput, tokens: PagedTokens) -> int:
    """Returns a bound from shapes alone: it sets into how many splits a context may be cut."""
    return tokens.page_table.shape[1] * x.k.shape[1]
