# mypy: allow-untyped-defs, allow-incomplete-defs
"""A short causal convolution per channel, then SiLU: y_t = silu(Σ_i w_i x_(t - K + 1 + i)).

Linear attention has it between the projections and the recurrence (arXiv 2312.00752, section 3.4).
A slot keeps the last K - 1 inputs. A decode or verify pass stores its own inputs beside them; the
next pass knows how many of these were committed, and reads its K - 1 from where they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ConvState:
    """What S slots keep of one layer, and the B slots of a pass."""

    slots: Tensor  # [B] int64
    num_pending: Tensor  # [S] int32: how many of `inputs` are committed and not in `state` yet
    state: Tensor  # [S, K - 1, C]: the last inputs, the latest at the end
    inputs: Tensor  # [S, W, C]: of the last decode or verify pass


def causal_conv_update(x: Tensor, weight: Tensor, state: ConvState) -> Tensor:
    """A decode or verify pass. Moves the pending inputs to the state, and stores those of x.

    Args:
        x: [B · q_len, C], any row stride; q_len <= W.
        weight: [C, K]; the last column is of the token itself.
        state: updated in place.

    Returns:
        [B · q_len, C].
    """
    return causal_conv_update_ref(x, weight, state)


def causal_conv_update_ref(x: Tensor, weight: Tensor, state: ConvState) -> Tensor:
    """Reference implementation of `causal_conv_update`."""
    slots, before = state.slots, weight.shape[1] - 1
    x = x.view(len(slots), -1, x.shape[1])
    kept = torch.cat((state.state[slots], state.inputs[slots]), 1)
    first = state.num_pending[slots].long().unsqueeze(1)
    at = first + torch.arange(before, device=x.device)
    window = kept.take_along_dim(at.unsqueeze(2), 1)
    state.state.index_copy_(0, slots, window)
    state.inputs[:, : x.shape[1]].index_copy_(0, slots, x)
    return _conv_silu(torch.cat((window, x), 1), weight).flatten(0, 1)


def causal_conv_prefill(
    x: Tensor, weight: Tensor, state: ConvState, num_tokens: Sequence[int]
) -> Tensor:
    """Prefill chunks: x [T, C] of B requests, `num_tokens` each, nothing pending -> [T, C]."""
    return causal_conv_prefill_ref(x, weight, state, num_tokens)


def causal_conv_prefill_ref(
    x: Tensor, weight: Tensor, state: ConvState, num_tokens: Sequence[int]
) -> Tensor:
    """Reference implementation of `causal_conv_prefill`."""
    slots, before = state.slots, weight.shape[1] - 1
    windows = state.state[slots].unbind()
    parts = x.split_with_sizes(list(num_tokens))
    whole = [torch.cat(pair) for pair in zip(windows, parts, strict=True)]
    state.state.index_copy_(0, slots, torch.stack([each[len(each) - before :] for each in whole]))
    return torch.cat([_conv_silu(each, weight) for each in whole])


def _conv_silu(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K - 1 + n, C] -> [..., n, C], in float32 until the end."""
    count = x.shape[-2] - weight.shape[1] + 1
    taps = enumerate(weight.float().unbind(1))
    total = sum(x.narrow(-2, i, count).float() * w for i, w in taps)
    assert isinstance(total, Tensor)
    return F.silu(total).to(x.dtype)
