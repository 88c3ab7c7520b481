"""Shared by `gemm.py` and `gemm_chain.py`: the GEMMs, how each is run, and timing."""

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

from forerun.kernels.elementwise.gated_act import silu_mul
from forerun.kernels.elementwise.rms_norm import add_rms_norm
from forerun.kernels.gemm.config import (
    GemmConfig,
    Sm90GemmConfig,
    TritonGemmConfig,
    num_tiles,
    uses_split_k,
)
from forerun.kernels.gemm.gemm import (
    DeferredNorm,
    GemmWeight,
    gemm,
    gemm_add_deferred_norm,
    gemm_argmax,
    gemm_partials,
    gemm_silu_mul,
)
from forerun.kernels.gemm.gemm_triton import max_splits
from forerun.kernels.sampling.argmax import argmax

DEVICE = torch.device("cuda", 0)
H, INNER, QKV, VOCAB, EPS = 4096, 12288, 6144, 151936, 1e-6  # Qwen3-8B
PLAIN, NORM_IN, NORM_SILU_MUL = "plain", "norm in", "norm in, silu-mul"
ADD_NORM, ARGMAX = "add, norm out", "argmax"
# name -> (N, K, epilogue)
SHAPES = {
    "qkv": (QKV, H, NORM_IN),
    "o": (H, H, ADD_NORM),
    "gate_up": (2 * INNER, H, NORM_SILU_MUL),
    "down": (H, INNER, ADD_NORM),
    "head": (VOCAB, H, ARGMAX),
    "fc": (H, 5 * H, PLAIN),
    "context_kv": (10240, H, PLAIN),
}
# Other models: shapes that are not tuned and take the default configurations.
OTHERS = {
    "Llama 3.1 8B, gate_up": (28672, 4096, NORM_SILU_MUL),
    "Llama 3.1 8B, down": (4096, 14336, ADD_NORM),
    "Llama 3.1 8B, head": (128256, 4096, ARGMAX),
    "Qwen3 4B, qkv": (6144, 2560, PLAIN),
    "Qwen3 4B, o": (2560, 4096, ADD_NORM),
    "Qwen3 4B, gate_up": (19456, 2560, NORM_SILU_MUL),
    "Qwen3 4B, down": (2560, 9728, ADD_NORM),
    "Qwen3 14B, qkv": (7168, 5120, PLAIN),
    "Qwen3 14B, o": (5120, 5120, ADD_NORM),
    "Qwen3 14B, gate_up": (34816, 5120, NORM_SILU_MUL),
    "Qwen3 14B, down": (5120, 17408, ADD_NORM),
    "Qwen3 32B, qkv": (10240, 5120, PLAIN),
    "Qwen3 32B, o": (5120, 8192, ADD_NORM),
    "Qwen3 32B, gate_up": (51200, 5120, NORM_SILU_MUL),
    "Qwen3 32B, down": (5120, 25600, ADD_NORM),
    "Qwen3 0.6B, qkv": (4096, 1024, PLAIN),
    "Qwen3 0.6B, gate_up": (6144, 1024, NORM_SILU_MUL),
    "Qwen3 0.6B, down": (1024, 3072, ADD_NORM),
    "Qwen3 8B on two GPUs, o": (4096, 2048, ADD_NORM),
}


@dataclass
class Report:
    """Results, saved to `path` after every GEMM: a run may be interrupted."""

    found: dict[str, Any]
    path: Path | None

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1))

    def floor_us(self, weight_bytes: int) -> float:
        """Time to read this many bytes once, at the measured bandwidth."""
        terabytes_per_second: float = self.found["read_tbs"]
        return weight_bytes / terabytes_per_second / 1e6


def config_of(entry: dict[str, Any]) -> GemmConfig:
    """The configuration of an entry in a report."""
    values = {key: value for key, value in entry.items() if key != "us"}
    if "consumer_warpgroups" in values:
        return Sm90GemmConfig(**values)
    return TritonGemmConfig(**values)


def call(epilogue: str, x: Tensor, w: GemmWeight, residual: Tensor, config: GemmConfig) -> Any:
    """Our kernel, with its epilogue."""
    if epilogue == NORM_SILU_MUL:
        return gemm_silu_mul(deferred_norm(x), w, config)
    if epilogue == NORM_IN:
        return gemm(deferred_norm(x), w, config)
    if epilogue == ARGMAX:
        return gemm_argmax(x, w, config)
    if epilogue == ADD_NORM and uses_split_k(config):
        return add_rms_norm(gemm_partials(x, w, config), residual, residual[0], EPS)
    if epilogue == ADD_NORM:
        return gemm_add_deferred_norm(x, w, residual, residual[0], EPS, config)
    return gemm(x, w, config)


def library(epilogue: str, x: Tensor, w: GemmWeight, residual: Tensor) -> Any:
    """The library's GEMM, with our elementwise kernels for the epilogue."""
    y = F.linear(x, w.weight)
    if epilogue == NORM_SILU_MUL:
        return silu_mul(y, y.dtype)
    if epilogue == ARGMAX:
        return argmax(y)
    return add_rms_norm(y, residual, residual[0], EPS) if epilogue == ADD_NORM else y


def error(epilogue: str, x: Tensor, w: GemmWeight, residual: Tensor, config: GemmConfig) -> float:
    """Relative error of our kernel against float32."""
    got = call(epilogue, x, w, residual, config)
    want = F.linear(x.float(), w.weight.float())
    if epilogue == ARGMAX:
        top = want.gather(1, got.unsqueeze(1)).squeeze(1)
        return float((want.amax(1) - top).max() / want.amax())
    if epilogue == ADD_NORM:
        want = F.rms_norm(want + residual.float(), residual.shape[1:], residual[0].float(), EPS)
        got = got[0] if uses_split_k(config) else got[0].x.float() * got[0].inv_rms()
    elif epilogue != PLAIN:
        want = want * deferred_norm(x).inv_rms()
    if epilogue == NORM_SILU_MUL:
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    return float((got.float() - want).norm() / want.norm())


@cache
def _ones() -> Tensor:
    return torch.ones(32 * 512, device=DEVICE)


def deferred_norm(x: Tensor) -> DeferredNorm:
    """x as a deferred RMSNorm, from a GEMM with 32 tiles along N."""
    return DeferredNorm(x, _ones()[: 32 * x.shape[0]].view(32, -1), EPS)


# --- compilation ----------------------------------------------------------------------------------

Job = tuple[str, int, GemmConfig, str]  # epilogue, M, configuration, name in SHAPES


def kernel_key(job: Job) -> Any:
    """Equal for jobs that share a compiled kernel."""
    epilogue, m, config, name = job
    if not isinstance(config, TritonGemmConfig):
        return epilogue, m, config
    n, k, _ = SHAPES[name]
    splits = max_splits(config.num_ctas, num_tiles(m, n, config), -(-k // config.block_k))
    return epilogue, m, replace(config, num_ctas=splits, prefetch_k=0)


def compile_one(job: Job) -> str | None:
    """In a worker process: fills the kernel cache on disk. Returns the error, if any."""
    epilogue, m, config, name = job
    n, k, _ = SHAPES[name]
    w = GemmWeight.from_tensor(torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE))
    x = torch.zeros(m, k, dtype=torch.bfloat16, device=DEVICE)
    try:
        call(epilogue, x, w, x.new_zeros(m, n), config)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  mostly too much shared memory
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_all(pool: ProcessPoolExecutor, jobs: set[Job]) -> set[Job]:
    """Compiles in parallel; returns the jobs that fail."""
    began = time.perf_counter()
    kernels: dict[Any, list[Job]] = {}
    for job in sorted(jobs, key=repr):
        kernels.setdefault(kernel_key(job), []).append(job)
    errors = list(pool.map(compile_one, [same[0] for same in kernels.values()]))
    failed = {j for same, e in zip(kernels.values(), errors, strict=True) if e for j in same}
    print(f"compiled {len(kernels)} in {time.perf_counter() - began:.0f} s, {len(failed)} failed")
    print(*{e for e in errors if e}, sep="\n", flush=True)
    return failed


# --- timing ---------------------------------------------------------------------------------------


LAUNCH_CYCLES = 4_000_000  # about 2 ms: the host launches a graph of 300 kernels meanwhile


class Timer:
    """Times work that is captured into a CUDA graph, in µs."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.anchor = torch.cuda.CUDAGraph()  # keeps the memory pool alive between graphs
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
        """µs per replay, over `count` replays in a row.

        The GPU waits before the start is recorded, so that the host's launches are not timed.
        """
        with torch.cuda.stream(self.stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LAUNCH_CYCLES)
            start.record()
            for _ in range(count):
                graph.replay()
            end.record()
            end.synchronize()
        us: float = start.elapsed_time(end) * 1e3 / count
        return us

    def __call__(self, work: Callable[[], object], repeats: int = 7) -> float:
        graph = self.capture(work)
        return statistics.median([self.replay(graph) for _ in range(repeats + 2)][2:])


class RotatingWeights:
    """Copies of a weight, enough that none is still in L2 when it is used again."""

    def __init__(self, n: int, k: int) -> None:
        self.count = max(2, -(-500_000_000 // (n * k * 2)))
        self.n, self.k = n, k
        self.weights = [
            GemmWeight.from_tensor(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5)
            for _ in range(self.count)
        ]

    def inputs(self, m: int, epilogue: str) -> tuple[Tensor, Tensor]:
        """Random (x, residual)."""
        x = torch.randn(m, self.k, device=DEVICE, dtype=torch.bfloat16)
        width = self.n // 2 if epilogue == NORM_SILU_MUL else self.n
        return x, torch.randn(m, width, device=DEVICE, dtype=torch.bfloat16)

    def time(self, timer: Timer, one: Callable[[GemmWeight], object]) -> float:
        """µs per GEMM."""
        rounds = 2 if self.count > 3 else 4
        one(self.weights[0])

        def work() -> None:
            for _ in range(rounds):
                for w in self.weights:
                    one(w)

        return timer(work) / rounds / self.count
