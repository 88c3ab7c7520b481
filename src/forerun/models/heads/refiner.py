"""XPress: a causal refiner corrects all rows at once, in Jacobi passes (arXiv 2608.02438).

A pass reads the tokens that the pass before chose: row k the one of row k - 1. A row whose tokens
before it are settled is settled, so B - 1 passes equal drafting one by one.
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
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import VocabEmbedding
from forerun.layers.linear import Linear
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
    agreed,
    checked_keys,
    whole,
)

Passes = Annotated[int, Meta(ge=1, le=1024)]


class XPressKeys(msgspec.Struct, kw_only=True):
    xpress_rank: Size = 256
    xpress_mlp_ratio: Annotated[int, Meta(ge=1, le=64)] = 2
    num_jacobi_passes: Passes | None = None
    xpress_num_passes: Passes | None = None
    xpress_selector: bool = False
    xpress_topc: Annotated[int, Meta(ge=0)] = 0  # an engine's own shortcut
    xpress_backbone: str = "dflash"


@dataclass(frozen=True)
class XPressConfig(HeadConfig):
    rank: int
    mlp_size: int
    passes: int

    files: ClassVar[HeadFiles] = HeadFiles(
        "XPress",
        ("xpress", "xpressdraftmodel", "xpressspeculator"),
        r"xpress_.*|num_jacobi_passes",
        r"(refiner_head|w1|w2|down_h|down_g|in_proj|mix|mlp)\..*",
        (),
        {
            "w1.": "refiner_head.token_embed.",  # released files
            "w2.": "refiner_head.readout.",
            "down_h.": "refiner_head.down_h.",
            "down_g.": "refiner_head.down_g.",
            "in_proj.": "refiner_head.in_proj.",
            "mix.L": "refiner_head.mix_l",
            "mlp.gate_proj.": "refiner_head.mlp_gate.",
            "mlp.up_proj.": "refiner_head.mlp_up.",
            "mlp.down_proj.": "refiner_head.mlp_down.",
        },
    )
    keys_read: ClassVar[type[msgspec.Struct]] = XPressKeys
    reads_before: ClassVar[bool] = True
    fill_in_only: ClassVar[bool] = True
    fixed_block: ClassVar[bool] = True

    @classmethod
    def read(cls, keys: Mapping[str, Any], where: str) -> XPressConfig:
        read = checked_keys(XPressKeys, keys, where)
        if read.xpress_selector:
            raise ConfigError(f"{where}: xpress_selector is not supported yet; it must be false.")
        if read.xpress_backbone not in ("dflash", "dflash2"):
            raise ConfigError(f"{where}: xpress_backbone must be dflash or dflash2.")
        stated = {
            "num_jacobi_passes": read.num_jacobi_passes,
            "xpress_num_passes": read.xpress_num_passes,
        }
        passes = agreed(stated, where) or 6
        return cls(read.xpress_rank, read.xpress_rank * read.xpress_mlp_ratio, passes)

    def build(
        self, sizes: BodySizes, place: WeightPlacement, options: Mapping[str, Any]
    ) -> XPressHead:
        return XPressHead(self, sizes, whole(place))

    def describe(self) -> str:
        return f"XPress head (rank {self.rank}, {self.passes} Jacobi passes)"


class Refiner(Parameters):
    def __init__(self, config: XPressConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        rank, block, hidden = config.rank, sizes.block_size, sizes.hidden_size
        super().__init__(place, mix_l=(rank, block, block))
        self.token_embed = VocabEmbedding(sizes.vocab_size, rank, place)
        self.down_h = Affine(hidden, rank, place, bias=False)
        self.down_g = Affine(hidden, rank, place, bias=False)
        self.in_proj = Affine(3 * rank, rank, place, bias=False)
        self.mlp_gate = Affine(rank, config.mlp_size, place, bias=False)
        self.mlp_up = Affine(rank, config.mlp_size, place, bias=False)
        self.mlp_down = Affine(config.mlp_size, rank, place, bias=False)
        self.readout = Linear(rank, sizes.draft_vocab_size, bias=False, place=place)

    def features(self, hidden: Tensor) -> Tensor:
        """What does not depend on tokens: hidden [B, R, H] -> [B, R, 2r]."""
        pooled = self.down_g(hidden.mean(1, keepdim=True)).expand(-1, hidden.shape[1], -1)
        return torch.cat([self.down_h(hidden), pooled], -1)

    def bias(self, features: Tensor, before: Tensor, rows: slice) -> Tensor:
        """The bias of some rows' logits, [B, n, V]; `before` [B, R] int64: tokens before rows."""
        tokens = self.token_embed(before.flatten()).view(*before.shape, -1)
        x = self.in_proj(torch.cat([features, tokens.to(features.dtype)], -1))
        mix = self["mix_l"].to(x.dtype).tril()
        x = x + torch.einsum("rij,bjr->bir", mix, x)
        x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
        x = x[:, rows]
        return self.readout(x.flatten(0, 1)).view(*x.shape[:2], -1)


class XPressHead(DraftHead):
    def __init__(self, config: XPressConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        self._passes = config.passes
        self.refiner_head = Refiner(config, sizes, place)

    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        assert block.before is not None
        first, end = block.first, block.first + block.depth
        everything = block.hidden.flatten(0, 1)
        tokens = vocabulary.to_target_ids(vocabulary.compute_argmax(everything))
        tokens = tokens.view(block.hidden.shape[:2])
        base = vocabulary.compute_logits(block.predicting.flatten(0, 1))
        base = base.view(*block.predicting.shape[:2], -1)
        features = self.refiner_head.features(block.hidden)
        for _ in range(min(self._passes, block.depth)):
            # Row 0 holds the anchor, whatever the body predicts there.
            known = torch.stack([block.before, block.anchor], 1)
            before = (
                torch.cat([known, tokens[:, 1:-1]], 1)
                if first
                else torch.cat([known[:, 1:], tokens[:, :-1]], 1)
            )
            bias = self.refiner_head.bias(features, before, slice(first, end))
            tokens = torch.cat([tokens[:, :first], draw(base + bias, 0), tokens[:, end:]], 1)
        return Proposal(tokens[:, first:end].contiguous())
