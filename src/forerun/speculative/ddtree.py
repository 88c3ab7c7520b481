"""DDTREE: the most probable prefixes of a DFLASH block, verified as one tree.

A block gives a distribution at every position. The tree holds the N prefixes that are most probable
under the product of these, found best first: a prefix comes after its parent. If the marginals were
exact and independent, no tree of N nodes would have a greater expected accept length.
(arXiv 2604.12989.)

A head that corrects a row's logits by the draft before it (DSpark) gives a distribution after every
prefix. Its trees grow row by row, as those of a draft model that runs step by step
(`beam_tree.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.attention.base import Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.best_first import best_first, top_log_probs
from forerun.kernels.speculation.tree import MAX_NODES
from forerun.models.heads.base import Block, Branches, BranchingHead
from forerun.speculative.base import Draft, Option, ProposeInput, SpecCaps
from forerun.speculative.beam_tree import Beams, BeamTree, propose_tree
from forerun.speculative.dflash import DFlash, read_draft

# Prefixes of a row after which a head's tree goes on, and tokens after each; more in short blocks,
# for as many nodes as are verified.
BEAMS = 8


class DDTree(DFlash):
    options: ClassVar[tuple[Option, ...]] = (
        *DFlash.options,
        Option("speculative_ddtree_budget", int, 32, "Tokens of a draft tree, 1 to 255"),
    )

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        budget = _budget(config)
        draft = read_draft(config)[1]
        if draft.head is not None and not draft.head.branches:
            raise ConfigError(
                f"DDTREE builds no trees of this draft: the {draft.head.files.name} head gives one"
                " token of each row; use --speculative-algorithm DFLASH."
            )
        caps = super().resolve(config, target, dtype)
        return replace(
            caps,
            num_drafts=budget,
            tree_depth=min(budget, caps.num_drafts),
            kv_reserve=max(budget + 1, caps.kv_reserve),
            verify_mask=Mask.CUSTOM,
        )

    def propose(self, step: ProposeInput) -> Draft:
        nodes = step.num_verify_tokens - 1  # no path is longer
        block, head = self._run_block(step), self._draft.head
        if isinstance(head, BranchingHead):
            return self._grow(step, block, head.branch(block, self._draft))
        rows = block.predicting
        logits = self._draft.compute_logits(rows.flatten(0, 1))
        logits = logits.unflatten(0, rows.shape[:2])  # [B, depth, V]
        scores, ids = top_log_probs(logits, min(nodes, logits.shape[-1]))
        return Draft(*best_first(scores, self._draft.to_target_ids(ids), nodes))

    def _grow(self, step: ProposeInput, block: Block, branches: Branches) -> Draft:
        def logits(beams: Beams) -> Tensor:
            return branches.after(beams.paths[:, :, -1], beams.paths.shape[2], beams.follow)

        first = branches.after(block.anchor.unsqueeze(1), 0, lambda state: state).squeeze(1)
        tree = _tree(block.depth, step.num_verify_tokens - 1, first.shape[-1])
        return propose_tree(step, tree, first, (logits, lambda x: x), self._token_ids)


def _tree(depth: int, nodes: int, vocab_size: int) -> BeamTree:
    """The tree of a head that has so many nodes to give, if the vocabulary is large enough."""
    trees = (BeamTree(depth, beams) for beams in range(BEAMS, max(BEAMS, nodes) + 1))
    tree = next(each for each in trees if each.candidates >= nodes)
    return replace(tree, topk=min(tree.topk, vocab_size))


def _budget(config: EngineConfig) -> int:
    budget = config.algorithm_options["speculative_ddtree_budget"]
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget < MAX_NODES:
        raise ConfigError(
            f"speculative_ddtree_budget must be 1 to {MAX_NODES - 1}, got {budget!r}."
        )
    if config.speculative_num_draft_tokens is not None:
        raise ConfigError(
            "speculative_num_draft_tokens counts the tokens of a chain; set"
            " speculative_ddtree_budget (tokens of a tree) instead."
        )
    return budget
