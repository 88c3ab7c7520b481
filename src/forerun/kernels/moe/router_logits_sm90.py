"""A router's logits for up to 4 tokens on Hopper; the experts' kernel chooses from them.

`router_sm90.py` does everything from x to the experts' tiles in one cluster, and is all latency: x,
partials to one CTA, the choices to another, lists to memory, and a kernel boundary after each
kernel. With few tokens every CTA of the experts' kernel chooses by itself in less time. What is
left of the router are the logits (`router_logits_sm90.cu`): a CTA per 8 experts, a warp per slice
of the columns, with the weight in registers before `griddepcontrol_wait()`.

Of one or two tokens, where the residual addition and RMSNorm before the router add up split-K
partials, every CTA computes these too, instead of waiting for a kernel that does. The GEMM that
makes the partials leaves shared memory free (`NORM_SMEM_BYTES`): without it, these CTAs start when
that GEMM's have ended, and load the weight then.

Logits, norm and choices have the same bits as those of the kernels that serve more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.moe.config import (
    SM90_FEW_TOKENS,
    SM90_MAX_FEW_TOKENS,
    Sm90RouterConfig,
    choose_moe_sm90,
    choose_router_sm90,
)
from forerun.kernels.moe.router_sm90 import routing_macros
from forerun.kernels.moe.routing import RouterLogits, Routing
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo

SOURCE = Path(__file__).with_name("router_logits_sm90.cu")
MAX_NORM_TOKENS, NORM_HIDDEN = 2, 2048  # a lane has 8 columns of each token
NORM_SMEM_BYTES = 10 << 10  # of a CTA that computes the norm too, and what the system takes
MAX_PAIRS = 32  # a lane each


def choose_logits_sm90(
    num_tokens: int, hidden: int, width: int, routing: Routing, dtype: torch.dtype, gpu: GpuInfo
) -> Sm90RouterConfig | None:
    """The configuration where the experts' kernel chooses; None: the router does.

    `width`: of an expert.
    """
    if num_tokens > SM90_MAX_FEW_TOKENS or routing.groups[0] > 1:
        return None
    if (routing.top_k + routing.num_shared) * SM90_MAX_FEW_TOKENS > MAX_PAIRS:
        return None
    if choose_moe_sm90(num_tokens, hidden, width, dtype, gpu) != SM90_FEW_TOKENS:
        return None
    sizes = routing.num_experts, routing.top_k, routing.groups[0]
    return choose_router_sm90(num_tokens, hidden, *sizes, dtype, gpu)


def cuda_source(
    config: Sm90RouterConfig, routing: Routing, hidden: int, norm_parts: int = 0
) -> str:
    """`router_logits_sm90.cu` with its configuration as macros in front, ready to compile.

    `norm_parts`: split-K partials that the norm adds up; 0: no norm.
    """
    sizes = {"HIDDEN": hidden, "SLICE": config.slice, "TILES_PER_WARP": 1, "NORM_PARTS": norm_parts}
    return nvrtc.with_macros(SOURCE, sizes | routing_macros(routing, bias=False))


@dataclass(frozen=True, eq=False)
class LogitsRouter:
    """The router of a layer, where `choose_logits_sm90` has a configuration for it."""

    weight: Tensor  # [E, H] bfloat16
    correction_bias: Tensor | None  # [E] float32
    routing: Routing
    counts: Tensor  # of `new_counts`
    config: Sm90RouterConfig

    def new_logits(self, num_tokens: int) -> RouterLogits:
        """Uninitialised."""
        routing, counts = self.routing, self.counts
        row = -(-routing.num_experts // 8) * 8
        logits = torch.empty(num_tokens, row, dtype=torch.float32, device=counts.device)
        progress = counts[routing.num_experts + 1 :]
        return RouterLogits(logits, self.correction_bias, routing, progress)


def router_logits_sm90(x: Tensor, router: LogitsRouter) -> RouterLogits:
    """The logits of x [T, H], bfloat16."""
    (tokens, hidden), weight = x.shape, router.weight
    assert tokens <= SM90_MAX_FEW_TOKENS and x.dtype == weight.dtype == torch.bfloat16
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
    made = router.new_logits(tokens)
    kernel = _load_kernel(router.config, router.routing, hidden, 0, x.device)
    threads = 32 * -(-hidden // router.config.slice)
    args = (x, weight, made.logits, tokens)
    nvrtc.launch(kernel, made.logits.shape[1] // 8, threads, args, x.device)
    return made


def norm_fits(num_tokens: int, hidden: int) -> bool:
    """Whether `add_rms_norm_router_logits_sm90` can serve."""
    return num_tokens <= MAX_NORM_TOKENS and hidden == NORM_HIDDEN


def add_rms_norm_router_logits_sm90(
    parts: Tensor, residual: Tensor, norm: tuple[Tensor, float], router: LogitsRouter
) -> tuple[Tensor, Tensor, RouterLogits]:
    """`add_rms_norm`, and the logits of its result.

    Args:
        parts: split-K partials [S, T, H], float32.
        residual: [T, H]; not written.
        norm: weight [H] and eps.

    Returns:
        (normed, total, logits).
    """
    num_parts, tokens, hidden = parts.shape
    norm_weight, eps = norm
    tensors = (parts, residual, norm_weight, router.weight)
    assert norm_fits(tokens, hidden) and parts.dtype == torch.float32
    assert all(t.dtype == torch.bfloat16 for t in tensors[1:])
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    made = router.new_logits(tokens)
    kernel = _load_kernel(router.config, router.routing, hidden, num_parts, parts.device)
    args = (*tensors, total, out, made.logits, tokens, float(eps))
    nvrtc.launch(kernel, made.logits.shape[1] // 8, 256, args, parts.device)
    return out, total, made


@cache
def _load_kernel(
    config: Sm90RouterConfig, routing: Routing, hidden: int, norm_parts: int, device: torch.device
) -> nvrtc.CudaKernel:
    source = cuda_source(config, routing, hidden, norm_parts)
    name = f"{'norm_' if norm_parts else ''}router_logits_sm90_kernel"
    return nvrtc.load_kernel(source, name, nvrtc.SM90A, 0, device)
