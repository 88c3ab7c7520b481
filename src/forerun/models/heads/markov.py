"""DSpark: a Markov head corrects each row's logits by the token before it (arXiv 2607.05147).

Three kinds, with e = W1[previous token]:

    vanilla   bias = W2 e
    gated     bias = W2 (sigmoid(G [h ; e]) · e)
    rnn       a recurrence over the rows: [gate | candidate | output] = J [state ; e ; h],
              state' = σ(gate) · state + (1 - σ(gate)) · tanh(candidate), bias = W2 tanh(output)

A confidence head estimates how likely each draft is to be accepted, given that those before it are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from forerun.config.schema import Size
from forerun.core.errors import ConfigError
from forerun.kernels.cpu.functions import add_argmax, serve
from forerun.kernels.drafting.best_token import CorrectedRows, fits_corrected_rows
from forerun.kernels.drafting.confidence import confidences
from forerun.kernels.runtime.jit import use_triton
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import VocabEmbedding
from forerun.layers.linear import Linear
from forerun.layers.module import Module
from forerun.models.formats.base import Headers
from forerun.models.heads.base import (
    Affine,
    Block,
    BodySizes,
    Branches,
    BranchingHead,
    DraftVocabulary,
    Draw,
    HeadConfig,
    HeadFiles,
    Proposal,
    agreed,
    check_choice,
    checked_keys,
    whole,
)

Kind = Literal["vanilla", "gated", "rnn"]


class DSparkKeys(msgspec.Struct, kw_only=True):
    """Keys of every writer; those of SGLang's `dspark_config` have the same names."""

    markov_rank: Size | None = None
    markov_head_type: Kind | None = None
    enable_confidence_head: bool | None = None
    use_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    confidence_head_alpha: Annotated[float, Meta(ge=0)] | None = None
    dspark_draft_topk: Size | None = None
    num_anchors: Size | None = None  # of training


@dataclass(frozen=True)
class MarkovConfig(HeadConfig):
    """`rank` r; `kind`; a confidence head or none, which reads e besides h or not."""

    rank: int
    kind: Kind
    confidence: bool | None  # None: its tensors say, here and below
    confidence_reads_token: bool | None
    draft_topk: int | None  # only the best k base logits of each row are corrected

    files: ClassVar[HeadFiles] = HeadFiles(
        "DSpark",
        (
            "dspark",
            "qwen3dsparkmodel",
            "dsparkdraftmodel",
            "dsparkspeculator",
        ),
        r"dspark_.*|markov_.*|enable_confidence_head|use_confidence_head|confidence_head_.*",
        r"(markov_|confidence_|gate_proj\.|joint_proj\.).*",
        ("markov_rank",),
        {
            "markov_w1.": "markov_head.markov_w1.",  # ModelOpt
            "markov_w2.": "markov_head.markov_w2.",
            "gate_proj.": "markov_head.gate_proj.",
            "joint_proj.": "markov_head.joint_proj.",
            "confidence_proj.": "confidence_head.proj.",
        },
    )

    keys_read: ClassVar[type[msgspec.Struct]] = DSparkKeys
    anchor_first: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    @classmethod
    def read(cls, keys: Mapping[str, Any], where: str) -> MarkovConfig:
        read = checked_keys(DSparkKeys, keys, where)
        of_speculators = keys.get("speculators_model_type") is not None
        if any(key.startswith("dspark_") and key != "dspark_draft_topk" for key in keys):
            raise ConfigError(
                f"{where}: a DSpark head in the target's own checkpoint (dspark_* keys) is not"
                " supported yet. Use a draft checkpoint of its own, or another"
                " speculative_algorithm."
            )
        kind = read.markov_head_type or ("vanilla" if of_speculators else None)
        if kind is None:
            raise ConfigError(
                f"{where} lacks markov_head_type: vanilla, gated or rnn. Add the one that was"
                " trained."
            )
        if read.markov_rank is None and not of_speculators:
            raise ConfigError(f"{where} lacks markov_rank, which the head needs. Add it.")
        stated = {
            "enable_confidence_head": read.enable_confidence_head,
            "use_confidence_head": read.use_confidence_head,
        }
        enabled = agreed(stated, where)
        if enabled is None and (of_speculators or read.confidence_head_alpha):
            enabled = True
        with_token = read.confidence_head_with_markov
        if with_token is None and (of_speculators or read.use_confidence_head is not None):
            with_token = True
        rank = read.markov_rank or 256
        return cls(rank, kind, enabled, with_token, read.dspark_draft_topk)

    def check(self, sizes: BodySizes, where: str) -> None:
        if self.draft_topk is not None:
            check_choice("dspark_draft_topk", self.draft_topk, sizes, where)

    def with_tensors(self, headers: Headers, sizes: BodySizes) -> MarkovConfig:
        own, out = headers.get("confidence_head.proj.weight"), self
        if self.confidence is None:
            out = replace(out, confidence=own is not None)
        if self.confidence_reads_token is None and own is not None:
            out = replace(out, confidence_reads_token=own.shape[-1:] > (sizes.hidden_size,))
        return out

    def build(
        self, sizes: BodySizes, place: WeightPlacement, options: Mapping[str, Any]
    ) -> DSparkHead:
        return DSparkHead(self, sizes, whole(place))

    def describe(self) -> str:
        confidence = ", confidence head" if self.confidence else ""
        return f"DSpark head ({self.kind} Markov, rank {self.rank}{confidence})"


class DSparkHead(BranchingHead):
    def __init__(self, config: MarkovConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        self._config = config
        self.markov_head = MARKOV_HEADS[config.kind](config, sizes, place)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config, sizes, place)

    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        hidden, base = block.predicting, _base_logits(block, vocabulary)
        top = self._config.draft_topk
        if block.greedy and top is None and self.markov_head.fuses(hidden):
            tokens, before = self._best(block, base, vocabulary)
        else:
            tokens, before = self._drawn(block, base, vocabulary, draw)
        confidence = self.confidence_head(hidden, before) if self._config.confidence else None
        return Proposal(tokens, confidence)

    def branch(self, block: Block, vocabulary: DraftVocabulary) -> Branches:
        base = _base_logits(block, vocabulary)
        if self._config.draft_topk is not None:
            best, columns = base.topk(self._config.draft_topk, -1)
            base = torch.full_like(base, -torch.inf).scatter(-1, columns, best)
        return _MarkovBranches(self.markov_head, block, base)

    def _best(
        self, block: Block, base: Tensor, vocabulary: DraftVocabulary
    ) -> tuple[Tensor, Tensor]:
        """The best tokens [B, D] by base logits [B, D, V_d] and bias, chosen by kernels; W1 of the
        token before each, [B, D, r].
        """
        markov, hidden = self.markov_head, block.predicting
        tables = markov.markov_w2.weight, markov.markov_w1.weight
        rows = CorrectedRows(base, block.anchor, *tables, vocabulary.d2t)
        state = markov.start(block)
        for i in range(block.depth):
            if markov.changes_before:
                x, state = markov.step(rows.look_up(i), hidden[:, i], state)
                rows.choose(i, x)
            else:
                rows.choose(i)
        return rows.tokens(), rows.before

    def _drawn(
        self, block: Block, base: Tensor, vocabulary: DraftVocabulary, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        """The same row by row, with drawn tokens, and of a few base logits if so configured."""
        markov, hidden, columns = self.markov_head, block.predicting, None
        if self._config.draft_topk is not None:
            base, columns = base.topk(self._config.draft_topk, -1)
        by_cpu_kernel = block.greedy and columns is None and serve(base)
        token, state = block.anchor, markov.start(block)
        tokens, before = [], []
        for i in range(block.depth):
            before.append(markov.markov_w1(token))
            x, state = markov.step(before[-1], hidden[:, i], state)
            bias = markov.markov_w2(x)
            own = None if columns is None else columns[:, i : i + 1]
            if own is not None:
                bias = bias.gather(1, own.squeeze(1))
            if by_cpu_kernel:
                token = vocabulary.to_target_ids(add_argmax(base[:, i], bias))
            else:
                token = draw((base[:, i] + bias).unsqueeze(1), i, own).squeeze(1)
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(before, 1)


def _base_logits(block: Block, vocabulary: DraftVocabulary) -> Tensor:
    """Returns the logits of the rows that predict, without the head's bias: [B, D, V]."""
    hidden = block.predicting
    return vocabulary.compute_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


class _MarkovBranches(Branches):
    def __init__(self, markov: MarkovHead, block: Block, base: Tensor) -> None:
        """`base`: [B, D, V], logits without the bias."""
        self._markov, self._hidden, self._base = markov, block.predicting, base
        self._state = markov.start(block).unsqueeze(1)  # [B, paths, r]

    def after(self, tokens: Tensor, row: int, follow: Callable[[Tensor], Tensor]) -> Tensor:
        shape, markov = tokens.shape, self._markov
        state = follow(self._state).expand(*shape, -1).flatten(0, 1)
        hidden = self._hidden[:, row, None].expand(*shape, -1).flatten(0, 1)
        x, state = markov.step(markov.markov_w1(tokens.flatten()), hidden, state)
        self._state = state.unflatten(0, shape)
        logits: Tensor = self._base[:, row, None] + markov.markov_w2(x).unflatten(0, shape)
        return logits


class MarkovHead(Module):
    """vanilla: the bias depends on the token before only."""

    changes_before: ClassVar[bool] = False  # whether `step` makes something else of W1's row

    def __init__(self, config: MarkovConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        self.markov_w1 = VocabEmbedding(sizes.vocab_size, config.rank, place)
        self.markov_w2 = Linear(config.rank, sizes.draft_vocab_size, bias=False, place=place)

    def start(self, block: Block) -> Tensor:
        """The state before the first row that predicts, [B, r]; unused here."""
        return block.hidden.new_zeros(block.hidden.shape[0], 0)

    def fuses(self, hidden: Tensor) -> bool:
        """Whether a kernel chooses the best token of a row without writing its logits."""
        return use_triton(hidden) and fits_corrected_rows(hidden[:, 0], self.markov_w2.weight)

    def step(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """W1 of the token before [B, r], the row's hidden states [B, H], the state -> what W2
        makes the bias of the row's logits of, [B, r], and the next row's state.
        """
        return before, state


class GatedMarkovHead(MarkovHead):
    changes_before = True

    def __init__(self, config: MarkovConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        super().__init__(config, sizes, place)
        self.gate_proj = Affine(sizes.hidden_size + config.rank, config.rank, place, bias=True)

    def step(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate_proj(torch.cat([hidden, before], 1)).sigmoid()
        return gate * before, state


class RecurrentMarkovHead(MarkovHead):
    changes_before = True

    def __init__(self, config: MarkovConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        super().__init__(config, sizes, place)
        self._rank = config.rank
        self.joint_proj = Affine(sizes.hidden_size + 2 * config.rank, 3 * config.rank, place, True)

    def start(self, block: Block) -> Tensor:
        """Zeros; rows before those that predict have gone through the recurrence, as in training,
        after the anchor.
        """
        state = block.hidden.new_zeros(block.hidden.shape[0], self._rank)
        for row in range(block.first):
            _, state = self.step(self.markov_w1(block.anchor), block.hidden[:, row], state)
        return state

    def step(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat([state, before, hidden], 1)).chunk(3, 1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


MARKOV_HEADS: Mapping[Kind, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead(Module):
    """σ(w · [h ; e] + b) of every draft, in float32."""

    def __init__(self, config: MarkovConfig, sizes: BodySizes, place: WeightPlacement) -> None:
        self._reads_token = bool(config.confidence_reads_token)
        inputs = sizes.hidden_size + (config.rank if self._reads_token else 0)
        self.proj = Affine(inputs, 1, place, bias=True)

    def __call__(self, hidden: Tensor, before: Tensor) -> Tensor:
        """hidden [B, D, H], W1 of the token before each [B, D, r] -> [B, D] float32."""
        more = before if self._reads_token else None
        return confidences(hidden, more, self.proj["weight"], self.proj["bias"])
