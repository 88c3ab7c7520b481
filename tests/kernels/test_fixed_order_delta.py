"""Linear attention in a fixed order: prompts, single tokens and verify passes have equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.linear_attention.causal_conv import (
    ConvState,
    causal_conv_prefill,
    causal_conv_update,
)
from forerun.kernels.linear_attention.chunks import PromptChunks
from forerun.kernels.linear_attention.gated_delta import (
    DeltaGates,
    DeltaState,
    gated_delta_prefill,
    gated_delta_prefill_ref,
    gated_delta_update,
)
from forerun.kernels.linear_attention.replay import DeltaStates, SnapshotRows, replay_gated_delta
from tests.kernels.test_linear_attention import Heads

pytest.importorskip("triton")

SMALL, REAL = Heads(1, 2, 8, 16), Heads(16, 32, 128, 128)
WIDTH, TOKENS, REQUESTS = 5, 17, 2


@dataclass(frozen=True)
class Pass:
    """A pass over `count` tokens of every request, of which `committed` stay."""

    count: int
    committed: int
    prompt: bool = False


def ways(tokens: int) -> dict[str, list[Pass]]:
    """Ways through the same tokens."""
    chunk, one = Pass(4, 4, prompt=True), Pass(1, 1)
    verify = [Pass(5, 2), Pass(5, 5), Pass(4, 1), Pass(3, 2)]
    found = {
        "a prompt": [Pass(tokens, tokens, prompt=True)],
        "chunks": [chunk] * 5,
        "single tokens": [one] * tokens,
        "verify passes": verify * 5,
        "all of them": [chunk, one, one, *verify, one],
    }
    return {name: _until(passes, tokens) for name, passes in found.items()}


def _until(passes: Sequence[Pass], tokens: int) -> list[Pass]:
    """As many passes as there are tokens."""
    out, left = [], tokens
    for each in passes:
        if left == 0:
            break
        count = min(each.count, left)
        out.append(Pass(count, min(each.committed, count), each.prompt))
        left -= out[-1].committed
    return [*out, *[Pass(1, 1)] * left]


def inputs(heads: Heads, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """qkv, a and b of all tokens, [B, T, ...]."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    both = REQUESTS, TOKENS
    return normal(*both, heads.conv), normal(*both, heads.v), normal(*both, heads.v)


def run(
    passes: Sequence[Pass],
    columns: Sequence[Tensor],
    numbers: tuple[Tensor, Tensor],
    forward: Callable[[Pass, list[Tensor]], Tensor],
) -> Tensor:
    """Outputs of all tokens, [B, T, ...]; `numbers`: pending and passes of the slots."""
    pending, done = numbers
    outs, at = [], 0
    for each in passes:
        part = [x[:, at : at + each.count].flatten(0, 1).contiguous() for x in columns]
        if each.prompt and at:  # as an engine has it: a prompt's chunks come first
            assert not pending.any()
        out = forward(each, part).unflatten(0, (REQUESTS, -1))
        outs.append(out[:, : each.committed])
        at += each.committed
        if not each.prompt:
            pending.fill_(each.committed)
            done.add_(1)
    return torch.cat(outs, 1)


def delta_run(
    heads: Heads, passes: Sequence[Pass], parts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Outputs [B, T, HV, Dv], and the states after all tokens [B, HV, Dk, Dv]."""
    device = parts[0].device
    made, own = new_state(heads, device), decays(heads, device)

    def forward(each: Pass, columns: list[Tensor]) -> Tensor:
        qkv, a, b = columns
        gates = DeltaGates(a, b, *own)
        if not each.prompt:
            return gated_delta_update(qkv, gates, made, fixed_order=True)
        counts = [each.count] * REQUESTS
        chunks = PromptChunks.of(counts, lambda host: host.to(device))
        return gated_delta_prefill(qkv, gates, made, chunks, fixed_order=True)

    out = run(passes, parts, (made.num_pending, made.num_passes), forward)
    snapshots = made.state.unsqueeze(0).clone()
    to = SnapshotRows(made.slots, made.slots, made.num_pending, made.num_passes)
    kept = (each.unsqueeze(0) for each in (made.state, made.k, made.delta, made.g))
    replay_gated_delta(DeltaStates(*kept, snapshots), to)
    return out, snapshots[0]


def decays(heads: Heads, device: torch.device) -> tuple[Tensor, Tensor]:
    """exp(A_log) and dt_bias."""
    decay = torch.linspace(0.1, 2, heads.v, device=device)
    return decay, torch.linspace(-1, 1, heads.v, device=device)


def new_state(heads: Heads, device: torch.device) -> DeltaState:
    """What no pass reads is NaN."""
    return DeltaState(
        slots=torch.arange(REQUESTS, device=device),
        num_pending=torch.zeros(REQUESTS, dtype=torch.int32, device=device),
        num_passes=torch.zeros(REQUESTS, dtype=torch.int32, device=device),
        state=torch.zeros(REQUESTS, heads.v, heads.k_dim, heads.v_dim, device=device),
        k=torch.full((REQUESTS, WIDTH, 2, heads.k, heads.k_dim), torch.nan, device=device),
        delta=torch.full((REQUESTS, WIDTH, heads.v, heads.v_dim), torch.nan, device=device),
        g=torch.full((REQUESTS, WIDTH, 2, heads.v), torch.nan, device=device),
    )


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


@pytest.mark.exhaustive
def test_the_delta_rule_has_the_same_bits_in_any_pass(device: torch.device) -> None:
    for heads in (SMALL, REAL) if device.type == "cuda" else (SMALL,):
        for dtype in dtypes(device):
            parts = inputs(heads, device, dtype)
            found = {name: delta_run(heads, each, parts) for name, each in ways(TOKENS).items()}
            want = found["single tokens"]
            assert want[0].isfinite().all()
            for name, got in found.items():
                assert torch.equal(got[0], want[0]), (name, dtype)
                assert torch.equal(got[1], want[1]), (name, dtype)


def test_it_is_the_delta_rule(device: torch.device) -> None:
    parts = inputs(SMALL, device, torch.float32)
    got, after = delta_run(SMALL, ways(TOKENS)["all of them"], parts)
    qkv, a, b = (part.flatten(0, 1) for part in parts)
    gates = DeltaGates(a, b, *decays(SMALL, device))
    kept = new_state(SMALL, device)
    chunks = PromptChunks.of([TOKENS] * REQUESTS, lambda host: host.to(device))
    right = gated_delta_prefill_ref(qkv, gates, kept, chunks)
    torch.testing.assert_close(got.flatten(0, 1), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, kept.state, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_the_convolution_has_the_same_bits_in_any_pass(device: torch.device) -> None:
    channels = 130 if device.type == "cuda" else 40
    for size in (3, 4):
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(REQUESTS, TOKENS, channels, generator=generator).to(device)
        weight = torch.randn(channels, size, generator=generator).to(device)
        x, weight = x.bfloat16(), weight.bfloat16()
        found = {}
        for name, passes in ways(TOKENS).items():
            state = ConvState(
                torch.arange(REQUESTS, device=device),
                torch.zeros(REQUESTS, dtype=torch.int32, device=device),
                x.new_zeros(REQUESTS, size - 1, channels),
                x.new_zeros(REQUESTS, WIDTH, channels),
            )

            def forward(
                each: Pass, columns: list[Tensor], state: ConvState = state, w: Tensor = weight
            ) -> Tensor:
                if not each.prompt:
                    return causal_conv_update(columns[0], w, state)
                counts = [each.count] * REQUESTS
                chunks = PromptChunks.of(counts, lambda host: host.to(device))
                return causal_conv_prefill(columns[0], w, state, chunks)

            found[name] = run(passes, [x], (state.num_pending, torch.zeros(1)), forward)
        for name, got in found.items():
            assert torch.equal(got, found["single tokens"]), (name, size)


@pytest.mark.exhaustive
def test_rows_beyond_32_bits(device: torch.device) -> None:
    """a and b lie 2^30 apart, so that the third one's offset exceeds 2^31.

    8.6 GB, of which on a CPU a few pages are touched.
    """
    stride, tokens, heads = 1 << 30, 3, Heads(1, 1, 4, 4)
    first = 2 * stride  # so that a wrong offset is within the memory
    wide = torch.empty(first + (tokens - 1) * stride + 2, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, heads.conv, generator=generator).to(device, torch.bfloat16)
    near = torch.randn(tokens, 2, generator=generator).to(device, torch.bfloat16)
    far = wide.as_strided((tokens, 2), (stride, 1), first)
    far.copy_(near)
    chunks = PromptChunks.of([tokens], lambda host: host.to(device))
    outs = []
    for each in (near, far):
        state = new_state(heads, device)
        state = replace(state, slots=state.slots[:1])
        gates = DeltaGates(each[:, :1], each[:, 1:], *decays(heads, device))
        outs.append(gated_delta_prefill(qkv, gates, state, chunks, fixed_order=True))
    assert torch.equal(*outs)
