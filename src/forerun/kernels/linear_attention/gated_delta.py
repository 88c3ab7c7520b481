# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): linear attention that overwrites.

Per value head, with a state S [Dk, Dv] in float32, for every token:

    S <- exp(g) S;   δ = β (v - Sᵀ k);   S <- S + k δᵀ;   o = Sᵀ q

q and k are normalised to length 1, q also divided by sqrt(Dk); g = -exp(A_log) · softplus(a +
dt_bias) and β = sigmoid(b). Value head h reads key head h // (HV / HK).

What a token adds to the state is k δᵀ after a decay by exp(g). So a verify pass leaves the state as
it is and stores k, δ and g of its tokens, a fiftieth of a state each; the next pass reads and
writes the state anyway, and first applies those of the committed tokens. (SGLang keeps whole states
per token, or, as "ReplaySSM", the same as here.)

In a fixed order prompts go token by token too, by the same operations on tiles of the same shape.
Products and sums are fused where the source says so and nowhere else: what the compiler would
choose depends on the code around.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import linear_attention as cpu
from forerun.kernels.cpu.library import serves
from forerun.kernels.linear_attention.chunks import CHUNK, PromptChunks
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.kernels.speculation.tree import tree_shape_ref, unpack_bits

# Columns of a state that a warp has in registers: 32 are whole lines of memory. AMD: RDNA has too
# few registers for those, CDNA is not measured.
BLOCK_V, HIP_BLOCK_V = 32, 8
PREFILL_BLOCK_V = 16
# On NVIDIA no wgmma, which needs four warps: with it Triton 3.6 gets operands of 32 columns wrong.
PREFILL_WARPS, HIP_PREFILL_WARPS = 2, 4
EPS = 1e-6  # of the normalisation of q and k


@dataclass(frozen=True)
class DeltaGates:
    """What decides how much a token's state decays and how much of it is overwritten."""

    a: Tensor  # [T, HV], any row stride
    b: Tensor  # [T, HV], any row stride
    decay: Tensor  # [HV] float32: exp(A_log)
    dt_bias: Tensor  # [HV] float32


@dataclass(frozen=True)
class DeltaState:
    """What S slots keep of one layer, and the B slots of a pass."""

    slots: Tensor  # [B] int64
    num_pending: Tensor  # [S] int32: how many updates are committed and not in `state` yet
    num_passes: Tensor  # [S] int32
    state: Tensor  # [S, HV, Dk, Dv] float32, or rounded to bfloat16 after every pass
    # Of the last decode or verify pass. Of k and g there are two: many CTAs read the last one's
    # while one of them writes. The parity of `num_passes` is that of the last one.
    k: Tensor  # [S, W, 2, HK, Dk] float32, normalised
    delta: Tensor  # [S, W, HV, Dv] float32: δ
    g: Tensor  # [S, W, 2, HV] float32


def gated_delta_update(
    qkv: Tensor,
    gates: DeltaGates,
    state: DeltaState,
    parents: Tensor | None = None,
    fixed_order: bool = False,
    rows: RaggedRows | None = None,
) -> Tensor:
    """A decode or verify pass. Applies the pending updates, and stores those of its own tokens.

    Args:
        qkv: [B · q_len, 2 HK Dk + HV Dv]: q, k and v heads; q_len <= W.
        state: updated in place.
        parents: [B, q_len] int64, of a tree: the earlier token that each one follows, -1 for the
            root; None: a chain.
        fixed_order: a token of a chain has the same bits in any pass; states are float32.
        rows: of a ragged pass, with N tokens; None: each request has q_len.

    Returns:
        o [B · q_len, HV, Dv] or [N, HV, Dv], in qkv's dtype.
    """
    if not use_triton(qkv):
        if rows is not None:
            gates = replace(gates, a=rows.unpack(gates.a), b=rows.unpack(gates.b))
            out = gated_delta_update(rows.unpack(qkv), gates, state, parents, fixed_order)
            return rows.pack(out)
        if _on_cpu(qkv, state):
            return gated_delta_cpu(qkv, gates, state, parents=parents)
        return gated_delta_update_ref(qkv, gates, state, parents)
    batch, (_, v_heads, k_dim, v_dim) = len(state.slots), state.state.shape
    width, _, k_heads, _ = state.k.shape[1:]
    assert qkv.is_contiguous() and gates.a.stride(1) == gates.b.stride(1) == 1
    out = torch.empty(len(qkv), v_heads, v_dim, dtype=qkv.dtype, device=qkv.device)
    num_tokens = len(qkv) // batch if rows is None else rows.max_width
    block_v = state_columns()
    _gated_delta_update[(batch * v_heads * triton.cdiv(v_dim, block_v),)](
        qkv, gates.a, gates.b, gates.decay, gates.dt_bias,
        state.slots, state.num_pending, state.num_passes,
        state.state, state.k, state.delta, state.g, out, parents,
        None if rows is None else rows.first, gates.a.stride(0), gates.b.stride(0), width,
        NUM_TOKENS=num_tokens, K_HEADS=k_heads, V_HEADS=v_heads, K_DIM=k_dim, V_DIM=v_dim,
        EPS=EPS, BLOCK_K=triton.next_power_of_2(k_dim), BLOCK_V=block_v,
        enable_fp_fusion=not fixed_order, num_warps=1, **pdl_options(qkv),
    )  # fmt: skip
    return out


def state_columns() -> int:
    """Columns of a state that a CTA has, wherever tokens go one after another."""
    return BLOCK_V if torch.version.hip is None else HIP_BLOCK_V


def _on_cpu(qkv: Tensor, state: DeltaState) -> bool:
    """Whether our kernels for CPUs serve; states in bfloat16 are rounded after every pass."""
    return serves(qkv.dtype, qkv.device) and state.state.dtype == torch.float32


def gated_delta_cpu(
    qkv: Tensor,
    gates: DeltaGates,
    state: DeltaState,
    prompts: PromptChunks | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """Both kinds of passes by our kernel for CPUs; states are float32."""
    chunks = None if prompts is None else prompts.requests
    width = state.delta.shape[1]
    pending = state.slots, state.num_pending, state.num_passes
    requests = cpu.Pass.of(pending, len(qkv), width, chunks, parents)
    own = gates.a, gates.b, gates.decay, gates.dt_bias
    updates = state.k, state.delta, state.g
    return cpu.gated_delta(qkv.contiguous(), own, requests, state.state, updates)


def gated_delta_update_ref(
    qkv: Tensor, gates: DeltaGates, state: DeltaState, parents: Tensor | None = None
) -> Tensor:
    """Reference implementation of `gated_delta_update`."""
    slots = state.slots
    x = _Tokens.of(qkv, gates, state).of_requests(len(slots))
    before = apply_updates(state)
    state.state.index_copy_(0, slots, before.to(state.state.dtype))
    seen = None
    if parents is not None:
        seen = unpack_bits(tree_shape_ref(parents[:, 1:])[2], parents.shape[1])
    o, delta, _ = _advance(x, before, seen)
    width = x.k.shape[1]
    state.delta[:, :width].index_copy_(0, slots, delta)
    turn = 1 - _last_turn(state)
    for kept, new in ((state.k, x.k), (state.g, x.g)):
        kept[slots, :width, turn] = new
    return o.flatten(0, 1).to(qkv.dtype)


def gated_delta_prefill(
    qkv: Tensor,
    gates: DeltaGates,
    state: DeltaState,
    prompts: PromptChunks,
    fixed_order: bool = False,
) -> Tensor:
    """Prefill chunks of B requests, nothing pending.

    Matrix products take operands of qkv's dtype and add up in float32.

    Args:
        qkv: [T, 2 HK Dk + HV Dv].
        state: its `state` is updated in place.
        fixed_order: tokens one after another, with the bits of `gated_delta_update`.

    Returns:
        o [T, HV, Dv], in qkv's dtype.
    """
    if not use_triton(qkv):
        if _on_cpu(qkv, state):
            return gated_delta_cpu(qkv, gates, state, prompts)
        return gated_delta_prefill_ref(qkv, gates, state, prompts)
    assert qkv.is_contiguous() and gates.a.stride(1) == gates.b.stride(1) == 1
    if fixed_order:
        return _prefill_by_token(qkv, gates, state, prompts)
    (tokens, v_heads), (_, _, k_dim, v_dim) = gates.a.shape, state.state.shape
    k_heads, block_k = state.k.shape[3], max(16, triton.next_power_of_2(k_dim))
    inverses = torch.empty(tokens, v_heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    warps = PREFILL_WARPS if torch.version.hip is None else HIP_PREFILL_WARPS
    heads = {"K_HEADS": k_heads, "V_HEADS": v_heads, "K_DIM": k_dim, "V_DIM": v_dim, "EPS": EPS}
    _invert_systems[(len(prompts.chunks), v_heads)](
        qkv, gates.a, gates.b, gates.decay, gates.dt_bias, prompts.chunks, inverses,
        gates.a.stride(0), gates.b.stride(0), **heads, CHUNK=CHUNK, BLOCK_K=block_k,
        num_warps=warps,
    )  # fmt: skip
    out = torch.empty(tokens, v_heads, v_dim, dtype=qkv.dtype, device=qkv.device)
    grid = len(state.slots) * v_heads, triton.cdiv(v_dim, PREFILL_BLOCK_V)
    _gated_delta_prefill[grid](
        qkv, gates.a, gates.b, gates.decay, gates.dt_bias, inverses,
        state.slots, prompts.requests, state.state, out, gates.a.stride(0), gates.b.stride(0),
        **heads, CHUNK=CHUNK, BLOCK_K=block_k, BLOCK_V=PREFILL_BLOCK_V,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out


def _prefill_by_token(
    qkv: Tensor, gates: DeltaGates, state: DeltaState, prompts: PromptChunks
) -> Tensor:
    (tokens, v_heads), (_, _, k_dim, v_dim) = gates.a.shape, state.state.shape
    out = torch.empty(tokens, v_heads, v_dim, dtype=qkv.dtype, device=qkv.device)
    block_v = state_columns()
    _gated_delta_tokens[(len(state.slots) * v_heads, triton.cdiv(v_dim, block_v))](
        qkv, gates.a, gates.b, gates.decay, gates.dt_bias,
        state.slots, prompts.requests, state.state, out, gates.a.stride(0), gates.b.stride(0),
        K_HEADS=state.k.shape[3], V_HEADS=v_heads, K_DIM=k_dim, V_DIM=v_dim, EPS=EPS,
        BLOCK_K=triton.next_power_of_2(k_dim), BLOCK_V=block_v, enable_fp_fusion=False,
        num_warps=1,
    )  # fmt: skip
    return out


def gated_delta_prefill_ref(
    qkv: Tensor, gates: DeltaGates, state: DeltaState, prompts: PromptChunks
) -> Tensor:
    """Reference implementation of `gated_delta_prefill`, one request after another."""
    whole, outs, ends, first = _Tokens.of(qkv, gates, state), [], [], 0
    starts = state.state[state.slots].float().split(1)
    for now, count in zip(starts, prompts.num_tokens, strict=True):
        for at in range(first, first + count, CHUNK):
            part = whole.span(at, min(at + CHUNK, first + count)).of_requests(1)
            o, _, now = _advance(part, now)
            outs.append(o[0])
        ends.append(now)
        first += count
    state.state.index_copy_(0, state.slots, torch.cat(ends).to(state.state.dtype))
    return torch.cat(outs).to(qkv.dtype)


@dataclass(frozen=True)
class _Tokens:
    """Tokens in float32: [T, ...], or [B, q_len, ...] of requests."""

    q: Tensor  # [..., HK, Dk]
    k: Tensor  # [..., HK, Dk]
    v: Tensor  # [..., HV, Dv]
    g: Tensor  # [..., HV]
    beta: Tensor  # [..., HV]

    @classmethod
    def of(cls, qkv: Tensor, gates: DeltaGates, state: DeltaState) -> _Tokens:
        _, v_heads, k_dim, v_dim = state.state.shape
        keys = (qkv.shape[1] - v_heads * v_dim) // 2
        q, k, v = qkv.float().split_with_sizes((keys, keys, v_heads * v_dim), 1)
        q, k = (_unit(x.unflatten(1, (-1, k_dim))) for x in (q, k))
        g = -gates.decay * F.softplus(gates.a.float() + gates.dt_bias)
        beta = gates.b.sigmoid().float()
        return cls(q * k_dim**-0.5, k, v.unflatten(1, (-1, v_dim)), g, beta)

    def span(self, start: int, end: int) -> _Tokens:
        return _Tokens(*(x[start:end] for x in (self.q, self.k, self.v, self.g, self.beta)))

    def of_requests(self, count: int) -> _Tokens:
        """Returns chunks of requests with equally many tokens."""
        parts = (self.q, self.k, self.v, self.g, self.beta)
        return _Tokens(*(x.unflatten(0, (count, -1)) for x in parts))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _last_turn(state: DeltaState) -> Tensor:
    """[B]: which of the two buffers the last pass wrote."""
    return state.num_passes[state.slots].long() & 1


def apply_updates(state: DeltaState) -> Tensor:
    """[B, HV, Dk, Dv] float32: the states after the committed tokens."""
    slots, turn = state.slots, _last_turn(state)
    kept = state.state[slots].float()
    i = torch.arange(state.k.shape[1], device=kept.device)
    beyond = (i >= state.num_pending[slots].unsqueeze(1))[..., None]  # [B, W, 1]: undefined
    g = state.g[slots, :, turn].masked_fill(beyond, 0.0).cumsum(1)
    k = state.k[slots, :, turn].masked_fill(beyond[..., None], 0.0)
    delta = state.delta[slots].masked_fill(beyond[..., None], 0.0)
    decayed = (g[:, -1:] - g).exp().unsqueeze(3) * delta
    k = _per_value_head(k, kept.shape[1]).permute(0, 2, 3, 1)
    return torch.addcmul(k @ decayed.transpose(1, 2), kept, g[:, -1].exp()[..., None, None])


def _per_value_head(x: Tensor, v_heads: int) -> Tensor:
    """x [B, n, HK, D] -> [B, n, HV, D]."""
    return x.repeat_interleave(v_heads // x.shape[2], 2)


def _advance(
    x: _Tokens, before: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Up to CHUNK tokens of B requests at once: (o, δ [B, n, HV, Dv], the states after them).

    With G the running sum of g, unrolling the recurrence gives a lower triangular system for δ:
    δ_i = β_i (v_i - e^(G_i) Sᵀ k_i - Σ_(j < i) e^(G_i - G_j) (k_i · k_j) δ_j).
    In a tree, sums are over the path to i: `seen` [B, n, n] bool, whether j is on it; there is no
    state after all tokens.
    """
    heads = before.shape[1]
    q, k = (_per_value_head(each, heads).transpose(1, 2) for each in (x.q, x.k))
    v, g = x.v.transpose(1, 2), x.g.transpose(1, 2)  # [B, HV, n, Dv], [B, HV, n]
    total = g.cumsum(2) if seen is None else g @ seen.transpose(1, 2).to(g.dtype)
    beta, grown = x.beta.transpose(1, 2).unsqueeze(3), total.exp().unsqueeze(3)
    delta = beta * torch.addcmul(v, grown, k @ before, value=-1)
    if total.shape[2] == 1:
        after = torch.addcmul(k.transpose(2, 3) * delta, before, grown)
        return (q @ after).transpose(1, 2), delta.transpose(1, 2), after
    later = torch.ones(total.shape[2:] * 2, dtype=torch.bool, device=total.device).triu(1)
    if seen is not None:
        later = ~seen.unsqueeze(1)
    decay = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
    system = (beta * k) @ k.transpose(2, 3) * decay  # its diagonal counts as 1
    delta = torch.linalg.solve_triangular(system, delta, upper=False, unitriangular=True)
    o = (q * grown) @ before + (q @ k.transpose(2, 3) * decay) @ delta
    left = (total[..., -1:] - total).exp().unsqueeze(3)
    after = torch.addcmul((k * left).transpose(2, 3) @ delta, before, grown[:, :, -1:])
    return o.transpose(1, 2), delta.transpose(1, 2), after


@jit
def _gated_delta_update(
    qkv, a_ptr, b_ptr, decay_ptr, dt_bias_ptr, slots, num_pending, num_passes,
    state, k_kept, delta_kept, g_kept, out_ptr, parents, first_rows, a_stride, b_stride, width,
    NUM_TOKENS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, EPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK_V columns of a request's state of a value head, which stay in registers.

    The columns of a state do not read each other, nor do those of δ. k and g are the same for all
    columns and written by the first of them; the last pass's are in the other of two buffers.

    In a chain (`parents` None) the state goes from token to token. In a tree it stays where it was
    before the pass, and every token adds up what those on its path have written.
    `first_rows` None: each request has NUM_TOKENS tokens; else at most so many.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NUM_BLOCKS: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    block, pair = tl.program_id(0) % NUM_BLOCKS, tl.program_id(0) // NUM_BLOCKS
    request, head = (pair // V_HEADS).to(tl.int64), pair % V_HEADS
    k_head = head // (V_HEADS // K_HEADS)
    first = block == 0
    slot = tl.load(slots + request)
    pending = tl.load(num_pending + slot)
    turn = tl.load(num_passes + slot) & 1
    row = tl.arange(0, BLOCK_K)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k, inside_v = row < K_DIM, column < V_DIM
    inside = inside_k[:, None] & inside_v[None, :]
    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)

    state += (slot * V_HEADS + head) * (K_DIM * V_DIM) + row[:, None] * V_DIM + column[None, :]
    k_kept += slot * width * (2 * K_HEADS * K_DIM) + k_head * K_DIM + row
    g_kept += slot * width * (2 * V_HEADS) + head
    delta_kept += (slot * width * V_HEADS + head) * V_DIM + column
    s = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    for i in range(pending):
        k = tl.load(k_kept + (2 * i + turn) * (K_HEADS * K_DIM), mask=inside_k, other=0.0)
        delta = tl.load(delta_kept + i * (V_HEADS * V_DIM), mask=inside_v, other=0.0)
        g = tl.load(g_kept + (2 * i + turn) * V_HEADS)
        s = add_update(s * tl.exp(g), k, delta)
    tl.store(state, s.to(state.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all of the last pass's δ are read before any is overwritten

    ROW: tl.constexpr = (2 * K_HEADS) * K_DIM + V_HEADS * V_DIM
    K_ROW: tl.constexpr = K_HEADS * K_DIM
    V_ROW: tl.constexpr = V_HEADS * V_DIM
    if first_rows is None:
        begin, count = request * NUM_TOKENS, NUM_TOKENS
    else:
        begin = tl.load(first_rows + request).to(tl.int64)
        count = tl.load(first_rows + request + 1) - begin.to(tl.int32)
    qkv += begin * ROW
    q_ptr = qkv + k_head * K_DIM + row
    v_ptr = qkv + 2 * K_ROW + head * V_DIM + column
    out_ptr += (begin * V_HEADS + head) * V_DIM + column
    a_ptr += begin * a_stride + head
    b_ptr += begin * b_stride + head
    k_kept += (1 - turn) * K_ROW
    g_kept += (1 - turn) * V_HEADS
    keeps_k = inside_k & first & (head % (V_HEADS // K_HEADS) == 0)
    if parents is None:
        for i in range(count):
            g = _log_decay(tl.load(a_ptr + i * a_stride), decay, dt_bias)
            s, k, delta, out = _advance_by_token(
                s, q_ptr + i * ROW, v_ptr + i * ROW, g, tl.load(b_ptr + i * b_stride),
                inside_k, inside_v, K_ROW, K_DIM, EPS,
            )  # fmt: skip
            _store_columns(out_ptr + i * V_ROW, out, delta_kept + i * V_ROW, delta, inside_v)
            _store_key(k_kept + 2 * i * K_ROW, k, g_kept + 2 * i * V_HEADS, g, keeps_k, first)
    else:
        parents += request * NUM_TOKENS
        for i in range(count):
            q = _normalised(q_ptr + i * ROW, inside_k, EPS) * (K_DIM**-0.5)
            k = _normalised(q_ptr + i * ROW + K_ROW, inside_k, EPS)
            v = tl.load(v_ptr + i * ROW, mask=inside_v, other=0.0).to(tl.float32)
            g = _log_decay(tl.load(a_ptr + i * a_stride), decay, dt_bias)
            decayed = tl.exp(g)  # from the token on the path to this one, its own decay included
            read = tl.zeros_like(v)  # of what the path has written, by k and by q
            out = tl.zeros_like(v)
            above = tl.load(parents + i)
            while above >= 0:
                other = _normalised(q_ptr + above * ROW + K_ROW, inside_k, EPS)
                written = decayed * tl.load(delta_kept + above * V_ROW, mask=inside_v, other=0.0)
                read += tl.sum(other * k, 0) * written
                out += tl.sum(other * q, 0) * written
                decayed *= tl.exp(_log_decay(tl.load(a_ptr + above * a_stride), decay, dt_bias))
                above = tl.load(parents + above)
            read += decayed * tl.sum(s * k[:, None], 0)
            delta = _sigmoid(tl.load(b_ptr + i * b_stride)) * (v - read)
            out += decayed * tl.sum(s * q[:, None], 0) + tl.sum(k * q, 0) * delta
            _store_columns(out_ptr + i * V_ROW, out, delta_kept + i * V_ROW, delta, inside_v)
            _store_key(k_kept + 2 * i * K_ROW, k, g_kept + 2 * i * V_HEADS, g, keeps_k, first)
            tl.debug_barrier()  # tokens that follow this one read its δ


@jit
def _store_columns(out_ptr, out, delta_ptr, delta, inside_v):
    """A token's output, and its δ for the next pass."""
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside_v)
    tl.store(delta_ptr, delta, mask=inside_v)


@jit
def _store_key(k_ptr, k, g_ptr, g, keeps_k, first):
    """What all columns share, by the CTA that keeps it."""
    tl.store(k_ptr, k, mask=keeps_k)
    tl.store(g_ptr, g, mask=first)


@jit
def add_update(s, k, delta):
    """s + k δᵀ: what a token adds to a state that has decayed, each product fused with its sum."""
    return tl.fma(tl.broadcast_to(k[:, None], s.shape), tl.broadcast_to(delta[None, :], s.shape), s)


@jit
def _advance_by_token(
    s, q_ptr, v_ptr, g, b, inside_k, inside_v,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """(the state after a token, its k, δ and output), from the state before it."""
    q = _normalised(q_ptr, inside_k, EPS) * (K_DIM**-0.5)
    k = _normalised(q_ptr + K_ROW, inside_k, EPS)
    v = tl.load(v_ptr, mask=inside_v, other=0.0).to(tl.float32)
    s *= tl.exp(g)
    delta = _sigmoid(b) * (v - tl.sum(s * k[:, None], 0))
    s = add_update(s, k, delta)
    return s, k, delta, tl.sum(s * q[:, None], 0)


@jit
def _gated_delta_tokens(
    qkv, a_ptr, b_ptr, decay_ptr, dt_bias_ptr, slots, requests, state, out_ptr,
    a_stride, b_stride,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    EPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A prompt chunk token by token: one CTA per BLOCK_V columns of a request's state of a head."""
    request, head = tl.program_id(0) // V_HEADS, tl.program_id(0) % V_HEADS
    k_head = head // (V_HEADS // K_HEADS)
    slot = tl.load(slots + request)
    begin = tl.load(requests + 2 * request).to(tl.int64)
    count = tl.load(requests + 2 * request + 1)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k, inside_v = row < K_DIM, column < V_DIM
    inside = inside_k[:, None] & inside_v[None, :]
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    K_ROW: tl.constexpr = K_HEADS * K_DIM
    ROW: tl.constexpr = 2 * K_ROW + V_HEADS * V_DIM
    q_ptr = qkv + k_head * K_DIM + row
    v_ptr = qkv + 2 * K_ROW + head * V_DIM + column
    out_ptr += head * V_DIM + column
    a_ptr += head
    b_ptr += head
    state += (slot * V_HEADS + head) * (K_DIM * V_DIM) + row[:, None] * V_DIM + column[None, :]
    s = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    for i in range(count):
        token = begin + i  # int64
        g = _log_decay(tl.load(a_ptr + token * a_stride), decay, dt_bias)
        s, _, _, out = _advance_by_token(
            s, q_ptr + token * ROW, v_ptr + token * ROW, g, tl.load(b_ptr + token * b_stride),
            inside_k, inside_v, K_ROW, K_DIM, EPS,
        )  # fmt: skip
        out_at = out_ptr + token * (V_HEADS * V_DIM)
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside_v)
    tl.store(state, s.to(state.dtype.element_ty), mask=inside)


@jit
def _normalised(x_ptr, inside, EPS: tl.constexpr):
    """A head of a token, of length 1, in float32."""
    x = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@jit
def _invert_systems(
    qkv, a_ptr, b_ptr, decay_ptr, dt_bias_ptr, chunks, inverses, a_stride, b_stride,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The inverse of a chunk's triangular system (`_advance`), [CHUNK, CHUNK] per value head.

    One CTA per chunk and value head, by forward substitution: row i is that of -A, plus the rows
    above it weighted by it.
    """
    entry = chunks + tl.program_id(0) * 4
    begin, count, first = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    i, row = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    inside = first + i < count
    token = (begin + first + i).to(tl.int64)
    ROW: tl.constexpr = (2 * K_HEADS) * K_DIM + V_HEADS * V_DIM
    k_ptr = qkv + (K_HEADS + head // (V_HEADS // K_HEADS)) * K_DIM
    k = _normalised_rows(k_ptr, token, row, inside, ROW, K_DIM, EPS).to(qkv.dtype.element_ty)
    a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0)
    g = _log_decay(a, tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head))
    total = tl.cumsum(tl.where(inside, g, 0.0), 0)
    beta = _sigmoid(tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0))
    earlier = i[:, None] > i[None, :]
    decay = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0))
    x = -beta[:, None] * tl.dot(k, tl.trans(k), input_precision="ieee") * decay
    x = tl.where(earlier & inside[:, None], x, 0.0)
    for n in range(1, CHUNK):
        at_n = i[:, None] == n
        weights = tl.sum(tl.where(at_n, x, 0.0), 0)
        x = tl.where(at_n, x + tl.sum(weights[:, None] * x, 0)[None, :], x)
    x += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    at = inverses + (token * V_HEADS + head)[:, None] * CHUNK + i[None, :]
    tl.store(at, x.to(inverses.dtype.element_ty), mask=inside[:, None])


@jit
def _gated_delta_prefill(
    qkv, a_ptr, b_ptr, decay_ptr, dt_bias_ptr, inverses, slots, requests, state, out_ptr,
    a_stride, b_stride,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK_V columns of a request's state of a value head, chunk after chunk."""
    request, head = tl.program_id(0) // V_HEADS, tl.program_id(0) % V_HEADS
    slot = tl.load(slots + request)
    begin, count = tl.load(requests + 2 * request), tl.load(requests + 2 * request + 1)
    i, row = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_v = column < V_DIM
    inside_s = (row < K_DIM)[:, None] & inside_v[None, :]
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    dtype: tl.constexpr = qkv.dtype.element_ty
    ROW: tl.constexpr = (2 * K_HEADS) * K_DIM + V_HEADS * V_DIM
    q_ptr = qkv + head // (V_HEADS // K_HEADS) * K_DIM
    k_ptr = q_ptr + K_HEADS * K_DIM
    v_ptr = qkv + 2 * K_HEADS * K_DIM + head * V_DIM + column[None, :]
    state += (slot * V_HEADS + head) * (K_DIM * V_DIM) + row[:, None] * V_DIM + column[None, :]
    s = tl.load(state, mask=inside_s, other=0.0).to(tl.float32)
    for first in range(0, count, CHUNK):
        inside = first + i < count
        token = (begin + first + i).to(tl.int64)
        inside_out = inside[:, None] & inside_v[None, :]
        k = _normalised_rows(k_ptr, token, row, inside, ROW, K_DIM, EPS).to(dtype)
        v = tl.load(v_ptr + token[:, None] * ROW, mask=inside_out, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0)
        g = tl.where(inside, _log_decay(a, decay, dt_bias), 0.0)
        total, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        beta = _sigmoid(tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0))
        before, grown = s.to(dtype), tl.exp(total)[:, None]
        read = tl.dot(k, before, input_precision="ieee") * grown
        delta = (beta[:, None] * (v - read)).to(dtype)
        inverse_at = inverses + (token * V_HEADS + head)[:, None] * CHUNK + i[None, :]
        inverse = tl.load(inverse_at, mask=inside[:, None], other=0.0)
        delta = tl.dot(inverse, delta, input_precision="ieee")

        q = _normalised_rows(q_ptr, token, row, inside, ROW, K_DIM, EPS) * (K_DIM**-0.5)
        q = q.to(dtype)
        out = tl.dot(q, before, input_precision="ieee") * grown
        seen = i[:, None] >= i[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores *= tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        scores = tl.where(seen, scores, 0.0).to(dtype)
        out += tl.dot(scores, delta.to(dtype), input_precision="ieee")
        out_at = out_ptr + (token * V_HEADS + head)[:, None] * V_DIM + column[None, :]
        tl.store(out_at, out.to(dtype), mask=inside_out)
        left = (delta * tl.exp(whole - total)[:, None]).to(dtype)
        s = s * tl.exp(whole) + tl.dot(tl.trans(k), left, input_precision="ieee")
    tl.store(state, s.to(state.dtype.element_ty), mask=inside_s)


@jit
def _normalised_rows(
    x_ptr, token, at, inside, ROW: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr
):
    """A head of several tokens, of length 1: [n, BLOCK] float32; zeros outside."""
    where = x_ptr + token[:, None] * ROW + at[None, :]
    x = tl.load(where, mask=inside[:, None] & (at < DIM)[None, :], other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@jit
def _log_decay(a, decay, dt_bias):
    """-decay · softplus(a + dt_bias)."""
    x = a.to(tl.float32) + dt_bias
    return -decay * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def _sigmoid(x):
    """Rounded to x's dtype."""
    y = 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))
    return y.to(x.dtype).to(tl.float32)
