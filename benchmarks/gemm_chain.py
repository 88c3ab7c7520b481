# ruff: noqa: B023  closures over loop variables run within the iteration
"""The products of a whole decode step in one graph: what is best by itself may lose there.

Part of `kernels_gemm.py --chain`: the layers and the head of Qwen3-8B as the decoder joins them,
with stand-ins for attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import torch
import torch.nn.functional as F
from gemm_work import (
    DEVICE,
    EPS,
    INNER,
    QKV,
    SHAPES,
    H,
    Job,
    Report,
    Timer,
    compile_all,
    config_of,
)
from torch import Tensor

from forerun.kernels.gemm import dispatch as gemm_table
from forerun.kernels.gemm.dispatch import BackendChoice, choose
from forerun.kernels.gemm.gemm import DeferredNorm, GemmConfig, rows_block
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl
from forerun.kernels.runtime.pdl import pdl_options
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.decoder import join

LAYERS = 36
LAYER = ("gate_up", "down", "qkv", "o")  # in the order in which the chain chooses
KEPT = 6  # best of each shape alone, tried in the chain


@jit
def _between_kernel(x, out, N_IN, N_OUT, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stands for norm + rope + write, or for attention: reads [M, N_IN], writes [M, N_OUT]."""
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


Chosen = dict[str, BackendChoice]


class Chain:
    """The layers of a step as the decoder joins them, with their own weights; x [rows, H]."""

    def __init__(self) -> None:
        def linear(name: str) -> Linear:
            n, k, _ = SHAPES[name]
            made = Linear.of(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16).mul_(k**-0.5))
            made.pack()
            return made

        self.layers = [{name: linear(name) for name in LAYER} for _ in range(LAYERS)]
        self.head = linear("head")
        self.norm = RMSNorm.of(torch.ones(H, device=DEVICE, dtype=torch.bfloat16), EPS)
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
        normed: Tensor | DeferredNorm = self.norm(x)
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


def kept(report: Report, name: str, bucket: int) -> list[BackendChoice]:
    """What the table says, the best found alone, variants, and the library."""
    found = [choose(*SHAPES[name][:2], bucket, gpu_of(DEVICE))]
    tuned = report.found["tuned"].get(name, {}).get(bucket)
    if tuned is not None:
        best = [config_of(entry) for entry in tuned["best"]]
        found += [c for c in best if c != found[0]][:KEPT]
    late = [replace(c, early=False) for c in found[:2] if isinstance(c, GemmConfig)]
    return [*found, *late] if None in found else [*found, *late, None]


def chain(timer: Timer, pool: ProcessPoolExecutor, rows_list: list[int], report: Report) -> None:
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
    floor = report.floor_us(links.bytes) / 1e3
    report.found["chain"] = {"floor_ms": floor}
    print(f"floor {floor:.3f} ms for {links.bytes / 1e9:.2f} GB")
    for rows in rows_list:
        bucket = rows_block(rows)
        x = torch.randn(rows, H, device=DEVICE, dtype=torch.bfloat16)

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
        both = {"library": none, "chosen": chosen}
        works = {label: lambda c=c: links.step(x, c) for label, c in both.items()}
        entry |= in_turn(timer, works)
        report.found["chain"][rows] = {
            "ms": entry,
            "chosen": {name: None if c is None else asdict(c) for name, c in chosen.items()},
        }
        report.save()
        print(f"rows {rows} ({time.perf_counter() - began:.1f} s)")
        for label, ms in entry.items():
            print(f"  {label:28} {ms:6.3f} ms  {ms / floor:5.2f} x floor", flush=True)
        for name, config in chosen.items():
            print(f"  {name:10} {config}")


def in_turn(timer: Timer, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """ms of each, replayed in turn: what is measured later runs on a warmer chip, and slower.

    "Short" is 3 replays after a rest, "sustained" 60 in a row, at the chip's power limit perhaps.
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


def unable(config: BackendChoice, name: str, bucket: int, broken: set[Job]) -> bool:
    return any((form, bucket, config, name) in broken for form in (SHAPES[name][2], "plain"))
