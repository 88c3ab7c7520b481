# ruff: noqa: B023  closures over loop variables run within the iteration
# mypy: allow-untyped-defs, allow-incomplete-defs
"""All GEMMs of a decode step in one CUDA graph: the best configuration alone may lose there.

Part of `gemm.py --chain`: the layers and the LM head of Qwen3-8B with the decoder's fusion,
and stand-ins for attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm.config import TritonGemmConfig, m_bucket
from forerun.kernels.gemm.dispatch import TUNED, GemmChoice, choose_gemm
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl
from forerun.kernels.runtime.pdl import pdl_options
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import LMHead
from forerun.layers.linear import (
    Hidden,
    Linear,
    LinearBase,
    MergedLinear,
    RowLinear,
    silu_and_mul,
)
from forerun.layers.residual import AddRMSNorm, FinalRMSNorm
from forerun_bench.kernels.gemm_work import (
    ADD_NORM,
    DEVICE,
    EPS,
    INNER,
    PLAIN,
    QKV,
    SHAPES,
    H,
    Job,
    Report,
    Timer,
    compile_all,
    config_of,
)

LAYERS = 36
LAYER = ("gate_up", "down", "qkv", "o")  # in the order in which their choices are optimized
NUM_CANDIDATES = 6  # per shape: the best alone, tried in the chain


@jit
def _between_kernel(x, out, N_IN, N_OUT, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stands in for QK-norm + RoPE + KV write, or attention: reads [M, N_IN], writes [M, N_OUT]."""
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


Choices = dict[str, GemmChoice]


PLACE = WeightPlacement(torch.bfloat16, DEVICE)
L = TypeVar("L", bound=LinearBase)


def ready(linear: L) -> L:
    """With random weights, prepared."""
    linear.weight.normal_().mul_(linear.weight.shape[1] ** -0.5)
    linear.prepare()
    return linear


class ChainLayer:
    """The GEMMs and norms of one layer, linked as a model links them."""

    def __init__(self) -> None:
        self.qkv = ready(Linear(H, QKV, bias=False, place=PLACE))
        self.o = ready(RowLinear(H, H, bias=False, place=PLACE))
        parts = {"gate": INNER, "up": INNER}
        self.gate_up = ready(MergedLinear(H, parts, bias=False, place=PLACE))
        self.down = ready(RowLinear(INNER, H, bias=False, place=PLACE))
        self.input_norm, self.post_norm = AddRMSNorm(H, EPS, PLACE), AddRMSNorm(H, EPS, PLACE)
        self.input_norm.link(self.qkv)
        self.post_norm.link(self.gate_up)

    @property
    def linears(self) -> tuple[LinearBase, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class Chain:
    """The GEMMs of a step, fused as in a model, with weights per layer; x is [M, H]."""

    def __init__(self) -> None:
        self.layers = [ChainLayer() for _ in range(LAYERS)]
        self.norm = FinalRMSNorm(H, EPS, PLACE)
        self.head = ready(LMHead(SHAPES["head"][0], H, PLACE, tied=None))
        norms = [norm for layer in self.layers for norm in (layer.input_norm, layer.post_norm)]
        for norm in (*norms, self.norm):
            norm.norm.weight.fill_(1)
        weights = [linear.weight for layer in self.layers for linear in layer.linears]
        self.bytes = 2 * sum(weight.numel() for weight in (*weights, self.head.weight))

    def library_gemms(self, x: Tensor) -> Tensor:
        """The library's GEMMs alone, without norms, activations and residuals."""
        for layer in self.layers:
            x = F.linear(F.linear(x, layer.qkv.weight)[:, :H], layer.o.weight)
            x = F.linear(x, layer.gate_up.weight)[:, :INNER]
            x = F.linear(x, layer.down.weight)
        return F.linear(x, self.head.weight)

    def step(self, x: Tensor, choices: Choices) -> Tensor:
        """The whole step. `choices` are written into the dispatch table first."""
        bucket = m_bucket(x.shape[0])
        entry = TUNED.setdefault(gpu_of(x.device).capability, {})
        for name, choice in choices.items():
            entry.setdefault(SHAPES[name][:2], {})[bucket] = choice
        hidden: Hidden = x
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer.input_norm(hidden, residual)
            y = between(between(layer.qkv(hidden), QKV), H)
            hidden, residual = layer.post_norm(layer.o(y), residual)
            hidden = layer.down(silu_and_mul(layer.gate_up(hidden)))
        return self.head.argmax(self.norm(hidden, residual)[0])


def candidates(report: Report, name: str, bucket: int) -> list[GemmChoice]:
    """The dispatch table's choice, the best found alone, PDL variants, and the library."""
    n, k, epilogue = SHAPES[name]
    found = [choose_gemm(n, k, bucket, gpu_of(DEVICE), partials=epilogue == ADD_NORM)]
    tuned = report.found["tuned"].get(name, {}).get(bucket)
    if tuned is not None:
        best = [config_of(entry) for entry in tuned["best"]]
        found += [c for c in best if c != found[0]][:NUM_CANDIDATES]
    no_pdl = [replace(c, early_launch=False) for c in found[:2] if isinstance(c, TritonGemmConfig)]
    return [*found, *no_pdl] if None in found else [*found, *no_pdl, None]


def chain(timer: Timer, pool: ProcessPoolExecutor, sizes: list[int], report: Report) -> None:
    """Optimizes the choices of every M, shape by shape, and prints the step's times."""
    jobs = {
        (epilogue, m_bucket(m), config, name)
        for name in (*LAYER, "head")
        for m in sizes
        for config in candidates(report, name, m_bucket(m))
        for epilogue in {SHAPES[name][2], PLAIN}
        if config is not None
    }
    failed = compile_all(pool, jobs)
    steps = Chain()
    floor = report.floor_us(steps.bytes) / 1e3
    report.found["chain"] = {"floor_ms": floor}
    print(f"floor {floor:.3f} ms for {steps.bytes / 1e9:.2f} GB")
    for m in sizes:
        bucket = m_bucket(m)
        x = torch.randn(m, H, device=DEVICE, dtype=torch.bfloat16)

        def run(work: Callable[[], object]) -> float:
            work()
            return timer(work, repeats=5) / 1e3

        began = time.perf_counter()
        all_library: Choices = dict.fromkeys((*LAYER, "head"))
        tried = {
            name: [c for c in candidates(report, name, bucket) if runs(c, name, bucket, failed)]
            for name in (*LAYER, "head")
        }
        entry = {
            "library, GEMMs alone": run(lambda: steps.library_gemms(x)),
            "library": run(lambda: steps.step(x, all_library)),
        }
        chosen: Choices = {name: found[0] for name, found in tried.items()}
        best = entry["first found"] = run(lambda: steps.step(x, chosen))
        for name in (*LAYER, "head", *LAYER):
            for config in tried[name]:
                ms = run(lambda: steps.step(x, chosen | {name: config}))
                if ms < best:
                    best, chosen = ms, chosen | {name: config}
        entry["chosen"] = best
        for name in all_library:
            if chosen[name] is not None:
                entry[f"{name} by the library"] = run(lambda: steps.step(x, chosen | {name: None}))
        both = {"library": all_library, "chosen": chosen}
        works = {label: lambda c=c: steps.step(x, c) for label, c in both.items()}
        entry |= alternate(timer, works)
        report.found["chain"][m] = {
            "ms": entry,
            "chosen": {name: None if c is None else asdict(c) for name, c in chosen.items()},
        }
        report.save()
        print(f"M = {m} ({time.perf_counter() - began:.1f} s)")
        for label, ms in entry.items():
            print(f"  {label:28} {ms:6.3f} ms  {ms / floor:5.2f} x floor", flush=True)
        for name, config in chosen.items():
            print(f"  {name:10} {config}")


def alternate(timer: Timer, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """ms of each, replayed alternately: later measurements run on a warmer and slower GPU.

    "Short": 3 replays after a rest. "Sustained": 60 in a row, possibly at the power limit.
    """
    graphs = {label: timer.capture(work) for label, work in works.items()}
    times: dict[str, list[float]] = {}
    for kind, turns, count, rest in (("short", 7, 3, 0.01), ("sustained", 3, 60, 0.0)):
        for _ in range(turns):
            for label, graph in graphs.items():
                timer.replay(graph, -(-count // 4))
                times.setdefault(f"{label}, {kind}", []).append(timer.replay(graph, count) / 1e3)
                time.sleep(rest)
    return {label: statistics.median(found) for label, found in times.items()}


def runs(config: GemmChoice, name: str, bucket: int, failed: set[Job]) -> bool:
    """Whether a candidate compiled with each epilogue it needs; the library always does."""
    return all(
        (epilogue, bucket, config, name) not in failed for epilogue in (SHAPES[name][2], PLAIN)
    )
