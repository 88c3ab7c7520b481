"""Paged attention against what the GPU can read and multiply.

    python -m forerun_bench.kernels.attention [--json results.json] [--sweep]

Each case is timed as a CUDA graph with one launch a layer, over enough layers' pools to exceed the
L2 cache. "after write" cases launch the kernel that writes K/V before each attention, as a step
does, and subtract that kernel's own time. Decode and verify are compared with the measured read
bandwidth, prefill (FLOPs of unmasked scores) with a large GEMM, both measured in the same run.
`--sweep` tries tiles and, for decode and verify, split counts; it prints the best of each case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention.decode import MaskSpec, paged_attention
from forerun.kernels.attention.paged_kv import PagedKV, compute_kv_slots
from forerun.kernels.attention.prefill import prefill_attention
from forerun.kernels.attention.prefill_sm90 import why_unfit
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import (
    DecodeProblem,
    TileConfig,
    choose_num_splits,
    prefill_tile_config,
)
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, RopePositions, qk_norm_rope_write
from forerun.kernels.runtime.gpu import gpu_of
from forerun_bench.ceilings import Ceilings

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16  # Qwen3-8B
SCALE = DIM**-0.5
ROTATE = 300 << 20  # bytes of K/V that one replay of a graph reads
DECODE = list(itertools.product((1, 8, 32), (1056, 8192), (1, 16)))  # batch, context, q_len
# prompts, tokens of each, context with these tokens
PREFILL = [(32, 1024, 1024), (8, 1024, 1024), (1, 8192, 8192), (1, 4096, 8192), (1, 512, 32768)]
PREFILL_PAGE = 64  # whole K/V blocks


Result = dict[str, Any]  # of one case, as in the JSON


@dataclass
class Pools:
    """K/V of B requests of `context` positions, in shuffled pages, for several layers."""

    k: list[Tensor]
    v: list[Tensor]
    table: Tensor
    start: Tensor
    q: Tensor

    def layers(self) -> list[PagedKV]:
        pairs = zip(self.k, self.v, strict=True)
        return [PagedKV(k, v, self.table, self.start) for k, v in pairs]

    @classmethod
    def make(
        cls, batch: int, context: int, q_len: int, dtype: torch.dtype, page: int, layers: int | None
    ) -> Pools:
        pages = -(-context // page)
        count = 1 + batch * pages
        size = 2 * count * page * KV_HEADS * DIM * dtype.itemsize
        layers = layers or max(1, -(-ROTATE // size))
        kind = torch.bfloat16
        k, v = (
            [
                torch.randn(count, page, KV_HEADS, DIM, device="cuda", dtype=kind).to(dtype)
                for _ in range(layers)
            ]
            for _ in range(2)
        )
        ids = torch.randperm(batch * pages, device="cuda").view(batch, pages) + 1
        start = torch.full((batch,), context - q_len, dtype=torch.int32, device="cuda")
        q = torch.randn(batch * q_len, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=kind)
        return cls(k, v, ids.int(), start, q[:, :HEADS])


def median_us(run: Callable[[], Any], launches: int, rounds: int = 7) -> float:
    """Microseconds a launch: median over graph replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[2:])


def decode(pools: Pools, q_len: int, num_splits: int, config: TileConfig | None) -> float:
    def run() -> None:
        for kv in pools.layers():
            paged_attention(pools.q, kv, q_len, MaskSpec(), SCALE, num_splits, config)

    return median_us(run, len(pools.k))


def tuned_splits(pools: Pools, q_len: int, context: int) -> int:
    problem = DecodeProblem(
        batch_size=len(pools.start),
        q_rows=HEADS // KV_HEADS * q_len,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        kv_dtype=pools.k[0].dtype,
        page_size=pools.k[0].shape[1],
        kv_len_ub=context,
    )
    return choose_num_splits(gpu_of(pools.q.device), problem)


def decode_case(batch: int, context: int, q_len: int, dtype: torch.dtype, page: int) -> Result:
    pools = Pools.make(batch, context, q_len, dtype, page, None)
    num_splits = tuned_splits(pools, q_len, context)
    took = decode(pools, q_len, num_splits, None)
    read = 2 * batch * context * KV_HEADS * DIM * dtype.itemsize
    name = f"{'decode' if q_len == 1 else 'verify'} b{batch} w{q_len} ctx{context} page{page}"
    kind = str(dtype).removeprefix("torch.")
    return {
        "case": f"{name} {kind}",
        "num_splits": num_splits,
        "us": took,
        "gbs": read / took / 1e3,
    }


def after_write_case(batch: int, context: int, q_len: int, dtype: torch.dtype, page: int) -> Result:
    """Attention after the kernel that does QK-norm, RoPE and the K/V write."""
    pools = Pools.make(batch, context, q_len, dtype, page, None)
    device, num_splits = pools.q.device, tuned_splits(pools, q_len, context)
    kv_slots = compute_kv_slots(pools.table, pools.start, None, q_len, batch * q_len, page)
    positions = (pools.start.unsqueeze(1) + torch.arange(q_len, device=device)).flatten().int()
    qkv = torch.randn(batch * q_len, (HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()
    ones = torch.ones(DIM, device=device, dtype=torch.bfloat16)
    norms = HeadNorms(ones, ones, 1e-6)
    rope = RopePositions(ones.expand(context, 2, 1, DIM).contiguous(), positions)

    def run(attend: bool) -> None:
        for kv in pools.layers():
            q = qk_norm_rope_write(qkv, HEADS, norms, rope, kv_slots, kv.k, kv.v)
            if attend:
                paged_attention(q, kv, q_len, MaskSpec(), SCALE, num_splits)

    took = median_us(lambda: run(True), len(pools.k)) - median_us(lambda: run(False), len(pools.k))
    read = 2 * batch * context * KV_HEADS * DIM * dtype.itemsize
    kind = str(dtype).removeprefix("torch.")
    name = f"after write b{batch} w{q_len} ctx{context} page{page} {kind}"
    return {"case": name, "num_splits": num_splits, "us": took, "gbs": read / took / 1e3}


def prefill(pools: Pools, count: int, context: int, config: TileConfig | None) -> float:
    """`count` prompts, their last `q_len` tokens at the end of `context`.

    `config`: the Triton kernel with this tile; None: the default kernel.
    """
    q_len = pools.q.shape[0] // count
    spans = [(context - q_len, q_len)] * count
    tile = config or prefill_tile_config(gpu_of(pools.q.device), DIM, pools.q.dtype)
    tokens_per_tile = tile.block_m * KV_HEADS // HEADS
    tile_map = build_tile_map(spans, tokens_per_tile, lambda host: host.cuda())
    kv = pools.layers()[0]

    def run() -> None:
        prefill_attention(pools.q, kv, spans, tile_map, MaskSpec(), SCALE, config)

    return median_us(run, 1)


def prefill_cases(count: int, q_len: int, context: int, page: int) -> Iterator[Result]:
    """The Triton kernel and, where it can be used, Hopper's."""
    pools = Pools.make(count, context, q_len, torch.bfloat16, page, 1)
    gpu, kind = gpu_of(pools.q.device), pools.q.dtype
    kernels: dict[str, TileConfig | None] = {"triton": prefill_tile_config(gpu, DIM, kind)}
    if why_unfit(gpu, kind, kind, DIM, page) is None:
        kernels["sm90"] = None
    seen = count * (q_len * (context - q_len) + q_len * (q_len + 1) / 2)
    flops = 4 * seen * HEADS * DIM
    for kernel, config in kernels.items():
        took = prefill(pools, count, context, config)
        name = f"prefill {count} x {q_len} ctx{context} page{page} {kernel}"
        yield {"case": name, "us": took, "tflops": flops / took / 1e6}


# --- sweeps -------------------------------------------------------------------------------------


def decode_candidates(q_len: int) -> list[TileConfig]:
    if q_len == 1:
        shapes = [(16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 4, 5), (16, 128, 4, 3), (16, 32, 4, 6)]
    else:
        shapes = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (64, 32, 4, 4), (64, 128, 4, 3)]
    return [TileConfig(*shape) for shape in shapes]


def prefill_candidates() -> list[TileConfig]:
    shapes = [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)]
    two = [
        TileConfig(128, 64, 8, 2, max_registers=128),
        TileConfig(128, 32, 8, 4, max_registers=128),
    ]
    return two + [TileConfig(*shape) for shape in shapes]


def run_once(job: tuple[str, TileConfig, int]) -> float:
    """Leaves the compiled kernels (decode with and without splits) in Triton's cache."""
    kind, config, q_len = job
    if kind == "decode":
        pools = Pools.make(2, 512, q_len, torch.bfloat16, PAGE, 1)
        return sum(decode(pools, q_len, splits, config) for splits in (1, 2))
    pools = Pools.make(2, 512, 512, torch.bfloat16, PREFILL_PAGE, 1)
    return prefill(pools, 2, 512, config)


def _compile(function: Callable[[Any], float], job: Any) -> None:
    torch.cuda.set_per_process_memory_fraction(0.06)
    try_us(partial(function, job))


def compile_all(function: Callable[[Any], float], jobs: Iterable[Any]) -> None:
    """`function(job)` of each in processes of their own: compiling takes longer than measuring."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(14, mp_context=spawn) as workers:
        list(workers.map(partial(_compile, function), jobs))


def sweep() -> Iterable[Result]:
    jobs = [("decode", config, q_len) for q_len in (1, 16) for config in decode_candidates(q_len)]
    jobs += [("prefill", config, 0) for config in prefill_candidates()]
    compile_all(run_once, jobs)
    for batch, context, q_len in DECODE:
        pools = Pools.make(batch, context, q_len, torch.bfloat16, PAGE, None)
        per_split = batch * KV_HEADS
        most = min(64, context // 64)
        counts = {max(1, min(most, int(f * 132) // per_split)) for f in (0.5, 1, 2, 4)}
        found = []
        for config in decode_candidates(q_len):
            for num_splits in sorted(counts):
                run = partial(decode, pools, q_len, num_splits, config)
                found.append((try_us(run), num_splits, config))
        yield from best(f"b{batch} w{q_len} ctx{context}", found)
    for count, rows, context in PREFILL:
        pools = Pools.make(count, context, rows, torch.bfloat16, PREFILL_PAGE, 1)
        tried = [
            (try_us(partial(prefill, pools, count, context, config)), 1, config)
            for config in prefill_candidates()
        ]
        yield from best(f"prefill {count} x {rows} ctx{context}", tried)


def try_us(run: Callable[[], float]) -> float:
    """What `run` measures; infinite if the tile is too large for the GPU."""
    from triton.runtime.errors import OutOfResources

    try:
        return run()
    except OutOfResources:
        return float("inf")


def best(name: str, found: list[tuple[float, int, TileConfig]]) -> Iterator[Result]:
    """(microseconds, number of splits, tile) of a case, fastest first."""
    for took, num_splits, config in sorted(found, key=lambda f: f[0])[:400]:
        yield {"case": name, "us": took, "num_splits": num_splits, **asdict(config)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    ceilings = Ceilings.measure(torch.device("cuda"), torch.bfloat16)
    results["read_gbs"] = ceilings.read_bytes_per_second / 1e9
    results["gemm_tflops"] = ceilings.flops / 1e12
    print(f"{results['gpu']}. {ceilings.line()}")
    if options.sweep:
        results["sweep"] = list(sweep())
        for name, group in itertools.groupby(results["sweep"], lambda r: r["case"]):
            for row in list(group)[:6]:
                tile = f"N{row['block_n']} w{row['num_warps']} s{row['num_stages']}"
                print(
                    f"{name:24} {row['us']:8.2f} us  M{row['block_m']} {tile} x{row['num_splits']}"
                )
    rows = [decode_case(*shape, torch.bfloat16, PAGE) for shape in DECODE]
    fp8 = torch.float8_e4m3fn
    rows += [decode_case(32, 1024, 1, fp8, PAGE), decode_case(32, 1024, 16, fp8, PAGE)]
    rows += [decode_case(32, 8192, 1, fp8, PAGE)]
    rows += [decode_case(32, 1024, 1, torch.bfloat16, page) for page in (1, 64, 256)]
    kinds = ((torch.bfloat16, PAGE), (torch.bfloat16, 64), (fp8, PAGE))
    rows += [after_write_case(*shape, *kind) for kind in kinds for shape in DECODE]
    for shape, page in itertools.product(PREFILL, (PAGE, PREFILL_PAGE)):
        rows += prefill_cases(*shape, page)
    for row in rows:
        if "gbs" in row:
            rate = f"{row['gbs']:8.0f} GB/s {row['gbs'] / results['read_gbs']:6.1%}"
        else:
            share = row["tflops"] / results["gemm_tflops"]
            rate = f"{row['tflops']:8.0f} TFLOP/s {share:6.1%}"
        print(f"{row['case']:44} {row['us']:9.2f} us {rate}  num_splits {row.get('num_splits', 1)}")
    results["cases"] = rows
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
