"""Drafts that predict one token at a time from their own hidden states: EAGLE-3 and MTP.

Every anchor begins a chain. Its first step stands at the position before the anchor: it reads the
target's hidden state there and the anchor's token, and predicts the token after the anchor. Later
steps read what the step before gave, and attend to the context and to the chain so far: training-
time test (arXiv 2503.01840, section 3). A step's token is the text's, which is the draft's own up
to the first wrong one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.config.model_config import ModelConfig
from forerun_train.batch import Batch, HiddenStates
from forerun_train.drafts.blocks import Blocks
from forerun_train.drafts.draft import Draft, DraftVocabulary, Objective
from forerun_train.drafts.heads import TrainingHead
from forerun_train.drafts.parts import GatedMLP, Linear, RMSNorm, RopeTables, turned
from forerun_train.masks import AttentionMask, MaskShape, attend, causal_in_documents, make_mask


@dataclass(frozen=True)
class Family:
    """How attention differs among families."""

    qk_norm: bool = False  # of queries and keys, before RoPE
    qkv_bias: bool = False
    o_bias: bool = False


class ChainAttention(nn.Module):
    """Projections of a layer whose attention is computed by the body."""

    def __init__(self, model: ModelConfig, inputs: int, family: Family) -> None:
        super().__init__()
        self.dim, bias, qk_norm = model.head_dim, family.qkv_bias, family.qk_norm
        heads, kv_heads = model.num_heads * self.dim, model.num_kv_heads * self.dim
        self.q_proj = Linear(inputs, heads, bias)
        self.k_proj = Linear(inputs, kv_heads, bias)
        self.v_proj = Linear(inputs, kv_heads, bias)
        self.o_proj = Linear(heads, model.hidden_size, family.o_bias)
        if qk_norm:
            self.q_norm = RMSNorm(self.dim, model.rms_norm_eps)
            self.k_norm = RMSNorm(self.dim, model.rms_norm_eps)
        self.qk_norm = qk_norm

    def project(self, x: Tensor, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, inputs] -> q, k rotated, and v: [B, heads, S, D]."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.dim))
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = turned(q, places), turned(k, places)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """[B, heads, S, D] -> [B, S, H]."""
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class ChainBody(nn.Module, ABC):
    """One layer, over the context once and then over every step of the chains."""

    recompute = False  # scores of the steps, to save memory

    def __init__(self, model: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.rope = RopeTables(model, max_positions)

    @abstractmethod
    def features(self, states: HiddenStates) -> Tensor:
        """What the first step reads of the target, [B, T, H]."""

    @abstractmethod
    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states [B, S, H] -> what q, k and v read, and the residual."""

    @abstractmethod
    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Residual and attention's output [B, S, H] -> for logits, and for the next step."""

    @property
    @abstractmethod
    def self_attention(self) -> ChainAttention:
        """The layer's attention."""

    def forward(self, chains: Chains, states: HiddenStates, mask: AttentionMask) -> Tensor:
        """Hidden states of all steps after the final norm, [B, N, D, H]."""
        attention, steps = self.self_attention, chains.embeds.shape[2]
        x, residual = self.inputs(chains.next_embeds, self.features(states))
        q, k, v = attention.project(x, self.rope(chains.positions))
        attended = attend(q, k, v, mask, 1 / math.sqrt(attention.dim))
        normed, hidden = self.finish(residual, attention.output(attended))
        first = (chains.anchors - 1).clamp(min=0)
        hidden, outputs = _at(hidden, first), [_at(normed, first)]
        context = _Context(k, v, chains.context, self.recompute and self.training)
        for step in range(1, steps):
            x, residual = self.inputs(chains.embeds[:, :, step], hidden)
            places = self.rope((chains.first_positions + step).clamp(min=0))
            q, k, v = attention.project(x, places)
            attended = context.attend(q, k, v)
            normed, hidden = self.finish(residual, attention.output(attended))
            outputs.append(normed)
        return torch.stack(outputs, 2)


@dataclass(frozen=True)
class Chains:
    """N chains of D steps in each of B sequences."""

    anchors: Tensor  # [B, N]
    first_positions: Tensor  # [B, N]: of the first steps, in their documents
    context: Tensor  # [B, N, T] bool: what each chain sees of its document
    embeds: Tensor  # [B, N, D, H]: of the tokens that the steps read
    next_embeds: Tensor  # [B, T, H]: of the token after each of the context's
    positions: Tensor  # [B, T]: of the context


@dataclass
class _Context:
    """K/V of the context, and of the steps of every chain so far."""

    k: Tensor
    v: Tensor
    seen: Tensor  # [B, N, T] bool
    recompute: bool  # scores for the backward pass, instead of keeping them
    own_k: list[Tensor] = field(default_factory=list)
    own_v: list[Tensor] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One step of all chains: q [B, Hq, N, D], k, v [B, Hkv, N, D] -> [B, Hq, N, D]."""
        self.own_k.append(k)
        self.own_v.append(v)
        own = torch.stack(self.own_k, 3), torch.stack(self.own_v, 3)
        arguments = q, (self.k, self.v), own, self.seen
        if not self.recompute:
            return attend_chains(*arguments)
        out: Tensor = checkpoint(attend_chains, *arguments, use_reentrant=False)
        return out


def attend_chains(
    q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], seen: Tensor
) -> Tensor:
    """Attends over the context and over the steps of each chain.

    Args:
        q: [B, Hq, N, D].
        context: k, v [B, Hkv, T, D].
        own: k, v [B, Hkv, N, steps, D].
        seen: [B, N, T] bool, the places of the context that each chain sees.

    Returns:
        [B, Hq, N, D].
    """
    (k, v), (own_k, own_v) = context, own
    grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    far = torch.einsum("bhgnd,bhsd->bhgns", grouped, k)
    far = far.masked_fill(~seen[:, None, None], -torch.inf)
    near = torch.einsum("bhgnd,bhnjd->bhgnj", grouped, own_k)
    share = torch.cat([far, near], -1).float().softmax(-1).to(v.dtype)
    of_far, of_own = share.split([far.shape[-1], near.shape[-1]], -1)
    out = torch.einsum("bhgns,bhsd->bhgnd", of_far, v)
    out = out + torch.einsum("bhgnj,bhnjd->bhgnd", of_own, own_v)
    return out.flatten(1, 2)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Rows of x [B, T, H] at places [B, N]."""
    return x.gather(1, places.unsqueeze(2).expand(-1, -1, x.shape[2]))


class EagleLayer(nn.Module):
    """The layer of EAGLE-3: attention reads [norm(embedding) | norm(hidden state)]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        size, eps = model.hidden_size, model.rms_norm_eps
        self.self_attn = ChainAttention(model, 2 * size, Family())
        self.mlp = GatedMLP(size, model.intermediate_size)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)


class EagleBody(ChainBody):
    """fc, midlayer and norm; the next step reads the state before the norm."""

    def __init__(self, model: ModelConfig, aux_size: int, max_positions: int) -> None:
        super().__init__(model, max_positions)
        self.fc = Linear(aux_size, model.hidden_size)
        self.midlayer = EagleLayer(model)
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)

    @property
    def self_attention(self) -> ChainAttention:
        return self.midlayer.self_attn

    def features(self, states: HiddenStates) -> Tensor:
        out: Tensor = self.fc(states.aux)
        return out

    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        parts = layer.input_layernorm(embeds), layer.hidden_norm(hidden)
        return torch.cat(parts, -1), hidden

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + attended
        out = x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))
        return self.norm(out), out


class MtpBody(ChainBody):
    """An MTP layer as DeepSeek-V3 stores it, with a decoder layer of the target's family.

    The next step reads the state after `shared_head.norm` (`models/nextn.py`).
    """

    def __init__(self, model: ModelConfig, family: Family, max_positions: int) -> None:
        super().__init__(model, max_positions)
        size, eps = model.hidden_size, model.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = ChainAttention(model, size, family)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, model.intermediate_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, eps)})

    @property
    def self_attention(self) -> ChainAttention:
        return self.self_attn

    def features(self, states: HiddenStates) -> Tensor:
        return states.final

    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        return self.input_layernorm(x), x

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + attended
        out = self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))
        return out, out


class ChainDraft(Draft):
    """A chain of D drafts after every anchor."""

    body: ChainBody

    def __init__(
        self,
        body: ChainBody,
        head: TrainingHead,
        vocabulary: DraftVocabulary,
        objective: Objective,
        shape: tuple[tuple[int, ...], int],
    ) -> None:
        """`shape`: layers of the target that it reads, and drafts of a chain."""
        super().__init__(body, head, vocabulary, objective)
        self.target_layer_ids, self.num_drafts = shape

    def layers(self) -> list[nn.Module]:
        return []  # one layer: it is gathered with all else

    def hidden(self, batch: Batch, states: HiddenStates, blocks: Blocks) -> Tensor:
        size, device = batch.input_ids.shape, batch.input_ids.device
        seen = causal_in_documents(batch.document_ids)
        mask = make_mask(seen, MaskShape(size[0], size[1], size[1], device))
        embed = self.vocabulary.target.embed
        following = torch.cat([batch.input_ids[:, 1:], batch.input_ids[:, -1:]], 1)
        place = torch.arange(size[1], device=device)
        anchors = blocks.anchors.unsqueeze(2)
        # At least one place, where an anchor has no context: such a chain does not count.
        first = torch.minimum(anchors - blocks.positions.unsqueeze(2), (anchors - 1).clamp(min=0))
        context = (place >= first) & (place < anchors.clamp(min=1))
        chains = Chains(
            blocks.anchors,
            blocks.positions - 1,
            context,
            embed(blocks.tokens[:, :, :-1]),
            embed(following),
            batch.position_ids,
        )
        run = self.compiled.get("body", self.body)
        out: Tensor = run(chains, states, mask)
        return out
