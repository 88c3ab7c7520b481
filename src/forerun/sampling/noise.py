"""Noise keyed by (seed, position, token): the same with any batch, step, drafter or device.

Tokens are sampled by the Gumbel-max trick: argmax over tokens of log w + G, with w the unnormalised
probabilities. We compute its exponential form, argmin of -w / E with E ~ Exp(1) and G = -log E,
which needs no logarithm of w. Since E depends only on (seed, absolute position, token id), a text
does not depend on how it was computed: "drafter-invariant speculative decoding", Daliri, Musco and
Suresh 2024.

**Hash.** It uses wrapping 32-bit arithmetic, so that kernels in true uint32 give the same bits.
Here, words are stored as int32: shifts are masked to make them logical, products wrap. A request's
seed is hashed to a 64-bit key once, on the host (`seed_key`), so that neighbouring seeds have
unrelated keys. Then, with mix = a xorshift-multiply permutation (16, 21f0aaad, 15, 735a2d97, 15;
from Wellons' hash-prospector):

    word_j = mix(key_j ^ position)                     the low and high words of the key, j = 0, 1
    x      = mix(mix(token) ^ word_0), with word_1 xored in after the first product of the outer mix

**Resolution.** u = (x + 0.5) / 2^32 in float32, at most 1 - 2^-24, and E = -log1p(-u). A token that
wins has a small E: about p for a token of probability p. Near 0, u is on a grid of spacing 2^-32,
which float32 represents exactly and log1p preserves. So a token's probability is off by at most
2^-32 per competing token, and tokens rarer than that are in effect never sampled. u is coarse near
1 only, where tokens lose. (A uniform rounded to float32 and used as -log(u) would end at 2^-24.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_MUL_1, _MUL_2 = 0x21F0AAAD, 0x735A2D97
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def _fold_(x: Tensor, shift: int, scratch: Tensor) -> None:
    """x ^= x >> shift on the bits of a uint32; in place."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    x.bitwise_xor_(scratch)


def _mix_(x: Tensor, key: Tensor | None = None) -> Tensor:
    """A permutation of the 32-bit words of x (int32), in place; `key` is mixed in half-way."""
    scratch = torch.empty_like(x)
    _fold_(x, 16, scratch)
    x.mul_(_MUL_1)
    if key is not None:
        x.bitwise_xor_(key)
    _fold_(x, 15, scratch)
    x.mul_(_MUL_2)
    _fold_(x, 15, scratch)
    return x


def seed_key(seed: int) -> int:
    """Hashes a request's seed to an int64 key, on the host: splitmix64's output permutation."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK_64
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def position_keys(key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 words per row, from `key` (int64) and `positions` (integers), broadcast."""
    at = positions.to(torch.int32)
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)  # to int32: the low 32 bits
    words = _mix_(torch.stack((low ^ at, high ^ at)))
    return words[0], words[1]


def noise_bits(key: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The hash, [*rows, V] int32 holding uint32 bits. Arguments as in `gumbel_scores`."""
    first, second = position_keys(key, positions)
    words = _mix_(tokens.to(torch.int32, copy=True))
    return _mix_(words ^ first[..., None], second[..., None])


def log1m_uniform(bits: Tensor) -> Tensor:
    """log(1 - u) = -E of every word: float32, in [-16.7, -2^-33]."""
    u = bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(-(2.0**-32))
    return u.clamp_min_(-_BELOW_ONE).log1p_()


def gumbel_scores(
    weights: Tensor, key: Tensor, positions: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """The score of every token: the lowest one is sampled (Gumbel-max in exponential form).

    Args:
        weights: [*rows, V] float32, unnormalised probabilities, the largest of a row about 1.
            Tokens of weight 0 score 0 and are never sampled: all others score below 0.
        key: int64, from `seed_key`, broadcastable to the rows.
        positions: integers, broadcastable to the rows; absolute positions of the sampled tokens.
        tokens: [V] token ids of the columns where these are not 0 ... V-1 (a pruned vocabulary).

    Returns:
        [*rows, V] float32: -w / E.
    """
    if tokens is None:
        tokens = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    noise = log1m_uniform(noise_bits(key, positions, tokens))
    return torch.div(weights, noise, out=noise) if noise.shape == weights.shape else weights / noise


def gumbel_argmax(
    logits: Tensor, key: Tensor, positions: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Samples one column per row from softmax(logits), logits [*rows, V]; returns [*rows] int64.

    For drafts: with the target's key, a sample of the draft's distribution agrees with the target's
    as often as the two distributions allow. Other arguments as in `gumbel_scores`.
    """
    logits = logits.float()
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    return gumbel_scores(weights, key, positions, tokens).argmin(-1)
