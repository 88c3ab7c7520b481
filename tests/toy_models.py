"""Targets for tests, from outside: what they keep is not K and V of one shape.

Each has an oracle that shares no code with the engine: the whole sequence again for every token.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.attention.base import AttentionContext, AttentionSpec, LayerMask
from forerun.attention.recurrent import RecurrentContext
from forerun.config.model_config import ModelConfig
from forerun.kernels.linear_attention.replay import SnapshotRows
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout, RecurrentState, StatePool
from forerun.layers.communication import WeightPlacement
from forerun.models.base import CausalLM

VOCAB, HIDDEN, HEADS, DIM = 61, 24, 3, 8
EPS = 1e-6


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


class ToyModel(CausalLM):
    """Embedding, layers and LM head; random weights instead of a checkpoint."""

    layers: ClassVar[int]

    def __init__(self, config: ModelConfig, place: WeightPlacement, max_positions: int) -> None:
        self.config = config
        self.layer_masks = (LayerMask(),) * config.num_layers
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            made = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return made.to(place.device, place.dtype)

        self._embedding, self._head = normal(VOCAB, HIDDEN) * HIDDEN**0.5, normal(VOCAB, HIDDEN) * 4
        self._made: list[dict[str, Tensor]] = [
            {name: normal(*shape) for name, shape in self.shapes(i).items()}
            for i in range(config.num_layers)
        ]

    @abstractmethod
    def shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Of a layer's matrices, [out, in]."""

    @abstractmethod
    def mix(self, layer: int, x: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Mixes tokens: x [T, H], normed -> [T, H]."""

    @abstractmethod
    def mix_whole(self, layer: int, x: Tensor) -> Tensor:
        """The same for one whole sequence [n, H], by another way."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self._embedding)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self._head)

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        return self.compute_logits(hidden_states).argmax(-1)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture_layers: tuple[int, ...] = (),
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        residual, outputs = self.embed(input_ids), {}
        for i in range(self.config.num_layers):
            residual = residual + self.mix(i, norm(residual), positions, ctx)
            outputs[i] = residual = residual + torch.sin(norm(residual))
        aux = torch.cat([outputs[i] for i in capture_layers], 1) if capture_layers else None
        return norm(residual if rows is None else residual[rows]), aux

    def oracle(self, prompt: list[int], count: int) -> list[int]:
        """Greedy decoding."""
        tokens = list(prompt)
        for _ in range(count):
            residual = self.embed(torch.tensor(tokens))
            for i in range(self.config.num_layers):
                residual = residual + self.mix_whole(i, norm(residual))
                residual = residual + torch.sin(norm(residual))
            tokens.append(int(self.compute_logits(norm(residual[-1:])).argmax()))
        return tokens[len(prompt) :]


def heads(x: Tensor) -> Tensor:
    return x.view(len(x), HEADS, -1)


def replay_last(pool: StatePool, to: SnapshotRows) -> None:
    """The last update that counts is the state."""
    for name, updates in pool.updates.items():
        at = (to.counts - 1).clamp_min(0).long()
        wanted = (to.counts > 0).view(-1, *[1] * (updates.dim() - 3))
        for kept, layer in zip(pool.snapshots[name], updates, strict=True):
            kept[to.rows] = torch.where(wanted, layer[to.slots, at], kept[to.rows])


class ToyRecurrentForCausalLM(ToyModel):
    """Gated linear attention after a token shift; every third layer is ordinary attention.

    x_t <- x_t + m * x_(t-1);  S_t = a_t S_(t-1) + k_t v_t^T;  o_t = q_t S_t
    """

    layers = 4

    def shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        width = HEADS * DIM
        return {**dict.fromkeys("qkv", (width, HIDDEN)), "o": (HIDDEN, width), "a": (HEADS, HIDDEN)}

    def is_dense(self, layer: int) -> bool:
        return layer % 3 == 2

    def kv_layout(self, kv_dtype: torch.dtype) -> ModelLayout:
        f32 = torch.float32
        tensors = {"s": ((HEADS, DIM, DIM), f32), "shift": ((HIDDEN,), f32)}
        # Updates are the states after each token.
        state = RecurrentState(tensors, updates=tensors, replay=replay_last, ragged=True)
        dense = DenseKV(HEADS, DIM, kv_dtype)
        return ModelLayout(
            tuple(dense if self.is_dense(i) else state for i in range(self.config.num_layers))
        )

    def mix(self, layer: int, x: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        w = self._made[layer]
        if self.is_dense(layer):
            q, k, v = (heads(F.linear(x, w[n])) for n in "qkv")
            ctx.backend.write(ctx.plan, layer, k, v)
            spec = AttentionSpec(LayerMask(), DIM**-0.5)
            return F.linear(ctx.backend.attend(ctx.plan, layer, spec, q).flatten(1), w["o"])
        state = ctx.recurrent(layer)
        s, shift = state.state("s"), state.state("shift")
        if state.q_len is not None:
            s, shift = (self.committed(state, name) for name in ("s", "shift"))
            state.store_state("s", s)
            state.store_state("shift", shift)
            blocks = state.by_request(x).view(len(s), state.q_len, HIDDEN)
            outs, kept, shifts = [], [], []
            for i in range(state.q_len):
                out, s, shift = self.advance(w, blocks[:, i], s, shift)
                outs.append(out)
                kept.append(s)
                shifts.append(shift)
            state.store_updates("s", torch.stack(kept, 1))
            state.store_updates("shift", torch.stack(shifts, 1))
            return state.by_token(torch.stack(outs, 1).flatten(0, 1))
        assert state.prompts is not None
        outs, ends, shifts, first = [], [], [], 0
        for request, count in enumerate(state.prompts.num_tokens):
            now, last = s[request : request + 1], shift[request : request + 1]
            for i in range(first, first + count):
                out, now, last = self.advance(w, x[i : i + 1], now, last)
                outs.append(out)
            ends.append(now)
            shifts.append(last)
            first += count
        state.store_state("s", torch.cat(ends))
        state.store_state("shift", torch.cat(shifts))
        return torch.cat(outs)

    @staticmethod
    def committed(state: RecurrentContext, name: str) -> Tensor:
        """[B, ...]: the update of the last committed token, if one is pending."""
        kept, updates, pending = state.state(name), state.updates(name), state.num_pending.long()
        at = (pending - 1).clamp_min(0).view(-1, *[1] * (updates.dim() - 1))
        last = updates.take_along_dim(at, 1).squeeze(1)
        return torch.where((pending > 0).view(-1, *[1] * (kept.dim() - 1)), last, kept)

    @staticmethod
    def advance(
        w: dict[str, Tensor], x: Tensor, s: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token of each of B requests: x, shift [B, H], s [B, heads, D, D]."""
        mixed = x + 0.5 * shift
        q, k, v = (heads(F.linear(mixed, w[n])) for n in "qkv")
        decay = torch.sigmoid(F.linear(mixed, w["a"]) + 1.0)
        s = decay[:, :, None, None] * s + k.unsqueeze(3) * v.unsqueeze(2)
        out = torch.einsum("bhd,bhde->bhe", q, s).flatten(1)
        return F.linear(norm(out), w["o"]), s, x

    def mix_whole(self, layer: int, x: Tensor) -> Tensor:
        """Both kinds as matrices of weights: o_t = sum over s <= t of (q_t k_s) A_t / A_s v_s."""
        w = self._made[layer]
        if self.is_dense(layer):
            q, k, v = (heads(F.linear(x, w[n])).transpose(0, 1) for n in "qkv")
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            return F.linear(out.transpose(0, 1).flatten(1), w["o"])
        mixed = x + 0.5 * F.pad(x, (0, 0, 1, 0))[:-1]
        q, k, v = (heads(F.linear(mixed, w[n])).double().transpose(0, 1) for n in "qkv")
        logs = F.logsigmoid(F.linear(mixed, w["a"]).double() + 1.0).cumsum(0).T  # [heads, n]
        decay = torch.exp((logs[:, :, None] - logs[:, None]).clamp_max(0))
        out = (q @ k.transpose(1, 2) * decay).tril() @ v
        return F.linear(norm(out.transpose(0, 1).flatten(1).to(x.dtype)), w["o"])


LATENT, ROPE = 12, 4


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Half-split RoPE over the last dimension of x [T, ..., ROPE]."""
    angle = positions.double()[:, None] / 100.0 ** (torch.arange(ROPE // 2) * 2 / ROPE)
    cos, sin = (
        t.to(x.dtype).view(len(x), *[1] * (x.dim() - 2), -1) for t in (angle.cos(), angle.sin())
    )
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class ToyLatentForCausalLM(ToyModel):
    """Multi-head latent attention as in DeepSeek-V2, section 2.1, served absorbed."""

    layers = 2

    def shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        return {
            "q": (HEADS * (DIM + ROPE), HIDDEN),
            "kv_a": (LATENT + ROPE, HIDDEN),
            "kv_b": (HEADS * 2 * DIM, LATENT),
            "o": (HIDDEN, HEADS * DIM),
        }

    def kv_layout(self, kv_dtype: torch.dtype) -> ModelLayout:
        return ModelLayout((LatentKV(LATENT, ROPE, kv_dtype),) * self.config.num_layers)

    def parts(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """(q_nope [T, heads, D], q_rope [T, heads, Dr], latent [T, Dl], k_rope [T, Dr])."""
        w = self._made[layer]
        q_nope, q_rope = heads(F.linear(x, w["q"])).split([DIM, ROPE], -1)
        latent, k_rope = F.linear(x, w["kv_a"]).split([LATENT, ROPE], -1)
        return q_nope, rotated(q_rope, positions), norm(latent), rotated(k_rope, positions)

    def mix(self, layer: int, x: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        q_nope, q_rope, latent, k_rope = self.parts(layer, x, positions)
        up_k, up_v = self._made[layer]["kv_b"].view(HEADS, 2, DIM, LATENT).unbind(1)
        q = torch.cat([torch.einsum("thd,hdr->thr", q_nope, up_k), q_rope], -1)
        spec = AttentionSpec(LayerMask(), (DIM + ROPE) ** -0.5)
        ctx.backend.write_latent(ctx.plan, layer, torch.cat([latent, k_rope], -1))
        out = ctx.backend.attend_latent(ctx.plan, layer, spec, q)
        values = torch.einsum("thr,hdr->thd", out, up_v)
        return F.linear(values.flatten(1), self._made[layer]["o"])

    def mix_whole(self, layer: int, x: Tensor) -> Tensor:
        """K and V of every head, as they are written in the paper."""
        q_nope, q_rope, latent, k_rope = self.parts(layer, x, torch.arange(len(x)))
        kv = F.linear(latent, self._made[layer]["kv_b"]).view(len(x), HEADS, 2, DIM)
        k = torch.cat([kv[:, :, 0], k_rope[:, None].expand(-1, HEADS, -1)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, kv[:, :, 1]))
        scores = (q @ k.transpose(2, 3)) * (DIM + ROPE) ** -0.5
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        out = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
        return F.linear(out[0].transpose(0, 1).flatten(1), self._made[layer]["o"])


TOY_MODELS = {cls.__name__: cls for cls in (ToyRecurrentForCausalLM, ToyLatentForCausalLM)}


def save_toy(kind: type[ToyModel], folder: Path) -> Path:
    """A folder with the config of a toy model; its weights come with the class."""
    config: dict[str, Any] = {
        "architectures": [kind.__name__],
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_attention_heads": HEADS,
        "num_hidden_layers": kind.layers,
        "vocab_size": VOCAB,
        "head_dim": DIM,
        "max_position_embeddings": 512,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def toy_model(kind: type[ToyModel], folder: Path) -> ToyModel:
    """The same model as the engine builds, for its reference."""
    from forerun.config.model_config import load_model_config

    place = WeightPlacement(torch.float32, torch.device("cpu"))
    return kind(load_model_config(folder), place, 512)
