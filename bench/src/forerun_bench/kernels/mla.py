"""MLA attention against what the GPU can read and multiply.

    python -m forerun_bench.kernels.mla [--heads 16] [--json results.json] [--sweep]

Decode, verify and prefill with DeepSeek's sizes (512 + 64 values a row; expanded heads of 192 and
128), each timed as a CUDA graph with one launch a layer, over enough layers' pools to exceed the
L2 cache. The floor of a case is the longer of two times: reading its latent rows once at the
measured bandwidth, and its FLOPs (unmasked scores) at the rate of a large GEMM. Verification of
many tokens is bound by the second. `--sweep` tries tiles and split counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention.decode import MaskSpec
from forerun.kernels.attention.mla_absorbed import (
    PagedLatent,
    build_row_tile_map,
    mla_decode,
    mla_prefill,
)
from forerun.kernels.attention.mla_expanded import ExpandedKV, expanded_attention
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import (
    TileConfig,
    choose_mla_splits,
    expanded_tile_config,
    mla_prefill_tile_rows,
)
from forerun.kernels.runtime.gpu import gpu_of
from forerun_bench.ceilings import Ceilings
from forerun_bench.kernels.attention import (
    ROTATE,
    Result,
    best,
    compile_all,
    median_us,
    try_us,
)

LATENT, ROPE, NOPE, V_DIM = 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
HALF, PAGE = torch.bfloat16, 64
DECODE = list(itertools.product((1024, 32768), (1, 8, 32), (1, 5, 16)))  # context, batch, q_len
# prompts, tokens of each, context with these tokens
EXPANDED = [(8, 1024, 1024), (1, 4096, 4096), (1, 4096, 8192), (1, 512, 32768)]
ABSORBED = [(1, 512, 8192), (8, 64, 8192), (1, 512, 32768)]


@dataclass
class Latents:
    """Latent rows of B requests of `context` positions, in shuffled pages, for several layers."""

    layers: list[PagedLatent]
    q: Tensor  # [B * q_len, H, 576]

    @classmethod
    def make(cls, heads: int, batch: int, context: int, q_len: int, page: int) -> Latents:
        pages = -(-context // page)
        count = 1 + batch * pages
        size = count * page * (LATENT + ROPE) * HALF.itemsize
        shape = (count, page, LATENT + ROPE)
        ids = torch.randperm(batch * pages, device="cuda").view(batch, pages).int() + 1
        start = torch.full((batch,), context - q_len, dtype=torch.int32, device="cuda")
        layers = [
            PagedLatent(torch.randn(shape, device="cuda", dtype=HALF), LATENT, ids, start)
            for _ in range(max(1, -(-ROTATE // size)))
        ]
        q = torch.randn(batch * q_len, heads, LATENT + ROPE, device="cuda", dtype=HALF)
        return cls(layers, q)


def unmasked_scores(count: int, q_len: int, context: int) -> float:
    """Per head: of `count` requests, causal, their last `q_len` tokens at the end of `context`."""
    return count * (q_len * (context - q_len) + q_len * (q_len + 1) / 2)


def decode_us(
    rows: Latents, q_len: int, num_splits: int, config: TileConfig | None = None
) -> float:
    def run() -> None:
        for layer in rows.layers:
            mla_decode(rows.q, layer, q_len, MaskSpec(), SCALE, num_splits, config)

    return median_us(run, len(rows.layers))


def decode_case(heads: int, context: int, batch: int, q_len: int, page: int) -> Result:
    rows = Latents.make(heads, batch, context, q_len, page)
    shape = rows.layers[0].shape(HALF)
    gpu = gpu_of(rows.q.device)
    num_splits = choose_mla_splits(gpu, heads * q_len, shape, batch, context)
    seen = unmasked_scores(batch, q_len, context)
    return {
        "case": f"decode ctx{context} b{batch} w{q_len} page{page}",
        "num_splits": num_splits,
        "us": decode_us(rows, q_len, num_splits),
        "bytes": batch * context * (LATENT + ROPE) * HALF.itemsize,
        "flops": 2 * seen * heads * (2 * LATENT + ROPE),
    }


def absorbed_case(heads: int, count: int, q_len: int, context: int) -> Result:
    rows = Latents.make(heads, count, context, q_len, PAGE)
    spans = [(context - q_len, q_len)] * count
    tile_rows = mla_prefill_tile_rows(gpu_of(rows.q.device), rows.layers[0].shape(HALF))
    tile_map = build_row_tile_map(spans, heads, tile_rows, lambda host: host.cuda())

    def run() -> None:
        for layer in rows.layers:
            mla_prefill(rows.q, layer, spans, tile_map, MaskSpec(), SCALE)

    seen = unmasked_scores(count, q_len, context)
    return {
        "case": f"absorbed prefill {count} x {q_len} ctx{context}",
        "us": median_us(run, len(rows.layers)),
        "bytes": count * context * (LATENT + ROPE) * HALF.itemsize,
        "flops": 2 * seen * heads * (2 * LATENT + ROPE),
    }


def expanded_us(
    heads: int, count: int, q_len: int, context: int, config: TileConfig | None = None
) -> float:
    """Attention alone, without expanding K and V."""
    dim = NOPE + ROPE
    q = torch.randn(count * q_len, heads, dim, device="cuda", dtype=HALF)
    k = torch.randn(count * context, heads, dim, device="cuda", dtype=HALF)
    v = torch.randn(count * context, heads, V_DIM, device="cuda", dtype=HALF)
    ends = torch.arange(count + 1, device="cuda", dtype=torch.int32) * context
    spans, kv = [(context - q_len, q_len)] * count, ExpandedKV(k, v, ends)
    tile = config or expanded_tile_config(gpu_of(q.device), dim, V_DIM, HALF)
    tile_map = build_tile_map(spans, tile.block_m, lambda host: host.cuda())
    return median_us(
        lambda: expanded_attention(q, kv, spans, tile_map, SCALE, None, config), launches=1
    )


def expanded_case(heads: int, count: int, q_len: int, context: int) -> Result:
    seen = unmasked_scores(count, q_len, context)
    return {
        "case": f"expanded prefill {count} x {q_len} ctx{context}",
        "us": expanded_us(heads, count, q_len, context),
        "bytes": count * context * heads * (NOPE + ROPE + V_DIM) * HALF.itemsize,
        "flops": 2 * seen * heads * (NOPE + ROPE + V_DIM),
    }


def decode_candidates(rows: int) -> list[TileConfig]:
    if rows <= 16:
        shapes = [(16, 64, 8, 3), (16, 32, 8, 6), (16, 64, 8, 2), (16, 32, 4, 6), (64, 64, 8, 2)]
    elif rows <= 32:
        shapes = [(32, 64, 8, 3), (16, 64, 8, 3), (64, 64, 8, 2)]
    else:
        shapes = [(64, 64, 8, 2), (64, 32, 8, 4), (64, 32, 8, 3), (32, 64, 8, 3), (16, 64, 8, 3)]
    return [TileConfig(*shape) for shape in shapes]


def expanded_candidates() -> list[TileConfig]:
    shapes = [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 4, 3)]
    return [TileConfig(*shape) for shape in shapes]


def run_once(job: tuple[int, int, TileConfig]) -> float:
    """Leaves the compiled kernels in Triton's cache; 0 query tokens: expanded prefill."""
    heads, q_len, config = job
    if q_len == 0:
        return expanded_us(heads, 2, 256, 512, config)
    rows = Latents.make(heads, 2, 512, q_len, PAGE)
    return sum(decode_us(rows, q_len, splits, config) for splits in (1, 2))


def sweep(heads: int) -> Iterator[Result]:
    q_lens = sorted({q_len for _, _, q_len in DECODE})
    jobs = [(heads, n, config) for n in q_lens for config in decode_candidates(heads * n)]
    compile_all(run_once, [*jobs, *((heads, 0, config) for config in expanded_candidates())])
    num_sms = gpu_of(torch.device("cuda")).num_sms
    for context, batch, q_len in DECODE:
        rows = Latents.make(heads, batch, context, q_len, PAGE)
        found = []
        for config in decode_candidates(heads * q_len):
            tiles = batch * -(-heads * q_len // config.block_m)
            most = min(64, context // 64)
            counts = {max(1, min(most, int(f * num_sms) // tiles)) for f in (0.5, 1, 2, 3)}
            for num_splits in sorted(counts):
                run = partial(decode_us, rows, q_len, num_splits, config)
                found.append((try_us(run), num_splits, config))
        yield from best(f"decode ctx{context} b{batch} w{q_len}", found)
    for case in EXPANDED:
        tried = [
            (try_us(partial(expanded_us, heads, *case, config)), 1, config)
            for config in expanded_candidates()
        ]
        yield from best(f"expanded {case[0]} x {case[1]} ctx{case[2]}", tried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: 16)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true", help="try tiles and split counts")
    options = parser.parse_args()
    ceilings = Ceilings.measure(torch.device("cuda"), HALF)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "heads": options.heads}
    print(f"{results['gpu']}. {ceilings.line()}")
    if options.sweep:
        results["sweep"] = list(sweep(options.heads))
        for name, group in itertools.groupby(results["sweep"], lambda r: r["case"]):
            for row in list(group)[:4]:
                tile = f"M{row['block_m']} N{row['block_n']} w{row['num_warps']}"
                tile += f" s{row['num_stages']} x{row['num_splits']}"
                print(f"{name:32} {row['us']:9.2f} us  {tile}")
    cases = [decode_case(options.heads, *shape, PAGE) for shape in DECODE]
    cases += [decode_case(options.heads, *shape, 16) for shape in DECODE if shape[1] == 8]
    cases += [absorbed_case(options.heads, *shape) for shape in ABSORBED]
    cases += [expanded_case(options.heads, *shape) for shape in EXPANDED]
    for row in cases:
        reading = row["bytes"] / ceilings.read_bytes_per_second * 1e6
        multiplying = row["flops"] / ceilings.flops * 1e6
        row["floor_us"] = max(reading, multiplying)
        rate = f"{row['bytes'] / row['us'] / 1e3:6.0f} GB/s {row['flops'] / row['us'] / 1e6:5.0f}"
        splits = row.get("num_splits", 1)
        print(
            f"{row['case']:36} {row['us']:9.2f} us, floor {row['floor_us']:8.2f}"
            f" ({row['us'] / row['floor_us']:4.2f}x) {rate} TFLOP/s  num_splits {splits}"
        )
    results["cases"] = cases
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
