"""Log-probabilities of a step on their way to the host, and as entries of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from forerun.core.logprobs import TokenLogprobs
from forerun.core.plan import PrefillChunk
from forerun.sampling.logprobs import LogprobQuery, Logprobs

Entries = dict[int, list[TokenLogprobs]]  # by row: one for each of its W positions


@dataclass(frozen=True)
class LogprobCopy:
    """Log-probabilities of a query, being copied to the host."""

    query: LogprobQuery
    values: Logprobs

    @classmethod
    def of(
        cls, query: LogprobQuery | None, values: Logprobs | None, copy: Callable[[Tensor], Tensor]
    ) -> Self | None:
        if query is None or values is None:
            return None
        return cls(query, Logprobs(*map(copy, values.tensors)))


def read_logprobs(copied: LogprobCopy | None) -> Entries:
    """The values, once their step has completed."""
    if copied is None:
        return {}
    query, (sampled, top, top_ids, of_ids) = copied.query, copied.values.tensors
    columns = zip(
        query.rows, query.tops, map(len, query.token_ids), sampled.tolist(), top.tolist(),
        top_ids.tolist(), of_ids.tolist(), strict=True,
    )  # fmt: skip
    return {
        row: [
            TokenLogprobs(
                value, tuple(zip(largest[:num_top], ids[:num_top], strict=True)), tuple(more[:num])
            )
            for value, largest, ids, more in zip(*values, strict=True)
        ]
        for row, num_top, num, *values in columns
    }


@dataclass
class StepLogprobs:
    """Log-probabilities of a step, where a request of it returns them."""

    decode: LogprobCopy | None = None
    prompt: LogprobCopy | None = None
    first: LogprobCopy | None = None

    def of_decode(self, tokens: Sequence[Sequence[int]]) -> list[list[TokenLogprobs]]:
        """`StepResult.decode_logprobs`; `tokens`: those of each request."""
        if self.decode is None:
            return []
        entries = read_logprobs(self.decode)
        return [entries.get(i, [])[: len(each)] for i, each in enumerate(tokens)]

    def of_prefill(
        self, chunks: Sequence[PrefillChunk], tokens: Sequence[int | None]
    ) -> list[list[TokenLogprobs]]:
        """`StepResult.prefill_logprobs`; `tokens`: `StepResult.prefill`."""
        if self.prompt is None and self.first is None:
            return []
        of_prompt, of_first = read_logprobs(self.prompt), read_logprobs(self.first)
        out, row, last = [], 0, 0
        for chunk, token in zip(chunks, tokens, strict=True):
            entries = [of_prompt.get(i, []) for i in range(row, row + chunk.num_tokens)]
            if token is not None:
                entries.append(of_first.get(last, []))
            out.append([entry for each in entries for entry in each])
            row, last = row + chunk.num_tokens, last + chunk.last
        return out
