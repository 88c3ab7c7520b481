"""Times GEMMs with quantized weights beside bfloat16 ones, with what is fused into them.

    python -m forerun_bench.kernels.gemm_quantized --tokens 1 8 16 32 64 128

Needs a GPU. Qwen3-8B's shapes. Each GEMM runs as layers call it: o and down with residual and
RMSNorm, gate_up with SiLU-mul; weights rotate among copies larger than L2. "chain": the GEMMs of 36
layers in one CUDA graph, with stand-ins for attention. "library" is the vendor's GEMM in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from forerun.layers.gemm import Gemm, LibraryGemm, plain_gemm_for
from forerun.layers.norm import RMSNorm
from forerun.layers.quantize_method import QuantizeMethod
from forerun.models.formats.fp8 import Fp8Blocks, Fp8Rows
from forerun.models.formats.int4 import Awq
from forerun_bench.ceilings import read_bandwidth
from forerun_bench.kernels.gemm_chain import LAYERS, between
from forerun_bench.kernels.gemm_work import ADD_NORM, DEVICE, EPS, NORM_SILU_MUL, SHAPES, H, Timer

NAMES = ("qkv", "o", "gate_up", "down")
COPIES_BYTES = 300_000_000  # of a weight: several times L2


def library(weight: Tensor) -> Gemm:
    return LibraryGemm(weight, None)


def quantized(method: QuantizeMethod) -> Callable[[Tensor], Gemm]:
    def make(weight: Tensor) -> Gemm:
        n, k = weight.shape
        stored = method.empty_linear(n, k, DEVICE)
        assert stored is not None
        stored.quantize_(weight)
        gemm = method.gemm(stored, None, weight.dtype)
        assert gemm is not None
        return gemm

    return make


# Name -> (a GEMM over a bfloat16 weight, bits that it reads per value).
FORMATS: dict[str, tuple[Callable[[Tensor], Gemm], float]] = {
    "library": (library, 16),
    "bf16": (plain_gemm_for, 16),
    "fp8": (quantized(Fp8Rows()), 8),
    "fp8 groups": (quantized(Fp8Blocks(128, 128)), 8.25),
    "int4": (quantized(Awq(128)), 4.25),
}


def make_gemm(format: str, name: str) -> Gemm:
    """With random weights."""
    n, k, _ = SHAPES[name]
    weight = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5
    return FORMATS[format][0](weight)


def run(gemm: Gemm, name: str, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """(output, residual), with the GEMM's epilogue; the norm is finished."""
    epilogue = SHAPES[name][2]
    if epilogue == ADD_NORM:
        normed, residual = gemm.add_rms_norm(x, residual, norm, None)
        assert isinstance(normed, Tensor)
        return normed, residual
    return gemm.silu_and_mul(x) if epilogue == NORM_SILU_MUL else gemm(x), residual


def gemm_us(timer: Timer, gemms: Sequence[Gemm], name: str, tokens: int, norm: RMSNorm) -> float:
    """µs of one, the weights in turn."""
    x = torch.randn(tokens, SHAPES[name][1], device=DEVICE, dtype=torch.bfloat16)
    residual = x.new_zeros(tokens, H)
    run(gemms[0], name, x, residual, norm)

    def work() -> None:
        for gemm in gemms:
            run(gemm, name, x, residual, norm)

    return timer(work) / len(gemms)


def chain_ms(timer: Timer, layers: Sequence[Sequence[Gemm]], tokens: int, norm: RMSNorm) -> float:
    x = torch.randn(tokens, H, device=DEVICE, dtype=torch.bfloat16)

    def work() -> None:
        hidden, residual = x, x
        for layer in layers:
            for gemm, name in zip(layer, NAMES, strict=True):
                hidden, residual = run(gemm, name, hidden, residual, norm)
                if name == "qkv":
                    hidden = between(between(hidden, hidden.shape[1]), H)

    work()
    return timer(work) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    timer, norm = Timer(), RMSNorm.of(torch.ones(H, device=DEVICE, dtype=torch.bfloat16), EPS)
    bandwidth = read_bandwidth(DEVICE)
    found: dict[str, dict[str, list[float]]] = {}
    print(torch.cuda.get_device_name(), f"reads {bandwidth / 1e12:.2f} TB/s; tokens", end=" ")
    print(*arguments.tokens, sep=" / ", end="; floor: W alone\n")
    for format in arguments.formats:
        bits, rows = FORMATS[format][1], found.setdefault(format, {})
        for name in NAMES:
            size = SHAPES[name][0] * SHAPES[name][1] * bits / 8
            gemms = [make_gemm(format, name) for _ in range(-(-COPIES_BYTES // int(size)))]
            rows[name] = [gemm_us(timer, gemms, name, m, norm) for m in arguments.tokens]
            line(format, name, rows[name], size / bandwidth * 1e6, "µs")
        del gemms
        layers = [[make_gemm(format, name) for name in NAMES] for _ in range(LAYERS)]
        rows["chain"] = [chain_ms(timer, layers, m, norm) for m in arguments.tokens]
        size = LAYERS * bits / 8 * sum(SHAPES[name][0] * SHAPES[name][1] for name in NAMES)
        line(format, "chain", rows["chain"], size / bandwidth * 1e3, "ms")
        del layers
        torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


def line(format: str, name: str, times: Sequence[float], floor: float, unit: str) -> None:
    digits = 2 if unit == "ms" else 1
    print(
        f"{format:10} {name:8} floor {floor:6.{digits}f} {unit}:",
        " / ".join(f"{time:.{digits}f}" for time in times),
        flush=True,
    )


if __name__ == "__main__":
    main()
