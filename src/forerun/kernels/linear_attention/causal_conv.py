# mypy: allow-untyped-defs, allow-incomplete-defs
"""A short causal convolution per channel, then SiLU: y_t = silu(Σ_i w_i x_(t - K + 1 + i)).

Linear attention has it between the projections and the recurrence (arXiv 2312.00752, section 3.4).
A slot keeps the last K - 1 inputs. A decode or verify pass stores its own inputs beside them; the
next pass knows how many of these were committed, and reads its K - 1 from where they end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import linear_attention as cpu
from forerun.kernels.cpu.library import serves
from forerun.kernels.linear_attention.chunks import CHUNK, PromptChunks
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.ragged import RaggedRows

MAX_KERNEL_SIZE = 4  # of the Triton kernels
BLOCK, PREFILL_BLOCK = 128, 64  # channels of a CTA


@dataclass(frozen=True)
class ConvState:
    """What S slots keep of one layer, and the B slots of a pass."""

    slots: Tensor  # [B] int64
    num_pending: Tensor  # [S] int32: how many of `inputs` are committed and not in `state` yet
    state: Tensor  # [S, K - 1, C]: the last inputs, the latest at the end
    inputs: Tensor  # [S, W, C]: of the last decode or verify pass


def causal_conv_update(
    x: Tensor,
    weight: Tensor,
    state: ConvState,
    parents: Tensor | None = None,
    rows: RaggedRows | None = None,
) -> Tensor:
    """A decode or verify pass. Moves the pending inputs to the state, and stores those of x.

    Args:
        x: [B · q_len, C], any row stride; q_len <= W.
        weight: [C, K]; the last column is of the token itself.
        state: updated in place.
        parents: [B, q_len] int64, of a tree: the earlier token that each one follows, -1 for the
            root; None: a chain.
        rows: of a ragged pass, with x [N, C]; None: each request has q_len tokens.

    Returns:
        [B · q_len, C], or [N, C].
    """
    if not use_triton(x):
        if rows is not None:
            return rows.pack(causal_conv_update(rows.unpack(x), weight, state, parents))
        if serves(x.dtype, x.device):
            return causal_conv_cpu(x, weight, state, parents=parents)
        return causal_conv_update_ref(x, weight, state, parents)
    batch, (channels, size) = len(state.slots), weight.shape
    assert size <= MAX_KERNEL_SIZE and x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _causal_conv_update[(batch, triton.cdiv(channels, BLOCK))](
        x, weight, state.slots, state.num_pending, state.state, state.inputs, out, parents,
        None if rows is None else rows.first,
        x.stride(0), channels, state.inputs.shape[1],
        NUM_TOKENS=len(x) // batch if rows is None else rows.max_width, SIZE=size, BLOCK=BLOCK,
        num_warps=1, **pdl_options(x),
    )  # fmt: skip
    return out


def causal_conv_update_ref(
    x: Tensor, weight: Tensor, state: ConvState, parents: Tensor | None = None
) -> Tensor:
    """Reference implementation of `causal_conv_update`."""
    slots, before = state.slots, weight.shape[1] - 1
    x = x.view(len(slots), -1, x.shape[1])
    kept = torch.cat((state.state[slots], state.inputs[slots]), 1)
    first = state.num_pending[slots].long().unsqueeze(1)
    at = first + torch.arange(before, device=x.device)
    window = kept.take_along_dim(at.unsqueeze(2), 1)
    state.state.index_copy_(0, slots, window)
    state.inputs[:, : x.shape[1]].index_copy_(0, slots, x)
    known = torch.cat((window, x), 1)
    if parents is not None:  # [B, q_len, K, C]: a window for every token
        known = _windows(known, parents, before)
    return _conv_silu(known, weight).flatten(0, -2)


def _windows(known: Tensor, parents: Tensor, before: int) -> Tensor:
    """Each token of trees with the `before` inputs on its path: [B, q_len, before + 1, C].

    `known` [B, before + q_len, C] begins with the inputs before the root.
    """
    at = [torch.arange(parents.shape[1], device=parents.device).expand_as(parents)]
    for _ in range(before):  # past the root, one further back each time
        up = parents.gather(1, at[0].clamp_min(0))
        at.insert(0, torch.where(at[0] >= 0, up, at[0] - 1))
    index = (torch.stack(at, 2) + before).flatten(1).unsqueeze(2)
    windows: Tensor = known.take_along_dim(index, 1).unflatten(1, (-1, before + 1))
    return windows


def causal_conv_prefill(
    x: Tensor, weight: Tensor, state: ConvState, prompts: PromptChunks
) -> Tensor:
    """Prefill chunks of B requests, nothing pending: x [T, C], any row stride -> [T, C]."""
    if not use_triton(x):
        if serves(x.dtype, x.device):
            return causal_conv_cpu(x, weight, state, prompts)
        return causal_conv_prefill_ref(x, weight, state, prompts)
    channels, size = weight.shape
    assert size <= MAX_KERNEL_SIZE and x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _causal_conv_prefill[(len(prompts.chunks), triton.cdiv(channels, PREFILL_BLOCK))](
        x, weight, state.slots, prompts.chunks, state.state, out,
        x.stride(0), channels, SIZE=size, CHUNK=CHUNK, BLOCK=PREFILL_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def causal_conv_prefill_ref(
    x: Tensor, weight: Tensor, state: ConvState, prompts: PromptChunks
) -> Tensor:
    """Reference implementation of `causal_conv_prefill`."""
    slots, before = state.slots, weight.shape[1] - 1
    windows = state.state[slots].unbind()
    parts = x.split_with_sizes(prompts.num_tokens)
    whole = [torch.cat(pair) for pair in zip(windows, parts, strict=True)]
    state.state.index_copy_(0, slots, torch.stack([each[len(each) - before :] for each in whole]))
    return torch.cat([_conv_silu(each, weight) for each in whole])


def causal_conv_cpu(
    x: Tensor,
    weight: Tensor,
    state: ConvState,
    prompts: PromptChunks | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """Both kinds of passes by our kernel for CPUs."""
    chunks = None if prompts is None else prompts.requests
    width = state.inputs.shape[1]
    pending = state.slots, state.num_pending, None
    requests = cpu.Pass.of(pending, len(x), width, chunks, parents)
    return cpu.causal_conv(x, weight.contiguous(), requests, state.state, state.inputs)


def _conv_silu(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K - 1 + n, C] -> [..., n, C], in float32 until the end."""
    count = x.shape[-2] - weight.shape[1] + 1
    taps = enumerate(weight.float().unbind(1))
    total = sum(x.narrow(-2, i, count).float() * w for i, w in taps)
    assert isinstance(total, Tensor)
    return F.silu(total).to(x.dtype)


@jit
def _causal_conv_update(
    x_ptr, weight_ptr, slots, num_pending, state, inputs, out_ptr, parents, first_rows,
    row_stride, channels, width,
    NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK channels of a request. What it reads and writes no other CTA does.

    `parents` None: a chain, whose last inputs stay in registers. `first_rows` None: each request
    has NUM_TOKENS tokens; else at most so many.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    pending = tl.load(num_pending + slot)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    w0, w1, w2, w3 = _taps(weight_ptr, at, inside, SIZE)
    state += slot * (SIZE - 1) * channels + at
    inputs += slot * width * channels + at
    # The three inputs before the first token; those that a shorter filter lacks have weight 0.
    x0 = _kept(state, inputs, pending + SIZE - 4, channels, inside, SIZE)
    x1 = _kept(state, inputs, pending + SIZE - 3, channels, inside, SIZE)
    x2 = _kept(state, inputs, pending + SIZE - 2, channels, inside, SIZE)
    tl.debug_barrier()  # all of them are read before any is overwritten
    if SIZE > 3:
        tl.store(state + (SIZE - 4) * channels, x0, mask=inside)
    if SIZE > 2:
        tl.store(state + (SIZE - 3) * channels, x1, mask=inside)
    tl.store(state + (SIZE - 2) * channels, x2, mask=inside)
    f0, f1, f2 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)
    if first_rows is None:
        begin, count = request * NUM_TOKENS, NUM_TOKENS
    else:
        begin = tl.load(first_rows + request).to(tl.int64)
        count = tl.load(first_rows + request + 1) - begin.to(tl.int32)
    x_ptr += begin * row_stride + at
    out_ptr += begin * channels + at
    if parents is None:
        for i in range(count):
            x = _keep_input(x_ptr + i * row_stride, inputs + i * channels, inside)
            total = f0 * w0 + f1 * w1 + f2 * w2 + x * w3
            _store_silu(out_ptr + i * channels, total, inside)
            f0, f1, f2 = f1, f2, x
    else:
        parents += request * NUM_TOKENS
        for i in range(count):
            x = _keep_input(x_ptr + i * row_stride, inputs + i * channels, inside)
            p2 = tl.load(parents + i)
            p1 = _above(parents, p2)
            p0 = _above(parents, p1)
            total = x * w3
            total += _on_path(x_ptr, p2, row_stride, inside, f0, f1, f2) * w2
            total += _on_path(x_ptr, p1, row_stride, inside, f0, f1, f2) * w1
            total += _on_path(x_ptr, p0, row_stride, inside, f0, f1, f2) * w0
            _store_silu(out_ptr + i * channels, total, inside)


@jit
def _keep_input(x_ptr, kept_ptr, inside):
    """A token's input in float32; it is stored for the next pass."""
    x = tl.load(x_ptr, mask=inside, other=0.0)
    tl.store(kept_ptr, x, mask=inside)
    return x.to(tl.float32)


@jit
def _store_silu(out_ptr, total, inside):
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _above(parents, token):
    """The parent of a token; before the root, one further back."""
    return tl.where(token >= 0, tl.load(parents + token, mask=token >= 0, other=0), token - 1)


@jit
def _on_path(x_ptr, token, row_stride, inside, f0, f1, f2):
    """A token's input in float32; f2, f1 and f0 are those before the root, the last one first."""
    x = tl.load(x_ptr + token * row_stride, mask=inside & (token >= 0), other=0.0).to(tl.float32)
    before = tl.where(token == -1, f2, tl.where(token == -2, f1, f0))
    return tl.where(token >= 0, x, before)


@jit
def _taps(weight_ptr, at, inside, SIZE: tl.constexpr):
    """The filters of channels `at`, of four taps with zeros in front."""
    last = weight_ptr + at * SIZE + SIZE - 4
    w0 = tl.load(last, mask=inside & (SIZE > 3), other=0.0).to(tl.float32)
    w1 = tl.load(last + 1, mask=inside & (SIZE > 2), other=0.0).to(tl.float32)
    w2 = tl.load(last + 2, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(last + 3, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@jit
def _kept(state, inputs, index, channels, inside, SIZE: tl.constexpr):
    """Row `index` of the state and, after it, of the last pass's inputs; 0 before both."""
    old = inside & (index >= 0) & (index < SIZE - 1)
    new = inside & (index >= SIZE - 1)
    return tl.load(state + index * channels, mask=old, other=0.0) + tl.load(
        inputs + (index - (SIZE - 1)) * channels, mask=new, other=0.0
    )


@jit
def _causal_conv_prefill(
    x_ptr, weight_ptr, slots, chunks, state, out_ptr, row_stride, channels,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per CHUNK tokens of a request and BLOCK channels.

    The first of a request alone reads its state, and writes the new one.
    """
    entry = chunks + tl.program_id(0) * 4
    slot = tl.load(slots + tl.load(entry))
    begin, count, first = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < channels
    state += slot * (SIZE - 1) * channels + at
    x_ptr += begin.to(tl.int64) * row_stride + at
    token = first + tl.arange(0, CHUNK)[:, None]
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for tap in tl.static_range(SIZE):
        weight = tl.load(weight_ptr + at * SIZE + tap, mask=inside, other=0.0).to(tl.float32)
        index = token + (tap - SIZE + 1)
        x = _of_request(x_ptr, state, index, count, row_stride, channels, inside, SIZE)
        total += x.to(tl.float32) * weight
    out = total / (1.0 + tl.exp(-total))
    out_at = out_ptr + (begin + token).to(tl.int64) * channels + at
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside & (token < count))
    if first == 0:
        i = tl.arange(0, 4)[:, None]
        kept = inside & (i < SIZE - 1)
        end = count - (SIZE - 1) + i
        latest = _of_request(x_ptr, state, end, count, row_stride, channels, kept, SIZE)
        tl.debug_barrier()  # the state is read before it is overwritten
        tl.store(state + i * channels, latest, mask=kept)


@jit
def _of_request(x_ptr, state, index, count, row_stride, channels, inside, SIZE: tl.constexpr):
    """Inputs at `index` [n, 1] of a request's tokens; before them, of its state."""
    new = inside & (index >= 0) & (index < count)
    old = inside & (index < 0) & (index >= 1 - SIZE)
    x = tl.load(x_ptr + index.to(tl.int64) * row_stride, mask=new, other=0.0)
    return x + tl.load(state + (SIZE - 1 + index) * channels, mask=old, other=0.0)
