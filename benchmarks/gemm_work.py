"""What `kernels_gemm.py` and `gemm_chain.py` share: the products, how each is run, and timing."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import add_rms_norm
from forerun.kernels.elementwise.silu_mul import silu_mul
from forerun.kernels.gemm.gemm import (
    Config,
    DeferredNorm,
    GemmConfig,
    Matrix,
    gemm,
    gemm_add_deferred_norm,
    gemm_argmax,
    gemm_partials,
    gemm_silu,
    max_splits,
    tiles,
    uses_split_k,
)
from forerun.kernels.gemm.gemm_sm90 import Sm90Config
from forerun.kernels.sampling.argmax import argmax

DEVICE = torch.device("cuda", 0)
H, INNER, QKV, VOCAB, EPS = 4096, 12288, 6144, 151936, 1e-6  # Qwen3-8B
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
# Of other models: for the default, which knows no shape.
OTHERS = {
    "Llama 3.1 8B, gate_up": (28672, 4096, "silu after norm"),
    "Llama 3.1 8B, down": (4096, 14336, "add and norm"),
    "Llama 3.1 8B, head": (128256, 4096, "ids"),
    "Qwen3 4B, qkv": (6144, 2560, "plain"),
    "Qwen3 4B, o": (2560, 4096, "add and norm"),
    "Qwen3 4B, gate_up": (19456, 2560, "silu after norm"),
    "Qwen3 4B, down": (2560, 9728, "add and norm"),
    "Qwen3 14B, qkv": (7168, 5120, "plain"),
    "Qwen3 14B, o": (5120, 5120, "add and norm"),
    "Qwen3 14B, gate_up": (34816, 5120, "silu after norm"),
    "Qwen3 14B, down": (5120, 17408, "add and norm"),
    "Qwen3 32B, qkv": (10240, 5120, "plain"),
    "Qwen3 32B, o": (5120, 8192, "add and norm"),
    "Qwen3 32B, gate_up": (51200, 5120, "silu after norm"),
    "Qwen3 32B, down": (5120, 25600, "add and norm"),
    "Qwen3 0.6B, qkv": (4096, 1024, "plain"),
    "Qwen3 0.6B, gate_up": (6144, 1024, "silu after norm"),
    "Qwen3 0.6B, down": (1024, 3072, "add and norm"),
    "Qwen3 8B on two GPUs, o": (4096, 2048, "add and norm"),
}


@dataclass
class Report:
    """What was found, written to `path` again and again: a run may be cut short."""

    found: dict[str, Any]
    path: Path | None

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1))

    def floor_us(self, weight_bytes: int) -> float:
        """Time of reading so much once."""
        return weight_bytes / self.found["read_tbs"] / 1e6


def config_of(entry: dict[str, Any]) -> Config:
    """A configuration as `Report` keeps it."""
    values = {key: value for key, value in entry.items() if key != "us"}
    return Sm90Config(**values) if "groups" in values else GemmConfig(**values)


def call(form: str, x: Tensor, m: Matrix, residual: Tensor, config: Config) -> Any:
    """The product by our kernel, with what surrounds it."""
    rows = scaled(x)
    if form == "silu after norm":
        return gemm_silu(rows, m, config)
    if form == "after norm":
        return gemm(rows, m, config)
    if form == "ids":
        return gemm_argmax(x, m, config)
    if form == "add and norm" and uses_split_k(config):
        return add_rms_norm(gemm_partials(x, m, config), residual, residual[0], EPS)
    if form == "add and norm":
        return gemm_add_deferred_norm(x, m, residual, residual[0], EPS, config)
    return gemm(x, m, config)


def library(form: str, x: Tensor, m: Matrix, residual: Tensor) -> Any:
    """The product by the library, what surrounds it by kernels of its own."""
    y = F.linear(x, m.weight)
    if form == "silu after norm":
        return silu_mul(y, y.dtype)
    if form == "ids":
        return argmax(y)
    return add_rms_norm(y, residual, residual[0], EPS) if form == "add and norm" else y


def error(form: str, x: Tensor, m: Matrix, residual: Tensor, config: Config) -> float:
    """Of the kernel against float32, relative."""
    got = call(form, x, m, residual, config)
    want = F.linear(x.float(), m.weight.float())
    if form == "ids":
        top = want.gather(1, got.unsqueeze(1)).squeeze(1)
        return float((want.amax(1) - top).max() / want.amax())
    if form == "add and norm":
        want = F.rms_norm(want + residual.float(), residual.shape[1:], residual[0].float(), EPS)
        got = got[0] if uses_split_k(config) else got[0].x.float() * got[0].factor()
    elif form != "plain":
        want = want * scaled(x).factor()
    if form == "silu after norm":
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    return float((got.float() - want).norm() / want.norm())


@cache
def _ones() -> Tensor:
    return torch.ones(32 * 512, device=DEVICE)


def scaled(x: Tensor) -> DeferredNorm:
    """As if a product of 32 tiles had left these rows."""
    return DeferredNorm(x, _ones()[: 32 * x.shape[0]].view(32, -1), EPS)


# --- compiling ------------------------------------------------------------------------------------

Job = tuple[str, int, Config, str]  # form, rows, configuration, shape


def kernel_of(job: Job) -> Any:
    """Equal for jobs that Triton compiles once."""
    form, rows, config, shape = job
    if isinstance(config, Sm90Config):
        return form, rows, config
    n, k, _ = SHAPES[shape]
    parts = max_splits(config.programs, tiles(rows, n, config), -(-k // config.block_k))
    return form, rows, replace(config, programs=parts, prefetch=0)


def compile_one(job: Job) -> str | None:
    """In a worker: fills Triton's cache on disk."""
    form, rows, config, shape = job
    n, k, _ = SHAPES[shape]
    m = Matrix.of(torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE))
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=DEVICE)
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


# --- timing ---------------------------------------------------------------------------------------


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

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool)
            work()
            graph.capture_end()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, count: int = 1) -> float:
        """µs of one of so many in a row."""
        with torch.cuda.stream(self.stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                graph.replay()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    def __call__(self, work: Callable[[], object], repeats: int = 7) -> float:
        graph = self.capture(work)
        return statistics.median([self.replay(graph) for _ in range(repeats + 2)][2:])


class Copies:
    """Enough copies of a matrix that one pass over them leaves nothing of use in the L2 cache."""

    def __init__(self, n: int, k: int) -> None:
        self.count = max(2, -(-500_000_000 // (n * k * 2)))
        self.n, self.k = n, k
        self.matrices = [
            Matrix.of(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5)
            for _ in range(self.count)
        ]

    def inputs(self, rows: int, form: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, self.k, device=DEVICE, dtype=torch.bfloat16)
        width = self.n // 2 if form == "silu after norm" else self.n
        return x, torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)

    def time(self, timer: Timer, one: Callable[[Matrix], object]) -> float:
        """µs a product."""
        rounds = 2 if self.count > 3 else 4
        one(self.matrices[0])

        def work() -> None:
            for _ in range(rounds):
                for m in self.matrices:
                    one(m)

        return timer(work) / rounds / self.count
