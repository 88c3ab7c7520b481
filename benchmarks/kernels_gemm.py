# ruff: noqa: B023  closures over loop variables run within the iteration
"""Products with few rows: tunes `gemm_table.py`, and times a whole decode step's worth of them.

    python benchmarks/kernels_gemm.py --tune --chain --out results.json

Needs a GPU. Weights rotate among copies larger than the L2 cache; times are medians of CUDA-graph
replays. `--chain` runs the products of 36 Qwen3-8B layers with stand-ins for what lies between
them, in one graph, and compares forms of fusion with the bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.device import gpu_of
from forerun.kernels.dispatch import jit, tl
from forerun.kernels.gemm import (
    GemmConfig,
    Matrix,
    Scaled,
    gemm,
    gemm_add,
    gemm_add_scaled,
    gemm_argmax,
    gemm_partials,
    gemm_silu,
    most_parts,
    rows_block,
)
from forerun.kernels.gemm_table import choose, default
from forerun.kernels.pdl import pdl_options

H, INNER, QKV, VOCAB, LAYERS, EPS = 4096, 12288, 6144, 151936, 36, 1e-6  # Qwen3-8B
# name -> (N, K, form)
SHAPES = {
    "qkv": (QKV, H, "plain"),
    "o": (H, H, "plain"),
    "gate_up": (2 * INNER, H, "silu"),
    "down": (H, INNER, "plain"),
    "head": (VOCAB, H, "plain"),
    "fc": (H, 5 * H, "plain"),
    "context_kv": (10240, H, "plain"),
}

# ---------------------------------------------------------------- candidates


# (block_n, block_k, stages, warps) worth trying, by bucket: without and with W on the left.
FEW = (
    [(32, 256, 5, 4), (64, 64, 8, 4), (64, 128, 6, 4), (64, 128, 4, 4), (64, 256, 3, 8)],
    [(64, 64, 6, 4), (64, 64, 10, 4), (64, 128, 3, 4), (64, 128, 5, 4), (64, 128, 6, 4),
     (64, 256, 2, 4), (128, 64, 5, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 128, 4, 8)],
)  # fmt: skip
SOME = (
    [(64, 128, 4, 4)],
    [(64, 64, 6, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 3, 8)],
)
TILES = {16: FEW, 32: SOME, 64: SOME}


def candidates(name: str, bucket: int) -> Iterator[GemmConfig]:
    """Programs fill the multiprocessors evenly, or are a whole number a tile."""
    n, k, _ = SHAPES[name]
    units = torch.cuda.get_device_properties(0).multi_processor_count
    for swap, shapes in enumerate(TILES[bucket]):
        for block_n, block_k, stages, warps in shapes:
            shared = (block_n + bucket) * block_k * 2 * (stages - 1 + swap)
            tiles = -(-n // block_n)
            counts = {units * i for i in (1, 2, 3)} | {tiles * i for i in (1, 2, 4)}
            for programs in sorted(counts):
                each = -(-programs // units)
                if not 0.9 * units <= programs or programs * 2 > tiles * (k // block_k):
                    continue
                if each <= 3 and each * (shared + 1024) <= 232_000 and each * shared >= 60_000:
                    yield GemmConfig(block_n, block_k, programs, warps, stages, bool(swap))


def call(form: str, x: Tensor, m: Matrix, residual: Tensor, config: GemmConfig) -> Any:
    if form == "silu":
        return gemm_silu(x, m, config)
    if form == "silu after norm":
        return gemm_silu(scaled(x), m, config)
    if form == "plain after norm":
        return gemm(scaled(x), m, config)
    if form == "ids after norm":
        return gemm_argmax(scaled(x), m, config)
    if form == "add and norm":
        return gemm_add_scaled(x, m, residual, residual[0], EPS, config)
    if form == "partials":
        return gemm_partials(x, m, config)
    if form == "add":
        return gemm_add(x, m, residual, config)
    return gemm(x, m, config)


def scaled(x: Tensor) -> Scaled:
    return Scaled(x, x.new_ones(64, x.shape[0], dtype=torch.float32), EPS)


Job = tuple[str, int, GemmConfig, str]  # form, rows, configuration, shape


def kernel_of(job: Job) -> Any:
    """Equal for jobs that Triton compiles once."""
    form, rows, config, shape = job
    n, k, _ = SHAPES[shape]
    tiles, chunks = n // config.block_n, k // config.block_k
    parts = most_parts(config.programs, tiles, chunks)
    same = tiles == config.programs if form == "partials" else None
    return form, rows, replace(config, programs=parts, prefetch=0), same


def compile_one(job: Job) -> str | None:
    """In a worker: fills Triton's cache on disk."""
    form, rows, config, shape = job
    device = torch.device("cuda", 0)
    n, k, _ = SHAPES[shape]
    m = Matrix.of(torch.zeros(n, k, dtype=torch.bfloat16, device=device))
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=device)
    try:
        call(form, x, m, x.new_zeros(rows, n), config)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  too much shared memory, most of all
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_all(pool: ProcessPoolExecutor, jobs: set[Job]) -> set[Job]:
    """Compiles side by side; returns those that cannot be."""
    began = time.perf_counter()
    kinds: dict[Any, list[Job]] = {}
    for job in sorted(jobs, key=repr):
        kinds.setdefault(kernel_of(job), []).append(job)
    errors = list(pool.map(compile_one, [same[0] for same in kinds.values()]))
    broken = {j for same, e in zip(kinds.values(), errors, strict=True) if e for j in same}
    print(f"compiled {len(kinds)} in {time.perf_counter() - began:.0f} s, {len(broken)} refused")
    print(*{e for e in errors if e}, sep="\n", flush=True)
    return broken


# ---------------------------------------------------------------- timing


class Timer:
    """Times work that is captured into a CUDA graph, in µs."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.anchor = torch.cuda.CUDAGraph()  # keeps the pool alive between graphs
        with torch.cuda.stream(self.stream):
            self.anchor.capture_begin(pool=self.pool)
            self.held = torch.zeros(1, device="cuda")
            self.anchor.capture_end()

    def __call__(self, work: Callable[[], object], repeats: int = 7) -> float:
        with torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool)
            work()
            graph.capture_end()
            times = []
            for turn in range(repeats + 2):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn >= 2:
                    times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)


class Copies:
    """Enough copies of a matrix that one pass over them leaves nothing of use in the L2 cache."""

    def __init__(self, n: int, k: int) -> None:
        self.count = max(2, -(-500_000_000 // (n * k * 2)))
        self.n, self.k = n, k
        device = torch.device("cuda", 0)
        self.matrices = [
            Matrix.of(torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5)
            for _ in range(self.count)
        ]

    def inputs(self, rows: int, form: str) -> tuple[Tensor, Tensor]:
        device = torch.device("cuda", 0)
        x = torch.randn(rows, self.k, device=device, dtype=torch.bfloat16)
        width = self.n // 2 if form == "silu" else self.n
        return x, torch.randn(rows, width, device=device, dtype=torch.bfloat16)

    def time(self, timer: Timer, one: Callable[[Matrix], object]) -> float:
        """µs a product."""
        rounds = 2 if self.count > 3 else 4
        one(self.matrices[0])

        def work() -> None:
            for _ in range(rounds):
                for m in self.matrices:
                    one(m)

        return timer(work) / rounds / self.count


def library(form: str, x: Tensor, m: Matrix, residual: Tensor) -> Tensor:
    if form == "silu":
        gate, up = F.linear(x, m.weight).chunk(2, -1)
        return F.silu(gate).mul_(up)
    if form == "add":
        return torch.addmm(residual, x, m.weight.t())
    return F.linear(x, m.weight)


def table(report: dict[str, Any]) -> str:
    """`gemm_table.py`'s entries for this GPU."""
    lines = []
    for name, buckets in report["tuned"].items():
        n, k, _ = SHAPES[name]
        lines.append(f"({n}, {k}): {{  # {name}")
        for bucket, entry in buckets.items():
            best = {key: value for key, value in entry["best"][0].items() if key != "us"}
            ours = entry["best"][0]["us"] < entry["library"]
            lines.append(f"    {bucket}: {GemmConfig(**best) if ours else None},")
        lines.append("},")
    return "\n".join(lines)


def bandwidth(timer: Timer) -> dict[str, float]:
    """TB/s of a read and of a copy of 4 GB."""
    a = torch.randint(0, 100, (1 << 30,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    out = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    block, each = 2048, 8
    programs = a.numel() // (block * each)

    def read() -> None:
        _read_kernel[(programs,)](a, out, BLOCK=block, EACH=each, num_warps=8)

    read()
    size = a.numel() * 4
    result = {
        "read": size / timer(read) / 1e6,
        "copy": 2 * size / timer(lambda: b.copy_(a)) / 1e6,
    }
    return result


@jit
def _read_kernel(x, out, BLOCK: tl.constexpr, EACH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK * EACH + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(EACH):
        total += tl.load(x + at + i * BLOCK)
    tl.store(out + tl.program_id(0) % 65536, tl.sum(total, 0))


# ---------------------------------------------------------------- tuning


def tune(
    timer: Timer,
    pool: ProcessPoolExecutor,
    names: list[str],
    buckets: list[int],
    report: dict[str, Any],
) -> None:
    jobs = {(SHAPES[s][2], b, c, s) for b in buckets for s in names for c in candidates(s, b)}
    broken = compile_all(pool, jobs)
    for name in names:
        n, k, form = SHAPES[name]
        copies = Copies(n, k)
        for bucket in buckets:
            began = time.perf_counter()
            x, residual = copies.inputs(bucket, form)
            lib = copies.time(timer, lambda m: library(form, x, m, residual))
            found = []
            for config in candidates(name, bucket):
                if (form, bucket, config, name) not in broken:
                    us = copies.time(timer, lambda m: call(form, x, m, residual, config))
                    found.append((us, config))
            found.sort(key=lambda pair: pair[0])
            for _, base in found[:4]:
                for prefetch in (0, 256, 1024, 2048):
                    config = replace(base, prefetch=prefetch)
                    us = copies.time(timer, lambda m: call(form, x, m, residual, config))
                    found.append((us, config))
            found.sort(key=lambda pair: pair[0])
            entry: dict[str, Any] = {
                "library": lib,
                "best": [{"us": us, **asdict(config)} for us, config in found[:12]],
                "floor_us": n * k * 2 / report["bandwidth"]["read"] / 1e6,
            }
            if bucket == 16:
                for rows in (1, 8):
                    x, residual = copies.inputs(rows, form)
                    entry[f"rows_{rows}"] = {
                        "library": copies.time(timer, lambda m: library(form, x, m, residual)),
                        "ours": [
                            copies.time(timer, lambda m: call(form, x, m, residual, config))
                            for _, config in found[:4]
                        ],
                    }
            report["tuned"].setdefault(name, {})[bucket] = entry
            us, config = found[0]
            print(
                f"{name:10} {bucket:4} floor {entry['floor_us']:6.1f} library {lib:6.1f} "
                f"ours {us:6.1f} {config} ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
            save(report)
        del copies
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- a step's chain


@jit
def _between_kernel(x, out, N_IN, N_OUT, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stands for norm + rotation + write, or for attention: reads [M, N_IN], writes [M, N_OUT]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * N_IN + at, mask=at < N_OUT)
    tl.store(out + tl.program_id(0) * N_OUT + at, value, mask=at < N_OUT)


def between(x: Tensor, n: int) -> Tensor:
    out = x.new_empty(x.shape[0], n)
    _between_kernel[(x.shape[0], -(-n // 1024))](
        x, out, x.shape[1], n, BLOCK=1024, **pdl_options(x)
    )
    return out


@jit
def _sum_norm_kernel(
    part, residual, weight, out, total, M, N, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    at = row * N + n
    inside = n < N
    acc = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(PARTS):
        acc += tl.load(part + i * M * N + at, mask=inside, other=0.0)
    r = acc.to(tl.bfloat16)
    tl.store(total + at, r, mask=inside)
    r = r.to(tl.float32)
    factor = tl.rsqrt(tl.sum(r * r, 0) / N + eps)
    w = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (r * factor * w).to(tl.bfloat16), mask=inside)


def sum_norm(part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    rows, n = residual.shape
    _sum_norm_kernel[(rows,)](
        part, residual, weight, out, total, rows, n, EPS,
        PARTS=part.shape[0], BLOCK=4096, num_warps=8, **pdl_options(out),
    )  # fmt: skip
    return out, total


Chosen = dict[str, GemmConfig]


class Chain:
    """The products of a step: x [rows, H] -> [rows, VOCAB] or ids, with its own weights."""

    def __init__(self) -> None:
        def matrix(n: int, k: int) -> Matrix:
            weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            return Matrix.of(weight.mul_(k**-0.5))

        names = ("qkv", "o", "gate_up", "down")
        self.layers = [{s: matrix(*SHAPES[s][:2]) for s in names} for _ in range(LAYERS)]
        self.head = matrix(VOCAB, H)
        self.norm = torch.ones(H, device="cuda", dtype=torch.bfloat16)
        self.bytes = 2 * (self.head.weight.numel() + LAYERS * sum(
            m.weight.numel() for m in self.layers[0].values()
        ))  # fmt: skip

    def library(self, x: Tensor) -> Tensor:
        """The products alone."""
        for layer in self.layers:
            qkv = F.linear(x, layer["qkv"].weight)
            x = F.linear(qkv[:, :H], layer["o"].weight)
            x = F.linear(F.linear(x, layer["gate_up"].weight)[:, :INNER], layer["down"].weight)
        return F.linear(x, self.head.weight)

    def products(self, x: Tensor, c: Chosen) -> Tensor:
        """The products alone, SiLU and residuals in their epilogues."""
        for layer in self.layers:
            y = gemm(x, layer["qkv"], c["qkv"])
            x = gemm_add(y[:, :H], layer["o"], x, c["o"])
            y = gemm_silu(x, layer["gate_up"], c["gate_up"])
            x = gemm_add(y, layer["down"], x, c["down"])
        return gemm(x, self.head, c["head"])

    def fused(self, x: Tensor, c: Chosen, ids: bool = False) -> Tensor:
        """Norms, SiLU and residuals in the products; two stand-ins for attention."""
        residual, rows = x, x.shape[0]
        normed: Tensor | Scaled = Scaled(x, x.new_ones(64, rows, dtype=torch.float32), EPS)
        for layer in self.layers:
            y = between(between(gemm(normed, layer["qkv"], c["qkv"]), QKV), H)
            normed, residual = gemm_add_scaled(y, layer["o"], residual, self.norm, EPS, c["o"])
            y = gemm_silu(normed, layer["gate_up"], c["gate_up"])
            normed, residual = gemm_add_scaled(
                y, layer["down"], residual, self.norm, EPS, c["down"]
            )
        product = gemm_argmax if ids else gemm
        return product(normed, self.head, c["head"])

    def partials(self, x: Tensor, c: Chosen) -> Tensor:
        """SiLU in the product; `o` and `down` leave partials that a norm kernel sums."""
        residual = x
        for layer in self.layers:
            y = between(between(gemm(x, layer["qkv"], c["qkv"]), QKV), H)
            x, residual = sum_norm(gemm_partials(y, layer["o"], c["o"]), residual, self.norm)
            y = gemm_silu(x, layer["gate_up"], c["gate_up"])
            x, residual = sum_norm(gemm_partials(y, layer["down"], c["down"]), residual, self.norm)
        return gemm(x, self.head, c["head"])

    def separate(self, x: Tensor, c: Chosen | None) -> Tensor:
        """Norms in kernels of their own, products by the library where `c` is None."""
        residual = x
        for layer in self.layers:
            if c is None:
                qkv = F.linear(x, layer["qkv"].weight)
                o = F.linear(between(between(qkv, QKV), H), layer["o"].weight)
                x, residual = sum_norm(o.unsqueeze(0), residual, self.norm)
                y = between(F.linear(x, layer["gate_up"].weight), INNER)
                down = F.linear(y, layer["down"].weight)
            else:
                qkv = gemm(x, layer["qkv"], c["qkv"])
                o = gemm(between(between(qkv, QKV), H), layer["o"], c["o"])
                x, residual = sum_norm(o.unsqueeze(0), residual, self.norm)
                y = gemm_silu(x, layer["gate_up"], c["gate_up"])
                down = gemm(y, layer["down"], c["down"])
            x, residual = sum_norm(down.unsqueeze(0), residual, self.norm)
        return F.linear(x, self.head.weight) if c is None else gemm(x, self.head, c["head"])


def without_prefetch(c: Chosen) -> Chosen:
    return {name: replace(config, prefetch=0) for name, config in c.items()}


CHAINED = {
    "qkv": ("plain after norm", "plain"),
    "o": ("add and norm", "add", "partials"),
    "gate_up": ("silu after norm", "silu"),
    "down": ("add and norm", "add", "partials"),
    "head": ("plain after norm", "ids after norm", "plain"),
}
KEPT = 8  # best of each shape alone, tried in the chain


def kept(report: dict[str, Any], name: str, bucket: int) -> list[GemmConfig]:
    """The best found alone; without a search, the table's and what differs in the overlap."""
    if name in report["tuned"]:
        best = report["tuned"][name][bucket]["best"][:KEPT]
        return [GemmConfig(**{k: v for k, v in entry.items() if k != "us"}) for entry in best]
    n, k, _ = SHAPES[name]
    gpu = gpu_of(torch.device("cuda", 0))
    first = choose(n, k, bucket, gpu) or default(bucket, gpu)
    found = [first]
    for stages in dict.fromkeys((first.stages, min(first.stages, 5))):
        for prefetch in (0, 256, 512, 1024):
            found.append(replace(first, stages=stages, prefetch=prefetch, early=False))
    return found


def chain(
    timer: Timer, pool: ProcessPoolExecutor, rows_list: list[int], report: dict[str, Any]
) -> None:
    buckets = {rows_block(rows) for rows in rows_list}
    compile_all(
        pool,
        {
            (form, bucket, config, name)
            for name, forms in CHAINED.items()
            for bucket in buckets
            for config in kept(report, name, bucket)
            for form in forms
        },
    )
    links = Chain()
    floor = links.bytes / report["bandwidth"]["read"] / 1e9
    report["chain"] = {"floor_ms": floor}
    print(f"floor {floor:.3f} ms for {links.bytes / 1e9:.2f} GB")
    picked: dict[int, Chosen] = {}
    for rows in rows_list:
        bucket = rows_block(rows)
        x = torch.randn(rows, H, device="cuda", dtype=torch.bfloat16)

        def run(work: Callable[[], object]) -> float:
            work()
            return timer(work, repeats=5) / 1e3

        def descend(x: Tensor, chosen: Chosen) -> Chosen:
            best = run(lambda: links.fused(x, chosen))
            for name in ("gate_up", "down", "qkv", "o", "head"):
                for config in kept(report, name, bucket):
                    trial = chosen | {name: config}
                    ms = run(lambda trial=trial: links.fused(x, trial))
                    if ms < best:
                        best, chosen = ms, trial
            return chosen

        began = time.perf_counter()
        entry: dict[str, float] = {}
        own = descend(x, picked.get(bucket) or {s: kept(report, s, bucket)[0] for s in CHAINED})
        chosen = picked.setdefault(bucket, own)
        small = without_prefetch(chosen)
        entry |= {
            "library, products alone": run(lambda: links.library(x)),
            "library, separate kernels": run(lambda: links.separate(x, None)),
            "products alone": run(lambda: links.products(x, chosen)),
            "separate kernels": run(lambda: links.separate(x, chosen)),
            "fused": run(lambda: links.fused(x, chosen)),
            "fused, own choice": run(lambda: links.fused(x, own)),
            "fused, ids": run(lambda: links.fused(x, chosen, ids=True)),
            "fused, no prefetch": run(lambda: links.fused(x, small)),
        }
        whole = {
            s: [c for c in kept(report, s, bucket) if c.programs % (H // c.block_n) == 0]
            for s in ("o", "down")
        }
        if all(whole.values()):
            parted = chosen | {s: found[0] for s, found in whole.items()}
            entry["partials"] = run(lambda: links.partials(x, parted))
        if rows == 16:
            pdl(False)
            entry["fused, no overlap"] = run(lambda: links.fused(x, small))
            entry["separate, no overlap"] = run(lambda: links.separate(x, small))
            entry["products alone, no overlap"] = run(lambda: links.products(x, small))
            pdl(True)
        report["chain"][rows] = {
            "ms": entry,
            "chosen": {name: asdict(config) for name, config in own.items()},
        }
        save(report)
        print(f"rows {rows} ({time.perf_counter() - began:.1f} s)")
        for name, ms in entry.items():
            print(f"  {name:28} {ms:6.3f} ms  {ms / floor:5.2f} x floor", flush=True)
        for name, config in own.items():
            print(f"  {name:10} {config}")


def pdl(on: bool) -> None:
    """For comparisons: overlap on or off."""
    from forerun.kernels import gemm as module

    module.pdl_options = pdl_options if on else (lambda tensor: {"PDL": False})  # type: ignore[assignment]
    globals()["pdl_options"] = ON if on else (lambda tensor: {"PDL": False})


ON = pdl_options
OUT: Path | None = None


def save(report: dict[str, Any]) -> None:
    if OUT is not None:
        OUT.write_text(json.dumps(report, indent=1))


def main() -> None:
    global OUT
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 1, 8, 32, 64, 128])
    parser.add_argument("--tuned", type=Path, help="an earlier --out, instead of --tune")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    OUT = arguments.out
    torch.cuda.init()
    timer = Timer()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bandwidth": bandwidth(timer),
        "tuned": {},
    }
    print(report)
    if arguments.tuned:
        loaded = json.loads(arguments.tuned.read_text())["tuned"]
        report["tuned"] = {s: {int(b): e for b, e in t.items()} for s, t in loaded.items()}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(14, mp_context=context) as pool:
        if arguments.tune:
            tune(timer, pool, arguments.shapes, arguments.buckets, report)
            print(table(report))
        if arguments.chain:
            chain(timer, pool, arguments.rows, report)
    save(report)


if __name__ == "__main__":
    main()
