"""The executor for a device of this process. `launch` queues a step without waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from forerun.core.errors import ConfigError, RequestError
from forerun.core.executor import Executor, ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.logprobs import LogprobParams
from forerun.core.plan import (
    GRAMMAR_ERROR,
    Admission,
    DecodeRequest,
    Failure,
    SlotGrammar,
    SlotLogprobs,
    SlotSampling,
    StepPlan,
    StepResult,
)
from forerun.core.pooling import Pooling
from forerun.core.profile import ProfileParams
from forerun.core.tokens import INVALID_TOKEN
from forerun.core.widths import DRAFTING_BATCH
from forerun.executor.graphs.steps import DecodeBatch, DeferredBatch, EagerSteps, StepExecutor
from forerun.executor.layout_check import RowLayoutCheck, warning
from forerun.executor.profiling.recorder import StepRecorder
from forerun.executor.step.clock import StepClock
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.grammar_masks import GrammarBatch
from forerun.executor.step.inputs import DecodeOutput, PrefillBatch, PrefillLogprobs
from forerun.executor.step.logprob_results import LogprobCopy, StepLogprobs
from forerun.executor.step.pooling import PoolCopy, PoolQuery
from forerun.executor.step.reliability import confidence_counts
from forerun.executor.step.slot_tables import ANY_SAMPLING
from forerun.executor.step.timing import StepTimer
from forerun.grammar.compiler import GrammarCompiler
from forerun.grammar.mask_threads import MaskThreads
from forerun.grammar.state import GrammarState
from forerun.platform.cpu_threads import CpuThreads
from forerun.platform.device import running_on
from forerun.platform.thread_tuner import ThreadTuner
from forerun.sampling.logprobs import LogprobQuery
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import HostTokens

log = logging.getLogger("forerun")
CONFIDENCE_STEPS = 16  # from one copy of the counts of confidences to the next
SURVIVAL_STEPS = 8  # the same of survivals
MISMATCH = "a token does not match the grammar; please report this."
TOO_SLOW = "its grammar takes too long to follow; make it less ambiguous."
NO_TOKEN = "no token of the vocabulary continues the output as its grammar demands."
NOT_FINITE = "the target produced NaN or infinite logits; check its weights and the dtype."


@dataclass
class _Slot:
    """Host state of the request in a slot."""

    rid: str
    sampling: SlotSampling
    tokens: list[int] | None  # if the algorithm reads tokens on the host
    logprobs: SlotLogprobs | None
    grammar: GrammarState | None = None
    pooling: Pooling | None = None


class DeviceExecutor:
    """Slot tables, model, algorithm and step executor of one device."""

    def __init__(
        self,
        step: DeviceStep,
        steps: StepExecutor | None = None,
        threads: CpuThreads | None = None,
    ) -> None:
        self.step = step
        self.tables = step.tables
        self.steps = EagerSteps(step) if steps is None else steps
        self._threads = threads  # on a CPU; None: those of the calling thread
        self.tuner = ThreadTuner(threads.count) if threads is not None and threads.tuned else None
        self.grammars: GrammarCompiler | None = None  # set by `executor/build.py`
        # None: several ranks, each of which needs every mask. Steps wait for them.
        self.mask_threads: MaskThreads | None = None
        self.layout_check: RowLayoutCheck | None = None  # over the first steps; set by `build.py`
        self._held: dict[str, GrammarState] = {}  # by request id: they have left the batch
        self._slots: dict[int, _Slot] = {}
        self._clock: StepClock | None = None  # of the last step
        self._decode_steps = 0
        self._unread: list[PendingDeviceStep] = []  # steps with grammars, in launch order
        self._keeps_tokens = step.caps.needs_host_tokens
        self._info: ExecutorInfo | None = None
        self.recorder = StepRecorder(step.tables.device)

    def num_threads(self, with_prompts: bool = False) -> int | None:
        """Intra-op threads of the next step; None: those of the calling thread.

        Operations of prompts are long enough for all threads, whatever else runs.
        """
        if self.tuner is not None and not with_prompts:
            return self.tuner.count
        return None if self._threads is None else self._threads.count

    @property
    def info(self) -> ExecutorInfo:
        assert self._info is not None, "the executor is not built yet"
        return self._info

    @info.setter
    def info(self, info: ExecutorInfo) -> None:
        self._info = info

    def launch(self, plan: StepPlan) -> PendingDeviceStep:
        """Queues the whole step on the device and returns (on a CPU: computes it)."""
        with self.recorder.step(plan):
            return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingDeviceStep:
        with running_on(self.tables.device, self.num_threads(bool(plan.prefill))):
            clock = self._clock = StepClock.after(self._clock, self.tables.device)
            if plan.cleared_pages:
                self.step.clear_pages(plan.cleared_pages)
            if plan.cleared_window_pages:
                self.step.clear_pages(plan.cleared_window_pages, windowed=True)
            failed = self._admit(plan)
            if plan.deferred:
                self.steps.observe_deferred(self._deferred(plan))
            decode = confidences = layout_counts = survivals = None
            logprobs = StepLogprobs()
            if plan.decode:
                batch = self._batch(plan)
                self._check_row_layout(batch, clock)
                out = self.steps.decode(batch)
                logprobs.decode = LogprobCopy.of(batch.logprobs, out.logprobs, self._copy)
                # Copies queued before the next replay overwrites the graph's outputs.
                decode = DecodeOutput(
                    self._copy(out.sampled),
                    self._copy(out.num_committed),
                    path=self._to_host(out.path),
                    widths=self._to_host(out.widths),
                )
                self.step.track_states(plan.tracked)
                confidences, layout_counts = self._due_confidences(), self._due_layout_counts()
                survivals = self._due_survivals(batch.slots, batch.num_verify_tokens > 1)
            timer = self.step.timer
            timestamps = timer.take() if timer is not None and plan.decode else None
            first = pooled = None
            if plan.prefill:
                first, pooled = self._prefill(plan, logprobs)
                self.step.save_states(plan.save_snapshots)
            clock.stop()
            if self.tuner is not None and plan.decode and not plan.prefill:
                self.tuner.record((batch.kind, bool(plan.deferred)), clock.wait())
            error = self.step.algorithm.take_error()
        pending = PendingDeviceStep(
            self,
            plan,
            decode,
            first,
            clock,
            None if error is None else str(error),
            None if timer is None or timestamps is None else (timer, timestamps),
            failed,
            logprobs,
            self._grammars_of(plan),
            confidences,
            layout_counts,
            pooled,
            survivals,
        )
        if pending.grammars:
            self._unread.append(pending)
        return pending

    def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        if self.step.simulate is not None:
            raise RequestError(
                f"{grammar.kind} does not work with speculative_simulate_accept_length; drop it."
            )
        assert self.grammars is not None, "set by `executor/build.py`"
        self.grammars.compile(grammar, client)

    def prepare_grammars(self) -> None:
        """Reads the vocabulary before the first grammar needs it, which takes a second.

        `explain` says what compiles grammars, or why nothing does.
        """
        assert self.grammars is not None, "set by `executor/build.py`"
        self.info.explain["grammars"] = self.grammars.prepare()

    def can_resume(self, rid: str) -> bool:
        state = self._held.get(rid)
        return state is None or state.can_resume

    def disable_drafts(self) -> None:
        self.step.algorithm.disable()

    def simulate_accept_lengths(self, means: Sequence[float]) -> None:
        if self.step.simulate is None:
            raise ConfigError("Acceptance is real; set speculative_simulate_accept_length.")
        self.step.simulate.set(means)

    def start_profile(self, params: ProfileParams) -> None:
        self.recorder.start(params)

    def stop_profile(self) -> None:
        self.recorder.stop()

    def check_profile(self, name: str) -> None:
        self.recorder.check(name)

    def close(self) -> None:
        """Ends processes. Pools and weights are freed with the last reference to this object."""
        if self.grammars is not None:
            self.grammars.close()

    def flags(self, slots: Sequence[int]) -> SamplingFlags:
        """The sampling operations that these slots need."""
        flags = SamplingFlags.of(self._slots[slot].sampling for slot in slots)
        if self.tables.device.type != "cuda":
            return flags
        # Only these sets of operations are compiled at start.
        return flags.widened(self.step.model.vocab_is_divided)

    def keep_tokens(self, plan: StepPlan, result: StepResult) -> None:
        """Appends a step's tokens to the host copies, for algorithms that read tokens there."""
        if not self._keeps_tokens:
            return
        for request, tokens in zip(plan.decode, result.decode, strict=True):
            self._tokens(request.slot).extend(tokens)
        for chunk, token in zip(plan.prefill, result.prefill, strict=True):
            if token is not None:
                self._tokens(chunk.slot).append(token)

    def _tokens(self, slot: int) -> list[int]:
        tokens = self._slots[slot].tokens
        assert tokens is not None
        return tokens

    def _admit(self, plan: StepPlan) -> list[Failure]:
        """Returns the admissions that failed."""
        for a in plan.admitted:
            self._slots[a.slot] = _Slot(
                a.rid,
                a.sampling,
                list(a.tokens) if self._keeps_tokens else None,
                a.logprobs,
                pooling=a.pooling,
            )
        failed = self.tables.admit(plan.admitted) if plan.admitted else []
        failed += self._admit_grammars(plan.admitted)
        for slot in (
            each.slot for each in failed
        ):  # it is part of this step, but its result is dropped
            self._slots[slot].sampling, self._slots[slot].logprobs = ANY_SAMPLING, None
        if plan.admitted:
            slots = [a.slot for a in plan.admitted]
            self.step.reset_states(slots, plan.load_snapshots)
            if self.step.simulate is not None:
                self.step.simulate.admit(slots)
        if plan.page_writes:
            self.tables.write_pages(plan.page_writes)
        if plan.window_writes:
            self.tables.write_pages(plan.window_writes, windowed=True)
        return failed

    def _admit_grammars(self, admitted: Sequence[Admission]) -> list[Failure]:
        """The admissions whose grammar fails; usually it is compiled already."""
        failed = []
        for a in admitted:
            if a.grammar is None:
                continue
            try:
                self._slots[a.slot].grammar = self._grammar_state(a, a.grammar)
            except RequestError as error:
                failed.append(Failure(a.slot, str(error), GRAMMAR_ERROR))
        return failed

    def _grammar_state(self, admission: Admission, grammar: SlotGrammar) -> GrammarState:
        """That of a request which was held, if it has this output; or a new one.

        Raises:
            RequestError: the grammar cannot be compiled, or takes too long to follow.
        """
        assert self.grammars is not None, "set by `executor/build.py`"
        state = self._held.pop(admission.rid, None)
        if state is None or state.num_tokens != admission.num_output_tokens:
            start = len(admission.tokens) - admission.num_output_tokens
            return GrammarState.of(grammar, admission.tokens[start:], self.grammars)
        if state.is_stuck_in_mask or state.too_slow:
            raise RequestError(TOO_SLOW)
        if state.can_resume:
            state.resume()
        return state

    def _grammars_of(self, plan: StepPlan) -> dict[int, GrammarState]:
        """Returns by slot the grammars of requests that this step samples tokens for."""
        slots = [request.slot for request in plan.decode]
        slots += [chunk.slot for chunk in plan.prefill if chunk.last]
        states = {slot: self._slots[slot].grammar for slot in slots}
        return {slot: state for slot, state in states.items() if state is not None}

    def _grammar_batch(
        self, slots: Sequence[int], catch_up: Callable[[], None] | None = None
    ) -> GrammarBatch | None:
        states = [self._slots[slot].grammar for slot in slots]
        if all(state is None for state in states):
            return None
        return GrammarBatch(states, catch_up, self.mask_threads)

    def _catch_up(self) -> None:
        """Commits tokens of steps in flight to the grammars of their requests."""
        for pending in list(self._unread):
            pending.result()

    def hold(self, slot: int, grammar: GrammarState) -> bool:
        """Whether a request has left the batch until its next mask is computed."""
        if grammar.waiting is None:
            if self.mask_threads is None or not grammar.slow:
                return False
            grammar.wait_beside(self.mask_threads)
        self._held[self._slots[slot].rid] = grammar
        while len(self._held) > 2 * self.info.limits.slots:  # requests that have ended since
            self._held.pop(next(iter(self._held)))
        return True

    def has_read(self, pending: PendingDeviceStep) -> None:
        """Its grammars are up to date."""
        if pending in self._unread:
            self._unread.remove(pending)

    def _batch(self, plan: StepPlan) -> DecodeBatch:
        slots = [request.slot for request in plan.decode]
        host = None
        if self._keeps_tokens and plan.num_verify_tokens > 1:
            host = HostTokens(
                [tuple(self._tokens(slot)) for slot in slots],
                [self._slots[slot].rid for slot in slots],
            )
        return DecodeBatch(
            slots=slots,
            num_verify_tokens=plan.num_verify_tokens,
            kv_len_ub=self._kv_len_ub(plan.decode),
            flags=self.flags(slots),
            lengths=self.tables.host_batch(slots, [r.kv_len_ub for r in plan.decode]),
            host=host,
            logprobs=LogprobQuery.of([self._logprobs(slot) for slot in slots]),
            grammars=self._grammar_batch(slots, self._catch_up),
            num_rows=plan.num_rows,
            num_drafting=plan.num_drafting,
        )

    def _prefill(
        self, plan: StepPlan, logprobs: StepLogprobs
    ) -> tuple[Tensor | None, PoolCopy | None]:
        """The first tokens after last chunks, and what is pooled."""
        ending = [c.slot for c in plan.prefill if c.last]
        flags = self.flags(ending)
        asked = {c.slot: self._slots[c.slot].logprobs for c in plan.prefill}
        query = PrefillLogprobs.of(plan.prefill, {s: a for s, a in asked.items() if a is not None})
        grammars = self._grammar_batch(ending)  # nothing is sampled for them in earlier steps
        pooled = PoolQuery.of(plan.prefill, {s: self._slots[s].pooling for s in asked})
        out = self.steps.prefill(PrefillBatch(plan.prefill, flags, query, grammars, pooled))
        if query is not None:
            logprobs.prompt = LogprobCopy.of(query.prompt, out.prompt_logprobs, self._copy)
            logprobs.first = LogprobCopy.of(query.first, out.first_logprobs, self._copy)
        sums = self._to_host(out.pooled)
        copied = None if pooled is None or sums is None else PoolCopy(pooled, sums)
        return self._to_host(out.sampled), copied

    def _logprobs(self, slot: int) -> LogprobParams | None:
        asked = self._slots[slot].logprobs
        return None if asked is None else asked.params

    def _deferred(self, plan: StepPlan) -> DeferredBatch:
        slots = [deferred.slot for deferred in plan.deferred]
        bounds = {request.slot: request.kv_len_ub for request in plan.decode}
        before = [bounds.get(d.slot, d.count) - d.count for d in plan.deferred]
        return DeferredBatch(
            slots=slots,
            counts=[deferred.count for deferred in plan.deferred],
            kv_len_ub=self._kv_len_ub(plan.decode),
            lengths=self.tables.host_batch(slots, before),
        )

    def _kv_len_ub(self, requests: Sequence[DecodeRequest]) -> int:
        return max(request.kv_len_ub for request in requests) + self.step.caps.kv_reserve

    def _due_confidences(self) -> tuple[Tensor, Tensor | None] | None:
        """Copies of the counts of confidences and of estimated rates; not in every step.

        Between two steps of those that tell survivals: while the host is busy with either, a short
        step ends.
        """
        self._decode_steps += 1
        table, estimator = self.step.reliability, self.step.estimator
        unused = not table.used and estimator is None
        if unused or self._decode_steps % CONFIDENCE_STEPS != CONFIDENCE_STEPS // 4:
            return None
        estimated = None if estimator is None else self._copy_of_state(estimator.counts)
        return self._copy_of_state(table.counts), estimated

    def _due_survivals(self, slots: Sequence[int], drafted: bool) -> tuple[Tensor, Tensor] | None:
        """[B, K] float32, those of a step's requests, and the rates [K] of a new one.

        Not in every step, as copies take time. On a CPU they are there, so that a step with drafts
        tells at once what it has shown, unless the batch is so large that looking for the best step
        takes long.
        """
        estimator, tables = self.step.estimator, self.tables
        told = drafted and tables.device.type == "cpu" and len(slots) < DRAFTING_BATCH
        if estimator is None or (self._decode_steps % SURVIVAL_STEPS and not told):
            return None
        survival = estimator.survival(tables.upload(slots, torch.int64), tables.max_drafts)
        return self._copy(survival), self._copy_of_state(estimator.prior)

    def _copy_of_state(self, tensor: Tensor) -> Tensor:
        """Copies what later steps change."""
        return tensor.clone() if tensor.device.type == "cpu" else self._copy(tensor)

    def _check_row_layout(self, batch: DecodeBatch, clock: StepClock) -> None:
        """Drafts for the first request of a step in both row layouts, if that is due."""
        check = self.layout_check
        if check is None or batch.num_verify_tokens == 1 or not check.is_due():
            return
        slot, bound = batch.slots[0], batch.lengths.kv_lens[0]
        lengths = self.tables.host_batch([slot], [bound])
        check.before(slot, self.flags([slot]), lengths)
        clock.restart()

    def _due_layout_counts(self) -> Tensor | None:
        """A copy of the counts of the check, once: after its last step."""
        counts = None if self.layout_check is None else self.layout_check.after()
        if counts is None:
            return None
        self.layout_check = None
        return self._copy(counts)

    def _to_host(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._copy(tensor)

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        """Copies to pinned memory; complete when the step is."""
        if tensor.device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


@dataclass(eq=False)
class PendingDeviceStep:
    """A launched step whose tokens are being copied to the host."""

    executor: DeviceExecutor
    plan: StepPlan
    decode: DecodeOutput | None
    first: Tensor | None  # [last prefill chunks] int64
    clock: StepClock
    error: str | None  # the algorithm failed in this step
    timestamps: tuple[StepTimer, Tensor] | None  # [4] int64, if tracing is on
    not_admitted: list[Failure]
    logprobs: StepLogprobs
    grammars: dict[int, GrammarState]  # by slot; its tokens are committed to them
    # `ReliabilityTable.counts`, and `Estimator.counts` if there is one.
    confidences: tuple[Tensor, Tensor | None] | None = None
    layout_counts: Tensor | None = None  # of `RowLayoutCheck.after`
    pooled: PoolCopy | None = None
    survivals: tuple[Tensor, Tensor] | None = None  # of the requests; rates of a new one
    _result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self._result is not None or self.clock.is_done

    def result(self) -> StepResult:
        """Waits for the step and reads its tokens."""
        if self._result is None:
            self._result = self._read()
            self.executor.has_read(self)
        return self._result

    def _read(self) -> StepResult:
        late, seconds = self.is_done, self.clock.wait()
        decode: list[list[int]] = []
        nodes: list[list[int]] = []
        widths: list[int] = []
        if self.decode is not None:
            counts = self.decode.num_committed.tolist()
            decode = _beginnings(self.decode.sampled.tolist(), counts)
            if self.decode.path is not None:
                nodes = [path[1:] for path in _beginnings(self.decode.path.tolist(), counts)]
            if self.decode.widths is not None:
                widths = self.decode.widths.tolist()
        first = iter(self.first.tolist() if self.first is not None else [])
        prefill = [next(first) if chunk.last else None for chunk in self.plan.prefill]
        failed = list(self.not_admitted)
        for i, request in enumerate(self.plan.decode):
            decode[i] = self._valid(request.slot, decode[i], failed)
        for i, (chunk, token) in enumerate(zip(self.plan.prefill, prefill, strict=True)):
            if token is not None and not self._valid(chunk.slot, [token], failed):
                prefill[i] = None
        ended = {each.slot for each in failed}
        held = [
            slot
            for slot, grammar in self.grammars.items()
            if slot not in ended and self.executor.hold(slot, grammar)
        ]
        survivals, phase_times = [], None
        if self.survivals is not None:
            survivals = _with_new(*(each.tolist() for each in self.survivals))
        if self.timestamps is not None:
            timer, timestamps = self.timestamps
            phase_times = timer.unix(timestamps)
        result = StepResult(
            decode,
            prefill,
            seconds,
            self.error,
            tuple(failed),
            phase_times,
            self.logprobs.of_decode(decode),
            self.logprobs.of_prefill(self.plan.prefill, prefill),
            [] if self.pooled is None else self.pooled.of_prefill(len(self.plan.prefill)),
            gap_seconds=self.clock.gap_seconds,
            held=tuple(held),
            confidences=None if self.confidences is None else confidence_counts(*self.confidences),
            warning=self._warning(),
            survivals=survivals,
            decode_nodes=nodes,
            decode_widths=widths,
            late=late,
        )
        self.executor.keep_tokens(self.plan, result)
        return result

    def _warning(self) -> str | None:
        other_row_layout = self.executor.step.caps.other_row_layout
        if self.layout_counts is None or other_row_layout is None:
            return None
        return warning(self.layout_counts, other_row_layout)

    def _valid(self, slot: int, tokens: list[int], failed: list[Failure]) -> list[int]:
        """The tokens before invalid logits, committed to the slot's grammar."""
        grammar, invalid = self.grammars.get(slot), INVALID_TOKEN in tokens
        valid = tokens[: tokens.index(INVALID_TOKEN)] if invalid else tokens
        if grammar is not None and grammar.waiting is not None:
            return []
        if grammar is not None and grammar.too_slow:
            failed.append(Failure(slot, TOO_SLOW, GRAMMAR_ERROR))
            return []
        if grammar is not None and not grammar.accept(valid):
            log.error("slot %d: tokens %s do not match the grammar", slot, valid)
            failed.append(Failure(slot, MISMATCH))
        if invalid:
            stuck = grammar is not None and grammar.is_stuck
            why = (NO_TOKEN, GRAMMAR_ERROR) if stuck else (NOT_FINITE, None)
            failed.append(Failure(slot, *why))
        return valid


def _beginnings(rows: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
    """The first entries of each row, as many as `counts` says."""
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _with_new(rows: list[list[float]], rates: Sequence[float]) -> list[list[float]]:
    """Survivals of requests, and those of a new one."""
    return [*rows, list(accumulate(rates, mul))]


def device_step(executor: Executor) -> DeviceStep:
    """The `DeviceStep` of an executor in this process, for benchmarks and tests.

    Raises:
        ConfigError: the executor is not a `DeviceExecutor`.
    """
    if not isinstance(executor, DeviceExecutor):
        raise ConfigError(
            "This reads the engine's steps, which are in other processes with tp_size; drop it."
        )
    return executor.step
