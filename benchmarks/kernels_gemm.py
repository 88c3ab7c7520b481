# ruff: noqa: B023  closures over loop variables run within the iteration
"""Products with few rows: tunes `gemm_table.py`, and times a whole decode step's worth of them.

    python benchmarks/kernels_gemm.py --tune --chain --out results.json

Needs a GPU. `--tune` takes every product with what surrounds it (norm, SiLU · up, argmax) through
the library and through the kernel; weights rotate among copies larger than the L2 cache; times are
medians of CUDA-graph replays. `--chain` runs the layers of Qwen3-8B as the decoder does, with
stand-ins for attention, in one graph, and chooses there among the best found alone and the library.
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

from forerun.kernels import gemm_table
from forerun.kernels.activation import silu_mul
from forerun.kernels.argmax import argmax
from forerun.kernels.device import gpu_of
from forerun.kernels.dispatch import jit, tl
from forerun.kernels.gemm import (
    GemmConfig,
    Matrix,
    Scaled,
    gemm,
    gemm_add_scaled,
    gemm_argmax,
    gemm_partials,
    gemm_silu,
    most_parts,
    rows_block,
    tiles,
)
from forerun.kernels.gemm_table import Choice, choose
from forerun.kernels.norm import add_rms_norm
from forerun.kernels.pdl import pdl_options
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.decoder import join

H, INNER, QKV, VOCAB, LAYERS, EPS = 4096, 12288, 6144, 151936, 36, 1e-6  # Qwen3-8B
# name -> (N, K, form)
SHAPES = {
    "qkv": (QKV, H, "after norm"),
    "o": (H, H, "add and norm"),
    "gate_up": (2 * INNER, H, "silu after norm"),
    "down": (H, INNER, "add and norm"),
    "head": (VOCAB, H, "ids"),
    "fc": (H, 5 * H, "plain"),
    "context_kv": (10240, H, "plain"),
}
LAYER = ("gate_up", "down", "qkv", "o")  # in the order in which the chain chooses

# ---------------------------------------------------------------- candidates

# (block_n, block_k, stages, warps) worth trying: by pointers, and with W on the left.
FEW = (
    [(64, 128, 6, 4), (64, 256, 3, 8)],
    [(64, 64, 6, 4), (64, 64, 10, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4),
     (128, 128, 3, 4), (128, 128, 4, 8)],
)  # fmt: skip
# The same, by descriptors, after block_m.
TMA: dict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    16: ([], [(64, 64, 12, 4), (64, 128, 5, 4), (128, 64, 6, 4), (128, 128, 5, 4),
              (128, 128, 3, 4), (128, 64, 10, 8), (128, 128, 5, 8)]),
    64: ([(128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 4, 4), (256, 64, 5, 8), (256, 64, 5, 4),
          (64, 128, 3, 4)],
         [(128, 64, 4, 4), (128, 64, 8, 8), (128, 128, 4, 8), (256, 64, 5, 8), (64, 128, 4, 4)]),
    128: ([(128, 64, 3, 4), (128, 64, 4, 8), (128, 64, 6, 8), (128, 128, 3, 8), (256, 64, 4, 8),
           (64, 64, 4, 4)],
          [(128, 64, 6, 8), (128, 128, 3, 8), (256, 64, 4, 8)]),
    512: ([(256, 64, 4, 8), (128, 64, 6, 8), (128, 64, 3, 4)], [(256, 64, 4, 8)]),
}  # fmt: skip
TMA[32], TMA[256] = TMA[16], TMA[512]


def shapes(bucket: int) -> Iterator[GemmConfig]:
    """Configurations short of their number of programs."""
    if bucket <= 32:
        for swap, found in enumerate(FEW):
            for block_n, block_k, stages, warps in found:
                yield GemmConfig(block_n, block_k, 0, warps, stages, bool(swap))
    for swap, found in enumerate(TMA[bucket]):
        for block_n, block_k, stages, warps in found:
            yield GemmConfig(block_n, block_k, 0, warps, stages, bool(swap), tma=True)


def candidates(name: str, bucket: int) -> Iterator[GemmConfig]:
    """Programs fill the multiprocessors evenly, or are a whole number a tile."""
    n, k, _ = SHAPES[name]
    units = torch.cuda.get_device_properties(0).multi_processor_count
    for base in shapes(bucket):
        rows = min(bucket, base.block_m)
        deep = base.stages if base.tma or base.swap else base.stages - 1
        shared = (base.block_n + rows) * base.block_k * 2 * deep
        count = tiles(bucket, n, base)
        fits = min(232_000 // (shared + 1024), 16 // base.warps)  # programs a multiprocessor
        for programs in sorted(
            {units * i for i in (1, 2, 3)} | {count * i for i in (1, 2, 3, 4, 8)}
        ):
            whole = programs == count and bucket > 32  # one after another, none resident for all
            if base.tma and programs % count:  # a program has one tile
                continue
            if programs > 3 * units and programs > count:
                continue
            if programs < 0.6 * units or programs * 2 > count * (k // base.block_k):
                continue
            if SHAPES[name][2] == "add and norm" and programs % count == 0 and bucket > 32:
                yield replace(base, programs=programs, parts=True)
            if whole or (programs <= fits * units and -(-programs // units) * shared >= 60_000):
                yield replace(base, programs=programs)


def call(form: str, x: Tensor, m: Matrix, residual: Tensor, config: GemmConfig) -> Any:
    if form == "silu after norm":
        return gemm_silu(scaled(x), m, config)
    if form == "after norm":
        return gemm(scaled(x), m, config)
    if form == "ids":
        return gemm_argmax(x, m, config)
    if form == "add and norm" and config.parts:
        return add_rms_norm(gemm_partials(x, m, config), residual, residual[0], EPS)
    if form == "add and norm":
        return gemm_add_scaled(x, m, residual, residual[0], EPS, config)
    return gemm(x, m, config)


def library(form: str, x: Tensor, m: Matrix, residual: Tensor) -> Any:
    """The product by the library, what surrounds it by kernels of its own."""
    y = F.linear(x, m.weight)
    if form == "silu after norm":
        return silu_mul(y, y.dtype)
    if form == "ids":
        return argmax(y)
    return add_rms_norm(y, residual, residual[0], EPS) if form == "add and norm" else y


def error(form: str, x: Tensor, m: Matrix, residual: Tensor, config: GemmConfig) -> float:
    """Of the kernel against float32, relative."""
    got = call(form, x, m, residual, config)
    want = F.linear(x.float(), m.weight.float())
    if form == "ids":
        top = want.gather(1, got.unsqueeze(1)).squeeze(1)
        return float((want.amax(1) - top).max() / want.amax())
    if form == "add and norm":
        want = F.rms_norm(want + residual.float(), residual.shape[1:], residual[0].float(), EPS)
        got = got[0] if config.parts else got[0].x.float() * got[0].factor()
    elif form != "plain":
        want = want * scaled(x).factor()
    if form == "silu after norm":
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    return float((got.float() - want).norm() / want.norm())


ONES = torch.empty(0)


def scaled(x: Tensor) -> Scaled:
    global ONES
    if ONES.numel() == 0:
        ONES = x.new_ones(32 * 512, dtype=torch.float32)
    return Scaled(x, ONES[: 32 * x.shape[0]].view(32, -1), EPS)


Job = tuple[str, int, GemmConfig, str]  # form, rows, configuration, shape


def kernel_of(job: Job) -> Any:
    """Equal for jobs that Triton compiles once."""
    form, rows, config, shape = job
    n, k, _ = SHAPES[shape]
    parts = most_parts(config.programs, tiles(rows, n, config), -(-k // config.block_k))
    return form, rows, replace(config, programs=parts, prefetch=0)


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
        width = self.n // 2 if form == "silu after norm" else self.n
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
            if bucket <= 128:
                for _, base in found[:3]:
                    for prefetch in (0, 1024):
                        config = replace(base, prefetch=prefetch)
                        us = copies.time(timer, lambda m: call(form, x, m, residual, config))
                        found.append((us, config))
            found.sort(key=lambda pair: pair[0])
            entry: dict[str, Any] = {
                "library": lib,
                "alone": copies.time(timer, lambda m: F.linear(x, m.weight)),
                "best": [{"us": us, **asdict(config)} for us, config in found[:12]],
                "floor_us": n * k * 2 / report["bandwidth"]["read"] / 1e6,
            }
            report["tuned"].setdefault(name, {})[bucket] = entry
            for _, config in found[:KEPT]:
                off = error(form, x, copies.matrices[0], residual, config)
                if not off < 1e-2:
                    print(f"  WRONG by {off}: {config}")
            us, config = found[0]
            print(
                f"{name:10} {bucket:4} floor {entry['floor_us']:6.1f} library {lib:6.1f} "
                f"({entry['alone']:.1f} alone) ours {us:6.1f} {config} "
                f"({time.perf_counter() - began:.1f} s)",
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


Chosen = dict[str, Choice]


class Chain:
    """The layers of a step as the decoder joins them, with their own weights; x [rows, H]."""

    def __init__(self) -> None:
        def linear(name: str) -> Linear:
            n, k, _ = SHAPES[name]
            made = Linear.of(torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5))
            made.pack()
            return made

        self.layers = [{name: linear(name) for name in LAYER} for _ in range(LAYERS)]
        self.head = linear("head")
        self.norm = RMSNorm.of(torch.ones(H, device="cuda", dtype=torch.bfloat16), EPS)
        self.bytes = 2 * (self.head.weight.numel() + LAYERS * sum(
            m.weight.numel() for m in self.layers[0].values()
        ))  # fmt: skip

    def products(self, x: Tensor) -> Tensor:
        """The library's products alone."""
        for layer in self.layers:
            x = F.linear(F.linear(x, layer["qkv"].weight)[:, :H], layer["o"].weight)
            x = F.linear(x, layer["gate_up"].weight)[:, :INNER]
            x = F.linear(x, layer["down"].weight)
        return F.linear(x, self.head.weight)

    def step(self, x: Tensor, chosen: Chosen) -> Tensor:
        """The whole, by what `chosen` says."""
        bucket = rows_block(x.shape[0])
        entry = gemm_table.TABLE.setdefault(gpu_of(x.device).capability, {})
        for name, choice in chosen.items():
            entry.setdefault(SHAPES[name][:2], {})[bucket] = choice
        residual = x
        normed: Tensor | Scaled = self.norm(x)
        for i, layer in enumerate(self.layers):
            y = between(between(layer["qkv"](normed), QKV), H)
            normed, residual = join(layer["o"], self.norm, layer["gate_up"], y, residual)
            y = layer["gate_up"].silu_mul(normed)
            if i + 1 < LAYERS:
                reader = self.layers[i + 1]["qkv"]
                normed, residual = join(layer["down"], self.norm, reader, y, residual)
            else:
                normed, residual = self.norm.add(layer["down"](y), residual)
        return self.head.argmax(normed)


KEPT = 6  # best of each shape alone, tried in the chain


def kept(report: dict[str, Any], name: str, bucket: int) -> list[Choice]:
    """The library, and the best found alone; without a search, variants of the table's."""
    n = SHAPES[name][0]
    tuned = report["tuned"].get(name, {}).get(bucket)
    if tuned is not None:
        best = [{k: v for k, v in entry.items() if k != "us"} for entry in tuned["best"]]
        found = [GemmConfig(**entry) for entry in best]
        found = [c for c in found if not c.tma or c.programs % tiles(bucket, n, c) == 0][:KEPT]
    else:
        first = choose(*SHAPES[name][:2], bucket, gpu_of(torch.device("cuda", 0)))
        found = [] if first is None else [first]
    late = [replace(c, early=False) for c in found[:2]]
    return [*found, *late, None]


def chain(
    timer: Timer, pool: ProcessPoolExecutor, rows_list: list[int], report: dict[str, Any]
) -> None:
    jobs = {
        (form, rows_block(rows), config, name)
        for name in (*LAYER, "head")
        for rows in rows_list
        for config in kept(report, name, rows_block(rows))
        for form in {SHAPES[name][2], "plain"}
        if config is not None
    }
    broken = compile_all(pool, jobs)
    links = Chain()
    floor = links.bytes / report["bandwidth"]["read"] / 1e9
    report["chain"] = {"floor_ms": floor}
    print(f"floor {floor:.3f} ms for {links.bytes / 1e9:.2f} GB")
    for rows in rows_list:
        bucket = rows_block(rows)
        x = torch.randn(rows, H, device="cuda", dtype=torch.bfloat16)

        def run(work: Callable[[], object]) -> float:
            work()
            return timer(work, repeats=5) / 1e3

        began = time.perf_counter()
        none: Chosen = dict.fromkeys((*LAYER, "head"))
        tried = {
            name: [c for c in kept(report, name, bucket) if not unable(c, name, bucket, broken)]
            for name in (*LAYER, "head")
        }
        entry = {
            "library, products alone": run(lambda: links.products(x)),
            "library": run(lambda: links.step(x, none)),
        }
        chosen: Chosen = {name: found[0] for name, found in tried.items()}
        best = entry["first found"] = run(lambda: links.step(x, chosen))
        for name in (*LAYER, "head", *LAYER):
            for config in tried[name]:
                ms = run(lambda: links.step(x, chosen | {name: config}))
                if ms < best:
                    best, chosen = ms, chosen | {name: config}
        entry["chosen"] = best
        for name in none:
            if chosen[name] is not None:
                entry[f"{name} by the library"] = run(lambda: links.step(x, chosen | {name: None}))
        report["chain"][rows] = {
            "ms": entry,
            "chosen": {name: None if c is None else asdict(c) for name, c in chosen.items()},
        }
        save(report)
        print(f"rows {rows} ({time.perf_counter() - began:.1f} s)")
        for label, ms in entry.items():
            print(f"  {label:28} {ms:6.3f} ms  {ms / floor:5.2f} x floor", flush=True)
        for name, config in chosen.items():
            print(f"  {name:10} {config}")


def unable(config: Choice, name: str, bucket: int, broken: set[Job]) -> bool:
    return any((form, bucket, config, name) in broken for form in (SHAPES[name][2], "plain"))


OUT: Path | None = None


def save(report: dict[str, Any]) -> None:
    if OUT is not None:
        OUT.write_text(json.dumps(report, indent=1))


def main() -> None:
    global OUT
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
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
