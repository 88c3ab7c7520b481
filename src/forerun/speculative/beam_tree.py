"""Trees of a draft model that runs step by step: EAGLE-2's beams (arXiv 2406.16858, section 4).

The first step gives the `topk` most probable tokens. Each further step runs the draft model on the
`topk` beams, the nodes of the last step whose product of probabilities along the path is highest,
and gives the `topk` most probable tokens after each of them. Of all nodes ever given, the N of the
highest products are verified (EAGLE-3 does the same). A node is never more probable than its
parent, so these are a tree.

A beam attends to the context and to the tokens on its path. Each step runs the whole paths of its
beams again, side by side: that takes one pass over the draft's weights, as their last tokens alone
would, and attention needs no more than the mask of a tree. Their K/V is overwritten by `observe`.

For N nodes, no more than N - d beams of d tokens are run: a beam on a path to one of the N best is
itself one of them, as are the d - 1 before it and a node after it. So small trees cost little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, Mask
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.best_first import NO_TOKEN, top_log_probs
from forerun.kernels.speculation.tree import MAX_NODES, pack_bits
from forerun.speculative.base import Draft, Option, ProposeInput, SpecCaps

TOPK = Option(
    "speculative_eagle_topk", int, 1, "Branches per draft token: 1 is a chain, more are a tree"
)
AT_ONCE = "this draft gives all tokens at once"  # why a parallel draft makes no trees
DEFAULT_TOKENS = 64  # verified at most, unless `speculative_num_draft_tokens` says more


@dataclass(frozen=True)
class Beams:
    """The beams of a step: B requests with n each, and their paths of d tokens."""

    paths: Tensor  # [B, n, d] int64
    above: Tensor | None  # [B, n] int64: which beam of the last step each one follows; None: d is 1

    def follow(self, before: Tensor) -> Tensor:
        """What belongs to the beams of the last step, [B, n, ...], for those that follow them."""
        if self.above is None:
            return before
        index = self.above.view(*self.above.shape, *[1] * (before.dim() - 2))
        return before.gather(1, index.expand(-1, -1, *before.shape[2:]))

    def attention(self, step: ProposeInput, offset: int) -> AttentionContext:
        """Attention of the paths, beam by beam, whose first tokens are `offset` after `start`."""
        assert step.attention is not None
        batch, count, depth = self.paths.shape
        device = self.paths.device
        own = torch.ones(depth, depth, dtype=torch.bool, device=device).tril()
        seen = torch.block_diag(*[own] * count)
        return step.attention(count * depth, offset, tree=pack_bits(seen).repeat(batch, 1, 1))


# Runs the draft model on the paths of beams: [B, n, H], for the logits after each.
RunBeams = Callable[[Beams], Tensor]


@dataclass(frozen=True)
class BeamTree:
    """The settings of a tree."""

    steps: int  # tokens of its longest path
    topk: int  # beams of a step, and tokens given after each

    @classmethod
    def of(cls, config: EngineConfig, caps: SpecCaps) -> Self | None:
        """Returns what `resolve_tree` was given for these caps; None: a chain."""
        if caps.tree_depth is None:
            return None
        return cls(caps.tree_depth, config.algorithm_options[TOPK.name])

    @property
    def candidates(self) -> int:
        """How many nodes are given."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def beams(self) -> int:
        """How many nodes the draft model runs on."""
        return (self.steps - 1) * self.topk


def resolve_tree(config: EngineConfig, caps: SpecCaps, why_not: str | None = None) -> SpecCaps:
    """The needs of a draft whose chain of `speculative_num_steps` tokens has those of `caps`.

    `why_not`: the reason why this draft makes no trees.

    Raises:
        ConfigError: a setting is out of range, or this draft makes no trees.
    """
    topk, tokens = config.algorithm_options[TOPK.name], config.speculative_num_draft_tokens
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ConfigError(f"{TOPK.name} must be >= 1, got {topk!r}.")
    if topk == 1:
        return caps
    if why_not is not None:
        raise ConfigError(f"{TOPK.name} must be 1 (a chain), got {topk}: {why_not}.")
    tree = BeamTree(caps.num_drafts, topk)
    if tree.beams > MAX_NODES:
        raise ConfigError(
            f"{TOPK.name} {topk} and {tree.steps} steps run the draft on {tree.beams} tokens at"
            f" once; it takes {MAX_NODES}. Lower one of them."
        )
    nodes = min(tree.steps * topk + 1, DEFAULT_TOKENS) if tokens is None else tokens
    most = min(tree.candidates + 1, MAX_NODES)
    if not tree.steps < nodes <= most:
        raise ConfigError(
            f"speculative_num_draft_tokens must be {tree.steps + 1} to {most} for a tree of"
            f" {tree.steps} steps and {TOPK.name} {topk}, got {nodes}."
        )
    return replace(
        caps,
        num_drafts=nodes - 1,
        kv_reserve=max(nodes, tree.beams + 1, caps.kv_reserve),
        verify_mask=Mask.CUSTOM,
        tree_depth=tree.steps,
        draft_trees=True,
    )


class _Nodes:
    """The nodes given so far; node 0 is the root."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []  # [B, n] each: tokens, log-probabilities of paths, parents
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []
        self._count = 0

    def add(self, ids: Tensor, scores: Tensor, parents: Tensor) -> None:
        """Adds nodes [B, n]."""
        self.ids.append(ids)
        self.scores.append(scores)
        self.parents.append(parents)
        self._count += ids.shape[1]

    def choose_beams(self, before: Beams | None, count: int) -> tuple[Tensor, Tensor, Beams]:
        """The `count` best nodes of the last step: scores and nodes [B, count], and their paths.

        `before`: the beams that they follow; None: they follow the root.
        """
        scores, at = self.scores[-1].topk(count, -1)
        tokens = self.ids[-1].gather(1, at).unsqueeze(2)
        beams = Beams(tokens, None)
        if before is not None:
            above = at // (self.ids[-1].shape[1] // before.paths.shape[1])
            beams = Beams(torch.cat((Beams(tokens, above).follow(before.paths), tokens), 2), above)
        return scores, at + (self._count - self.scores[-1].shape[1] + 1), beams

    def best(self, count: int) -> Draft:
        """The `count` best nodes, best first: parents come first, where scores are equal too.

        Where fewer were given, the others have no token.
        """
        if (missing := count - self._count) > 0:
            ids, scores = self.ids[0], self.scores[0]
            empty = ids.new_full((ids.shape[0], missing), NO_TOKEN)
            self.add(empty, torch.full_like(empty, -torch.inf, dtype=scores.dtype), empty * 0)
        ids, scores, parents = (
            torch.cat(each, 1) for each in (self.ids, self.scores, self.parents)
        )
        order = scores.sort(dim=1, descending=True, stable=True)[1][:, :count]
        places = torch.arange(1, count + 1, device=ids.device).expand_as(order)
        place = ids.new_zeros(ids.shape[0], self._count + 1).scatter(1, order + 1, places)
        return Draft(ids.gather(1, order), place.gather(1, parents.gather(1, order)))


def propose_tree(
    step: ProposeInput,
    tree: BeamTree,
    first: Tensor,
    model: tuple[RunBeams, Callable[[Tensor], Tensor]],
    token_ids: Tensor | None = None,
) -> Draft:
    """Grows the tree of a step.

    Args:
        first: [B, H], for the logits of the first tokens.
        model: runs it on beams, step after step; its logits [T, H] -> [T, V]. Where the first gives
            logits, the second is the identity.
        token_ids: [V] int64, the target's token id of each column; default: 0 … V - 1.
    """
    run, compute_logits = model
    nodes, beams, count = _Nodes(), None, step.num_verify_tokens - 1
    scores, ids = _most_probable(
        compute_logits(first).unsqueeze(1), min(tree.topk, count), token_ids
    )
    nodes.add(ids.flatten(1), scores.flatten(1), torch.zeros_like(ids).flatten(1))
    for depth in range(1, min(tree.steps, count)):
        most = min(tree.topk, count - depth)
        above, parents, beams = nodes.choose_beams(beams, most)
        logits = compute_logits(run(beams).flatten(0, 1)).unflatten(0, (-1, most))
        scores, ids = _most_probable(logits, most, token_ids)
        scores = above.unsqueeze(2) + scores
        parents = parents.unsqueeze(2).expand_as(ids)
        nodes.add(ids.flatten(1), scores.flatten(1), parents.flatten(1))
    return nodes.best(count)


def _most_probable(logits: Tensor, count: int, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, n, V] -> log-probabilities, at most 0, and tokens of the best [B, n, count]."""
    scores, ids = top_log_probs(logits, count)
    scores = torch.where(scores == scores, scores.clamp_max(0), -torch.inf)
    return scores, ids if token_ids is None else token_ids[ids]
