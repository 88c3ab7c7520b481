"""Gated delta rule, causal convolution and gated norm against loops over tokens in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.linear_attention.causal_conv import (
    ConvState,
    causal_conv_prefill,
    causal_conv_prefill_ref,
    causal_conv_update,
    causal_conv_update_ref,
)
from forerun.kernels.linear_attention.chunks import PromptChunks
from forerun.kernels.linear_attention.gated_delta import (
    DeltaGates,
    DeltaState,
    gated_delta_prefill,
    gated_delta_prefill_ref,
    gated_delta_update,
    gated_delta_update_ref,
)
from forerun.kernels.linear_attention.gated_norm import gated_rms_norm, gated_rms_norm_ref
from forerun.kernels.linear_attention.replay import (
    ConvStates,
    DeltaStates,
    SnapshotRows,
    replay_conv,
    replay_conv_ref,
    replay_gated_delta,
    replay_gated_delta_ref,
)

SLOTS, WIDTH = 4, 5
F32 = torch.float32


@dataclass(frozen=True)
class Heads:
    k: int
    v: int
    k_dim: int
    v_dim: int

    @property
    def conv(self) -> int:
        return 2 * self.k * self.k_dim + self.v * self.v_dim


SMALL, ODD, REAL = Heads(2, 4, 8, 16), Heads(1, 3, 12, 10), Heads(16, 32, 128, 128)
UPDATES = [gated_delta_update, gated_delta_update_ref]
PREFILLS = [gated_delta_prefill, gated_delta_prefill_ref]
CONV_UPDATES = [causal_conv_update, causal_conv_update_ref]
CONV_PREFILLS = [causal_conv_prefill, causal_conv_prefill_ref]


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = F32) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device, dtype)


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    """`want` in float64."""
    if got.dtype != F32:
        tolerance = 2e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def prompts(counts: tuple[int, ...], device: torch.device) -> PromptChunks:
    return PromptChunks.of(counts, lambda host: host.to(device))


# --- the gated delta rule -------------------------------------------------------------------------


def gates(tokens: int, heads: Heads, device: torch.device, dtype: torch.dtype = F32) -> DeltaGates:
    both = normal(tokens, 2 * heads.v + 3, seed=1, device=device, dtype=dtype)[:, 3:]
    b, a = both.chunk(2, 1)
    decay = normal(heads.v, seed=2, device=device).exp() * 0.3
    return DeltaGates(a, b, decay, normal(heads.v, seed=3, device=device))


def state(
    heads: Heads,
    device: torch.device,
    slots: list[int],
    pending: list[int],
    width: int = WIDTH,
) -> DeltaState:
    """What no pass reads is NaN."""
    made = DeltaState(
        slots=torch.tensor(slots, device=device),
        num_pending=torch.zeros(SLOTS, dtype=torch.int32, device=device),
        num_passes=torch.tensor([3, 0, 1, 2], dtype=torch.int32, device=device),
        state=normal(SLOTS, heads.v, heads.k_dim, heads.v_dim, seed=4, device=device),
        k=normal(SLOTS, width, 2, heads.k, heads.k_dim, seed=5, device=device),
        delta=normal(SLOTS, width, heads.v, heads.v_dim, seed=6, device=device),
        g=-normal(SLOTS, width, 2, heads.v, seed=7, device=device).abs(),
    )
    for slot, count in zip(slots, pending, strict=True):
        made.num_pending[slot] = count
        made.delta[slot, count:] = torch.nan
        for kept in (made.k, made.g):
            kept[slot, count:] = torch.nan
            kept[slot, :, 1 - int(made.num_passes[slot]) % 2] = torch.nan
    return made


def copied(each: DeltaState) -> DeltaState:
    names = "num_pending", "num_passes", "state", "k", "delta", "g"
    return replace(each, **{name: getattr(each, name).clone() for name in names})


def start_of(kept: DeltaState, slot: int) -> Tensor:
    """[HV, Dk, Dv] float64: the state with its pending updates."""
    now, turn = kept.state[slot].double(), int(kept.num_passes[slot]) % 2
    each = kept.state.shape[1] // kept.k.shape[3]
    for i in range(int(kept.num_pending[slot])):
        k = kept.k[slot, i, turn].double().repeat_interleave(each, 0)
        decay = kept.g[slot, i, turn].double().exp()
        now = now * decay[:, None, None] + k[:, :, None] * kept.delta[slot, i].double()[:, None]
    return now


def by_token(qkv: Tensor, of: DeltaGates, heads: Heads, now: Tensor) -> tuple[Tensor, list[Tensor]]:
    """o [n, HV, Dv] and the state after each of n tokens, as the paper writes it."""
    keys, each = heads.k * heads.k_dim, heads.v // heads.k
    outs, states = [], []
    for x, a, b in zip(qkv.double(), of.a.double(), of.b, strict=True):
        q, k, v = x.split_with_sizes((keys, keys, heads.v * heads.v_dim))
        q, k = (
            (y := each_head.view(heads.k, -1)) * torch.rsqrt((y * y).sum(1, keepdim=True) + 1e-6)
            for each_head in (q, k)
        )
        q, k = (y.repeat_interleave(each, 0) for y in (q * heads.k_dim**-0.5, k))
        g = -of.decay.double() * F.softplus(a + of.dt_bias.double())
        now = now * g.exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", now, k)
        delta = b.sigmoid().double()[:, None] * (v.view(heads.v, -1) - read)
        now = now + k[:, :, None] * delta[:, None]
        outs.append(torch.einsum("hkv,hk->hv", now, q))
        states.append(now)
    return torch.stack(outs), states


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("function", UPDATES)
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("heads", [SMALL, ODD], ids=["small", "odd"])
def test_update(function: object, tokens: int, heads: Heads, device: torch.device) -> None:
    check_update(function, tokens, heads, F32, device)


@pytest.mark.parametrize("function", UPDATES)
def test_update_of_bfloat16_states(function: object, device: torch.device) -> None:
    """Rounded once per pass, when stored: the outputs are those of the state before that."""
    check_update(function, 2, SMALL, F32, device, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_update_real(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    check_update(gated_delta_update, tokens, REAL, dtype, device)


def check_update(
    function: object,
    tokens: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    state_dtype: torch.dtype = F32,
) -> None:
    """One pass, and then what a next pass makes of every number of committed tokens."""
    assert callable(function)
    slots, pending = [2, 0, 3], [0, 3, 5]
    kept = state(heads, device, slots, pending)
    kept = replace(kept, state=kept.state.to(state_dtype))
    before = copied(kept)
    qkv = normal(3 * tokens, heads.conv, seed=8, device=device, dtype=dtype)
    of = gates(3 * tokens, heads, device, dtype)
    out = function(qkv, of, kept)
    assert out.dtype == dtype
    after = []
    for i, slot in enumerate(slots):
        rows = slice(i * tokens, (i + 1) * tokens)
        part = replace(of, a=of.a[rows], b=of.b[rows])
        start = start_of(before, slot)
        want, states = by_token(qkv[rows], part, heads, start)
        close(out[rows], want)
        close(kept.state[slot], start)
        after.append([start, *states])
    untouched = next(slot for slot in range(SLOTS) if slot not in slots)
    for name in ("state", "k", "delta", "g"):
        assert torch.equal(getattr(kept, name)[untouched], getattr(before, name)[untouched])
    kept.num_passes[slots] += 1
    for committed in range(tokens + 1):
        kept.num_pending[slots] = committed
        for i, slot in enumerate(slots):
            close(start_of(kept, slot), after[i][committed], 1e-4)


def random_trees(count: int, nodes: int, device: torch.device) -> Tensor:
    """[count, nodes] int64: parents, -1 for the root; one tree of them is a chain."""
    draw, index = random.Random(5), range(nodes)
    trees = [
        [draw.randint(max(i // 3 - 1, 0), i - 1) if i else -1 for i in index] for _ in range(count)
    ]
    trees[1] = [i - 1 for i in index]
    return torch.tensor(trees, device=device)


def path_to(parents: list[int], node: int) -> list[int]:
    """The tokens from the root to this one."""
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else []), node]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("function", UPDATES)
@pytest.mark.parametrize("nodes", [2, 9, 70])
@pytest.mark.parametrize("heads", [SMALL, ODD], ids=["small", "odd"])
def test_update_of_trees(function: object, nodes: int, heads: Heads, device: torch.device) -> None:
    check_tree(function, nodes, heads, F32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [2, 33, 256])
def test_update_of_trees_real(nodes: int, dtype: torch.dtype, device: torch.device) -> None:
    check_tree(gated_delta_update, nodes, REAL, dtype, device)


def check_tree(
    function: object, nodes: int, heads: Heads, dtype: torch.dtype, device: torch.device
) -> None:
    """Every token is as if its path had been a chain, and so is what it leaves to be replayed."""
    assert callable(function)
    slots, pending = [2, 0, 3], [0, 2, 1]
    kept = state(heads, device, slots, pending, width=nodes + 1)
    before, parents = copied(kept), random_trees(3, nodes, device)
    qkv = normal(3 * nodes, heads.conv, seed=8, device=device, dtype=dtype)
    of = gates(3 * nodes, heads, device, dtype)
    out = function(qkv, of, kept, parents)
    assert out.dtype == dtype
    kept.num_passes[slots] += 1
    for i, slot in enumerate(slots):
        start = start_of(before, slot)
        close(kept.state[slot], start)
        for node in range(nodes) if nodes < 10 else range(0, nodes, 7):
            path = path_to(parents[i].tolist(), node)
            rows = torch.tensor(path, device=device) + i * nodes
            part = replace(of, a=of.a[rows], b=of.b[rows])
            want, states = by_token(qkv[rows], part, heads, start)
            close(out[i * nodes + node], want[-1])
            moved = copied(kept)
            for update in (moved.k, moved.delta, moved.g):
                update[slot, : len(path)] = update[slot, path]
            moved.num_pending[slot] = len(path)
            close(start_of(moved, slot), states[-1], 1e-4)
    for name in ("state", "k", "delta", "g"):
        assert torch.equal(getattr(kept, name)[1], getattr(before, name)[1])


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("function", PREFILLS)
@pytest.mark.parametrize("heads", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("counts", [(1, 3, 2), (63, 65, 64), (130, 1, 17)])
def test_prefill(
    function: object, counts: tuple[int, ...], heads: Heads, device: torch.device
) -> None:
    check_prefill(function, counts, heads, F32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(1, 3, 2), (63, 65, 64), (700, 1, 128)])
def test_prefill_real(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check_prefill(gated_delta_prefill, counts, REAL, dtype, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("function", PREFILLS)
def test_prefill_of_bfloat16_states(function: object, device: torch.device) -> None:
    check_prefill(function, (3, 5, 1), SMALL, F32, device, torch.bfloat16)


@pytest.mark.exhaustive
def test_prefill_in_half_precision(device: torch.device) -> None:
    """float16, because Triton's interpreter has no matrix products of bfloat16."""
    check_prefill(gated_delta_prefill, (1, 70, 64), SMALL, torch.float16, device)


def check_prefill(
    function: object,
    counts: tuple[int, ...],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    state_dtype: torch.dtype = F32,
) -> None:
    assert callable(function)
    slots = [2, 0, 3]
    kept = state(heads, device, slots, [0, 0, 0])
    kept = replace(kept, state=kept.state.to(state_dtype))
    before = copied(kept)
    qkv = normal(sum(counts), heads.conv, seed=8, device=device, dtype=dtype)
    of, first = gates(sum(counts), heads, device, dtype), 0
    out = function(qkv, of, kept, prompts(counts, device))
    for slot, count in zip(slots, counts, strict=True):
        rows = slice(first, first + count)
        part = replace(of, a=of.a[rows], b=of.b[rows])
        want, states = by_token(qkv[rows], part, heads, before.state[slot].double())
        close(out[rows], want, 1e-4)
        close(kept.state[slot], states[-1], 1e-4 if dtype == F32 else 2e-2)
        first += count
    assert torch.equal(kept.state[1], before.state[1])


# --- convolution ----------------------------------------------------------------------------------


def conv_state(
    size: int, channels: int, slots: list[int], device: torch.device, dtype: torch.dtype = F32
) -> ConvState:
    made = ConvState(
        slots=torch.tensor(slots, device=device),
        num_pending=torch.tensor([3, 9, 0, WIDTH], dtype=torch.int32, device=device),
        state=normal(SLOTS, size - 1, channels, seed=1, device=device, dtype=dtype),
        inputs=normal(SLOTS, WIDTH, channels, seed=2, device=device, dtype=dtype),
    )
    made.inputs[0, 3:] = torch.nan
    made.inputs[2] = torch.nan
    return made


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """x [K - 1 + n, C] -> [n, C], in float64."""
    size = weight.shape[1]
    rows = [x[i : i + size].double().T * weight.double() for i in range(len(x) - size + 1)]
    return F.silu(torch.stack([row.sum(1) for row in rows]))


@pytest.mark.parametrize("function", CONV_UPDATES)
@pytest.mark.parametrize("tokens", [1, 2, WIDTH])
@pytest.mark.parametrize(("size", "channels"), [(4, 130), (3, 7), (2, 20)])
def test_conv_update(
    function: object, tokens: int, size: int, channels: int, device: torch.device
) -> None:
    assert callable(function)
    slots = [3, 0, 2]
    kept = conv_state(size, channels, slots, device)
    weight = normal(channels, size, seed=3, device=device)
    x = normal(3 * tokens, channels + 4, seed=4, device=device)[:, 4:]
    untouched = kept.state[1].clone(), kept.inputs[1].clone()
    before = [torch.cat((kept.state[s], kept.inputs[s, : kept.num_pending[s]])) for s in slots]
    out = function(x, weight, kept)
    for i, (slot, old) in enumerate(zip(slots, before, strict=True)):
        rows = x[i * tokens : (i + 1) * tokens]
        window = old[len(old) - size + 1 :]
        close(out[i * tokens : (i + 1) * tokens], convolved(torch.cat((window, rows)), weight))
        assert torch.equal(kept.state[slot], window)
        assert torch.equal(kept.inputs[slot, :tokens], rows)
    assert torch.equal(kept.state[1], untouched[0]) and torch.equal(kept.inputs[1], untouched[1])


@pytest.mark.parametrize("function", CONV_UPDATES)
@pytest.mark.parametrize("nodes", [2, WIDTH])
@pytest.mark.parametrize(("size", "channels"), [(4, 130), (3, 7), (2, 20)])
def test_conv_update_of_trees(
    function: object, nodes: int, size: int, channels: int, device: torch.device
) -> None:
    assert callable(function)
    slots, parents = [3, 0, 2], random_trees(3, nodes, device)
    kept = conv_state(size, channels, slots, device)
    weight = normal(channels, size, seed=3, device=device)
    x = normal(3 * nodes, channels + 4, seed=4, device=device)[:, 4:]
    before = [torch.cat((kept.state[s], kept.inputs[s, : kept.num_pending[s]])) for s in slots]
    out = function(x, weight, kept, parents).view(3, nodes, channels)
    for i, (slot, old) in enumerate(zip(slots, before, strict=True)):
        rows = x[i * nodes : (i + 1) * nodes]
        window = old[len(old) - size + 1 :]
        assert torch.equal(kept.state[slot], window)
        assert torch.equal(kept.inputs[slot, :nodes], rows)
        for node in range(nodes):
            path = path_to(parents[i].tolist(), node)
            close(out[i, node], convolved(torch.cat((window, rows[path])), weight)[-1])


@pytest.mark.parametrize("function", CONV_PREFILLS)
@pytest.mark.parametrize("counts", [(1, 2, 3), (40, 1, 5)])
@pytest.mark.parametrize(("size", "channels"), [(4, 130), (2, 20)])
def test_conv_prefill(
    function: object, counts: tuple[int, ...], size: int, channels: int, device: torch.device
) -> None:
    assert callable(function)
    slots, first = [3, 0, 2], 0
    kept = conv_state(size, channels, slots, device)
    weight = normal(channels, size, seed=3, device=device)
    x = normal(sum(counts), channels + 4, seed=4, device=device)[:, 4:]
    before = kept.state.clone()
    out = function(x, weight, kept, prompts(counts, device))
    for slot, count in zip(slots, counts, strict=True):
        whole = torch.cat((before[slot], x[first : first + count]))
        close(out[first : first + count], convolved(whole, weight))
        assert torch.equal(kept.state[slot], whole[len(whole) - size + 1 :])
        first += count
    assert torch.equal(kept.state[1], before[1])


# --- states at a length within the last pass ------------------------------------------------------

LAYERS, ROWS = 2, 5


def rows_of(counts: list[int], device: torch.device) -> SnapshotRows:
    """Of slots 2, 0 and 3, to rows 4, 1 and 2."""
    return SnapshotRows(
        slots=torch.tensor([2, 0, 3], device=device),
        rows=torch.tensor([4, 1, 2], device=device),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        num_passes=torch.tensor([3, 0, 1, 2], dtype=torch.int32, device=device),
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("function", [replay_gated_delta, replay_gated_delta_ref])
@pytest.mark.parametrize("counts", [(1, 0, 4), (3, 5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [SMALL, ODD], ids=["small", "odd"])
def test_replay_gated_delta(
    function: object,
    counts: tuple[int, ...],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    check_replay(function, list(counts), heads, dtype, device)


@pytest.mark.gpu
def test_replay_real(device: torch.device) -> None:
    check_replay(replay_gated_delta, [1, 0, 4], REAL, F32, device)


def check_replay(
    function: object, counts: list[int], heads: Heads, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows hold what the next pass would begin with, had so many tokens been committed."""
    assert callable(function)
    to = rows_of(counts, device)
    layers = [state(heads, device, to.slots.tolist(), counts) for _ in range(LAYERS)]
    layers = [replace(each, state=each.state.to(dtype) * i) for i, each in enumerate(layers)]
    parts = (torch.stack([getattr(each, n) for each in layers]) for n in ("k", "delta", "g"))
    shape = (LAYERS, ROWS, heads.v, heads.k_dim, heads.v_dim)
    snapshots = normal(*shape, seed=9, device=device, dtype=dtype)
    before = snapshots.clone()
    states = torch.stack([each.state for each in layers])
    function(DeltaStates(states, *parts, snapshots), to)
    written = [r for r, count in zip(to.rows.tolist(), counts, strict=True) if count]
    for row in range(ROWS):
        for i, layer in enumerate(layers):
            if row in written:
                slot = int(to.slots[to.rows.tolist().index(row)])
                close(snapshots[i, row], start_of(layer, slot))
            else:
                assert torch.equal(snapshots[i, row], before[i, row])


@pytest.mark.covering(1)
@pytest.mark.parametrize("function", [replay_conv, replay_conv_ref])
@pytest.mark.parametrize("counts", [(1, 0, 4), (3, 5, 0)])
@pytest.mark.parametrize(("size", "channels"), [(4, 130), (2, 7)])
def test_replay_conv(
    function: object, counts: tuple[int, ...], size: int, channels: int, device: torch.device
) -> None:
    assert callable(function)
    to = rows_of(list(counts), device)
    kept = normal(LAYERS, SLOTS, size - 1, channels, seed=1, device=device)
    inputs = normal(LAYERS, SLOTS, WIDTH, channels, seed=2, device=device)
    snapshots = normal(LAYERS, ROWS, size - 1, channels, seed=3, device=device)
    want = snapshots.clone()
    for slot, row, count in zip(to.slots.tolist(), to.rows.tolist(), counts, strict=True):
        inputs[:, slot, count:] = torch.nan
        if count:
            whole = torch.cat((kept[:, slot], inputs[:, slot, :count]), 1)
            want[:, row] = whole[:, count:]
    function(ConvStates(kept, inputs, snapshots), to)
    assert torch.equal(snapshots, want)


# --- norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [gated_rms_norm, gated_rms_norm_ref])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(6, 12), (4, 64)])
def test_gated_norm(
    function: object, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    assert callable(function)
    x = normal(5, heads, dim, seed=1, device=device, dtype=dtype)
    z = normal(5, heads * dim + 8, seed=2, device=device, dtype=dtype)[:, 8:]
    weight = normal(dim, seed=3, device=device, dtype=dtype)
    normed = x.double() / (x.double().square().mean(2, keepdim=True) + 1e-5).sqrt()
    want = (normed * weight.double()).flatten(1) * F.silu(z.double())
    got = function(x, z, weight, 1e-5)
    assert got.shape == (5, heads * dim)
    close(got, want)
