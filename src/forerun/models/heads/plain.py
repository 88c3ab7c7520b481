"""No head: every row's most likely token, all in one GEMM."""

from __future__ import annotations

from forerun.models.heads.base import Block, DraftHead, DraftVocabulary, Draw, Proposal


class PlainHead(DraftHead):
    """The body's own prediction of each row (arXiv 2602.06036, section 4)."""

    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        rows = block.predicting
        best = vocabulary.compute_argmax(rows.flatten(0, 1))
        return Proposal(vocabulary.to_target_ids(best).view(rows.shape[:2]))
