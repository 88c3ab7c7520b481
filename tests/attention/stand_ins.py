"""Stand-ins for attention libraries that are not on this machine.

Each takes exactly the arguments of the real call (signatures recorded from the packages named
below), checks what the real one checks, and computes the result in plain PyTorch from these
arguments alone. A backend run over them shows that it says what it means; it shows nothing about
the real kernels, which the GPU tests run where they are installed.

    vLLM 0.20.2       torch.ops._vllm_fa3_C, schemas as in the shared library
    flash-attention   flash_attn_interface.py of the folder hopper
    sglang-kernel 0.4.5   sgl_kernel.flash_attn
    flash-attn-4 4.0.0b36   flash_attn.cute
    sgl-flash-mla 1.0.0   flash_mla
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend
from forerun.attention.capabilities import AttentionNeed
from forerun.attention.fa3 import Fa3, SglFa3, UpstreamFa3, VllmFa3
from forerun.attention.fa4 import CuteFlash, Fa4
from forerun.attention.flash import FlashLibrary
from forerun.attention.flashmla import FlashMla
from forerun.attention.select import BACKENDS

VLLM_FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v,
Tensor!? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,
Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,
Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]
"""
VLLM_METADATA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k,
int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype,
Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,
int sm_margin) -> Tensor"""


@dataclass
class Ask:
    """The arguments of a FlashAttention call that are used here, under one set of names."""

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    used_k: Tensor | None
    max_q: int | None
    max_k: int | None
    page_table: Tensor | None
    scale: float
    causal: bool
    window: tuple[int, int]
    sinks: Tensor | None = None
    metadata: Tensor | None = None


calls: list[str] = []  # names of the functions called, for tests that count


def flash_attention(ask: Ask) -> Tensor:
    """What FlashAttention 3 and 4 compute; the checks are those of flash_api.cpp."""
    _check(ask)
    q, batch = ask.q, _batch_size(ask)
    flat, flat_qv = (None if x is None else x.flatten(0, -3) for x in (q, ask.qv))
    assert flat is not None
    if ask.cu_q is None:
        ends_q = torch.arange(batch + 1) * q.shape[1]
    else:
        ends_q = ask.cu_q
        assert ask.max_q is not None and int(ends_q.diff().max()) <= ask.max_q
        assert int(ends_q[-1]) == len(flat)
    out = flat.new_empty(*flat.shape[:2], ask.v.shape[-1])
    for b in range(batch):
        own = slice(int(ends_q[b]), int(ends_q[b + 1]))
        k, v = _keys(ask, b)
        out[own] = _one(ask, flat[own], None if flat_qv is None else flat_qv[own], k, v)
    return out.view(*q.shape[:-1], ask.v.shape[-1])


def _check(ask: Ask) -> None:
    q, k, v = ask.q, ask.k, ask.v
    assert q.dtype == k.dtype == v.dtype, "query and key must have the same dtype"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "contiguous last dimension"
    assert q.dim() == (4 if ask.cu_q is None else 3)
    assert q.shape[-1] == k.shape[-1] and k.shape[:-1] == v.shape[:-1]
    assert q.shape[-2] % k.shape[-2] == 0
    for lengths in (ask.cu_q, ask.cu_k, ask.used_k):
        assert lengths is None or (lengths.dtype == torch.int32 and lengths.is_contiguous())
    if ask.page_table is None:
        assert ask.cu_k is not None and ask.max_k is not None and ask.used_k is None
    else:
        assert ask.cu_k is None and ask.used_k is not None and k.dim() == 4
        assert ask.page_table.dtype == torch.int32 and ask.page_table.stride(-1) == 1
        assert ask.page_table.shape[0] == ask.used_k.shape[0] == _batch_size(ask)
    if ask.qv is not None:
        assert q.shape[-1] <= 64 and ask.qv.dtype == q.dtype and ask.qv.stride(-1) == 1
        assert ask.qv.shape == (*q.shape[:-1], v.shape[-1])
    if ask.sinks is not None:
        assert ask.sinks.shape == (q.shape[-2],) and ask.sinks.is_contiguous()
    if ask.metadata is not None:  # of these lengths, this mask, this many tokens
        assert ask.used_k is not None and ask.cu_q is None
        want = schedule(ask.used_k, q.shape[1], ask.causal, ask.window)
        assert torch.equal(ask.metadata, want), "stale scheduler metadata"


def schedule(used_k: Tensor, max_q: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """In place of a schedule: what it depends on."""
    rest = torch.tensor([max_q, causal, *window], dtype=torch.int32)
    return torch.cat([used_k.clone(), rest])


def _batch_size(ask: Ask) -> int:
    return ask.q.shape[0] if ask.cu_q is None else ask.cu_q.shape[0] - 1


def _keys(ask: Ask, b: int) -> tuple[Tensor, Tensor]:
    """K [n, Hkv, D] and V of request b, in order; entries of the table past them are not read."""
    if ask.page_table is None:
        assert ask.cu_k is not None and ask.max_k is not None
        own = slice(int(ask.cu_k[b]), int(ask.cu_k[b + 1]))
        assert own.stop - own.start <= ask.max_k
        return ask.k[own], ask.v[own]
    assert ask.used_k is not None
    length, page = int(ask.used_k[b]), ask.k.shape[1]
    used = -(-length // page)
    assert used <= ask.page_table.shape[1]
    pages = ask.page_table[b, :used].long()
    k, v = (x[pages].flatten(0, 1)[:length] for x in (ask.k, ask.v))
    return k, v


def _one(ask: Ask, q: Tensor, qv: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """q [n, Hq, D] at the last n of k's positions."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k)
    if qv is not None:
        scores = scores + torch.einsum("ihd,jhd->hij", qv.double(), v)
    at = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    j = torch.arange(len(k))
    left, right = ask.window
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if ask.causal or right >= 0:
        seen &= j <= at + (0 if ask.causal else right)
    if left >= 0:
        seen &= j >= at - left
    scores = (scores * ask.scale).masked_fill(~seen, float("-inf"))
    if ask.sinks is not None:
        sinks = ask.sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hij,jhd->ihd", weights, v).to(q.dtype)


# --- vLLM's operators ---------------------------------------------------------------------------


def _vllm_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    (k_new, v_new, qv, out, cu_q, cu_k, cu_k_new, used_q, used_k, max_q, max_k, table, batch_idx,
     leftpad, cos, sin, rotary_lens, q_scale, k_scale, v_scale, scale, causal, left, right, softcap,
     _, metadata, num_splits, pack_gqa, margin, sinks, cp_size, cp_rank, cp_lens,
    ) = rest  # fmt: skip
    unused = (k_new, v_new, out, cu_k_new, used_q, batch_idx, leftpad, cos, sin, rotary_lens)
    assert all(x is None for x in (*unused, q_scale, k_scale, v_scale, pack_gqa, cp_lens))
    assert (softcap, num_splits, margin, cp_size, cp_rank) == (0.0, 0, 0, 1, 0)
    if sinks is not None:
        assert sinks.dtype == torch.bfloat16 and len(sinks) <= 64 and k.shape[-1] == v.shape[-1]
    calls.append("fwd")
    window = (left, right)
    ask = Ask(
        q, k, v, qv, cu_q, cu_k, used_k, max_q, max_k, table, scale, causal, window, sinks, metadata
    )
    return [flash_attention(ask), torch.empty(0)]


def _vllm_metadata(*args: Any) -> Tensor:
    (batch, max_q, max_k, heads, kv_heads, dim, dim_v, _, used_k, cu_q, cu_k, cu_k_new, used_q,
     leftpad, page, max_new, causal, left, right, softcap, splits, pack_gqa, margin,
    ) = args  # fmt: skip
    assert all(x is None for x in (cu_q, cu_k, cu_k_new, used_q, leftpad, pack_gqa))
    assert (max_new, softcap, splits, margin) == (0, False, 0, 0)
    assert batch == len(used_k) and heads % kv_heads == 0 and dim <= max(dim_v, 192)
    assert page is not None and max_k % page == 0 and int(used_k.max()) <= max_k
    calls.append("get_scheduler_metadata")
    return schedule(used_k, max_q, causal, (left, right))


NAMESPACE = "forerun_stand_in_fa3"


@cache
def vllm_ops() -> Any:
    """As `torch.ops._vllm_fa3_C`, with the real schemas; that name is left to the real library."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema, function in ((VLLM_FWD, _vllm_fwd), (VLLM_METADATA, _vllm_metadata)):
        library.define(" ".join(schema.split()))
        library.impl(schema.partition("(")[0], function, "CPU")
    return SimpleNamespace(ops=torch.ops.forerun_stand_in_fa3, library=library)


# --- flash_attn_interface, sgl_kernel.flash_attn ------------------------------------------------


def _get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
    attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return _vllm_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
        headdim if headdim_v is None else headdim_v, qkv_dtype, cache_seqlens, cu_seqlens_q, None,
        cu_seqlens_k_new, None, cache_leftpad, page_size, max_seqlen_k_new, causal, *window_size,
        has_softcap, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def _flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert k is None and v is None and isinstance(softmax_scale, float)
    calls.append("fwd")
    return flash_attention(
        Ask(
            q, k_cache, v_cache, qv, cu_seqlens_q, None, cache_seqlens, max_seqlen_q, None,
            page_table, softmax_scale, causal, window_size, metadata=scheduler_metadata,
        )
    )  # fmt: skip


def _flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    calls.append("varlen")
    return flash_attention(
        Ask(
            q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, None,
            softmax_scale, causal, window_size,
        )
    )  # fmt: skip


def _sgl_with_kvcache(q, k_cache, v_cache, sinks=None, **named):
    """As upstream's, and `sinks` (bfloat16)."""
    if sinks is None:
        return _flash_attn_with_kvcache(q, k_cache, v_cache, **named)
    assert sinks.dtype == torch.bfloat16 and named["qv"] is None
    return flash_attention(
        Ask(
            q, k_cache, v_cache, None, named["cu_seqlens_q"], None, named["cache_seqlens"],
            named["max_seqlen_q"], None, named["page_table"], named["softmax_scale"],
            named["causal"], named["window_size"], sinks, named["scheduler_metadata"],
        )
    )  # fmt: skip


UPSTREAM = SimpleNamespace(
    flash_attn_with_kvcache=_flash_attn_with_kvcache,
    flash_attn_varlen_func=_flash_attn_varlen_func,
    get_scheduler_metadata=_get_scheduler_metadata,
)
SGL = SimpleNamespace(
    flash_attn_with_kvcache=_sgl_with_kvcache,
    flash_attn_varlen_func=_flash_attn_varlen_func,
    get_scheduler_metadata=_get_scheduler_metadata,
)


# --- flash_attn.cute ----------------------------------------------------------------------------


def _cute_varlen(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
    mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    assert num_splits >= 0 and seqused_q is None and not return_lse
    calls.append("cute")
    window = tuple(-1 if side is None else side for side in window_size)
    out = flash_attention(
        Ask(
            q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
            page_table, softmax_scale, causal, window, learnable_sink,
        )
    )  # fmt: skip
    return out, None


CUTE = SimpleNamespace(flash_attn_varlen_func=_cute_varlen)


# --- flash_mla ----------------------------------------------------------------------------------


@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None
    filled: list[Tensor] = field(default_factory=list)


def _get_mla_metadata(*args, **named):
    calls.append("get_mla_metadata")
    return FlashMLASchedMeta(), None


def _flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    enable_batch_invariant=False, use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
):  # fmt: skip
    assert use_legacy, "Sparse attention is required"
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and indices is None
    assert k_cache.shape[1] == 64, "Currently page_block_size must be 64"
    assert k_cache.is_contiguous() and k_cache.shape[2] == 1 and q.shape[-1] == k_cache.shape[-1]
    want = schedule(cache_seqlens, q.shape[1], causal, (-1, -1))
    if tile_scheduler_metadata.tile_scheduler_metadata is None:
        tile_scheduler_metadata.tile_scheduler_metadata = want
    else:
        assert torch.equal(tile_scheduler_metadata.tile_scheduler_metadata, want), "stale metadata"
    calls.append("fwd")
    rope = q.shape[-1] - head_dim_v
    assert rope <= 64
    out = flash_attention(
        Ask(
            q[..., head_dim_v:], k_cache[..., head_dim_v:], k_cache[..., :head_dim_v],
            q[..., :head_dim_v], None, None, cache_seqlens, None, None, block_table, softmax_scale,
            causal, (-1, -1),
        )
    )  # fmt: skip
    return out, torch.empty(0)


FLASH_MLA = SimpleNamespace(
    get_mla_metadata=_get_mla_metadata,
    flash_mla_with_kvcache=_flash_mla_with_kvcache,
    has_legacy=lambda: True,
)


# --- backends over them -------------------------------------------------------------------------


def on_cpu(kind: type[AttentionBackend], library: FlashLibrary | Any) -> type[AttentionBackend]:
    """The backend with its library replaced, on a CPU, for any dtype and size."""
    anywhere = replace(
        kind.capabilities,
        devices=None,
        archs=None,
        dtypes=None,
        kv_dtypes=None,
        head_dims=None,
        latent_row=None,
        mixed_layouts=True,
    )

    class StandIn(kind):  # type: ignore[valid-type, misc]
        capabilities = anywhere

        @classmethod
        def load(cls, need: AttentionNeed) -> Any:
            return library

        @classmethod
        def why_missing(cls) -> list[str]:
            return []

        @classmethod
        def why_unfit(cls, need: AttentionNeed) -> list[str]:
            return cls.capabilities.refusals(need)

    return StandIn


def stand_ins() -> dict[str, type[AttentionBackend]]:
    """By package."""
    return {
        "fa3-vllm": on_cpu(Fa3, VllmFa3(vllm_ops().ops)),
        "fa3-upstream": on_cpu(Fa3, UpstreamFa3(UPSTREAM)),
        "fa3-sgl": on_cpu(Fa3, SglFa3(SGL)),
        "fa4": on_cpu(Fa4, CuteFlash(CUTE, 0)),
        "flashmla": on_cpu(FlashMla, FLASH_MLA),
    }


@contextmanager
def registered(kind: type[AttentionBackend]) -> Iterator[str]:
    """Selectable under the name that is yielded, within the block."""
    name = f"stand_in_{kind.name}"
    BACKENDS[name] = lambda: kind
    try:
        yield name
    finally:
        del BACKENDS[name]
