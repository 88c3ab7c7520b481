"""Log-probabilities of sampled tokens and of the most probable ones, from the target's logits.

They are those of the raw logits, in float32: before biases, penalties, temperature and filters
(vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.logprobs import MAX_TOP_LOGPROBS, LogprobParams
from forerun.kernels.drafting.top_columns import has_kernel, top_columns
from forerun.kernels.sampling.log_sum_exp import log_sum_exp
from forerun.kernels.sampling.sort_keys import from_sort_keys, sort_keys
from forerun.platform.device import upload


@dataclass(frozen=True)
class LogprobQuery:
    """What is asked for at some rows of logits; known on the host."""

    rows: tuple[int, ...]  # of a batch: requests, or tokens of a prefill; ascending
    token_ids: tuple[tuple[int, ...], ...]  # further tokens of each row
    tops: tuple[int, ...]  # most probable tokens of each row
    num_top: int  # the largest of `tops` in the batch
    num_ids: int  # columns of the further tokens; shorter lists are padded

    @classmethod
    def of(cls, params: Sequence[LogprobParams | None]) -> LogprobQuery | None:
        """Makes it from the parameters of all rows; None: no row asks for any."""
        asked = [(row, each) for row, each in enumerate(params) if each is not None]
        if not asked:
            return None
        return cls(
            rows=tuple(row for row, _ in asked),
            token_ids=tuple(each.token_ids for _, each in asked),
            tops=tuple(each.top for _, each in asked),
            num_top=max(each.top for _, each in asked),
            num_ids=max(len(each.token_ids) for _, each in asked),
        )

    def between(self, first: int, last: int) -> LogprobQuery | None:
        """The rows in [first, last), counted from `first`."""
        begin, end = bisect_left(self.rows, first), bisect_left(self.rows, last)
        if begin == end:
            return None
        rows = tuple(row - first for row in self.rows[begin:end])
        return replace(
            self, rows=rows, token_ids=self.token_ids[begin:end], tops=self.tops[begin:end]
        )

    def upload_ids(self, device: torch.device) -> Tensor:
        """The further tokens [R, num_ids] int64, padded with token 0."""
        if not self.num_ids:
            return torch.empty(len(self.rows), 0, dtype=torch.int64, device=device)
        ids = [[*each, *[0] * (self.num_ids - len(each))] for each in self.token_ids]
        return upload(torch.tensor(ids, dtype=torch.int64), device)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of R rows with W positions each, on one device."""

    sampled: Tensor  # [R, W] float32: of the token itself
    top: Tensor  # [R, W, n] float32, the largest first
    top_ids: Tensor  # [R, W, n] int64
    of_ids: Tensor  # [R, W, m] float32, of the further tokens

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.sampled, self.top, self.top_ids, self.of_ids

    @classmethod
    def cat(cls, parts: Sequence[Logprobs]) -> Logprobs:
        return cls(*(torch.cat(each) for each in zip(*(p.tensors for p in parts), strict=True)))

    def along(self, path: Tensor) -> Logprobs:
        """Returns those at positions `path` [R, W] int64 of each row."""

        def taken(x: Tensor) -> Tensor:
            return x.gather(1, path.unsqueeze(2).expand(-1, -1, x.shape[2]))

        return Logprobs(
            self.sampled.gather(1, path), taken(self.top), taken(self.top_ids), taken(self.of_ids)
        )


@dataclass(frozen=True)
class LogprobRows:
    """What is kept of logits [R, W, V] until their tokens are sampled, which may change them."""

    normalizer: Tensor  # [R, W] float32: log of the sum of exponentials
    top: Tensor  # logits [R, W, n] float32
    top_ids: Tensor  # [R, W, n] int64
    of_ids: Tensor  # logits [R, W, m] float32

    @classmethod
    def of(cls, logits: Tensor, num_top: int, token_ids: Tensor) -> LogprobRows:
        """logits [R, W, V], any float dtype; token_ids [R, m] int64."""
        index = token_ids.unsqueeze(1).expand(-1, logits.shape[1], -1)
        rows, shape = logits.flatten(0, 1), logits.shape[:2]
        top, top_ids = top_tokens(rows, num_top)
        return cls(
            log_sum_exp(rows).view(shape),
            top.unflatten(0, shape),
            top_ids.unflatten(0, shape),
            logits.gather(2, index).float(),
        )

    def logprobs(self, tokens: Tensor, logits: Tensor) -> Logprobs:
        """Adds those of tokens [R, W] int64 (INVALID_TOKEN: of token 0).

        `logits` [R, W, V]: those of tokens that may be sampled are as they were.
        """
        chosen = logits.gather(2, tokens.clamp_min(0).unsqueeze(2)).squeeze(2).float()
        normalizer = self.normalizer.unsqueeze(2)
        return Logprobs(
            chosen - self.normalizer, self.top - normalizer, self.top_ids, self.of_ids - normalizer
        )


def top_tokens(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n most probable tokens, the lowest id of equals first: whatever else a batch asks for.

    logits [R, V], any float dtype -> values [R, n] float32, ids [R, n] int64; V of them at most.
    """
    n = min(n, logits.shape[1])
    if n == 0:
        return logits.new_empty(len(logits), 0).float(), logits.new_empty(len(logits), 0).long()
    if has_kernel(logits, MAX_TOP_LOGPROBS):  # for one k, so that it compiles once
        top, ids, _ = top_columns(logits, MAX_TOP_LOGPROBS)
        return top[:, :n], ids[:, :n]
    if logits.device.type != "cpu":
        return _sorted_top(logits, n)
    top, ids = logits.topk(min(n + 1, logits.shape[1]))
    tied = (top[:, 1:] == top[:, :-1]).any(1)  # also with the first one that is left out
    top, ids = top[:, :n].float(), ids[:, :n].contiguous()
    if tied.any():
        top[tied], ids[tied] = _sorted_top(logits[tied], n)
    return top, ids


def _sorted_top(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`top_tokens` by integers that sort like (value, id), which takes three times as long."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = sort_keys(-logits.float(), ids).topk(n, largest=False).values
    values, ids = from_sort_keys(keys)
    return -values, ids
