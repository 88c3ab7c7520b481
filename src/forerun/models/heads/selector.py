"""DFlash2's candidate selector: a greedy walk over the best K tokens of each row.

The score of candidate c after token p is its logit plus an edge, <A[p] · (P h), S[c]>. Only
candidates can be proposed. (z-lab, DFlash2, 2026; the convolutions that come with it belong to the
body: `models/block_convolution.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from forerun.config.schema import Size
from forerun.core.errors import ConfigError
from forerun.kernels.drafting.top_columns import top_columns
from forerun.kernels.drafting.walk import selector_walk
from forerun.kernels.runtime.jit import use_triton
from forerun.layers.communication import WeightPlacement
from forerun.models.block_convolution import ConvolutionConfig
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
    check_choice,
    checked_keys,
    whole,
)


class SelectorKeys(msgspec.Struct, kw_only=True):
    selector_rank: Size | None = None
    selector_top_k: Annotated[int, Meta(ge=1, le=1024)] | None = None
    output_multiplier: Annotated[float, Meta(gt=0)] | None = None
    final_logit_softcapping: Annotated[float, Meta(gt=0)] | None = None


@dataclass(frozen=True)
class SelectorConfig(HeadConfig):
    rank: int
    top_k: int
    multiplier: float = 1.0  # of the logits, before the cap
    soft_cap: float | None = None

    files: ClassVar[HeadFiles] = HeadFiles(
        "DFlash2",
        (
            "dflash2",
            "dflash2draftmodel",
            "minimaxdflash2draftmodel",
            "dflash2beamdraftmodel",
            "dflash2speculator",
        ),
        r"selector_rank|selector_top_k",
        r"candidate_selector\..*",
        (),
        {
            f"candidate_selector.{table}.weight": f"candidate_selector.{table}"
            for table in ("predecessor_codebook", "successor_codebook")
        },
    )
    keys_read: ClassVar[type[msgspec.Struct]] = SelectorKeys
    fill_in_only: ClassVar[bool] = True
    causal_windows: ClassVar[bool] = False
    honours: ClassVar[tuple[str, ...]] = ("output_multiplier", "final_logit_softcapping")

    @classmethod
    def read(cls, keys: Mapping[str, Any], where: str) -> SelectorConfig:
        read = checked_keys(SelectorKeys, keys, where)
        rank, top_k = read.selector_rank, read.selector_top_k
        if keys.get("speculators_model_type") is not None:
            rank, top_k = rank or 256, top_k or 16
        if rank is None or top_k is None:
            raise ConfigError(
                f"{where} needs both selector_rank and selector_top_k, as they were trained."
            )
        cap = read.final_logit_softcapping
        return cls(rank, top_k, read.output_multiplier or 1.0, cap)

    @classmethod
    def convolution(cls, keys: Mapping[str, Any]) -> ConvolutionConfig | None:
        of_speculators = keys.get("speculators_model_type") is not None
        return ConvolutionConfig(2, 16) if of_speculators else None

    def check(self, sizes: BodySizes, where: str) -> None:
        if sizes.draft_vocab_size != sizes.vocab_size:
            raise ConfigError(
                f"{where}: a DFlash2 head has no pruned vocabulary (draft_vocab_size)."
            )
        check_choice("selector_top_k", self.top_k, sizes, where)

    def build(
        self, sizes: BodySizes, place: WeightPlacement, options: Mapping[str, Any]
    ) -> SelectorHead:
        return SelectorHead(self, sizes, whole(place))

    def describe(self) -> str:
        return f"candidate selector (best {self.top_k}, rank {self.rank})"


class Selector(Parameters):
    def __init__(self, config: SelectorConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        table = (sizes.vocab_size, config.rank)
        super().__init__(place, predecessor_codebook=table, successor_codebook=table)
        self.hidden_projection = Affine(sizes.hidden_size, config.rank, place, bias=False)

    def edges(self, before: Tensor, projected: Tensor, candidates: Tensor) -> Tensor:
        """Scores of candidates [B, K] after tokens [B]; projected [B, r]. -> [B, K]."""
        query = self["predecessor_codebook"][before] * projected
        return torch.einsum("br,bkr->bk", query, self["successor_codebook"][candidates])


class SelectorHead(DraftHead):
    def __init__(self, config: SelectorConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        self._config = config
        self.candidate_selector = Selector(config, sizes, place)

    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        hidden, selector = block.predicting, self.candidate_selector
        logits = self._unary(vocabulary.compute_logits(hidden.flatten(0, 1)))
        unary, candidates = (
            best.view(*hidden.shape[:2], -1) for best in top_columns(logits, self._config.top_k)[:2]
        )
        projected = selector.hidden_projection(hidden)
        if block.greedy and use_triton(hidden):
            tables = selector["predecessor_codebook"], selector["successor_codebook"]
            return Proposal(selector_walk(block.anchor, unary, candidates, projected, *tables))
        token, tokens = block.anchor, []
        for i in range(block.depth):
            ids = candidates[:, i]
            scores = unary[:, i] + selector.edges(token, projected[:, i], ids)
            token = draw(scores.unsqueeze(1), i, ids.unsqueeze(1)).squeeze(1)
            tokens.append(token)
        return Proposal(torch.stack(tokens, 1))

    def _unary(self, logits: Tensor) -> Tensor:
        config = self._config
        if config.multiplier != 1:
            logits = logits * config.multiplier
        if config.soft_cap is not None:
            logits = config.soft_cap * torch.tanh(logits / config.soft_cap)
        return logits
