"""Blocks of GGUF's quantized kinds, kept as codes, have the values of the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.models.gguf.blocks import BLOCKS, read_blocks

ROWS, COLUMNS = 70, 512
AT = {  # where float16 values are in a block
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_rows(kind: str) -> np.ndarray:
    """Rows of random blocks: all codes, and scales of any finite float16."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(len(kind) + size)
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // block, size), dtype=np.uint8)
    for at in AT[kind]:
        halves = rng.integers(0, 1 << 16, blocks.shape[:2], dtype=np.uint16)
        halves = np.where(halves & 0x7C00 == 0x7C00, halves & 0x83FF, halves)  # inf, NaN: subnormal
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_the_package(kind: str) -> None:
    rows = random_rows(kind)
    want = torch.from_numpy(np.array(dequantize(rows, GGMLQuantizationType[kind])))
    weight = read_blocks(torch.from_numpy(rows), kind)
    assert weight.shape == (ROWS, COLUMNS)
    assert torch.equal(weight.dequantize(), want)


@pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", BLOCKS)
def test_gemms_have_the_bits_of_float32(kind: str) -> None:
    rows = random_rows(kind)
    want = torch.from_numpy(np.array(dequantize(rows, GGMLQuantizationType[kind])))
    packed = cpu.pack_grouped(read_blocks(torch.from_numpy(rows), kind), None, torch.float32)
    assert torch.equal(cpu.take_packed_rows(packed, torch.arange(ROWS)), want)
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(0))
    plain = cpu.gemm(x, cpu.pack(want, None, cpu.Format.FLOAT32))
    for tokens in (1, 5, 40):
        assert torch.equal(cpu.gemm(x[:tokens], packed), plain[:tokens])
