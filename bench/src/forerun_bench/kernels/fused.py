"""The kernels between GEMMs at Qwen3-8B's shapes: time, bandwidth, and plain PyTorch's time.

    python -m forerun_bench.kernels.fused --tokens 1 16 128 512 --json results.json

Needs a GPU. Times are per call, of many calls in one CUDA graph; inputs are small enough to stay
in the L2 cache for few tokens, as they do in a decode step. The copy bandwidth is measured in
the same run on buffers that do not fit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from forerun.config.rope_config import RopeConfig
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.kernels.elementwise import gated_act as activation
from forerun.kernels.elementwise import qk_norm_rope as qkv
from forerun.kernels.elementwise import rms_norm as norm
from forerun.kernels.sampling import argmax
from forerun.kernels.speculation import accept, decode_inputs
from forerun.layers.rope import Rope
from forerun.sampling.sampler import SamplingFlags, sample, sample_ref
from forerun.sampling.table import SamplingTable
from forerun.speculative.simulate import SimulatedAcceptance
from forerun_bench.ceilings import seconds_of

H, INNER, VOCAB, HEADS, KV_HEADS, DIM, PAGE, EPS = 4096, 12288, 151936, 32, 8, 128, 16, 1e-6
DRAFT_LAYERS, WIDTH = 5, 16
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
Run = Callable[[], object]


@dataclass(frozen=True)
class Result:
    kernel: str
    tokens: int
    us: float
    torch_us: float
    gbs: float
    of_copy: float  # share of the measured copy bandwidth


def timed(run: Run, calls: int = 20) -> float:
    """µs a call, of `calls` calls in one graph."""

    def work() -> None:
        for _ in range(calls):
            run()

    return seconds_of(work, DEVICE) * 1e6 / calls


def copy_bandwidth() -> float:
    """GB/s, read and write, of 1 GiB."""
    source = torch.empty(1 << 29, dtype=DTYPE, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), calls=2) / 1e3


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


Cases = dict[str, tuple[Run, Run, int]]  # name -> (kernel, reference, bytes moved)


def kernel_cases(tokens: int) -> Cases:
    """Kernels of a decode step."""
    return _norm_cases(tokens) | _qkv_cases(tokens) | _step_cases(tokens)


def _norm_cases(tokens: int) -> Cases:
    x, residual, weight = normal(tokens, H), normal(tokens, H), normal(H)
    partials = normal(4, tokens, H, dtype=torch.float32)
    gate_up = normal(tokens, 2 * INNER)
    return {
        "norm": (
            lambda: norm.rms_norm(x, weight, EPS),
            lambda: norm.rms_norm_ref(x, weight, EPS),
            2 * x.nbytes,
        ),
        "add + norm": (
            lambda: norm.add_rms_norm(x, residual, weight, EPS),
            lambda: norm.add_rms_norm_ref(x, residual, weight, EPS),
            4 * x.nbytes,
        ),
        "4 split-K partials + add + norm": (
            lambda: norm.add_rms_norm(partials, residual, weight, EPS),
            lambda: norm.add_rms_norm_ref(partials, residual, weight, EPS),
            partials.nbytes + 3 * x.nbytes,
        ),
        "silu · mul": (
            lambda: activation.silu_mul(gate_up, DTYPE),
            lambda: activation.silu_mul_ref(gate_up, DTYPE),
            gate_up.nbytes * 3 // 2,
        ),
    }


def _qkv_cases(tokens: int) -> Cases:
    qkv_out = normal(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    context = normal(tokens, 2 * DRAFT_LAYERS * KV_HEADS * DIM)
    table = Rope(RopeConfig(theta=1e6), DIM, 2048, DTYPE, DEVICE).table
    positions = torch.randint(0, 2048, (tokens,), device=DEVICE, dtype=torch.int32)
    pages = -(-tokens // PAGE) + 1
    kv_slots = torch.randperm(pages * PAGE, device=DEVICE)[:tokens]
    pool = torch.zeros(2, DRAFT_LAYERS, pages, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    keys = normal(DRAFT_LAYERS, DIM)
    norms, layer_norms = qkv.HeadNorms(keys[0], keys[1], EPS), qkv.HeadNorms(keys[0], keys, EPS)
    rope = qkv.RopePositions(table, positions)
    one_layer = (HEADS, norms, rope, kv_slots, pool[0, 0], pool[1, 0])
    all_layers = (layer_norms, rope, kv_slots, pool)
    return {
        "QK-norm + RoPE + write": (
            lambda: qkv.qk_norm_rope_write(qkv_out, *one_layer),
            lambda: qkv.qk_norm_rope_write_ref(qkv_out, *one_layer),
            2 * qkv_out.nbytes,
        ),
        "K-norm + RoPE + write, 5 layers": (
            lambda: qkv.kv_norm_rope_write(context, *all_layers),
            lambda: qkv.kv_norm_rope_write_ref(context, *all_layers),
            2 * context.nbytes,
        ),
    }


def _step_cases(tokens: int) -> Cases:
    logits = normal(tokens, VOCAB)
    batch = max(1, tokens // WIDTH)
    sampled = torch.zeros(batch, WIDTH, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(batch, device=DEVICE)
    start = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    state = accept.SlotState(
        torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(batch + 1, dtype=torch.int64, device=DEVICE),
        torch.zeros(batch + 1, 4096, dtype=torch.int32, device=DEVICE),
    )
    step = (sampled[:, 1:], sampled, slots, start, state)
    simulated = SimulatedAcceptance.of(6.5, WIDTH, batch + 1, DEVICE)
    page_table = torch.zeros(batch + 1, 2560, dtype=torch.int32, device=DEVICE)
    tables = (slots, state.kv_len, state.last_token, page_table, WIDTH, PAGE, 2560 * PAGE)
    return {
        "argmax": (
            lambda: argmax.argmax(logits),
            lambda: argmax.argmax_ref(logits),
            logits.nbytes,
        ),
        "accept + commit": (
            lambda: accept.accept_commit(*step),
            lambda: accept.accept_commit_ref(*step),
            4 * sampled.nbytes,
        ),
        "simulated acceptance": (
            lambda: simulated.num_committed(slots, WIDTH),
            lambda: simulated.num_committed_ref(slots, WIDTH),
            3 * slots.nbytes,
        ),
        "decode inputs, 2,560 pages": (
            lambda: decode_inputs.build_decode_inputs(*tables),
            lambda: decode_inputs.build_decode_inputs_ref(*tables),
            2 * batch * page_table[0].nbytes,
        ),
    }


SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.6),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top-p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "top-p 0.95, flat": SamplingParams(temperature=3.0, top_p=0.95),
    "top-k 500, top-p 0.95": SamplingParams(temperature=0.6, top_k=500, top_p=0.95),
}


def sampling_cases(tokens: int) -> dict[str, tuple[Run, Run, int]]:
    batch = max(1, tokens // WIDTH)
    logits = 4 * normal(batch, tokens // batch, VOCAB)
    positions = torch.randint(0, 2048, logits.shape[:2], device=DEVICE, dtype=torch.int32)
    found: dict[str, tuple[Run, Run, int]] = {}
    for name, params in SAMPLING.items():
        table = SamplingTable(batch, DEVICE)
        requests = [Request("r", (1, 2), params, i, frozenset((3,))) for i in range(batch)]
        sampling = [request.sampling for request in requests]
        table.set(range(batch), sampling)
        batch_params = table.gather(torch.arange(batch, device=DEVICE))
        flags = SamplingFlags.of(sampling)
        found[f"sample: {name}"] = (
            partial(sample, logits, positions, batch_params, flags),
            partial(sample_ref, logits, positions, batch_params, flags),
            logits.nbytes,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies at {copy:.0f} GB/s")
    results = []
    for tokens in options.tokens:
        for name, (kernel, reference, size) in (
            kernel_cases(tokens) | sampling_cases(tokens)
        ).items():
            sampled = name.startswith("sample")
            us = timed(kernel, 3 if sampled else 20)
            torch_us = timed(reference, 1 if sampled else 20)
            gbs = size / us / 1e3
            result = Result(name, tokens, us, torch_us, gbs, gbs / copy)
            results.append(asdict(result))
            print(
                f"{tokens:4} tokens  {name:32} {us:8.2f} µs  {gbs:6.0f} GB/s"
                f" {gbs / copy:6.1%} of copy   PyTorch {torch_us:8.2f} µs",
                flush=True,
            )
    if options.json is not None:
        found = {"device": torch.cuda.get_device_name(), "copy_gbs": copy, "results": results}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
