"""GEMMs of packed weights on a CPU, with fused epilogues: y = x Wᵀ + b for any number of tokens.

A weight is packed once into the layout that the kernel reads (gemm.cpp), in one of seven formats:

    FLOAT32, BFLOAT16   as the model computes; float32 tokens of a BFLOAT16 weight are rounded
    WIDENED             FLOAT32 in half of the memory, where all values fit into bfloat16, as those
                        of a bfloat16 checkpoint do: they become float32 when they are read
    HALVES              the same where all values fit into float16
    INT8                32 neighbouring k share a scale, and tokens are quantized likewise when they
                        are read; x and y are float32 or bfloat16 (llama.cpp's Q8_0)
    GROUPED             a `GroupedWeight`, such as GGUF files and AWQ and GPTQ checkpoints have:
                        codes of 4 or 8 bits become float32 when they are read; the results are
                        those of FLOAT32, which are rounded once if x is bfloat16
    GROUPED_INT8        the same weight, and tokens as in INT8

A token's result depends neither on the number of tokens nor on that of threads. Threads are
PyTorch's: `torch.get_num_threads()`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from forerun.kernels.cpu import large_pages
from forerun.kernels.cpu.library import call, panel
from forerun.kernels.gemm.grouped import GroupedKind, GroupedWeight

GROUP = 32  # k that share a scale in INT8
ROWS_COMPARED = 512  # at a time, so that little memory is needed


class Format(Enum):
    """How a packed weight is stored; the values are those of `Kind` in gemm.cpp."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    WIDENED = 3
    GROUPED = 4
    HALVES = 5
    GROUPED_INT8 = 6


class _Weight(ctypes.Structure):
    """`Weight` in gemm.cpp."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int32),
        ("bfloat16_tokens", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_type", c_int32),
        ("zero", c_int32),
        ("points", c_int32),
        ("supers", c_int32),
    )


# In the order of `ScaleType` in gemm.cpp.
SCALE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@dataclass(eq=False)
class PackedWeight:
    """A weight [N, K] as the kernels read it."""

    n: int
    k: int
    dtype: torch.dtype  # of tokens and results
    format: Format
    data: Tensor  # uint8
    scales: Tensor  # INT8: bfloat16, a scale per group of 32 k; GROUPED: and leasts or zeros
    bias: Tensor | None  # [N] float32
    grouped: GroupedKind | None = None

    def __post_init__(self) -> None:
        self._struct = _Weight(
            self.data.data_ptr(),
            self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.n,
            self.k,
            self.format.value,
            self.dtype == torch.bfloat16,
        )
        if self.grouped is not None:
            self._struct.bits, self._struct.group = self.grouped.bits, self.grouped.group
            self._struct.scale_type = SCALE_TYPES.index(self.grouped.scales)
            self._struct.zero, self._struct.points = self.grouped.zero, self.grouped.points
            self._struct.supers = self.grouped.supers
        self.address = ctypes.addressof(self._struct)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes


def plain_format(dtype: torch.dtype) -> Format:
    """The format that keeps weights of this dtype as they are."""
    return Format.BFLOAT16 if dtype == torch.bfloat16 else Format.FLOAT32


def is_plain(weight: PackedWeight) -> bool:
    """Whether it has the values of the weight that was packed."""
    return weight.format in (plain_format(weight.dtype), Format.WIDENED, Format.HALVES)


def has_rows(weight: PackedWeight) -> bool:
    """Whether `take_packed_rows` gives the rows of the weight that was packed."""
    return weight.grouped is not None or is_plain(weight)


def fits(weight: Tensor, format: Format) -> bool:
    """Whether a weight [N, K] can be packed: bfloat16 values are stored in pairs."""
    return format not in (Format.BFLOAT16, Format.WIDENED) or weight.shape[1] % 2 == 0


def smallest_format(weight: Tensor) -> Format:
    """The format that keeps all values of a weight [N, K] and needs the least memory."""
    plain = plain_format(weight.dtype)
    if plain is Format.BFLOAT16:
        return plain
    for smaller, dtype in ((Format.WIDENED, torch.bfloat16), (Format.HALVES, torch.float16)):
        rows = weight.split(ROWS_COMPARED)
        if fits(weight, smaller) and all(
            torch.equal(each, each.to(dtype).float()) for each in rows
        ):
            return smaller
    return plain


def pack(weight: Tensor, bias: Tensor | None = None, format: Format | None = None) -> PackedWeight:
    """Packs weight [N, K], float32 or bfloat16, and bias [N]; `format` None: `smallest_format`.

    INT8 rounds to the nearest multiple of a scale, which is the group's largest value / 127,
    rounded up to bfloat16.
    """
    n, k = weight.shape
    format = format or smallest_format(weight)
    rows = -(-n // panel()) * panel()
    groups = -(-k // GROUP)
    size = {Format.FLOAT32: 4 * k, Format.INT8: groups * GROUP}.get(format, 2 * k)
    data = large_pages.empty(rows * size).zero_()
    scales = torch.zeros(rows * groups if format is Format.INT8 else 0, dtype=torch.bfloat16)
    weight = weight.contiguous()
    if format is Format.HALVES:
        to = data.view(torch.float16).view(-1, k, panel())
        for first in range(0, n, ROWS_COMPARED):  # a multiple of `panel`
            part = weight[first : first + ROWS_COMPARED].half()
            _lay_out(part, to[first // panel() :][: -(-len(part) // panel())])
        return PackedWeight(n, k, weight.dtype, format, data, scales, _of_bias(bias))
    call(
        "forerun_pack", weight.data_ptr(), weight.dtype == torch.bfloat16, n, k, format.value,
        data.data_ptr(), scales.data_ptr(),
    )  # fmt: skip
    return PackedWeight(n, k, weight.dtype, format, data, scales, _of_bias(bias))


def _of_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def with_int8_tokens(weight: PackedWeight) -> PackedWeight:
    """A GROUPED weight as GROUPED_INT8, in the same memory."""
    assert weight.format is Format.GROUPED
    return replace(weight, format=Format.GROUPED_INT8)


def pack_grouped(weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedWeight:
    """Packs a weight [N, K] and bias [N]; `dtype`: of tokens and results."""
    (n, k), kind = weight.shape, weight.kind
    panels = -(-n // panel())
    data = large_pages.empty(panels * panel() * weight.codes.shape[1])
    words = weight.codes.contiguous().view(torch.int32)
    _lay_out(words, data.view(torch.int32).view(panels, -1, panel()))
    scales = _pack_scales(weight, panels)
    return PackedWeight(n, k, dtype, Format.GROUPED, data, scales, _of_bias(bias), kind)


def _pack_scales(weight: GroupedWeight, panels: int) -> Tensor:
    """Scales and leasts in the order in which the kernel reads them."""
    kind, size = weight.kind, panel()
    parts = [each for each in (weight.scales, weight.leasts) if each is not None]
    groups = weight.shape[1] // kind.group
    if not kind.supers:
        scales = _empty(panels, groups, len(parts), size, dtype=kind.scales)
        for i, part in enumerate(parts):
            _lay_out(part, scales[:, :, i])
        return scales
    supers = [each for each in (weight.super_scales, weight.super_leasts) if each is not None]
    head, values = 2 * len(parts) * size, len(parts) * size
    blocks = _empty(panels, groups // kind.supers, head + kind.supers * values)
    heads = blocks[..., :head].view(torch.float16).unflatten(-1, (-1, size))
    multiples = blocks[..., head:].view(torch.int8).unflatten(-1, (kind.supers, -1, size))
    for i, (of_blocks, part) in enumerate(zip(supers, parts, strict=True)):
        _lay_out(of_blocks, heads[:, :, i])
        _lay_out(part.unflatten(1, (-1, kind.supers)), multiples[:, :, :, i])
    return blocks


def _empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return large_pages.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _lay_out(rows: Tensor, to: Tensor) -> None:
    """rows [N, ...] -> to [panels, ..., panel]; what the last panel has beyond them: zeros."""
    panels, size = to.shape[0], to.shape[-1]
    whole, rest = divmod(len(rows), size)
    to[:whole] = rows[: whole * size].unflatten(0, (whole, size)).movedim(1, -1)
    if rest:
        to[panels - 1].zero_()[..., :rest] = rows[whole * size :].movedim(0, -1)


def gemm(x: Tensor, w: PackedWeight) -> Tensor:
    """x [M, K] -> x Wᵀ + b, [M, N]."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], w.n)
    call("forerun_gemm", w.address, x.data_ptr(), x.shape[0], out.data_ptr())
    return out


def gemm_add_rms_norm(
    x: Tensor, w: PackedWeight, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """total = residual [M, N] + x Wᵀ + b -> (its RMSNorm, total), new tensors."""
    x, residual = x.contiguous(), residual.contiguous()
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    call(
        "forerun_gemm_add_norm", w.address, x.data_ptr(), x.shape[0], residual.data_ptr(),
        norm_weight.data_ptr(), eps, total.data_ptr(), normed.data_ptr(),
    )  # fmt: skip
    return normed, total


def gemm_silu_mul(x: Tensor, w: PackedWeight) -> Tensor:
    """W = [gate; up]: SiLU(x gateᵀ) * (x upᵀ), [M, N / 2]; computed in float32."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], w.n // 2)
    call("forerun_gemm_silu_mul", w.address, x.data_ptr(), x.shape[0], out.data_ptr())
    return out


def gemm_argmax(x: Tensor, w: PackedWeight) -> Tensor:
    """argmax over N of `gemm`, [M] int64; ties: the lowest index.

    INVALID_TOKEN for rows with a NaN or +inf, or of -inf alone.
    """
    x = x.contiguous()
    ids = x.new_empty(x.shape[0], dtype=torch.int64)
    call("forerun_gemm_argmax", w.address, x.data_ptr(), x.shape[0], ids.data_ptr())
    return ids


class _HeadGemm(ctypes.Structure):
    """`HeadGemm` in gemm.cpp."""

    _fields_ = (
        ("weights", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("x_token_stride", c_int64),
        ("x_head_stride", c_int64),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("bfloat16_tokens", c_int32),
    )


class PackedWeights:
    """Weights of equal shape, and their addresses in a row."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self.weights = list(weights)
        self._table = (c_void_p * len(self.weights))(*(w.address for w in self.weights))
        self.address = ctypes.addressof(self._table)

    def __len__(self) -> int:
        return len(self.weights)

    @classmethod
    def pack(cls, weights: Tensor, biases: Tensor | None = None) -> PackedWeights:
        """Packs weights [E, N, K], and biases [E, N], one by one."""
        of = [None] * len(weights) if biases is None else biases
        return cls([pack(weight, bias) for weight, bias in zip(weights, of, strict=True)])


def head_gemm(x: Tensor, weights: PackedWeights, out: Tensor) -> None:
    """out[t, h] = x[t, h] W_hᵀ for the weights [N, K] of each head.

    Args:
        x: [T, heads, K], tokens and heads at any stride.
        out: [T, heads, N], likewise, written.
    """
    assert x.stride(2) == out.stride(2) == 1
    arguments = _HeadGemm(
        weights.address, x.data_ptr(), out.data_ptr(), *x.shape[:2], *x.stride()[:2],
        *out.stride()[:2], x.dtype == torch.bfloat16,
    )  # fmt: skip
    call("forerun_head_gemm", ctypes.addressof(arguments), keep=(arguments, x, out))


def take_packed_rows(w: PackedWeight, ids: Tensor) -> Tensor:
    """Rows of W at ids [T] int64, as they were before packing: [T, K]; where `has_rows`.

    Those of a GROUPED weight are dequantized, and rounded once in bfloat16.
    """
    ids = ids.contiguous()
    out = torch.empty(ids.shape[0], w.k, dtype=w.dtype)
    call("forerun_take_packed_rows", w.address, ids.data_ptr(), ids.shape[0], out.data_ptr())
    return out


def quantize_ref(x: Tensor, round_up: bool = False) -> tuple[Tensor, Tensor]:
    """x [R, K] -> integers [R, K / 32, 32] as float32 and scales [R, K / 32, 1].

    `round_up`: scales are rounded up to bfloat16, as those of weights.
    """
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = largest / 127
    if round_up:
        scale = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        return torch.where(scale > 0, groups / scale, 0).round(), scale
    return torch.where(largest > 0, groups * (127 / largest), 0).round(), scale


def int8_gemm_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Reference implementation of `gemm` in INT8: x [M, K], weight [N, K] -> float32 [M, N]."""
    values, scales = quantize_ref(x)
    weights, weight_scales = quantize_ref(weight, round_up=True)
    dots = torch.einsum("mgk,ngk->mng", values, weights)  # integers below 2^24: exact
    return (dots * (scales.squeeze(-1).unsqueeze(1) * weight_scales.squeeze(-1))).sum(-1)
