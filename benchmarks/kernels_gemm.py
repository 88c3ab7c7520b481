# ruff: noqa: B023  closures over loop variables run within the iteration
"""Products with few rows: tunes `gemm_table.py`, and times a whole decode step's worth of them.

    python benchmarks/kernels_gemm.py --tune --chain --out results.json

Needs a GPU. `--tune` takes every product with what surrounds it (norm, SiLU · up, argmax) through
the library and through the kernel; weights rotate among copies larger than the L2 cache; times are
medians of CUDA-graph replays. `--chain` times the layers of Qwen3-8B in one graph, and chooses
there among the best found alone and the library (`gemm_chain.py`).
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
from gemm_chain import KEPT, chain
from gemm_work import (
    DEVICE,
    OTHERS,
    SHAPES,
    Copies,
    Report,
    Timer,
    call,
    compile_all,
    config_of,
    error,
    library,
)
from torch import Tensor

from forerun.bench.ceilings import read_bandwidth
from forerun.kernels.gemm.dispatch import SILU_MANY, choose
from forerun.kernels.gemm.gemm import Config, GemmConfig, Matrix, gemm_silu, tiles
from forerun.kernels.gemm.gemm_sm90 import Form, Sm90Config, stages
from forerun.kernels.runtime import nvrtc as cuda
from forerun.kernels.runtime.gpu import gpu_of

# (block_n, block_k, stages, warps) worth trying in Triton: as it is, and with W on the left.
FEW = (
    [(64, 128, 6, 4), (64, 256, 3, 8)],
    [(64, 64, 6, 4), (64, 64, 10, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4),
     (128, 128, 3, 4), (128, 128, 4, 8)],
)  # fmt: skip
# In CUDA C++ for Hopper: block_n, and (groups, cluster).
SM90 = (32, 48, 64, 96, 128, 160, 192, 224, 256)
SM90_ROWS = ((1, 1), (1, 2), (2, 1), (2, 2))


def shapes() -> Iterator[GemmConfig]:
    """Configurations short of their number of programs."""
    for swap, found in enumerate(FEW):
        for block_n, block_k, deep, warps in found:
            yield GemmConfig(block_n, block_k, 0, warps, deep, bool(swap))


def candidates(name: str, bucket: int, sm90_only: bool = False) -> Iterator[Config]:
    """Programs fill the multiprocessors evenly, or are a whole number a tile."""
    n, k, form = SHAPES[name]
    units = torch.cuda.get_device_properties(0).multi_processor_count
    if cuda.available():
        yield from candidates_sm90(n, k, form, bucket, units)
    if sm90_only:
        return
    for base in shapes() if bucket <= 32 else ():
        rows = min(bucket, base.block_m)
        deep = base.stages if base.swap else base.stages - 1
        shared = (base.block_n + rows) * base.block_k * 2 * deep
        count = tiles(bucket, n, base)
        fits = min(232_000 // (shared + 1024), 16 // base.warps)  # programs a multiprocessor
        for programs in sorted(
            {units * i for i in (1, 2, 3)} | {count * i for i in (1, 2, 3, 4, 8)}
        ):
            if programs > 3 * units and programs > count:
                continue
            if programs < 0.6 * units or programs * 2 > count * (k // base.block_k):
                continue
            if form == "add and norm" and programs % count == 0:
                yield replace(base, programs=programs, parts=True)
            if programs <= fits * units and -(-programs // units) * shared >= 60_000:
                yield replace(base, programs=programs)


def candidates_sm90(n: int, k: int, form: str, bucket: int, units: int) -> Iterator[Config]:
    """Those that occupy most of the multiprocessors in every wave."""
    kind = Form("silu" in form, best=form == "ids", scaled_in="after" in form)
    for block_n, (groups, cluster) in itertools.product(SM90, SM90_ROWS):
        if 64 * groups * cluster > max(bucket, 64) or (kind.paired and block_n % (16 * cluster)):
            continue
        base = Sm90Config(block_n, groups, cluster)
        for split in (1, 2, 4) if form == "add and norm" else (1,):
            programs = tiles(bucket, n, base) * split
            busy = programs / units / -(-programs // units)
            if k % (64 * split) == 0 and stages(base, kind) > 2 and busy > 0.7:
                yield replace(base, split=split)


def table(report: Report) -> str:
    """`gemm_table.py`'s entries for this GPU."""
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
    jobs = {
        (SHAPES[s][2], b, c, s) for b in buckets for s in names for c in candidates(s, b, sm90_only)
    }
    broken = compile_all(pool, jobs)
    for name in names:
        n, k, form = SHAPES[name]
        copies = Copies(n, k)
        for bucket in buckets:
            began = time.perf_counter()
            x, residual = copies.inputs(bucket, form)
            lib = copies.time(timer, lambda m: library(form, x, m, residual))
            found = []
            for config in candidates(name, bucket, sm90_only):
                if (form, bucket, config, name) not in broken:
                    us = copies.time(timer, lambda m: call(form, x, m, residual, config))
                    found.append((us, config))
            found.sort(key=lambda pair: pair[0])
            if bucket <= 128:
                for base in [c for _, c in found[:3] if isinstance(c, GemmConfig)]:
                    for prefetch in (0, 1024):
                        config = replace(base, prefetch=prefetch)
                        us = copies.time(timer, lambda m: call(form, x, m, residual, config))
                        found.append((us, config))
            if not found:
                continue
            found.sort(key=lambda pair: pair[0])
            entry: dict[str, Any] = {
                "library": lib,
                "alone": copies.time(timer, lambda m: F.linear(x, m.weight)),
                "best": [{"us": us, **asdict(config)} for us, config in found[:12]],
                "floor_us": report.floor_us(n * k * 2),
            }
            report.found["tuned"].setdefault(name, {})[bucket] = entry
            for _, config in found[:KEPT]:
                off = error(form, x, copies.matrices[0], residual, config)
                if not off < 1e-2:
                    print(f"  WRONG by {off}: {config}")
            print(
                f"{name:10} {bucket:4} floor {entry['floor_us']:6.1f} library {lib:6.1f} "
                f"({entry['alone']:.1f} alone), {time.perf_counter() - began:.1f} s"
            )
            print(*(f"    {us:6.1f} {config}" for us, config in found[:3]), sep="\n", flush=True)
            report.save()
        del copies
        torch.cuda.empty_cache()


Way = Callable[[str, Tensor, Matrix, Tensor], object]  # form, x, matrix, residual


def beside_library(
    timer: Timer,
    shapes: Mapping[str, tuple[int, int, str]],
    rows_list: list[int],
    report: Report,
    ours: Way,
) -> None:
    """In turn: at the power limit what ran before counts."""
    for name, (n, k, form) in shapes.items():
        copies = Copies(n, k)
        line = [f"{name:24} {n:6} x {k:5}  floor {report.floor_us(2 * n * k):6.1f}"]
        for rows in rows_list:
            x, residual = copies.inputs(rows, form)
            times = [
                [copies.time(timer, lambda m: way(form, x, m, residual)) for way in (library, ours)]
                for _ in range(3)
            ]
            lib, own = map(statistics.median, zip(*times, strict=True))
            line.append(f"{rows} rows {lib:.1f} -> {own:.1f} ({own / lib:.3f})")
        print(*line, sep="  ", flush=True)
        del copies
        torch.cuda.empty_cache()


def by_default(form: str, x: Tensor, m: Matrix, residual: Tensor) -> object:
    """As `gemm_table.py` chooses; at shapes that padding_slot tuned, its default."""
    return call(form, x, m, residual, choose(*m.weight.shape, len(x), gpu_of(DEVICE)))


def silu_inside(form: str, x: Tensor, m: Matrix, residual: Tensor) -> object:
    return gemm_silu(x, m, SILU_MANY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--defaults", action="store_true", help="other models' shapes")
    parser.add_argument("--silu", action="store_true", help="gate_up of many --rows")
    parser.add_argument("--sm90", action="store_true", help="tune the kernel for Hopper alone")
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
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
        beside_library(timer, OTHERS, arguments.rows, report, by_default)
    if arguments.silu:
        gates = {name: shape for name, shape in (SHAPES | OTHERS).items() if "silu" in shape[2]}
        beside_library(timer, gates, arguments.rows, report, silu_inside)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(14, mp_context=context) as pool:
        if arguments.tune:
            tune(timer, pool, arguments.shapes, arguments.buckets, report, arguments.sm90)
            print(table(report))
        if arguments.chain:
            chain(timer, pool, arguments.rows, report)
    report.save()


if __name__ == "__main__":
    main()
