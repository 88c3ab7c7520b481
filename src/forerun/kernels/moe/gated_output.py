# mypy: allow-untyped-defs, allow-incomplete-defs
"""A gated shared expert (Qwen2-MoE, Qwen3-Next): sigmoid(w · x) times the output of its MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu.functions import sigmoid
from forerun.kernels.cpu.gemm import PackedWeight, gemm
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pairs import sum_pairs
from forerun.kernels.runtime.pdl import pdl_options


@dataclass(frozen=True, eq=False)
class GatedOutput:
    """The gate is computed, and multiplied, where the result is needed."""

    x: Tensor  # [T, H]
    weight: Tensor  # [1, H]
    value: Tensor  # [T, H]: of the MLP
    packed: PackedWeight | None = None  # the weight, where our kernels for CPUs serve

    def result(self, out: Tensor | None = None) -> Tensor:
        """[T, H], rounded to x's dtype; written to `out`, of that dtype or float32, if given."""
        if self.packed is None:
            return gate_output(self.x, self.weight, self.value, out)
        gated = sigmoid(gemm(self.x, self.packed)) * self.value
        return gated if out is None else out.copy_(gated)


def gate_output(x: Tensor, weight: Tensor, value: Tensor, out: Tensor | None = None) -> Tensor:
    """`GatedOutput.result`. Logit and gate are rounded to x's dtype, as in a plain model."""
    if not use_triton(x):
        return gate_output_ref(x, weight, value, out)
    out = torch.empty_like(value) if out is None else out
    assert x.is_contiguous() and value.is_contiguous() and out.is_contiguous()
    hidden = x.shape[1]
    block = triton.next_power_of_2(hidden)
    _gate_output[(len(x),)](
        x, weight, value, out, HIDDEN=hidden, BLOCK=block,
        num_warps=vector_warps(block, out), **pdl_options(out),
    )  # fmt: skip
    return out


def gate_output_ref(x: Tensor, weight: Tensor, value: Tensor, out: Tensor | None = None) -> Tensor:
    """Reference implementation of `gate_output`."""
    gated = torch.sigmoid(F.linear(x, weight)) * value
    return gated if out is None else out.copy_(gated)


@jit
def _gate_output(
    x_ptr, weight_ptr, value_ptr, out_ptr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per token."""
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:  # no kernel writes the weight
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = x_ptr.dtype.element_ty
    at += tl.program_id(0).to(tl.int64) * HIDDEN
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + at, mask=inside, other=0.0).to(tl.float32)
    products = sum_pairs(x * weight, 1, 1, BLOCK)  # one order, whatever `out` is
    logit = tl.sum(tl.reshape(products, (1,)), 0).to(dtype).to(tl.float32)
    gate = tl.sigmoid(logit).to(dtype).to(tl.float32)
    out = (gate * value).to(dtype)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
