"""Decode steps captured in two parts, with sampling in between.

Penalties, biases, grammars and log-probabilities work on the logits between the target's forward
and the commit, and differ from batch to batch. So batches that need them replay two graphs:

    propose, the target's forward  →  LM head, logits, sampling (eager)  →  commit, observe

The first one also copies the drafts to the host, which walks the grammars during the forward.

All other batches keep the whole step as one graph (`cuda.py`). A shape (batch bucket, W) is
captured when it is first used: most servers need few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from forerun.attention.model_attention import StepBuffers
from forerun.executor.graphs.piecewise import GraphRecorder
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.grammar_masks import DraftCopy
from forerun.executor.step.inputs import (
    DecodeOutput,
    SampledTokens,
    SampleInput,
    StepShape,
    VerifyPass,
)
from forerun.kernels.sampling.penalties import DraftPath
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.speculative.base import Draft


@dataclass
class SplitStep:
    """One captured shape: B requests of W tokens, filled up with the padding slot."""

    step: DeviceStep
    slots: Tensor  # [B] int64, static
    draft: Draft | None  # [B, W - 1], static, if drafts are proposed outside of the graphs
    buffers: StepBuffers | None  # of attention backends that plan on the host
    whole: bool  # drafts are captured too; otherwise `observe` runs after every replay
    sampled: Tensor  # [B, W] int64, static
    drafts: DraftCopy | None  # static; None: W is 1
    to_sample: SampleInput  # overwritten by the next replay of any step
    output: DecodeOutput  # static
    forward: Callable[[], None]
    commit: Callable[[], None]

    def replay(self, shape: StepShape, count: int) -> DecodeOutput:
        """Replays with `slots`, `draft` and `buffers` set for `count` requests and padding."""
        self.forward()
        # Of the padding too: the kernels of B requests are loaded, of any other number perhaps not.
        sampled = self.step.sample(self.to_sample, replace(shape, drafts=self.drafts))
        self.sampled.copy_(sampled.ids)
        self.commit()
        output = self.output
        if not self.whole:
            self.step.observe(output)
        return replace(output.of_first(count), logprobs=sampled.logprobs_along(output.path))


def capture_split(
    step: DeviceStep,
    recorder: GraphRecorder,
    slots: Tensor,
    shape: StepShape,
    buffers: StepBuffers | None,
) -> SplitStep:
    """Captures a shape, in a block of dummy steps.

    slots: [B] int64, the padding slot; they become static.
    """
    width, whole = shape.num_verify_tokens, step.captures_drafts
    draft = step.empty_draft(slots, width) if width > 1 and not whole else None
    sampled = slots.new_zeros(slots.shape[0], width)
    drafts = step.new_draft_copy(slots, width)
    shape = replace(shape, drafts=drafts)

    def forward() -> VerifyPass:
        given = step.begin(slots, shape, buffers, proposed=draft is not None)
        return step.verify(given, step.propose(given) if draft is None else draft)

    def commit(verified: VerifyPass) -> DecodeOutput:
        # Attention of the draft is planned again: what the first graph planned is not in this one.
        given = replace(verified.given, attention=None)
        output = step.commit(replace(verified, given=given), SampledTokens(sampled))
        if not whole:
            return output
        step.observe(output)
        return replace(output, observe=None)

    commit(forward())  # lazy initialisation must not be captured
    try:
        recorder.begin()
        verified = forward()
        run_forward = recorder.end()
        recorder.begin()
        output = commit(verified)
        run_commit = recorder.end()
    finally:
        recorder.abort()
    # Both parts are captured. Steps that are captured later may use the memory between them.
    to_sample = _borrowed(verified.to_sample, recorder)
    return SplitStep(
        step=step,
        slots=slots,
        draft=draft,
        buffers=buffers,
        whole=whole,
        sampled=sampled,
        drafts=drafts,
        to_sample=to_sample,
        output=output,
        forward=run_forward,
        commit=run_commit,
    )


def _borrowed(tokens: SampleInput, recorder: GraphRecorder) -> SampleInput:
    borrow, path, rows = recorder.borrow, tokens.path, tokens.rows
    assert path is not None
    ancestors = None if path.ancestors is None else borrow(path.ancestors)
    own = DraftPath(borrow(path.ids), ancestors)
    if rows is not None:
        tensors = rows.widths, rows.first, rows.places, rows.rows
        rows = RaggedRows(*map(borrow, tensors))
    hidden_states, positions = borrow(tokens.hidden_states), borrow(tokens.positions)
    return SampleInput(hidden_states, positions, tokens.slots, own, rows=rows)
