"""Algorithms for tests, written as plugins: each uses a different part of the interface."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.attention.base import Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.speculative.base import (
    Draft,
    DraftContext,
    ObserveInput,
    Phase,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)

DRAFTS = 5


class Toy(SpeculativeAlgorithm):
    """Proposes earlier tokens of the request's own text, which are sometimes correct."""

    caps: ClassVar[SpecCaps] = SpecCaps(num_drafts=DRAFTS, kv_reserve=DRAFTS + 1)

    @classmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        return cls.caps

    parents: ClassVar[list[int]] = []

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def load(self, ctx: DraftContext) -> None:
        self.shape = torch.tensor([self.parents], device=ctx.device, dtype=torch.int64)
        self.device, self.vocab = ctx.device, ctx.target.config.vocab_size

    def back(self, step: ProposeInput, distance: int, count: int) -> Tensor:
        """[B, count] int64: the tokens `distance` before the drafts."""
        at = step.start.unsqueeze(1) + 1 + torch.arange(count, device=self.device) - distance
        known = torch.minimum(at, step.start.unsqueeze(1)).clamp_min(0)
        return step.history[step.slots].gather(1, known.long()).long()

    def propose(self, step: ProposeInput) -> Draft:
        return Draft(self.back(step, 3, step.num_verify_tokens - 1))


class Trees(Toy):
    """Two branches below the last token, a chain of three and one of two."""

    caps = SpecCaps(num_drafts=DRAFTS, kv_reserve=DRAFTS + 1, verify_mask=Mask.CUSTOM)
    parents: ClassVar[list[int]] = [0, 1, 2, 0, 4]

    def propose(self, step: ProposeInput) -> Draft:
        near, far = self.back(step, 1, 3), self.back(step, 3, 3)
        # Nodes 1, 2, 3 are a chain; 4 is a sibling of 1, 5 a child of 4.
        other = torch.where(far[:, :1] == near[:, :1], (near[:, :1] + 1) % self.vocab, far[:, :1])
        tokens = torch.cat([near, other, far[:, 1:2]], 1)
        return Draft(tokens, self.shape.expand_as(tokens))


class Oracle(Toy):
    """Reads tokens on the host and knows the output, so that long paths are accepted."""

    caps = SpecCaps(num_drafts=DRAFTS, kv_reserve=DRAFTS + 1, needs_host_tokens=True)
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # prompt -> output

    def known(self, step: ProposeInput) -> list[list[int]]:
        out = []
        assert step.host is not None
        for tokens in step.host.tokens:
            rest: list[int] = []
            for prompt, output in self.answers.items():
                whole = [*prompt, *output]
                if whole[: len(tokens)] == list(tokens):
                    rest = whole[len(tokens) :]
            out.append((rest + [0] * DRAFTS)[: step.num_verify_tokens - 1])
        return out

    def propose(self, step: ProposeInput) -> Draft:
        return Draft(torch.tensor(self.known(step), device=self.device))


class OracleTrees(Oracle):
    """A tree in which the correct path alternates with wrong tokens."""

    caps = SpecCaps(
        num_drafts=DRAFTS,
        kv_reserve=DRAFTS + 1,
        needs_host_tokens=True,
        verify_mask=Mask.CUSTOM,
    )
    parents: ClassVar[list[int]] = [0, 0, 2, 2, 4]

    def propose(self, step: ProposeInput) -> Draft:
        right = torch.tensor(self.known(step), device=self.device)
        wrong = (right + 1) % self.vocab
        # Nodes 2, 4, 5 are the answer; 1 is a sibling of 2, 3 of 4.
        columns = [wrong[:, 0], right[:, 0], wrong[:, 1], right[:, 1], right[:, 2]]
        return Draft(torch.stack(columns, 1), self.shape.expand(len(right), -1))


class Learner(Toy):
    """Keeps state per slot, with a prefix lookahead: checks what `observe` gets."""

    caps = SpecCaps(num_drafts=DRAFTS, kv_reserve=DRAFTS + 1, prefix_lookahead=1)

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        self.last_token = torch.zeros(ctx.slots, dtype=torch.int64, device=ctx.device)
        return SlotState({"last_token": self.last_token})

    def propose(self, step: ProposeInput) -> Draft:
        last_token = self.last_token[step.slots]
        torch._assert_async((last_token == step.last_token).all())
        return Draft(last_token.unsqueeze(1).expand(-1, step.num_verify_tokens - 1).contiguous())

    def observe(self, step: ObserveInput) -> None:
        self.last_token[step.slots] = step.next_ids[step.last_index]


class Sampler(Toy):
    """Samples from artificial logits with the sampling parameters of the requests."""

    def propose(self, step: ProposeInput) -> Draft:
        shape = (len(step.slots), step.num_verify_tokens - 1)
        logits = torch.nn.functional.one_hot(self.back(step, 3, shape[1]), self.vocab).float() * 5
        positions = step.start.unsqueeze(1) + 1 + torch.arange(shape[1], device=self.device)
        columns = torch.arange(self.vocab - 1, -1, -1, device=self.device)
        if step.slots.shape[0] % 2:  # with the columns in another order
            sampled = step.sample(logits.flip(-1), positions, columns)
            return Draft(columns[sampled])
        return Draft(step.sample(logits, positions))


class Eager(Learner):
    """Reads the device on the host, so it runs between the captured parts of a step."""

    def supports_target_verify_for_draft(self) -> bool:
        return False

    def propose(self, step: ProposeInput) -> Draft:
        assert self.last_token[step.slots].tolist() == step.last_token.tolist()
        return Draft(self.back(step, 3, step.num_verify_tokens - 1))

    def observe(self, step: ObserveInput) -> None:
        for slot, token in zip(step.slots, step.next_ids[step.last_index].tolist(), strict=True):
            self.last_token[slot] = token


class EagerTrees(Trees):
    """The same with trees: parents are made on the host, too."""

    def supports_target_verify_for_draft(self) -> bool:
        return False

    def load(self, ctx: DraftContext) -> None:
        super().load(ctx)
        self.committed = 0

    def propose(self, step: ProposeInput) -> Draft:
        draft = super().propose(step)
        parents = torch.tensor([self.parents] * len(step.slots), device=self.device)
        return Draft(torch.tensor(draft.tokens.tolist(), device=self.device), parents)

    def observe(self, step: ObserveInput) -> None:
        self.committed += 0 if step.dummy else int(step.num_committed.sum())


class Faulty(Toy):
    """Fails as `fault` says after `after` proposals."""

    fault: ClassVar[str] = "raise"
    after: ClassVar[int] = 2

    def load(self, ctx: DraftContext) -> None:
        super().load(ctx)
        self.count = 0

    def propose(self, step: ProposeInput) -> Any:
        draft = super().propose(step)
        self.count += 1
        if self.count <= self.after:
            return draft
        wrong: dict[str, Any] = {
            "shape": Draft(draft.tokens[:, :2]),
            "dtype": Draft(draft.tokens.float()),
            "kind": draft.tokens,
            "tree": Draft(draft.tokens, torch.zeros_like(draft.tokens)),
            "range": Draft(draft.tokens + 10**9),
            "strides": Draft(draft.tokens.t().contiguous().t()),
            "meta": Draft(draft.tokens.to("meta")),
            "sparse": Draft(draft.tokens.to_sparse()),
        }
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault not in wrong:
            raise ZeroDivisionError("somebody else's bug")
        return wrong[self.fault]


class FaultyTrees(OracleTrees):
    """Fails in its third proposal only."""

    def load(self, ctx: DraftContext) -> None:
        super().load(ctx)
        self.count = 0

    def propose(self, step: ProposeInput) -> Draft:
        self.count += 1
        if self.count == 3:
            raise ZeroDivisionError("somebody else's bug")
        return super().propose(step)


class FaultyObserver(Toy):
    def observe(self, step: ObserveInput) -> None:
        if step.phase is Phase.VERIFY:
            raise KeyError("lost")


TOYS = {
    "TOY-TREES": Trees,
    "TOY-ORACLE": Oracle,
    "TOY-ORACLE-TREES": OracleTrees,
    "TOY-LEARNER": Learner,
    "TOY-SAMPLER": Sampler,
    "TOY-EAGER": Eager,
    "TOY-EAGER-TREES": EagerTrees,
    "TOY-FAULTY": Faulty,
    "TOY-FAULTY-TREES": FaultyTrees,
    "TOY-FAULTY-OBSERVER": FaultyObserver,
}


def register_toys() -> None:
    from forerun.speculative import registry

    for name, cls in TOYS.items():
        if name not in registry.algorithm_names():
            registry.register_algorithm(name, cls)
