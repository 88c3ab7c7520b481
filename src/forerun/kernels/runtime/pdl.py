# mypy: allow-untyped-defs, allow-incomplete-defs
"""Programmatic dependent launch (PDL): a kernel starts before its predecessor has finished.

A kernel that supports PDL takes a constexpr `PDL`. If it is set, the kernel calls

- `tl.extra.cuda.gdc_launch_dependents()` at its start, so that the next kernel may be scheduled;
- `tl.extra.cuda.gdc_wait()` in every CTA before it reads or writes anything that another kernel
  of the step writes. Weights never change, so they may be prefetched, or loaded, before the wait.

It is launched with `**pdl_options(tensor)`.

`gdc_wait()` waits for the preceding launch only. That is enough as long as every kernel waits, so
that it cannot finish before its own predecessor. A library's kernels that do not keep to this
need launches without PDL around them (`attention/flashmla.py`).

Three kinds of kernel read results of earlier kernels before `gdc_wait()`. Norm + RoPE
(`elementwise/qk_norm_rope.py`, `latent_norm_rope.py`: positions, slots) and decode attention
(`attention/decode.py`, `attention/mla_absorbed.py`: start positions, page tables, K/V of earlier
steps) are safe because a launch without PDL (any PyTorch kernel, a copy) lies between the writer
and the reader: such a launch waits for the writer to finish, and nothing after it starts earlier.
In a decode step, writer and launch in between are the kernel of `speculation/decode_inputs.py` and
the embedding lookup; between the passes of an autoregressive draft, that of `attention/paged_kv.py`
for KV slots and the embedding lookup; in a prefill, the upload of the tile list comes in between.
The second GEMM of the experts (`moe/experts.py`: tiles) is safe because the first one, which is
launched between it and the writer, calls `gdc_launch_dependents()` after `gdc_wait()`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl


def pdl_options(tensor: Tensor) -> dict[str, Any]:
    """Launch keywords: the constexpr `PDL` and, on NVIDIA GPUs from sm_90 on, `launch_pdl`."""
    index = tensor.device.index if tensor.is_cuda else None
    if index is not None and _supports_pdl(index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _supports_pdl(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


@jit
def prefetch_lines(addresses):
    """Prefetches the 128-byte lines of addresses into the L2 cache (CUDA), before the wait."""
    instruction: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(instruction, "=r,l", [addresses], tl.int32, is_pure=False, pack=1)
