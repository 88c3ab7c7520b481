"""LiLiCorr: a small transformer correlates the best K tokens of all rows (arXiv 2608.20530).

Every candidate gets an "in" and an "out" vector; the score of candidate j after candidate i of the
row before is scale · <out_i, in_j>. The anchor has an out vector of its own, made from the context
feature C of the last committed token. Drafts are a greedy walk; logits are not added to scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from forerun.config.schema import Heads, Layers, Positive, Size
from forerun.core.errors import ConfigError
from forerun.kernels.drafting.top_columns import top_columns
from forerun.kernels.drafting.walk import lattice_walk
from forerun.kernels.runtime.jit import use_triton
from forerun.layers.communication import WeightPlacement
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.models.heads.base import (
    Affine,
    Block,
    BodySizes,
    DraftHead,
    DraftVocabulary,
    Draw,
    HeadConfig,
    HeadFiles,
    Parameters,
    Proposal,
    SiLUMLP,
    check_choice,
    checked_keys,
    whole,
)

FEATURES = 5  # of a candidate: logp, p, logp - max, rank / (K - 1), rank == 0


class LiLiCorrKeys(msgspec.Struct, kw_only=True):
    """Sizes and scales are required: a guess would score another function of the same weights."""

    lilicorr_candidate_topk: Annotated[int, Meta(ge=1, le=64)]
    lilicorr_hidden_size: Annotated[int, Meta(ge=0, le=1 << 20)]  # 0: the draft's
    lilicorr_num_layers: Layers
    lilicorr_num_heads: Heads
    lilicorr_mlp_ratio: Positive
    lilicorr_factor_dim: Size
    lilicorr_vector_eps: Positive
    lilicorr_logit_scale: Positive
    lilicorr_enabled: bool | None = None


@dataclass(frozen=True)
class LiLiCorrConfig(HeadConfig):
    keys: LiLiCorrKeys

    files: ClassVar[HeadFiles] = HeadFiles(
        "LiLiCorr",
        ("lilicorr", "lilicorrdraftmodel", "lilicorrspeculator"),
        r"lilicorr_.*",
        r"lilicorr\..*",
        ("lilicorr_enabled",),
    )
    keys_read: ClassVar[type[msgspec.Struct]] = LiLiCorrKeys
    reads_context: ClassVar[bool] = True
    fill_in_only: ClassVar[bool] = True
    fixed_block: ClassVar[bool] = True

    @classmethod
    def read(cls, keys: Mapping[str, Any], where: str) -> LiLiCorrConfig:
        return cls(checked_keys(LiLiCorrKeys, keys, where))

    def check(self, sizes: BodySizes, where: str) -> None:
        size, heads = self.size(sizes), self.keys.lilicorr_num_heads
        if size % heads:
            raise ConfigError(
                f"{where}: lilicorr_hidden_size {size} is not a multiple of lilicorr_num_heads"
                f" {heads}. Correct one."
            )
        if sizes.draft_vocab_size != sizes.vocab_size:
            raise ConfigError(
                f"{where}: a LiLiCorr head has no pruned vocabulary (draft_vocab_size)."
            )
        check_choice("lilicorr_candidate_topk", self.keys.lilicorr_candidate_topk, sizes, where)

    def size(self, sizes: BodySizes) -> int:
        """Returns the width of its layers."""
        return self.keys.lilicorr_hidden_size or sizes.hidden_size

    def build(
        self, sizes: BodySizes, place: WeightPlacement, options: Mapping[str, Any]
    ) -> LiLiCorrHead:
        return LiLiCorrHead(self, sizes, whole(place))

    def describe(self) -> str:
        keys = self.keys
        return (
            f"LiLiCorr head (best {keys.lilicorr_candidate_topk},"
            f" {keys.lilicorr_num_layers} layers)"
        )


class LatticeAttention(Parameters):
    """Multi-head attention with one projection of q, k and v, and a bias per head and pair."""

    def __init__(self, size: int, heads: int, place: WeightPlacement) -> None:
        super().__init__(place, in_proj_weight=(3 * size, size), in_proj_bias=(3 * size,))
        self.out_proj = Affine(size, size, place, bias=True)
        self._heads = heads

    def __call__(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [B, N, h], bias [heads, N, N] -> [B, N, h]."""
        qkv = F.linear(x, self["in_proj_weight"].to(x.dtype), self["in_proj_bias"].to(x.dtype))
        q, k, v = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(x.dtype))
        return self.out_proj(out.transpose(1, 2).flatten(2))


class LatticeLayer(Module):
    def __init__(self, keys: LiLiCorrKeys, size: int, eps: float, place: WeightPlacement) -> None:
        inner = int(size * keys.lilicorr_mlp_ratio)
        self.attn_norm = RMSNorm(size, eps, place)
        self.attn = LatticeAttention(size, keys.lilicorr_num_heads, place)
        self.mlp_norm = RMSNorm(size, eps, place)
        up, down = Affine(size, inner, place, bias=True), Affine(inner, size, place, bias=True)
        self.mlp = SiLUMLP(up, down)

    def __call__(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [B, N, h], bias [heads, N, N] -> [B, N, h]."""
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class Correlator(Parameters):
    def __init__(self, config: LiLiCorrConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        keys, size = config.keys, config.size(sizes)
        slots, k = sizes.block_size - 1, keys.lilicorr_candidate_topk
        heads, dim = keys.lilicorr_num_heads, keys.lilicorr_factor_dim
        super().__init__(
            place,
            slot_embedding=(1, 1, slots, 1, size),
            rank_embedding=(1, 1, 1, k, size),
            relative_slot_bias=(heads, 2 * sizes.block_size - 1),
            same_slot_bias=(heads,),
        )
        self._keys, self._block = keys, sizes.block_size
        self.token_proj = None
        if size != sizes.hidden_size:
            self.token_proj = Affine(sizes.hidden_size, size, place, bias=True)
        self.pass_hidden_proj = Affine(sizes.hidden_size, size, place, bias=True)
        self._feature_norm = LayerNorm(FEATURES, place)
        widen, again = (
            Affine(FEATURES, size, place, bias=True),
            Affine(size, size, place, bias=True),
        )
        self.feature_mlp = SiLUMLP(widen, again, self._feature_norm)
        self.context_proj = Affine(sizes.hidden_size, size, place, bias=True)
        self.layers = [
            LatticeLayer(keys, size, sizes.eps, place) for _ in range(keys.lilicorr_num_layers)
        ]
        self.output_norm = RMSNorm(size, sizes.eps, place)
        self.anchor_norm = RMSNorm(size, sizes.eps, place)
        self.factor_input_proj = Affine(3 * size, size, place, bias=True)
        self.out_head = Affine(size, dim, place, bias=True)
        self.in_head = Affine(size, dim, place, bias=True)
        self.anchor_out_head = Affine(size, dim, place, bias=True)

    def prepare(self) -> None:
        super().prepare()
        self._bias = self._attention_bias()

    def _attention_bias(self) -> Tensor:
        """Returns the bias per head and pair of candidates, [heads, N, N] with N = slots · K."""
        slots, k = self._block - 1, self._keys.lilicorr_candidate_topk
        relative, same = self["relative_slot_bias"], self["same_slot_bias"]
        slot = torch.arange(slots, device=same.device).repeat_interleave(k)
        distance = slot.unsqueeze(1) - slot
        bias = relative[:, distance + self._block - 1]
        return bias + (distance == 0) * same[:, None, None]

    def vectors(
        self, embedded: Tensor, logp: Tensor, hidden: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a walk multiplies.

        Args:
            embedded: [B, slots, K, H], the target's embedding of each candidate.
            logp: [B, slots, K], log probabilities over the whole vocabulary.
            hidden: [B, slots, H], of the rows.
            context: [B, H], C of the last committed token.

        Returns:
            out and in vectors [B, slots, K, d], and the anchor's out vector [B, d]; of length 1.
        """
        eps, lattice = self._keys.lilicorr_vector_eps, logp.shape
        projected = embedded if self.token_proj is None else self.token_proj(embedded)
        x = projected + self.pass_hidden_proj(hidden).unsqueeze(2)
        x = x + self._features(logp, x.dtype)
        x = x + self["slot_embedding"][0].to(x.dtype) + self["rank_embedding"][0].to(x.dtype)
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, self._bias)
        x = self.output_norm(x).unflatten(1, lattice[1:])
        anchor = self.anchor_norm(self.context_proj(context))
        near = anchor[:, None, None].expand_as(x)
        factors = F.silu(self.factor_input_proj(torch.cat([x, near, x * near], -1)))
        out, into, start = (
            F.normalize(head(each), dim=-1, eps=eps)
            for head, each in (
                (self.out_head, factors),
                (self.in_head, factors),
                (self.anchor_out_head, anchor),
            )
        )
        return out, into, start

    def _features(self, logp: Tensor, dtype: torch.dtype) -> Tensor:
        k = logp.shape[-1]
        rank = torch.arange(k, dtype=torch.float32, device=logp.device)
        columns = (
            logp,
            logp.exp(),
            logp - logp.amax(-1, keepdim=True),
            (rank / max(k - 1, 1)).expand_as(logp),
            (rank == 0).float().expand_as(logp),
        )
        return self.feature_mlp(self._feature_norm(torch.stack(columns, -1)).to(dtype))


class LayerNorm(Parameters):
    """Norms the last dimension, with weight and bias."""

    def __init__(self, size: int, place: WeightPlacement) -> None:
        super().__init__(place, weight=(size,), bias=(size,))
        self._size = size

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self._size,), self["weight"].float(), self["bias"].float())


class LiLiCorrHead(DraftHead):
    def __init__(self, config: LiLiCorrConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        self._keys, self._slots = config.keys, sizes.block_size - 1
        self.lilicorr = Correlator(config, sizes, place)

    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        assert block.context is not None
        # The lattice is whole, however few drafts are wanted: it was trained so.
        hidden = block.hidden[:, 1:]
        batch, slots = hidden.shape[:2]
        logits = vocabulary.compute_logits(hidden.flatten(0, 1))
        top, columns, lse = top_columns(logits, self._keys.lilicorr_candidate_topk)
        logp = (top - lse.unsqueeze(1)).view(batch, slots, -1)
        columns = columns.view(batch, slots, -1)
        embedded = vocabulary.embed(columns.flatten()).view(*columns.shape, -1)
        out, into, start = self.lilicorr.vectors(
            embedded.to(hidden.dtype), logp, hidden, block.context
        )
        if block.greedy and use_triton(hidden):
            return Proposal(lattice_walk(start, out, into, columns, block.depth))
        tokens, before = [], start
        for i in range(block.depth):
            scores = torch.einsum("bd,bkd->bk", before, into[:, i]).float()
            own = columns[:, i]
            token = draw(
                (self._keys.lilicorr_logit_scale * scores).unsqueeze(1), i, own.unsqueeze(1)
            )
            tokens.append(token.squeeze(1))
            chosen = (own == token).float().argmax(-1)
            before = out[:, i][torch.arange(batch, device=chosen.device), chosen]
        return Proposal(torch.stack(tokens, 1))
