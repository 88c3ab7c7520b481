# ruff: noqa: B023  closures over loop variables run within the iteration
"""Tunes GEMM dispatch (`kernels/gemm/dispatch.py`) and times all GEMMs of a decode step.

    python -m forerun_bench.kernels.gemm --tune --chain --out results.json

Needs a GPU. `--tune` times every GEMM with its epilogue (norm, SiLU-mul, argmax) in the library
and in our kernels; weights rotate among copies larger than L2; times are medians of CUDA graph
replays. `--chain` times the layers of Qwen3-8B in one graph, and chooses there among the best
configurations found alone and the library (`gemm_chain.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm.config import GemmConfig, Sm90GemmConfig, TritonGemmConfig, num_tiles
from forerun.kernels.gemm.dispatch import LARGE_M_SILU_MUL, choose_gemm
from forerun.kernels.gemm.gemm import GemmWeight, gemm_silu_mul
from forerun.kernels.gemm.gemm_sm90 import Sm90Variant, num_stages
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of
from forerun_bench.ceilings import read_bandwidth
from forerun_bench.kernels.gemm_chain import NUM_CANDIDATES, chain
from forerun_bench.kernels.gemm_work import (
    ADD_NORM,
    ARGMAX,
    DEVICE,
    NORM_IN,
    NORM_SILU_MUL,
    OTHERS,
    SHAPES,
    Report,
    RotatingWeights,
    Timer,
    call,
    compile_all,
    config_of,
    error,
    library,
)

# Candidates (block_n, block_k, num_stages, num_warps) in Triton: plain, and with operands swapped.
TRITON = (
    [(64, 128, 6, 4), (64, 256, 3, 8)],
    [(64, 64, 6, 4), (64, 64, 10, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4),
     (128, 128, 3, 4), (128, 128, 4, 8)],
)  # fmt: skip
# Candidates in CUDA C++ for Hopper: block_n, and (consumer_warpgroups, cluster_m).
SM90_BLOCK_N = (32, 48, 64, 96, 128, 160, 192, 224, 256)
SM90_ALONG_M = ((1, 1), (1, 2), (2, 1), (2, 2))


def triton_bases() -> Iterator[TritonGemmConfig]:
    """Configurations without their number of CTAs."""
    for swap_ab, found in enumerate(TRITON):
        for block_n, block_k, stages, warps in found:
            yield TritonGemmConfig(block_n, block_k, 0, warps, stages, bool(swap_ab))


def candidates(name: str, bucket: int, sm90_only: bool = False) -> Iterator[GemmConfig]:
    """CTAs fill the SMs evenly, or each tile has the same number of CTAs."""
    n, k, epilogue = SHAPES[name]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    if nvrtc.available():
        yield from candidates_sm90(n, k, epilogue, bucket, num_sms)
    if sm90_only:
        return
    for base in triton_bases() if bucket <= 32 else ():
        block_m = min(bucket, base.block_m)
        stages = base.num_stages if base.swap_ab else base.num_stages - 1
        smem = (base.block_n + block_m) * base.block_k * 2 * stages
        tiles = num_tiles(bucket, n, base)
        ctas_per_sm = min(232_000 // (smem + 1024), 16 // base.num_warps)
        for ctas in sorted({num_sms * i for i in (1, 2, 3)} | {tiles * i for i in (1, 2, 3, 4, 8)}):
            if ctas > 3 * num_sms and ctas > tiles:
                continue
            if ctas < 0.6 * num_sms or ctas * 2 > tiles * (k // base.block_k):
                continue
            if epilogue == ADD_NORM and ctas % tiles == 0:
                yield replace(base, num_ctas=ctas, keep_partials=True)
            if ctas <= ctas_per_sm * num_sms and -(-ctas // num_sms) * smem >= 60_000:
                yield replace(base, num_ctas=ctas)


def candidates_sm90(
    n: int, k: int, epilogue: str, bucket: int, num_sms: int
) -> Iterator[Sm90GemmConfig]:
    """Those that use most of the SMs in every wave."""
    variant = Sm90Variant(
        silu_mul=epilogue == NORM_SILU_MUL,
        argmax=epilogue == ARGMAX,
        deferred_norm_in=epilogue in (NORM_IN, NORM_SILU_MUL),
    )
    for block_n, (warpgroups, cluster_m) in itertools.product(SM90_BLOCK_N, SM90_ALONG_M):
        if 64 * warpgroups * cluster_m > max(bucket, 64):
            continue
        if variant.silu_mul and block_n % (16 * cluster_m):
            continue
        base = Sm90GemmConfig(block_n, warpgroups, cluster_m)
        for split_k in (1, 2, 4) if epilogue == ADD_NORM else (1,):
            ctas = num_tiles(bucket, n, base) * split_k
            utilization = ctas / num_sms / -(-ctas // num_sms)
            if k % (64 * split_k) == 0 and num_stages(base, variant) > 2 and utilization > 0.7:
                yield replace(base, split_k=split_k)


def table(report: Report) -> str:
    """This GPU's entries of `dispatch.TUNED`."""
    lines = []
    for name, buckets in report.found["tuned"].items():
        n, k, _ = SHAPES[name]
        lines.append(f"({n}, {k}): {{  # {name}")
        for bucket, entry in buckets.items():
            best = config_of(entry["best"][0])
            ours = entry["best"][0]["us"] < entry["library"]
            lines.append(f"    {bucket}: {best if ours else None},")
        lines.append("},")
    return "\n".join(lines)


def tune(
    timer: Timer,
    pool: ProcessPoolExecutor,
    names: list[str],
    buckets: list[int],
    report: Report,
    sm90_only: bool,
) -> None:
    """Times every candidate of every shape, alone."""
    jobs = {
        (SHAPES[s][2], b, c, s) for b in buckets for s in names for c in candidates(s, b, sm90_only)
    }
    failed = compile_all(pool, jobs)
    for name in names:
        n, k, epilogue = SHAPES[name]
        weights = RotatingWeights(n, k)
        for bucket in buckets:
            began = time.perf_counter()
            x, residual = weights.inputs(bucket, epilogue)
            lib = weights.time(timer, lambda w: library(epilogue, x, w, residual))
            found = []
            for config in candidates(name, bucket, sm90_only):
                if (epilogue, bucket, config, name) not in failed:
                    us = weights.time(timer, lambda w: call(epilogue, x, w, residual, config))
                    found.append((us, config))
            found.sort(key=lambda pair: pair[0])
            if bucket <= 128:
                for base in [c for _, c in found[:3] if isinstance(c, TritonGemmConfig)]:
                    for prefetch_k in (0, 1024):
                        config = replace(base, prefetch_k=prefetch_k)
                        us = weights.time(timer, lambda w: call(epilogue, x, w, residual, config))
                        found.append((us, config))
            if not found:
                continue
            found.sort(key=lambda pair: pair[0])
            entry: dict[str, Any] = {
                "library": lib,
                "alone": weights.time(timer, lambda w: F.linear(x, w.weight)),
                "best": [{"us": us, **asdict(config)} for us, config in found[:12]],
                "floor_us": report.floor_us(n * k * 2),
            }
            report.found["tuned"].setdefault(name, {})[bucket] = entry
            for _, config in found[:NUM_CANDIDATES]:
                off = error(epilogue, x, weights.weights[0], residual, config)
                if not off < 1e-2:
                    print(f"  WRONG by {off}: {config}")
            print(
                f"{name:10} {bucket:4} floor {entry['floor_us']:6.1f} library {lib:6.1f} "
                f"({entry['alone']:.1f} alone), {time.perf_counter() - began:.1f} s"
            )
            print(*(f"    {us:6.1f} {config}" for us, config in found[:3]), sep="\n", flush=True)
            report.save()
        del weights
        torch.cuda.empty_cache()


Run = Callable[[str, Tensor, GemmWeight, Tensor], object]  # epilogue, x, w, residual


def compare_with_library(
    timer: Timer,
    shapes: Mapping[str, tuple[int, int, str]],
    sizes: list[int],
    report: Report,
    ours: Run,
) -> None:
    """Alternately, since at the power limit a time depends on what ran before."""
    for name, (n, k, epilogue) in shapes.items():
        weights = RotatingWeights(n, k)
        line = [f"{name:24} {n:6} x {k:5}  floor {report.floor_us(2 * n * k):6.1f}"]
        for m in sizes:
            x, residual = weights.inputs(m, epilogue)
            times = [
                [
                    weights.time(timer, lambda w: run(epilogue, x, w, residual))
                    for run in (library, ours)
                ]
                for _ in range(3)
            ]
            lib, own = map(statistics.median, zip(*times, strict=True))
            line.append(f"M = {m}: {lib:.1f} -> {own:.1f} ({own / lib:.3f})")
        print(*line, sep="  ", flush=True)
        del weights
        torch.cuda.empty_cache()


def dispatched(epilogue: str, x: Tensor, w: GemmWeight, residual: Tensor) -> object:
    """As GEMM dispatch chooses; shapes that are not tuned get the default configuration."""
    n, k = w.weight.shape
    config = choose_gemm(n, k, len(x), gpu_of(DEVICE), partials=epilogue == ADD_NORM)
    assert config is not None, "the library computes GEMMs of this size; use smaller --tokens"
    return call(epilogue, x, w, residual, config)


def large_m_silu_mul(epilogue: str, x: Tensor, w: GemmWeight, residual: Tensor) -> object:
    return gemm_silu_mul(x, w, LARGE_M_SILU_MUL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--defaults", action="store_true", help="untuned shapes of other models")
    parser.add_argument(
        "--silu", action="store_true", help="gate_up with fused SiLU-mul at large --tokens"
    )
    parser.add_argument(
        "--sm90", action="store_true", help="tune only the CUDA C++ kernel for Hopper"
    )
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512], help="M"
    )
    parser.add_argument("--tuned", type=Path, help="an earlier --out, instead of --tune")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.cuda.init()
    timer = Timer()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_tbs": read_bandwidth(DEVICE) / 1e12,
        "tuned": {},
    }
    print(found)
    report = Report(found, arguments.out)
    if arguments.tuned:
        loaded = json.loads(arguments.tuned.read_text())["tuned"]
        found["tuned"] = {s: {int(b): e for b, e in t.items()} for s, t in loaded.items()}
    if arguments.defaults:
        compare_with_library(timer, OTHERS, arguments.tokens, report, dispatched)
    if arguments.silu:
        gates = {
            name: shape for name, shape in (SHAPES | OTHERS).items() if shape[2] == NORM_SILU_MUL
        }
        compare_with_library(timer, gates, arguments.tokens, report, large_m_silu_mul)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(14, mp_context=context) as pool:
        if arguments.tune:
            tune(timer, pool, arguments.shapes, arguments.buckets, report, arguments.sm90)
            print(table(report))
        if arguments.chain:
            chain(timer, pool, arguments.tokens, report)
    report.save()


if __name__ == "__main__":
    main()
