"""Launches the router's kernel for Hopper (`router_sm90.cu`), compiled by NVRTC.

For up to 128 tokens a router is all latency: its weight is small, and its arithmetic is nothing.
So one kernel does everything from x to the experts' tiles, in one cluster of 8 CTAs that exchange
data in distributed shared memory (DSMEM) instead of in two launches through global memory.

1. A CTA computes a slice of K for all experts with mma.sync. Its slice of the weight stays in
   registers: it is loaded before `griddepcontrol_wait()`, while the preceding kernel still runs
   (PDL), and it serves all tokens. Each of the 8 warps has every 8th tile of 8 experts. Up to 16
   tokens are one tile, and each warp loads x itself. Of more tokens x is copied to shared memory
   once per CTA (cp.async), all tiles at once, and a tile is multiplied as soon as it is there.
2. The partials are stored in the shared memory of the CTA that will choose the token's experts,
   which waits at an mbarrier for their bytes and for no remote load. Up to 16 tokens: token t in
   CTA t % 8. More: CTA t / 4 % 8, so that what a warp stores at a time is in 2 CTAs, not in 8.
3. A warp adds up the 8 slices of a token, in order, and chooses its experts. A lane has every 32nd
   expert; one choice is a maximum over keys that are ordered as the scores are, then a minimum over
   the ids of those that have it (redux.sync).
4. The choices go to CTA 0. An expert has a bit there for each token, set if the token chose it. A
   pair's place in the expert's list is the number of bits of earlier tokens: so one thread per pair
   writes the lists, in order of tokens, and one per expert its tiles. One or two tokens are all
   CTA 0's from the start.

No results are added atomically, and the order of every sum is the same for 1 to 128 tokens. So a
token's experts and weights are the same alone and among up to 127 others. (Triton's router, which
serves everything else, adds up in another order.) In a fixed order more tokens are served too, a
cluster per 128 of them; these leave pairs and tiles to `align.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.moe.align import align
from forerun.kernels.moe.config import (
    DECODE_BLOCK_M,
    MAX_DECODE_TOKENS,
    ROUTER_SLICES,
    Sm90RouterConfig,
    choose_moe,
    max_tiles,
    router_sm90_smem_bytes,
)
from forerun.kernels.moe.routing import ExpertTiles, Routed, Routing
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

SOURCE = Path(__file__).with_name("router_sm90.cu")
CTAS, THREADS = ROUTER_SLICES, 256


def cuda_source(
    config: Sm90RouterConfig, routing: Routing, hidden: int, bias: bool, logit_bias: bool = False
) -> str:
    """`router_sm90.cu` with its configuration as macros in front, ready to compile.

    `bias`: there is a correction bias; `logit_bias`: there is one of the logits.
    """
    sizes = {"HIDDEN": hidden, "SLICE": config.slice, "TILES_PER_WARP": config.tiles_per_warp}
    sizes["LOGIT_BIAS"] = int(logit_bias)
    return nvrtc.with_macros(SOURCE, sizes | routing_macros(routing, bias))


def routing_macros(routing: Routing, bias: bool) -> dict[str, int]:
    """A routing as the kernels' macros; `bias`: there is a correction bias."""
    num_groups, kept = routing.groups
    return {
        "NUM_EXPERTS": routing.num_experts,
        "TOP_K": routing.top_k,
        "NUM_SHARED": routing.num_shared,
        "NUM_GROUPS": num_groups,
        "KEPT_GROUPS": kept,
        "TOP2": int(routing.group_score == "top2"),
        "SIGMOID": int(routing.scoring == "sigmoid"),
        "NORM": int(routing.norm_topk_prob),
        "ROUND_LOGITS": int(not routing.float32_logits),
        "HAS_BIAS": int(bias),
    }


def route_sm90(
    x: Tensor,
    weight: Tensor,
    correction_bias: Tensor | None,
    routing: Routing,
    counts: Tensor,
    config: Sm90RouterConfig,
    bias: Tensor | None = None,
) -> Routed:
    """`route` for bfloat16. `counts`: only the experts' progress is used."""
    (tokens, hidden), num_experts, device = x.shape, routing.num_experts, x.device
    assert x.dtype == weight.dtype == torch.bfloat16 and weight.shape == (num_experts, hidden)
    assert bias is None or bias.dtype == torch.bfloat16
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
    blocks = -(-tokens // MAX_DECODE_TOKENS)
    assert blocks == 1 or routing.fixed_order
    shared = routing.num_shared
    k, all_experts = routing.top_k + shared, num_experts + shared
    weights = torch.empty(tokens, k, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=device)
    pairs, tiles, most = None, None, 0
    if blocks == 1:
        pairs = torch.empty(all_experts * tokens, dtype=torch.int32, device=device)
        most = max_tiles(tokens * k, all_experts, DECODE_BLOCK_M)
        tiles = torch.empty(3, most, dtype=torch.int32, device=device)
    biases = correction_bias is not None, bias is not None
    kernel = _load_kernel(device, config, routing, hidden, *biases)
    args = (
        x, weight, correction_bias, bias, weights, experts, pairs, tiles,
        tokens, most, float(routing.routed_scaling_factor),
    )  # fmt: skip
    most_of_block = min(tokens, MAX_DECODE_TOKENS)
    smem = router_sm90_smem_bytes(most_of_block, num_experts, routing.top_k, config.slice)
    nvrtc.launch(replace(kernel, smem_bytes=smem), CTAS * blocks, THREADS, args, device)
    if pairs is None or tiles is None:
        block_m = choose_moe(tokens, gpu_of(device), fixed_order=True).block_m
        made = align(experts, all_experts, block_m)
    else:
        made = ExpertTiles(pairs, tiles, DECODE_BLOCK_M, counts[num_experts + 1 :])
    return Routed(weights, experts, made, shared, fixed_order=routing.fixed_order)


def _most_smem_bytes(
    config: Sm90RouterConfig, routing: Routing, hidden: int, bias: bool, logit_bias: bool = False
) -> int:
    """Returns shared memory for all tokens that it serves, the most of a launch."""
    sizes = routing.num_experts, routing.top_k, config.slice
    return router_sm90_smem_bytes(MAX_DECODE_TOKENS, *sizes)


_load_kernel = nvrtc.loader("router_sm90_kernel", cuda_source, _most_smem_bytes)
