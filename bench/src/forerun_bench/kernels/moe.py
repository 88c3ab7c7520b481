"""A layer of experts against the time of reading the experts that its tokens touch.

    python -m forerun_bench.kernels.moe [--shape qwen3-30b-a3b] [--json results.json] [--sweep]

For 1 to 128 tokens, and for prefill chunks: the router, the experts, and both with the RMSNorm that
adds up the experts' outputs, each timed as a CUDA graph with one launch a layer, over several
layers' weights and tokens of their own. The floor is the bytes of the touched experts and of the
router over the measured bandwidth, or the FLOPs at the rate of a large GEMM, whichever is longer.
Shared experts are computed up to 128 tokens, where they are choices. Where the kernel for Hopper
serves the experts, Triton's are timed beside it. `--sweep` tries tile sizes of Triton's two grouped
GEMMs.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import add_rms_norm
from forerun.kernels.moe.config import (
    MAX_DECODE_TOKENS,
    GroupedGemmConfig,
    MoeConfig,
    choose_moe,
    choose_moe_sm90,
)
from forerun.kernels.moe.experts import expert_partials, expert_partials_ref
from forerun.kernels.moe.router import new_counts, route
from forerun.kernels.moe.routing import Routed, Routing, align_ref
from forerun.kernels.runtime.gpu import gpu_of
from forerun_bench.ceilings import Ceilings
from forerun_bench.kernels.attention import Result, compile_all, median_us, try_us

HALF, LAYERS = torch.bfloat16, 4
DECODE, PREFILL = (1, 2, 4, 8, 16, 32, 64, 128), (256, 1024, 8192)


@dataclass(frozen=True)
class Shape:
    hidden: int
    width: int
    routing: Routing


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, Routing(128, 8, norm_topk_prob=True, float32_logits=False)),
    "qwen3-235b-a22b": Shape(
        4096, 1536, Routing(128, 8, norm_topk_prob=True, float32_logits=False)
    ),
    "deepseek-v2-lite": Shape(2048, 1408, Routing(64, 6, num_shared=2)),
}


@dataclass
class Layer:
    """Weights of one layer, its tokens, and where they go."""

    shape: Shape
    gate: Tensor
    w13: Tensor
    w2: Tensor
    norm: Tensor
    counts: Tensor
    x: Tensor
    routed: Routed

    @classmethod
    def make(cls, shape: Shape, tokens: int, device: torch.device) -> Layer:
        routing, hidden, width = shape.routing, shape.hidden, shape.width
        experts = routing.num_experts + routing.num_shared_choices(tokens)

        def normal(*size: int) -> Tensor:
            return torch.empty(size, dtype=HALF, device=device).normal_(0, 0.02)

        gate, counts = normal(routing.num_experts, hidden), new_counts(routing, device)
        x = torch.empty(tokens, hidden, dtype=HALF, device=device).normal_()
        weights = normal(experts, 2 * width, hidden), normal(experts, hidden, width)
        routed = route(x, gate, None, routing, counts)
        return cls(shape, gate, *weights, normal(hidden), counts, x, routed)

    def route(self) -> Routed:
        return route(self.x, self.gate, None, self.shape.routing, self.counts)

    def experts(self, routed: Routed, config: MoeConfig | None = None) -> Tensor:
        return expert_partials(self.x, self.w13, self.w2, routed, None, config)

    def run(self) -> tuple[Tensor, Tensor]:
        """As in a model: router, experts, residual and norm."""
        return add_rms_norm(self.experts(self.route()), self.x, self.norm, 1e-6)

    def with_tiles(self, block_m: int) -> Routed:
        tiles = align_ref(self.routed.experts, len(self.w13), block_m)
        return replace(self.routed, tiles=tiles)

    @property
    def touched(self) -> int:
        return len(self.routed.experts.unique())

    @property
    def bytes(self) -> int:
        """Read at least: the router and the touched experts."""
        expert = self.w13[0].nbytes + self.w2[0].nbytes
        return self.gate.nbytes + self.touched * expert

    @property
    def flops(self) -> int:
        return 2 * self.routed.experts.numel() * 3 * self.shape.hidden * self.shape.width


def layers(shape: Shape, tokens: int) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer.make(shape, tokens, torch.device("cuda")) for _ in range(LAYERS)]


def case(shape: Shape, tokens: int, ceilings: Ceilings) -> Result:
    stack = layers(shape, tokens)
    size = sum(layer.bytes for layer in stack) / LAYERS
    floor = max(
        size / ceilings.read_bytes_per_second,
        sum(layer.flops for layer in stack) / LAYERS / ceilings.flops,
    )
    times = {
        "router": median_us(lambda: [layer.route() for layer in stack], LAYERS),
        "experts": median_us(lambda: [layer.experts(layer.routed) for layer in stack], LAYERS),
        "layer": median_us(lambda: [layer.run() for layer in stack], LAYERS),
        "grouped_mm": median_us(
            lambda: [expert_partials_ref(y.x, y.w13, y.w2, y.routed) for y in stack], LAYERS
        ),
    }
    gpu = gpu_of(stack[0].x.device)
    if choose_moe_sm90(tokens, shape.hidden, shape.width, HALF, gpu) is not None:
        triton = choose_moe(tokens, gpu)
        times["triton"] = median_us(
            lambda: [layer.experts(layer.routed, triton) for layer in stack], LAYERS
        )
    touched = sum(layer.touched for layer in stack) / LAYERS
    return {"tokens": tokens, "touched": touched, "floor_us": floor * 1e6, **times}


def candidates(tokens: int) -> Iterator[tuple[int, GroupedGemmConfig]]:
    """block_m, and the tile of one of the GEMMs."""
    blocks: tuple[Sequence[int], ...]
    if tokens <= MAX_DECODE_TOKENS:
        heights = (16, 32) if tokens > 16 else (16,)
        blocks = heights, (16, 32, 64), (64, 128, 256), (4,), (3, 4, 6)
    else:
        blocks = (64, 128), (64, 128, 256), (64,), (4, 8), (3, 4)
    for block_m, block_n, block_k, warps, count in itertools.product(*blocks):
        yield block_m, GroupedGemmConfig(block_n, block_k, warps, count)


def variants(tokens: int) -> Iterator[tuple[str, MoeConfig]]:
    """The name of a GEMM, and the tiles with one of its own."""
    default = choose_moe(tokens, gpu_of(torch.device("cuda")))
    for block_m, tile in candidates(tokens):
        yield "gate_up", replace(default, block_m=block_m, gate_up=tile)
        yield "down", replace(default, block_m=block_m, down=tile)


def experts_us(stack: Sequence[Layer], config: MoeConfig) -> float:
    pairs = [(layer, layer.with_tiles(config.block_m)) for layer in stack]
    return median_us(lambda: [layer.experts(r, config) for layer, r in pairs], len(stack))


@torch.inference_mode()
def run_once(job: tuple[Shape, int, MoeConfig]) -> float:
    """Leaves the compiled kernels in Triton's cache."""
    shape, tokens, config = job
    return experts_us([Layer.make(shape, tokens, torch.device("cuda"))], config)


def sweep(shape: Shape, tokens: int) -> list[Result]:
    """Both grouped GEMMs, one of them with another tile; fastest first."""
    tried, stack = list(variants(tokens)), layers(shape, tokens)
    compile_all(run_once, [(shape, tokens, config) for _, config in tried])
    found: list[Result] = []
    for name, config in tried:
        took, tile = try_us(partial(experts_us, stack, config)), asdict(config)[name]
        found.append({"gemm": name, "us": took, "block_m": config.block_m, **tile})
    return sorted(found, key=lambda row: (row["gemm"], row["us"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[*DECODE, *PREFILL])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true", help="try tile sizes")
    options = parser.parse_args()
    shape, ceilings = SHAPES[options.shape], Ceilings.measure(torch.device("cuda"), HALF)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "shape": options.shape}
    print(f"{results['gpu']}, {options.shape}. {ceilings.line()}")
    results["cases"] = []
    for tokens in options.tokens:
        row = case(shape, tokens, ceilings)
        results["cases"].append(row)
        print(
            f"{tokens:6} tokens, {row['touched']:5.1f} experts: layer {row['layer']:8.2f} us, floor"
            f" {row['floor_us']:8.2f} ({row['layer'] / row['floor_us']:4.2f}x); router"
            f" {row['router']:6.2f}, experts {row['experts']:8.2f}, grouped_mm"
            f" {row['grouped_mm']:8.2f}"
            + (f", Triton {row['triton']:8.2f}" if "triton" in row else ""),
            flush=True,
        )
        if options.sweep:
            row["sweep"] = sweep(shape, tokens)
            for name, group in itertools.groupby(row["sweep"], lambda tried: tried["gemm"]):
                for tried in itertools.islice(group, 4):
                    tile = f"M{tried['block_m']} N{tried['block_n']} K{tried['block_k']}"
                    tile += f" w{tried['num_warps']} s{tried['num_stages']}"
                    print(f"         {name:8} {tried['us']:8.2f} us  {tile}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
