# mypy: allow-untyped-defs, allow-incomplete-defs
"""The best token of logits that a low-rank product corrects, without writing the sums.

A Markov head's row adds W2 x to the row's logits, and only the best column is wanted. So the CTAs
stream W2 once, and each offers its best (`keys.py`). The next row's kernel looks W1 up by it, so a
row is one kernel. Domino's pool is the same with a matrix per request.

A block's rows read W2 in alternate directions: what one has read last is in the L2 cache still, and
the next begins with it. Its first tiles are loaded before the preceding kernel has ended (PDL).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.drafting.keys import new_keys, raise_key, token_before, tokens_of_keys
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl
from forerun.kernels.runtime.pdl import pdl_options, prefetch_lines

MAX_BATCH = 64  # requests of `CorrectedRows`: their x stays in registers
MAX_RANK = 512
BLOCK_V = 64  # columns of a tile
AHEAD = 4  # tiles that a CTA requests before the preceding kernel has ended
LINE = 128  # bytes of a line of the L2 cache
POOL_BLOCK = 32
SPARE_SMEM = 8 << 10


def fits_corrected_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `CorrectedRows` serves x [B, r] and a weight [V, r] that is not quantized."""
    rank = weight.shape[-1]
    power = 16 <= rank <= MAX_RANK and rank == next_power_of_2(rank)
    plain = weight.numel() > 0 and weight.is_contiguous() and x.dtype == weight.dtype
    return plain and power and len(x) <= MAX_BATCH


class CorrectedRows:
    """The best columns of a block's rows, chosen one after the other on a GPU.

    Row i's is that of the largest logits + weight x, the lowest id of equals, 0 where all are NaN
    or -inf; x is made of the row of `table` of the token before it, which row i - 1 has chosen.
    """

    def __init__(
        self,
        logits: Tensor,
        anchor: Tensor,
        weight: Tensor,
        table: Tensor,
        d2t: Tensor | None = None,
    ) -> None:
        """Sets the rows before any is chosen.

        Args:
            logits: [B, D, C], the last dimension contiguous.
            anchor: [B] int64, the token before row 0.
            weight: [C, r], contiguous: `fits_corrected_rows`.
            table: [V, r], contiguous.
            d2t: [C] int64, the id of a column less the column; none: columns are ids.
        """
        batch, depth, _ = logits.shape
        self._logits, self._weight, self._table, self._d2t = logits, weight, table, d2t
        self._anchor = anchor.contiguous()
        self._keys = new_keys(depth, batch, logits.device)
        # [B, D, r]: of the table, for the token before each row.
        self.before = table.new_empty(batch, depth, table.shape[1])

    def look_up(self, row: int) -> Tensor:
        """The table's row of the token before a row, [B, r], where x is not just that."""
        batch, depth, rank = self.before.shape
        _look_up[(batch,)](
            self._anchor, self._keys, self._table, self.before, depth, row,
            RANK=rank, num_warps=1, **pdl_options(self.before),
        )  # fmt: skip
        return self.before[:, row]

    def choose(self, row: int, x: Tensor | None = None) -> None:
        """Chooses a row's token, after those before it.

        x: [B, r]; none: the table's row of the token before, which is also put into `before`.
        """
        batch, depth, vocab = self._logits.shape
        rank, gpu = self._weight.shape[1], gpu_of(self._weight.device)
        tile, block_b = BLOCK_V // 2 if gpu.amd else BLOCK_V, max(16, next_power_of_2(batch))
        _corrected[(min(gpu.num_sms, -(-vocab // tile)),)](
            self._logits, self.before if x is None else x.contiguous(), self._weight, self._table,
            self._d2t, self._anchor, self._keys, self.before, batch, depth, vocab, row,
            self._logits.stride(0), self._logits.stride(1),
            LOOK_UP=x is None, RANK=rank, BLOCK_B=block_b, BLOCK_V=tile,
            BACKWARD=row % 2 == 1, PREFETCH=AHEAD * tile * rank * self._weight.itemsize // LINE,
            LINE=LINE // self._weight.itemsize, num_warps=8 if gpu.amd else 4,
            num_stages=stages(gpu, tile, block_b, rank * self._weight.itemsize),
            **pdl_options(self.before),
        )  # fmt: skip

    def tokens(self) -> Tensor:
        """What the rows have chosen, ids [B, D] int64."""
        return tokens_of_keys(self._keys)


def stages(gpu: GpuInfo, tile: int, block_b: int, row_bytes: int) -> int:
    """How many tiles of W2 are under way, beside x and what Triton needs in shared memory."""
    room = gpu.smem_bytes - block_b * row_bytes - SPARE_SMEM
    return max(1, min(2 if gpu.amd else 4, room // (tile * row_bytes)))


@dataclass(frozen=True)
class Pool:
    """The columns that are scored of each request."""

    columns: Tensor  # [B, C] int64, contiguous
    tokens: Tensor  # [B, C] int64, contiguous: their ids, of the target


def best_in_pool(
    logits: Tensor, x: Tensor, pool: Pool, weight: Tensor, keys: Tensor, row: int
) -> None:
    """Chooses the token of the largest logits + weight x in every request's pool, on a GPU.

    Args:
        logits: [B, V], contiguous rows.
        x: [B, m], contiguous.
        weight: [V, m], contiguous.
        keys: [D, B] int64, of `new_keys`; those of `row` become the best tokens', the lowest of
            equals.
    """
    batch, places = pool.columns.shape
    size = weight.shape[1]
    _pooled[(-(-places // POOL_BLOCK), batch)](
        logits, x, pool.columns, pool.tokens, weight, keys, row, places, size,
        logits.stride(0),
        SIZE=next_power_of_2(size), BLOCK=POOL_BLOCK, num_warps=4, **pdl_options(x),
    )  # fmt: skip


@jit
def _tile(step, tiles, BACKWARD: tl.constexpr):
    """The tile that is read at a step of a pass over all `tiles`."""
    tile = step
    if BACKWARD:
        tile = tiles - 1 - step
    return tile


@jit
def _prefetch_tiles(
    weight_ptr, vocab, part, parts, RANK: tl.constexpr, BLOCK_V: tl.constexpr,
    BACKWARD: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Requests PREFETCH lines, of LINE elements, of a CTA's first tiles."""
    element = tl.arange(0, PREFETCH) * LINE
    step = part + element // (BLOCK_V * RANK) * parts
    tile = _tile(step, tl.cdiv(vocab, BLOCK_V), BACKWARD).to(tl.int64)
    at = tile * (BLOCK_V * RANK) + element % (BLOCK_V * RANK)
    prefetch_lines(weight_ptr + tl.minimum(tl.maximum(at, 0), vocab.to(tl.int64) * RANK - 1))


@jit_no_specialize("row")
def _corrected(
    logits_ptr, x_ptr, weight_ptr, table_ptr, d2t_ptr, anchor_ptr, keys_ptr, before_ptr,
    batch, depth, vocab, row, batch_stride, row_stride,
    LOOK_UP: tl.constexpr, RANK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
    BACKWARD: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A CTA takes every num_programs-th tile of columns and keeps each request's best."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(vocab, BLOCK_V)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch_tiles(weight_ptr, vocab, part, parts, RANK, BLOCK_V, BACKWARD, PREFETCH, LINE)
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
    logits_ptr += row.to(tl.int64) * row_stride
    place = tl.arange(0, BLOCK_V)
    of_request = b.to(tl.int64)[None, :] * batch_stride + place[:, None]
    of_weight = place[:, None] * RANK + r[None, :]
    # Of every place in a tile and request: sums across threads are for the end.
    best = tl.full([BLOCK_V, BLOCK_B], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK_V, BLOCK_B], tl.int32)
    tile = _tile(part, tiles, BACKWARD)
    both = (place < vocab - tile * BLOCK_V)[:, None] & served[None, :]
    logits = tl.load(logits_ptr + tile * BLOCK_V + of_request, mask=both, other=float("-inf"))
    for step in range(part, tiles, parts):
        tile = _tile(step, tiles, BACKWARD)
        tile_ptr = weight_ptr + tile.to(tl.int64) * (BLOCK_V * RANK)
        inside = (place < vocab - tile * BLOCK_V)[:, None]
        weight = tl.load(tile_ptr + of_weight, mask=inside, other=0.0)
        # The next tile's logits are under way while this one is multiplied.
        ahead = _tile(step + parts, tiles, BACKWARD)
        both = (place < vocab - ahead * BLOCK_V)[:, None] & served[None, :]
        both &= step + parts < tiles
        following = logits_ptr + ahead * BLOCK_V + of_request
        following = tl.load(following, mask=both, other=float("-inf"))
        scores = logits.to(tl.float32) + tl.dot(weight, x, input_precision="ieee")
        # Of equals, the lower column comes later in a backward pass.
        better = scores >= best if BACKWARD else scores > best
        best = tl.where(better, scores, best)
        best_tile = tl.where(better, tile, best_tile)
        logits = following
    largest = tl.max(best, 0)
    tokens = best_tile * BLOCK_V + place[:, None]
    wins = best == largest[None, :]
    if d2t_ptr is not None:
        inside = tokens < vocab
        tokens += tl.load(d2t_ptr + tokens, mask=wins & inside, other=0).to(tl.int32)
    first = tl.min(tl.where(wins, tokens, 0x7FFFFFFF), 0)
    raise_key(keys_ptr + row * batch + b, largest, first, served & (largest > float("-inf")))


@jit_no_specialize("row")
def _look_up(
    anchor_ptr, keys_ptr, table_ptr, before_ptr, depth, row, RANK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, r = tl.program_id(0), tl.arange(0, RANK)
    token = token_before(anchor_ptr, keys_ptr, row, tl.num_programs(0), request, True)
    own = (request.to(tl.int64) * depth + row) * RANK + r
    tl.store(before_ptr + own, tl.load(table_ptr + token * RANK + r))


@jit_no_specialize("row")
def _pooled(
    logits_ptr, x_ptr, columns_ptr, tokens_ptr, weight_ptr, keys_ptr, row, places, size, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A CTA scores BLOCK places of a request's pool."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, m = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside, in_size = c < places, m < size
    columns = tl.load(columns_ptr + request * places + c, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + request * places + c, mask=inside, other=0)
    at = columns[:, None] * size + m[None, :]
    weights = tl.load(weight_ptr + at, mask=inside[:, None] & in_size[None, :], other=0.0)
    x = tl.load(x_ptr + request * size + m, mask=in_size, other=0.0).to(tl.float32)
    scores = tl.load(logits_ptr + request * stride + columns, mask=inside, other=0.0)
    scores = scores.to(tl.float32) + tl.sum(weights.to(tl.float32) * x[None, :], 1)
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
    largest = tl.max(scores, 0)
    first = tl.min(tl.where(inside & (scores == largest), tokens, 0x7FFFFFFF), 0)
    own = keys_ptr + row * tl.num_programs(1) + request
    raise_key(own, largest, first, largest > float("-inf"))
