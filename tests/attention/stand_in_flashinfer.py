"""A stand-in for FlashInfer's attention calls, where it is not installed.

It takes exactly the arguments that are recorded here from flashinfer-python 0.6.15.post1, checks
what the real calls check, and computes in plain PyTorch from these arguments and from what was
planned last: nothing else, so a plan that is missing or stale gives another result. A backend run
over it shows that it says what it means. It shows nothing about the real kernels, which the GPU
tests run where they are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend
from forerun.attention.flashinfer import FlashInfer
from forerun.attention.flashinfer_mla import FlashInferMla
from forerun.attention.select import BACKENDS
from forerun.attention.trtllm_mha import TrtllmMha

SEMAPHORES = 8 << 20  # bytes at the head of XQA's workspace
calls: list[str] = []  # functions and masks that ran, for tests that ask


@dataclass(frozen=True)
class Seen:
    """One request: which of its K/V positions each of its tokens sees, [n, L] bool."""

    mask: Tensor

    @classmethod
    def of(cls, q_len: int, kv_len: int, causal: bool, window_left: int = -1) -> Seen:
        at = torch.arange(kv_len - q_len, kv_len).view(-1, 1)
        kv = torch.arange(kv_len)
        mask = (kv <= at) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
        return cls(mask & (kv >= at - window_left) if window_left >= 0 else mask)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """q [n, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv] -> [n, Hq, Dv], in float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * scale
    scores = scores.masked_fill(~seen.mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)


def bits_of(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits of bytes, lowest first, as bool."""
    return ((packed.unsqueeze(1).int() >> torch.arange(8)) & 1).flatten()[:count].bool()


# --- flashinfer.decode --------------------------------------------------------------------------


class Decode:
    """`trtllm_batch_decode_with_kv_cache` of one architecture."""

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels  # "xqa" or "trtllm-gen"

    def trtllm_batch_decode_with_kv_cache(
        self, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
        bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
        o_sf_vec_size=None, sinks=None, kv_layout="HND", enable_pdl=None, backend="auto",
        q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True,
        lse=None, return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None,
    ):  # fmt: skip
        (k, v), width = kv_cache, q_len_per_req
        batch = query.shape[0] // width
        assert query.dim() == 3 and query.is_contiguous() and batch * width == query.shape[0]
        assert kv_layout == "NHD" and k.dim() == 4 and k.shape == v.shape
        page = k.shape[1]
        assert page in (16, 32, 64, 128)
        assert k.dtype == v.dtype == query.dtype and query.shape[2] == k.shape[3]
        assert block_tables.dtype == torch.int32 and block_tables.shape[0] == batch
        assert max_seq_len == block_tables.shape[1] * page
        assert seq_lens.dtype == torch.uint32 and seq_lens.shape == (batch,)
        assert isinstance(bmm1_scale, float) and bmm2_scale == 1.0
        assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any(), "not zeroed"
        if sinks is not None:
            assert sinks.dtype == torch.float32 and sinks.shape == (query.shape[1],)
        rows = self._rows(mask, batch, width)
        calls.append(f"{self.kernels} {width}")
        parts = []
        for b, length in enumerate(seq_lens.long().tolist()):
            used = -(-length // page)
            pages = block_tables[b, :used].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
            own = query[b * width : (b + 1) * width]
            seen = self._seen(width, length, window_left, None if rows is None else rows[b])
            parts.append(attend(own, keys, values, seen, bmm1_scale, sinks))
        return torch.cat(parts)

    def _rows(self, mask: Tensor | None, batch: int, width: int) -> Tensor | None:
        """[B, W, W] bool of XQA's mask."""
        if self.kernels == "trtllm-gen" or width == 1:
            assert mask is None
            return None
        assert mask is not None, "Mask is required for speculative decoding"
        words = -(-width // 32) * 2
        assert mask.dtype == torch.uint16 and mask.shape == (batch, width, words)
        assert mask.is_contiguous()
        bits = (mask.view(torch.int16).int().unsqueeze(3) >> torch.arange(16)) & 1
        bits = bits.flatten(2).bool()
        assert not bits[:, :, width:].any()
        return bits[:, :, :width]

    def _seen(self, width: int, length: int, window_left: int, rows: Tensor | None) -> Seen:
        """XQA cuts every token's context where the last one's window begins."""
        if self.kernels == "trtllm-gen":
            return Seen.of(width, length, True, window_left)
        seen = Seen.of(width, length, True).mask
        if rows is not None:
            seen[:, length - width :] = rows
        if window_left >= 0:
            seen[:, : max(0, length - window_left - 1)] = False
        return Seen(seen)


# --- flashinfer: wrappers -----------------------------------------------------------------------


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        assert backend in ("fa2", "fa3") and jit_args is None and jit_kwargs is None
        assert custom_mask_buf is None or backend == "fa2"
        self.backend, self.graph = backend, use_cuda_graph
        self.bufs = [
            qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        ]  # fmt: skip
        self.custom, self.custom_indptr = custom_mask_buf, mask_indptr_buf
        self.rows: int | None = None
        self.workspace = float_workspace_buffer

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.workspace = float_workspace_buffer

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True,
    ):  # fmt: skip
        assert not torch.compiler.is_compiling()
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(x.dtype == torch.int32 for x in given)
        assert custom_mask is None and packed_custom_mask is None  # the buffers hold it
        rows = int(qo_indptr[-1])
        if self.graph:
            self.rows = self.rows or rows
            assert rows <= self.rows and len(qo_indptr) == len(self.bufs[0])
            for buf, value in zip(self.bufs, given, strict=True):
                assert len(value) <= len(buf)
                buf[: len(value)].copy_(value)
            tiles = self._tiles(rows, len(qo_indptr) - 1, num_qo_heads // num_kv_heads)
            size = num_qo_heads * tiles * (head_dim_qk + 1) * 4
            assert self.workspace.numel() >= size, "batch_prefill_tmp_v"
        else:
            self.bufs = [x.clone() for x in given]
        pages, last = paged_kv_indptr.diff(), paged_kv_last_page_len
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert bool(((last > 0) & (last <= page_size)).all())
        self.planned = {
            "q_lens": qo_indptr.diff().tolist(),
            "kv_lens": ((pages - 1) * page_size + last).tolist(),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "dtypes": (q_data_type, kv_data_type),
        }
        self.causal, self.window_left, self.scale = causal, window_left, sm_scale

    @staticmethod
    def _tiles(rows: int, batch: int, group: int) -> int:
        """Query rows in the tiles of a captured plan (scheduler.cuh, PrefillSplitQOKVIndptr)."""
        packed = (rows - batch + 1) * group
        tile = 16 if packed <= 16 else 64 if packed <= 64 else 128
        return tile * (-(-rows * group // tile) + batch - 1)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
    ):  # fmt: skip
        k, v = paged_kv_cache
        heads, kv_heads, dim, page = self.planned["heads"]
        assert q.shape == (sum(self.planned["q_lens"]), heads, dim) and q.stride(-1) == 1
        assert k.shape[1:] == v.shape[1:] == (page, kv_heads, dim)
        assert (q.dtype, k.dtype) == self.planned["dtypes"] and window_left is None
        scale = self.scale * (1.0 if q_scale is None else q_scale)
        qo, indptr, indices, _ = self.bufs
        parts = []
        for b, (n, length) in enumerate(
            zip(self.planned["q_lens"], self.planned["kv_lens"], strict=True)
        ):
            pages = indices[int(indptr[b]) : int(indptr[b + 1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
            own = q[int(qo[b]) : int(qo[b]) + n]
            parts.append(attend(own, keys, values, self._seen(b, n, length), scale))
        calls.append(f"{self.backend} {'custom' if self.custom is not None else self.causal}")
        if out is None:
            return torch.cat(parts)
        assert out.shape == q.shape and out.dtype == q.dtype
        return out.copy_(torch.cat(parts))

    def _seen(self, b: int, q_len: int, kv_len: int) -> Seen:
        if self.custom is None:
            return Seen.of(q_len, kv_len, self.causal, self.window_left)
        assert self.custom.dtype == torch.uint8 and self.custom_indptr.dtype == torch.int32
        begin, count = int(self.custom_indptr[b]), q_len * kv_len
        bits = bits_of(self.custom[begin : begin + -(-count // 8)], count)
        return Seen(bits.view(q_len, kv_len))


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and backend in ("fa2", "fa3")
        self.backend, self.graph = backend, use_cuda_graph
        self.bufs = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        given = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]
        assert all(x.dtype == torch.int32 for x in given)
        assert len(kv_indices) == int(kv_indptr[-1])
        if self.graph:
            for buf, value in zip(self.bufs, given, strict=True):
                buf[: len(value)].copy_(value)
        else:
            self.bufs = [x.clone() for x in given]
        self.sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self.causal, self.scale, self.dtypes = causal, sm_scale, (q_data_type, kv_data_type)
        self.lengths = (qo_indptr.diff().tolist(), kv_len_arr.tolist())

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False,
        o_scale=None, *, ckv_scale=None, kpe_scale=None,
    ):  # fmt: skip
        heads, latent, rope, page = self.sizes
        assert q_nope.shape[1:] == (heads, latent) and q_pe.shape[1:] == (heads, rope)
        assert ckv_cache.shape[1:] == (page, latent) and kpe_cache.shape[1:] == (page, rope)
        assert q_nope.is_contiguous() and q_pe.is_contiguous()
        assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes
        qo, indptr, indices, _ = self.bufs
        q, parts = torch.cat([q_nope, q_pe], -1), []
        for b, (n, length) in enumerate(zip(*self.lengths, strict=True)):
            pages = indices[int(indptr[b]) : int(indptr[b + 1])].long()
            c, r = (x[pages].flatten(0, 1)[:length].unsqueeze(1) for x in (ckv_cache, kpe_cache))
            own = q[int(qo[b]) : int(qo[b]) + n]
            seen = Seen.of(n, length, self.causal)
            parts.append(attend(own, torch.cat([c, r], -1), c, seen, self.scale))
        calls.append(f"mla {self.backend} {self.causal}")
        return torch.cat(parts)


# --- installing it ------------------------------------------------------------------------------


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    module.__spec__ = ModuleSpec(name, None, origin="stand-in")
    return module


@contextmanager
def installed(kernels: str = "xqa") -> Iterator[None]:
    """`import flashinfer` finds the stand-in; `kernels`: of `Decode`. Workspaces are small."""
    decode = Decode(kernels).trtllm_batch_decode_with_kv_cache
    modules = {
        "flashinfer": _module(
            "flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper
        ),
        "flashinfer.decode": _module("decode", trtllm_batch_decode_with_kv_cache=decode),
        "flashinfer.mla": _module(
            "mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for file in ("flashinfer", "flashinfer_mla", "trtllm_mha"):
            patch.setattr(f"forerun.attention.{file}.WORKSPACE_BYTES", 64)
        calls.clear()
        yield


def on_cpu(kind: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend, allowed on a CPU in any dtype and head dim; its masks and pages are its own."""
    capabilities = replace(
        kind.capabilities,
        devices=frozenset({"cpu"}),
        archs=None,
        dtypes=None,
        head_dims=None,
        latent_row=None,
    )
    return type(kind)(f"{kind.__name__}OnCpu", (kind,), {"capabilities": capabilities})


KINDS = {kind.name: on_cpu(kind) for kind in (TrtllmMha, FlashInfer, FlashInferMla)}


@contextmanager
def registered(kernels: str = "xqa") -> Iterator[None]:
    """Installed, and the settings' names mean the backends on a CPU; they are no defaults."""
    own = {name: load for name, load in BACKENDS.items() if name not in KINDS}
    own |= {name: lambda kind=kind: kind for name, kind in KINDS.items()}
    with installed(kernels), pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.attention.select.BACKENDS", own)
        yield
