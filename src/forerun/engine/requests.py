"""Makes requests from prompts and sampling parameters, and refuses what cannot be served.

Only `ExecutorInfo` is needed, so a process without the engine can refuse a request at once.
"""

from __future__ import annotations

import itertools
import random

from forerun.core.checks import integer
from forerun.core.errors import RequestError, shown
from forerun.core.executor import ExecutorInfo
from forerun.core.logprobs import LogprobParams
from forerun.core.pooling import Pooling
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams, check_stop_ids
from forerun.core.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from forerun.scheduler.scheduler import check_fits


class RequestFactory:
    """Validates requests, and gives them ids and seeds. Thread-safe."""

    def __init__(self, info: ExecutorInfo, random_seed: int) -> None:
        """`random_seed`: seeds the seeds of requests without one."""
        self._info = info
        self._capacity = info.num_pages - 1  # without the null page
        self._ids = itertools.count()
        self._seeds = random.Random(random_seed)

    @property
    def context_length(self) -> int:
        return self._info.limits.context_length

    def make(
        self,
        prompt: list[int],
        params: SamplingParams,
        rid: str | None = None,
        seed_offset: int = 0,
        logprobs: LogprobParams | None = None,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        pooling: Pooling | None = None,
    ) -> Request:
        """A request that is not queued yet, so that a list can be refused as a whole.

        Args:
            prompt: token ids.
            rid: request id; default: a new one.
            seed_offset: added to the seed: the index of a sample, with n > 1.
            logprobs: the log-probabilities that it returns.
            scheduling: its priority and deadlines.
            pooling: what it returns of the prompt's hidden states, with `max_new_tokens` 0.

        Raises:
            RequestError: it cannot be served.
        """
        vocab = self._info.vocab_size
        if pooling is None and not self._info.has_lm_head:
            raise RequestError(
                "The model's checkpoint has no LM head: it makes embeddings, and no text or"
                " log-probabilities."
            )
        if not prompt:
            raise RequestError("The prompt is empty; give at least one token.")
        if any(type(token) is not int for token in prompt):
            prompt = [integer("input_ids", token, RequestError) for token in prompt]
        ids_of = {
            "Token": prompt,
            "Stop token": params.stop_token_ids,
            "logit_bias: token": [token for token, _ in params.logit_bias],
            "token_ids_logprob: token": () if logprobs is None else logprobs.token_ids,
        }
        for what, ids in ids_of.items():
            outside = [t for t in ids if not 0 <= t < vocab]
            if outside:
                raise RequestError(
                    f"{what} id {shown(outside[0])} is outside the vocabulary of {vocab}."
                )
        if logprobs is not None and logprobs.start_len >= len(prompt):
            raise RequestError(
                f"logprob_start_len must be below the prompt's {len(prompt)} tokens, got"
                f" {shown(logprobs.start_len)}; -1 is for the output alone."
            )
        rid = rid if rid is not None else f"request-{next(self._ids)}"
        # With a grammar, EOS is its end; `ignore_eos` delays it as long as the grammar goes on.
        ignored = params.ignore_eos and params.grammar is None
        eos = () if ignored else self._info.eos_token_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        check_stop_ids(params, stop_ids)
        seed = params.sampling_seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        # Consecutive seeds for the samples of a prompt, wrapped to signed 64 bits.
        seed = (seed + seed_offset + 2**63) % 2**64 - 2**63
        request = Request(
            rid,
            tuple(prompt),
            params,
            seed,
            stop_ids,
            scheduling,
            logprobs=logprobs,
            pooling=pooling,
        )
        check_fits(request, self._info.limits, self._capacity)
        return request

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """The most tokens that a prompt of this length leaves room for; at least 1."""
        return max(self._info.limits.room(prompt_tokens, self._capacity), 1)
