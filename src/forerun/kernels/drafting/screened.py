# mypy: allow-untyped-defs, allow-incomplete-defs
"""`CorrectedRows` that read an 8-bit copy of the weight, and little of the weight itself.

|weight x - scale rounded x| <= radius |x| for every column. So one kernel reads the copy, half of
the bytes, and writes the largest score that each tile of columns may have; the largest score that
some column has at least, less its radius, bounds the best from below. A second kernel computes the
scores of the tiles that reach the bound, from the weight: the best column is among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forerun.kernels.drafting.best_token import BLOCK_V, CorrectedRows, prefetch_tiles, tile_of
from forerun.kernels.drafting.keys import raise_key, score_of_key, token_before
from forerun.kernels.runtime.gpu import gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit_no_specialize, tl
from forerun.kernels.runtime.pdl import pdl_options

LEVELS = 127
ROWS = 8192  # of a weight that are rounded at once
CTAS_PER_SM = 2  # they convert as much as they load, so one alone does not keep memory busy
AHEAD = 4  # tiles that a CTA requests before the preceding kernel has ended
SPANS = 32, 128  # tiles that a CTA of the second kernel looks through: for few requests, and many
# Rounding errors of the sums, which both kernels make in float32: as a share of |weight| |x|, and
# of the score.
OF_SUMS, OF_SCORE = 2.0**-12, 1e-6


@dataclass(frozen=True)
class Screen:
    """A weight [V, r] rounded to 8 bits: V (r + 8) bytes."""

    rounded: Tensor  # [V, r] int8
    scale: Tensor  # [V] float32
    radius: Tensor  # [V] float32, at least |weight - scale rounded|

    @staticmethod
    def of(weight: Tensor) -> Screen:
        """Rounds a weight [V, r] on its device."""
        vocab, _ = weight.shape
        rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale, radius = (
            torch.empty(vocab, dtype=torch.float32, device=weight.device) for _ in range(2)
        )
        for first in range(0, vocab, ROWS):
            rows = slice(first, first + ROWS)
            values = weight[rows].float()
            step = values.abs().amax(1, keepdim=True) / LEVELS
            whole = (values / step.clamp_min(torch.finfo(torch.float32).tiny)).round()
            rounded[rows] = whole.clamp(-LEVELS, LEVELS)
            error = (values - step * rounded[rows].float()).norm(dim=1)
            scale[rows] = step.squeeze(1)
            radius[rows] = error * 1.001 + values.norm(dim=1) * OF_SUMS
        return Screen(rounded, scale, radius)


class ScreenedRows(CorrectedRows):
    key_sets: ClassVar[int] = 2  # the columns', and those of the bounds from below

    def __init__(
        self, logits: Tensor, anchor: Tensor, weight: Tensor, table: Tensor, screen: Screen
    ) -> None:
        """`screen`: of `weight`."""
        super().__init__(logits, anchor, weight, table)
        self._screen = screen
        batch, _, vocab = logits.shape
        self._tile = BLOCK_V // 2 if gpu_of(weight.device).amd else BLOCK_V
        tiles = -(-vocab // self._tile)
        self._upper = torch.empty(batch, tiles, dtype=torch.float32, device=weight.device)

    def choose(self, row: int, x: Tensor | None = None) -> None:
        batch, depth, vocab = self._logits.shape
        rank, gpu, tiles = self._weight.shape[1], gpu_of(self._weight.device), self._upper.shape[1]
        of_logits = self._logits.stride(0), self._logits.stride(1)
        screen, pdl = self._screen, pdl_options(self.before)
        _bounds[(min(CTAS_PER_SM * gpu.num_sms, tiles),)](
            self._logits, self.before if x is None else x.contiguous(), screen.rounded,
            screen.scale, screen.radius, self._table, self._anchor, self._keys, self.before,
            self._upper, batch, depth, vocab, row, *of_logits,
            LOOK_UP=x is None, RANK=rank, BLOCK_B=max(16, next_power_of_2(batch)),
            BLOCK_V=self._tile, BACKWARD=row % 2 == 1, PREFETCH=AHEAD * self._tile * rank // 128,
            num_warps=8 if gpu.amd else 4, num_stages=2 if gpu.amd or rank > 256 else 4, **pdl,
        )  # fmt: skip
        x = self.before[:, row] if x is None else x
        span = SPANS[batch >= 8]
        _rescore[(-(-tiles // span), batch)](
            self._logits, x, self._weight, self._keys, self._upper, depth, vocab, row, tiles,
            *of_logits, x.stride(0), RANK=rank, BLOCK_V=self._tile, SPAN=span, OF_SCORE=OF_SCORE,
            num_warps=4, **pdl,
        )  # fmt: skip


@jit_no_specialize("row")
def _bounds(
    logits_ptr, x_ptr, rounded_ptr, scale_ptr, radius_ptr, table_ptr, anchor_ptr, keys_ptr,
    before_ptr, upper_ptr, batch, depth, vocab, row, batch_stride, row_stride,
    LOOK_UP: tl.constexpr, RANK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
    BACKWARD: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A CTA takes every num_programs-th tile: the largest score that a column of it may have, and
    the largest that a column of all has at least, to the second set of keys.
    """
    part, parts = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(vocab, BLOCK_V)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_tiles(rounded_ptr, vocab, part, parts, RANK, BLOCK_V, BACKWARD, PREFETCH, 128)
        tl.extra.cuda.gdc_wait()
    b, r = tl.arange(0, BLOCK_B), tl.arange(0, RANK)
    served = b < batch
    if LOOK_UP:
        token = token_before(anchor_ptr, keys_ptr, row, batch, b, served)
        looked_up = table_ptr + token[None, :] * RANK + r[:, None]
        x = tl.load(looked_up, mask=served[None, :], other=0.0)
        kept = before_ptr + (b.to(tl.int64) * depth + row)[None, :] * RANK + r[:, None]
        tl.store(kept, x, mask=served[None, :] & (part == 0))
    else:
        x = tl.load(x_ptr + r[:, None] + b[None, :] * RANK, mask=served[None, :], other=0.0)
    length = tl.sqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 0))
    logits_ptr += row.to(tl.int64) * row_stride
    lower = tl.full([BLOCK_B], float("-inf"), tl.float32)
    for step in range(part, tiles, parts):
        tile = tile_of(step, tiles, BACKWARD)
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = v < vocab
        at = v.to(tl.int64)[:, None] * RANK + r[None, :]
        rounded = tl.load(rounded_ptr + at, mask=inside[:, None], other=0)
        scale = tl.load(scale_ptr + v, mask=inside, other=0.0)
        radius = tl.load(radius_ptr + v, mask=inside, other=0.0)
        both = inside[:, None] & served[None, :]
        own = b.to(tl.int64)[None, :] * batch_stride + v[:, None]
        scores = tl.load(logits_ptr + own, mask=both, other=float("-inf")).to(tl.float32)
        products = tl.dot(rounded.to(x.dtype), x, input_precision="ieee")
        scores += scale[:, None] * products
        scores = tl.where(both & (scores == scores), scores, float("-inf"))
        reach = radius[:, None] * length[None, :]
        tl.store(upper_ptr + b * tiles + tile, tl.max(scores + reach, 0), mask=served)
        lower = tl.maximum(lower, tl.max(scores - reach, 0))
    some = served & (lower > float("-inf"))
    raise_key(keys_ptr + (depth + row) * batch + b, lower, tl.zeros([BLOCK_B], tl.int32), some)


@jit_no_specialize("row")
def _rescore(
    logits_ptr, x_ptr, weight_ptr, keys_ptr, upper_ptr, depth, vocab, row, tiles, batch_stride,
    row_stride, x_stride, RANK: tl.constexpr, BLOCK_V: tl.constexpr, SPAN: tl.constexpr,
    OF_SCORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A CTA looks through SPAN tiles of a request, and scores those that may have the best."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, batch = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    tile, r = tl.program_id(0) * SPAN + tl.arange(0, SPAN), tl.arange(0, RANK)
    upper = tl.load(upper_ptr + request * tiles + tile, mask=tile < tiles, other=float("-inf"))
    lower = score_of_key(tl.load(keys_ptr + (depth + row) * batch + request))
    error = tl.where(tl.abs(lower) < float("inf"), tl.abs(lower) * OF_SCORE, 0.0)
    left = (upper >= lower - error) & (upper > float("-inf"))
    x = tl.load(x_ptr + request * x_stride + r).to(tl.float32)
    logits_ptr += request * batch_stride + row.to(tl.int64) * row_stride
    best, column = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for _ in range(tl.sum(left.to(tl.int32), 0)):
        own = tl.min(tl.where(left, tile, tiles), 0)
        v = own * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = v < vocab
        at = v.to(tl.int64)[:, None] * RANK + r[None, :]
        weight = tl.load(weight_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.load(logits_ptr + v, mask=inside, other=float("-inf")).to(tl.float32)
        scores += tl.sum(weight * x[None, :], 1)
        scores = tl.where(inside & (scores == scores), scores, float("-inf"))
        largest = tl.max(scores, 0)
        first = tl.min(tl.where(scores == largest, v, vocab), 0)
        column = tl.where(largest > best, first, column)
        best = tl.maximum(best, largest)
        left = left & (tile != own)
    raise_key(keys_ptr + row * batch + request, best, column, best > float("-inf"))
