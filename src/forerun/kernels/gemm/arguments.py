"""The tensors of one GEMM launch, for both implementations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, eq=False)  # not frozen: built per launch, frozen ones cost 1 µs more
class GemmArguments:
    """Operands, outputs, and what the epilogue reads; None: the epilogue has no such step.

    The output is one of `out`, `tile_max` (with `tile_argmax`) and `partials`. N counts output
    features: with `silu_mul`, `weight` and `bias` have 2N rows, gate before up.
    """

    x: Tensor  # [M, K] bfloat16
    weight: Tensor  # [N, K] bfloat16; or float8_e4m3fn, with `scales`
    bias: Tensor | None = None  # [N] bfloat16
    sum_of_squares: Tensor | None = None  # [P, M] float32: finish x's deferred RMSNorm
    eps: float = 0.0  # of that RMSNorm
    silu_mul: bool = False  # SiLU(gate) * up
    residual: Tensor | None = None  # [M, N] bfloat16, added
    norm_weight: Tensor | None = None  # [N] bfloat16: begin a deferred RMSNorm of `out`
    out: Tensor | None = None  # [M, N] bfloat16
    norm_out: Tensor | None = None  # [M, N] bfloat16: out * norm_weight
    sum_of_squares_out: Tensor | None = None  # [N tiles, M] float32
    tile_max: Tensor | None = None  # [M, N tiles] float32: each tile's largest output
    tile_argmax: Tensor | None = None  # [M, N tiles] int32: its index in N
    scales: Tensor | None = (
        None  # [N, G] float32: of every row, or of its groups of `group` columns
    )
    group: int = 0  # 0: G is 1
    partials: Tensor | None = None  # [split_k, M, N] float32: split-K partials, to be summed

    @property
    def norm_tiles(self) -> int:
        """P, the number of sums of squares per token."""
        return 0 if self.sum_of_squares is None else self.sum_of_squares.shape[0]
