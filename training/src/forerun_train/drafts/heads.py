"""Heads in training: scores of all drafts of a block, with the labels before each of them known.

A greedy draft that is right up to draft k has seen what the labels show. So the drafts of this one
pass are right as far as those of serving are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.core.errors import ConfigError
from forerun.models.heads.base import HeadConfig
from forerun.models.heads.gru import DominoConfig
from forerun.models.heads.markov import MarkovConfig
from forerun.models.heads.selector import SelectorConfig
from forerun_train.drafts.parts import Linear, Table, matrix
from forerun_train.objectives import Distances, Mix, PositionWeights, distances


@dataclass(frozen=True)
class HeadSizes:
    """What a head is built for."""

    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int


@dataclass(frozen=True)
class Rows:
    """The rows of n blocks that predict, D of each."""

    hidden: Tensor  # [n, D, H]
    own: Tensor | None  # [n, D, V_d]: logits of the target's LM head, unless a head has its own
    before: Tensor  # [n, D] int64: the token before each draft, ids of the target
    labels: Tensor  # [n, D] int64: columns of the draft's vocabulary
    valid: Tensor  # [n, D] bool
    target: Tensor | None  # [n, D, V_d]: the target's logits
    embeds: Tensor | None  # [n, D, H]: the target's embedding of `before`
    skipped: Tensor  # [n, F, H]: hidden states of the rows before those that predict

    @property
    def base(self) -> Tensor:
        """[n, D, V_d]: logits of the body alone."""
        assert self.own is not None
        return self.own


class HeadLoss(NamedTuple):
    """What a head says of some blocks."""

    total: Tensor  # the sum of weighted losses
    weight: Tensor  # the sum of weights
    drafts: Tensor  # [n, D]: greedy ones, columns


class TrainingHead(nn.Module):
    """No head: each row's logits are those of the body."""

    reads_target = False  # its objective needs the target's distribution
    reads_embeddings = False
    has_lm_head = False  # its own, which is trained
    default_mix = Mix()
    default_decay = 4.0  # γ

    def forward(self, rows: Rows, mix: Mix, weights: PositionWeights, done: Tensor) -> HeadLoss:
        """
        Args:
            done: how much of the run is done, float32, for schedules.
        """
        scores = self.scores(rows)
        found = distances(scores, rows.labels, rows.target, mix)
        w = weights.of(found.ce, rows.valid)
        total = self.mixed(rows, found, w, mix, done)
        return HeadLoss(total, w.sum(), scores.detach().argmax(-1))

    def scores(self, rows: Rows) -> Tensor:
        """[n, D, V_d]."""
        return rows.base

    def mixed(
        self, rows: Rows, found: Distances, weights: Tensor, mix: Mix, done: Tensor
    ) -> Tensor:
        """The sum of weighted losses, `found` of the scores among them."""
        return (found.loss * weights).sum()


class LMHead(TrainingHead):
    """An LM head of the draft's own (EAGLE-3), taught by the target's distribution."""

    has_lm_head = True
    default_mix = Mix(0.0, 1.0, 0.0)
    default_decay = 9.5  # 0.9 per draft

    def __init__(self, weight: Tensor) -> None:
        """`weight` [V_d, H]: the first one, of the target's LM head."""
        super().__init__()
        self.lm_head = Linear(weight.shape[1], len(weight))
        self.lm_head.weight.data.copy_(weight.float())

    def scores(self, rows: Rows) -> Tensor:
        out: Tensor = self.lm_head(rows.hidden)
        return out


class MarkovHead(TrainingHead):
    """DSpark: each row's logits are corrected by the token before; and maybe a confidence head.

    CE + 0.9 L1 + BCE of the confidence against 1 - ½ L1, the part of drafts that rejection sampling
    accepts; all three with the same weights. The paper has 0.1 CE, for ten epochs of 1.3 M samples
    (arXiv 2607.05147): a short run hardly gets anywhere with that. After 100 steps of the smoke
    preset it accepted 1.61 tokens per step, with 1.0 CE 2.28.
    """

    reads_target = True
    default_mix = Mix(1.0, 0.0, 0.9)

    def __init__(self, config: MarkovConfig, sizes: HeadSizes) -> None:
        super().__init__()
        rank, size = config.rank, sizes.hidden_size
        self.kind = config.kind
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": Table(sizes.vocab_size, rank),
                "markov_w2": Linear(rank, sizes.draft_vocab_size),
            }
        )
        if config.kind == "gated":
            self.markov_head["gate_proj"] = Linear(size + rank, rank, bias=True)
        if config.kind == "rnn":
            self.markov_head["joint_proj"] = Linear(size + 2 * rank, 3 * rank, bias=True)
        self.reads_token = config.confidence_reads_token
        self.confidence_head: nn.ModuleDict | None = None
        if config.confidence:
            inputs = size + (rank if self.reads_token else 0)
            self.confidence_head = nn.ModuleDict({"proj": Linear(inputs, 1, bias=True)})

    def scores(self, rows: Rows) -> Tensor:
        x = self._corrections(rows, self._before(rows))
        out: Tensor = rows.base + self.markov_head["markov_w2"](x)
        return out

    def _before(self, rows: Rows) -> Tensor:
        """W1 of the token before each draft, [n, D, r]."""
        out: Tensor = self.markov_head["markov_w1"](rows.before, rows.hidden.dtype)
        return out

    def _corrections(self, rows: Rows, before: Tensor) -> Tensor:
        """What W2 makes biases of, [n, D, r]."""
        if self.kind == "gated":
            joined = torch.cat([rows.hidden, before], -1)
            out: Tensor = self.markov_head["gate_proj"](joined).sigmoid() * before
            return out
        return self._recurrence(rows, before) if self.kind == "rnn" else before

    def _recurrence(self, rows: Rows, before: Tensor) -> Tensor:
        """Runs over the rows of a block; those that predict nothing come after the anchor."""
        skipped = rows.skipped.shape[1]
        hidden = torch.cat([rows.skipped, rows.hidden], 1)
        inputs = torch.cat([before[:, :1].expand(-1, skipped, -1), before], 1)
        state, outputs = torch.zeros_like(before[:, 0]), []
        for row in range(hidden.shape[1]):
            joined = torch.cat([state, inputs[:, row], hidden[:, row]], -1)
            gate, candidate, output = self.markov_head["joint_proj"](joined).chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            outputs.append(output.tanh())
        return torch.stack(outputs[skipped:], 1)

    def confidence(self, rows: Rows) -> Tensor:
        """Logits of the probability that each draft is accepted, [n, D] float32."""
        assert self.confidence_head is not None
        parts = [rows.hidden.float()]
        if self.reads_token:
            parts.append(self._before(rows).float())
        out: Tensor = self.confidence_head["proj"](torch.cat(parts, -1)).squeeze(-1)
        return out

    def mixed(
        self, rows: Rows, found: Distances, weights: Tensor, mix: Mix, done: Tensor
    ) -> Tensor:
        total = super().mixed(rows, found, weights, mix, done)
        if self.confidence_head is None:
            return total
        bce = F.binary_cross_entropy_with_logits(
            self.confidence(rows), found.overlap.clamp(0, 1), reduction="none"
        )
        return total + (bce * weights).sum()


class DominoHead(TrainingHead):
    """Domino: a GRU over the tokens corrects the logits (arXiv 2605.29707).

    (1 - λ) of the loss is that of the corrected logits and λ that of the body's; λ falls from 1 to
    0 over the first half of the run, so that the body learns first.
    """

    reads_embeddings = True
    decay_part = 0.5

    def __init__(self, config: DominoConfig, sizes: HeadSizes) -> None:
        super().__init__()
        gru, inner = config.gru_size, config.inner_size
        self.prefix_gru = nn.ParameterDict(
            {
                "weight_ih_l0": matrix(3 * gru, sizes.hidden_size),
                "weight_hh_l0": matrix(3 * gru, gru),
            }
        )
        self.embed_proj = nn.ModuleDict(
            {
                "0": Linear(sizes.hidden_size + gru, inner),
                "2": Linear(inner, sizes.draft_vocab_size),
            }
        )
        self.pure_prefix = config.pure_prefix

    def scores(self, rows: Rows) -> Tensor:
        joined = torch.cat([rows.hidden, self._states(rows)], -1)
        bias: Tensor = self.embed_proj["2"](F.silu(self.embed_proj["0"](joined)))
        corrected = torch.arange(bias.shape[1], device=bias.device) >= self.pure_prefix
        return rows.base + bias * corrected.unsqueeze(1)

    def _states(self, rows: Rows) -> Tensor:
        """The GRU after each token before a draft, [n, D, g]; gates in PyTorch's order."""
        assert rows.embeds is not None
        dtype = rows.hidden.dtype
        of_input = F.linear(rows.embeds.to(dtype), self.prefix_gru["weight_ih_l0"].to(dtype))
        weight = self.prefix_gru["weight_hh_l0"].to(dtype)
        state = of_input.new_zeros(len(of_input), weight.shape[1])
        states = []
        for k in range(of_input.shape[1]):
            r, z, n = of_input[:, k].chunk(3, -1)
            of_r, of_z, of_n = F.linear(state, weight).chunk(3, -1)
            z = (z + of_z).sigmoid()
            state = (1 - z) * torch.tanh(n + (r + of_r).sigmoid() * of_n) + z * state
            states.append(state)
        return torch.stack(states, 1)

    def mixed(
        self, rows: Rows, found: Distances, weights: Tensor, mix: Mix, done: Tensor
    ) -> Tensor:
        share = (1 - done / self.decay_part).clamp(0, 1)
        base = distances(rows.base, rows.labels, rows.target, mix)
        return (((1 - share) * found.loss + share * base.loss) * weights).sum()


class Selector(nn.Module):
    """Scores of candidates after the token before."""

    def __init__(self, rank: int, sizes: HeadSizes) -> None:
        super().__init__()
        self.predecessor_codebook = matrix(sizes.vocab_size, rank)
        self.successor_codebook = matrix(sizes.vocab_size, rank)
        self.hidden_projection = Linear(sizes.hidden_size, rank)

    def forward(self, rows: Rows, candidates: Tensor) -> Tensor:
        """<A[before] · (P h), S[c]> of candidates [n, D, K] -> the same shape."""
        dtype = rows.hidden.dtype
        before = F.embedding(rows.before, self.predecessor_codebook).to(dtype)
        query = before * self.hidden_projection(rows.hidden)
        successors = F.embedding(candidates, self.successor_codebook).to(dtype)
        return torch.einsum("ndr,ndkr->ndk", query, successors)


class SelectorHead(TrainingHead):
    """DFlash2: a walk over the best K tokens of each row, scored by edges between them.

    The loss of the body's logits, and K-way CE of the walk's scores, with the label before as the
    token before. A label that is not among the candidates takes the weakest one's place.
    """

    edge_weight = 1.0

    def __init__(self, config: SelectorConfig, sizes: HeadSizes) -> None:
        super().__init__()
        self.candidate_selector = Selector(config.rank, sizes)
        self.top_k = config.top_k

    def scores(self, rows: Rows) -> Tensor:
        """[n, D, V_d]; -inf where a token is no candidate."""
        candidates = rows.base.topk(self.top_k, -1).indices
        scores = self._scored(rows, candidates)
        return torch.full_like(rows.base, float("-inf")).scatter(-1, candidates, scores)

    def forward(self, rows: Rows, mix: Mix, weights: PositionWeights, done: Tensor) -> HeadLoss:
        found = distances(rows.base, rows.labels, rows.target, mix)
        w = weights.of(found.ce, rows.valid)
        candidates = rows.base.topk(self.top_k, -1).indices
        best = self._scored(rows, candidates).detach().argmax(-1, keepdim=True)
        drafts = candidates.gather(-1, best).squeeze(-1)
        among = candidates == rows.labels.unsqueeze(-1)
        known = among.any(-1, keepdim=True)
        weakest = torch.where(known, candidates[..., -1:], rows.labels.unsqueeze(-1))
        trained = torch.cat([candidates[..., :-1], weakest], -1)
        place = torch.where(known, among.long().argmax(-1, keepdim=True), self.top_k - 1)
        scores = self._scored(rows, trained).float().flatten(0, 1)
        edge = F.cross_entropy(scores, place.flatten(), reduction="none").view_as(w)
        total = ((found.loss + self.edge_weight * edge) * w).sum()
        return HeadLoss(total, w.sum(), drafts)

    def _scored(self, rows: Rows, candidates: Tensor) -> Tensor:
        edges: Tensor = self.candidate_selector(rows, candidates)
        return rows.base.gather(-1, candidates) + edges


def build_head(config: HeadConfig | None, sizes: HeadSizes) -> TrainingHead:
    """The head of a draft's config.

    Raises:
        ConfigError: one that cannot be trained here.
    """
    if config is None:
        return TrainingHead()
    if isinstance(config, MarkovConfig) and config.draft_topk is None:
        return MarkovHead(config, sizes)
    if isinstance(config, DominoConfig):
        return DominoHead(config, sizes)
    if isinstance(config, SelectorConfig) and config.multiplier == 1 and config.soft_cap is None:
        return SelectorHead(config, sizes)
    raise ConfigError(f"A draft with this head cannot be trained here: {config.describe()}.")
