"""Domino: a GRU over the drafted tokens corrects the logits of each row (arXiv 2605.29707).

G_j is the state after the tokens t_0 … t_j (t_0: the anchor), from zero. The row that predicts
t_{j+1} is corrected by embed_proj([h ; G_j]), but for the first `pure_draft_prefix_len` ones.
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

from forerun.config.schema import Size
from forerun.core.errors import ConfigError
from forerun.kernels.drafting.best_token import Pool, best_in_pool
from forerun.kernels.drafting.gru import gru_step, silu_of_state
from forerun.kernels.drafting.keys import TokensBefore, new_keys, tokens_of_keys
from forerun.kernels.runtime.jit import use_triton
from forerun.kernels.sampling.argmax import argmax
from forerun.layers.communication import WeightPlacement
from forerun.models.heads.base import (
    Affine,
    Block,
    BodySizes,
    DraftHead,
    DraftVocabulary,
    Draw,
    HeadConfig,
    HeadFiles,
    HeadOption,
    Parameters,
    Proposal,
    SiLUMLP,
    checked_keys,
    whole,
)

# Where `pure_draft_prefix_len` is left out, by the writer: ModelOpt and the published drafts say
# DFlashDraftModel and mean 1, the only one that SGLang serves; SpecForge has a name of its own.
PURE_PREFIX = {"DFlashDraftModel": 1, "DominoDraftModel": 0}
POOL = "speculative_domino_candidate_pool_size"


class DominoKeys(msgspec.Struct, kw_only=True):
    gru_hidden_dim: Size
    emb_dim: Size
    pure_draft_prefix_len: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None


@dataclass(frozen=True)
class DominoConfig(HeadConfig):
    gru_size: int
    inner_size: int
    pure_prefix: int

    files: ClassVar[HeadFiles] = HeadFiles(
        "Domino",
        ("domino", "causal_v5", "dominodraftmodel", "dominospeculator"),
        r"pure_draft_prefix_len|gru_hidden_dim|emb_dim",
        r"(prefix_gru|embed_proj)\..*",
    )
    keys_read: ClassVar[type[msgspec.Struct]] = DominoKeys
    options: ClassVar[tuple[HeadOption, ...]] = (
        HeadOption(
            POOL,
            int,
            2048,
            "Domino scores only as many tokens, the likeliest of any row of a block; 0: all",
        ),
    )
    last_row_predicts: ClassVar[bool] = False

    @classmethod
    def read(cls, keys: Mapping[str, Any], where: str) -> DominoConfig:
        read = checked_keys(DominoKeys, keys, where)
        pure = read.pure_draft_prefix_len
        if pure is None:
            found = (PURE_PREFIX[n] for n in keys.get("architectures") or () if n in PURE_PREFIX)
            pure = next(found, None)
        if pure is None:
            raise ConfigError(
                f"{where} lacks pure_draft_prefix_len, whose default differs between writers:"
                " SpecForge's is 0, ModelOpt's 1. Add the one that was trained."
            )
        return cls(read.gru_hidden_dim, read.emb_dim, pure)

    def build(
        self, sizes: BodySizes, place: WeightPlacement, options: Mapping[str, Any]
    ) -> DominoHead:
        pool = options.get(POOL, 0)
        if pool < 0:
            raise ConfigError(f"{POOL} must be 0 (all tokens) or more, got {pool}.")
        return DominoHead(self, sizes, whole(place), pool)

    def describe(self) -> str:
        return f"Domino head (GRU of {self.gru_size}, first {self.pure_prefix} uncorrected)"


class GRUCell(Parameters):
    """One step of a GRU without biases, gates in PyTorch's order: r, z, n."""

    def __init__(self, inputs: int, size: int, place: WeightPlacement) -> None:
        super().__init__(place, weight_ih_l0=(3 * size, inputs), weight_hh_l0=(3 * size, size))

    def __call__(
        self, x: Tensor, state: Tensor | None, tokens: TokensBefore | None = None
    ) -> Tensor:
        """x [B, in], or a table of it for `tokens`; state [B, size], or zeros -> the next state."""
        weights = self["weight_ih_l0"], self["weight_hh_l0"]
        return gru_step(x.to(weights[0].dtype), state, *weights, tokens)


class DominoHead(DraftHead):
    def __init__(
        self, config: DominoConfig, sizes: BodySizes, place: WeightPlacement, pool: int
    ) -> None:
        """`pool`: tokens that are scored per block; 0: all."""
        self._config, self._pool = config, pool
        self.prefix_gru = GRUCell(sizes.hidden_size, config.gru_size, place)
        inputs, inner = sizes.hidden_size + config.gru_size, config.inner_size
        self._readout = Affine(inner, sizes.draft_vocab_size, place, bias=False)
        self._inner = Affine(inputs, inner, place, bias=False)
        self.embed_proj = SiLUMLP(self._inner, self._readout)

    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        hidden, pool = block.predicting, None
        base = vocabulary.compute_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        if 0 < self._pool < base.shape[-1]:
            pool = base.amax(1).topk(self._pool, -1, sorted=False).indices  # [B, C], of all rows
        corrects = block.depth > self._config.pure_prefix
        if pool is not None and block.greedy and corrects and use_triton(hidden):
            columns = Pool(pool, vocabulary.to_target_ids(pool))
            return Proposal(self._best(block, vocabulary, base, columns))
        return Proposal(self._drawn(block, vocabulary, base, draw, pool))

    def _best(self, block: Block, vocabulary: DraftVocabulary, base: Tensor, pool: Pool) -> Tensor:
        """The best tokens [B, D] by base logits [B, D, V] and correction, chosen by kernels."""
        of_hidden, of_state = self._halves(block.predicting)
        prefix, readout = self._config.pure_prefix, self._readout["weight"]
        keys = new_keys(block.depth - prefix, len(base), base.device)
        state, token, tokens = None, block.anchor.contiguous(), []
        for i in range(block.depth):
            before = TokensBefore(token, keys, max(0, i - prefix))
            state = self._after(before, vocabulary, state)
            if i < prefix:
                token = vocabulary.to_target_ids(argmax(base[:, i], invalid=0))
                tokens.append(token)
            else:
                inner = silu_of_state(of_hidden[:, i], state, of_state)
                best_in_pool(base[:, i], inner, pool, readout, keys, i - prefix)
        return torch.cat([*(token.unsqueeze(1) for token in tokens), tokens_of_keys(keys)], 1)

    def _after(
        self, before: TokensBefore, vocabulary: DraftVocabulary, state: Tensor | None
    ) -> Tensor:
        """The GRU's state after the tokens before a row."""
        table, row = vocabulary.embedding_rows(), before.row
        if table is not None and table.dtype == self.prefix_gru["weight_ih_l0"].dtype:
            return self.prefix_gru(table, state, before)
        token = before.first
        if row > 0:
            token = tokens_of_keys(before.keys[row - 1 : row]).squeeze(1)
        return self.prefix_gru(vocabulary.embed(token), state)

    def _drawn(
        self,
        block: Block,
        vocabulary: DraftVocabulary,
        base: Tensor,
        draw: Draw,
        pool: Tensor | None,
    ) -> Tensor:
        """The same with drawn tokens, and of all columns if there is no pool."""
        hidden, pooled, rows = block.predicting, base, self._readout["weight"]
        if pool is not None:
            pooled = base.gather(2, pool.unsqueeze(1).expand(-1, block.depth, -1))
            rows = rows[pool]
        own = None if pool is None else pool.unsqueeze(1)
        of_hidden, of_state = self._halves(hidden)
        state, token, tokens = None, block.anchor, []
        for i in range(block.depth):
            state = self.prefix_gru(vocabulary.embed(token), state)
            if i < self._config.pure_prefix:
                token = draw(base[:, i : i + 1], i).squeeze(1)
            else:
                inner = silu_of_state(of_hidden[:, i], state, of_state)
                scores = pooled[:, i : i + 1] + inner.unsqueeze(1) @ rows.mT
                token = draw(scores, i, own).squeeze(1)
            tokens.append(token)
        return torch.stack(tokens, 1)

    def _halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The first linear's product with the rows' hidden states [B, D, H], [B, D, m], and its
        weight for the GRU's state, [m, g].
        """
        weight, size = self._inner["weight"], hidden.shape[-1]
        return F.linear(hidden, weight[:, :size]), weight[:, size:]
