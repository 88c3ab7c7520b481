"""Draft extend on the decode kernel and on the prefill kernel: which is faster where.

    python -m forerun_bench.kernels.draft_extend [--json results.json]

Draft extend (and verify) runs W tokens of every request at the end of its context. Both kernels
compute it: decode with W query tokens a request, its K/V split over CTAs, and prefill with chunks
of W tokens. Each is timed as a CUDA graph with one launch a layer, over enough layers' pools to
exceed the L2 cache; the heads are those of Qwen3-8B.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from forerun.kernels.attention.decode import MaskSpec
from forerun.kernels.attention.prefill import prefill_attention
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import prefill_tile_config
from forerun.kernels.runtime.gpu import gpu_of
from forerun_bench.kernels.attention import (
    HEADS,
    KV_HEADS,
    SCALE,
    Pools,
    Result,
    decode,
    median_us,
    tuned_splits,
)

Q_LENS, BATCHES, CONTEXTS, PAGE = (2, 4, 5, 8), (1, 8, 32, 64), (1024, 8192, 32768), 64


def prefill_us(pools: Pools, batch: int, q_len: int, context: int) -> float:
    tile = prefill_tile_config(gpu_of(pools.q.device), pools.q.shape[2], pools.q.dtype)
    spans = [(context - q_len, q_len)] * batch
    tile_map = build_tile_map(spans, tile.block_m * KV_HEADS // HEADS, lambda host: host.cuda())

    def run() -> None:
        for kv in pools.layers():
            prefill_attention(pools.q, kv, spans, tile_map, MaskSpec(), SCALE)

    return median_us(run, len(pools.k))


def case(q_len: int, batch: int, context: int) -> Result:
    pools = Pools.make(batch, context, q_len, torch.bfloat16, PAGE, None)
    splits = tuned_splits(pools, q_len, context)
    return {
        "q_len": q_len,
        "batch": batch,
        "context": context,
        "decode_us": decode(pools, q_len, splits, None),
        "prefill_us": prefill_us(pools, batch, q_len, context),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [case(*each) for each in itertools.product(Q_LENS, BATCHES, CONTEXTS)]
    table = Table(title=f"{torch.cuda.get_device_name()}: draft extend, µs a layer")
    for name in ("W", "batch", "context", "decode kernel", "prefill kernel", "prefill / decode"):
        table.add_column(name, justify="right")
    for row in rows:
        decoded, prefilled = row["decode_us"], row["prefill_us"]
        figures = f"{decoded:.1f}", f"{prefilled:.1f}", f"{prefilled / decoded:.2f}"
        table.add_row(str(row["q_len"]), str(row["batch"]), str(row["context"]), *figures)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
