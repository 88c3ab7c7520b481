"""Builds the executor: target, algorithm, slot tables, KV pools, and captured or eager steps."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.attention.model_attention import ModelAttention
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.executor import ExecutorInfo
from forerun.executor.agreement import Agreement
from forerun.executor.attention_setup import AttentionSetup
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.fixed_order import what_holds
from forerun.executor.graphs.cpu import CpuGraphSteps
from forerun.executor.graphs.cuda import CudaGraphSteps
from forerun.executor.graphs.piecewise import DEFAULT_MAX_TOKENS, host_bound_buckets, token_buckets
from forerun.executor.graphs.steps import EagerSteps, StepExecutor
from forerun.executor.layout_check import RowLayoutCheck
from forerun.executor.memory import (
    KVBudget,
    KVDemand,
    MemoryLog,
    ProfilingRun,
    kv_budget,
    profile_run,
)
from forerun.executor.resolve import Settings, resolve
from forerun.executor.step.costs import (
    measure_draft_costs,
    measure_step_costs,
    measure_threads,
)
from forerun.executor.step.deferred_observe import DeferredObserve
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.slot_tables import SlotTables
from forerun.executor.step.timing import StepTimer
from forerun.grammar.compiler import CompileOptions, GrammarCompiler
from forerun.grammar.mask_threads import MaskThreads
from forerun.grammar.vocabulary import VocabularySource
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.layers.attention import KVScales, ProjectedAttention
from forerun.layers.communication import SINGLE_RANK, Communicator, WeightPlacement
from forerun.layers.linear import LinearBase
from forerun.layers.moe import Experts
from forerun.models.base import CausalLM
from forerun.models.dummy_weights import DUMMY_FORMATS
from forerun.models.loader import load_target_at, load_transformers_target
from forerun.models.registry import TRANSFORMERS
from forerun.models.stop_ids import tokenizer_folder, union
from forerun.platform.device import dtype_name, running_on
from forerun.platform.progress import progress
from forerun.speculative.base import DraftContext, SlotContext, SpeculativeAlgorithm, TargetHandle
from forerun.speculative.check import one_line_error, slot_tensors
from forerun.speculative.ragged.estimator import Estimator
from forerun.speculative.registry import get_algorithm
from forerun.speculative.simulate import SimulatedAcceptance, accept_lengths

log = logging.getLogger("forerun")
MAX_GRAPH_BATCH = 256


def build_executor(
    config: EngineConfig,
    model_path: Path,
    overlap_depth: int | None = None,
    comm: Communicator = SINGLE_RANK,
) -> DeviceExecutor:
    """Validates the settings before any weight is read, then builds the executor.

    Args:
        model_path: folder of the target.
        overlap_depth: 0 or 1 instead of the device's default; for tests.
        comm: the `tp_size` ranks of which this executor is one.

    Raises:
        ConfigError: invalid settings or checkpoint, or not enough memory.
    """
    algorithm_class = get_algorithm(config.speculative_algorithm)
    with one_line_error(algorithm_class):
        algorithm = algorithm_class()
    assert comm.size == config.tp_size, "`start_executor` starts the ranks"
    settings = resolve(config, model_path, algorithm, overlap_depth, comm)
    if settings.device.type == "cuda":
        gc.collect()  # closed engines in reference cycles, before free memory is measured
    threads = None if settings.threads is None else settings.threads.count
    with running_on(settings.device, threads):
        return _Builder(settings, algorithm, comm).build(model_path)


class _Builder:
    def __init__(
        self, settings: Settings, algorithm: SpeculativeAlgorithm, comm: Communicator
    ) -> None:
        self.settings, self.comm = settings, comm
        self.agreement = Agreement(comm, settings.device)
        self.algorithm = algorithm
        self.memory = MemoryLog(settings.device)
        self.piece_buckets: list[int] = []  # tokens of prefills that are captured in pieces

    def build(self, model_path: Path) -> DeviceExecutor:
        settings, config = self.settings, self.settings.config
        model = self._load(model_path)
        fix = "lower max_running_requests or context_length"
        with self.memory.stage("slot tables", fix):
            tables = self._tables()
            deferred, estimator = self._deferred(), self._estimator(tables)

        def make_step(budget: KVBudget) -> DeviceStep:
            step = self._step(model, tables, budget)
            step.deferred, step.estimator = deferred, estimator
            return step

        profiled = self._profile(make_step)
        limits = settings.limits
        budget = kv_budget(config, self._demand(), settings.device, profiled)
        budget = budget.least(self.agreement.least)
        with self.memory.stage("K/V pools", "lower mem_fraction_static or max_total_tokens"):
            step = make_step(budget)
        step.simulate = self._simulated()
        if config.enable_trace:
            step.timer = StepTimer(settings.device)
        executor = DeviceExecutor(step, self._steps(step), settings.threads)
        executor.layout_check = self._layout_check(step)
        executor.grammars = self._grammars(model_path)
        if self.comm.size == 1:
            executor.mask_threads = MaskThreads()
        memory = self.memory.report(profiled)
        explain = _explain(settings, budget, self.piece_buckets, memory)
        kinds = Counter(linear.quantized_gemm for linear in model.modules(LinearBase))
        kinds.update(experts.quantized_gemm for experts in model.modules(Experts))
        explain["quantized_weights"] = {kind: count for kind, count in kinds.items() if kind}
        attentions = model.modules(ProjectedAttention)
        explain["custom_all_reduce"] = self.comm.peers is not None
        explain["kv_scales"] = sum(each.kv_scales != KVScales() for each in attentions)
        log.info("engine: %s", explain)
        measure_threads(executor)
        with running_on(settings.device, executor.num_threads()):
            costs, draft_costs = self._costs(executor), self._draft_costs(executor)
        executor.info = ExecutorInfo(
            limits=limits,
            num_pages=budget.num_pages,
            num_snapshots=(
                budget.num_snapshots if step.attention.pools.layout.has_recurrent_state else None
            ),
            num_window_pages=budget.num_window_pages if limits.window else None,
            window_in_prefill=settings.window_in_prefill,
            vocab_size=model.config.vocab_size,
            eos_token_ids=union(settings.stop_ids),
            prefix_lookahead=settings.caps.prefix_lookahead,
            verify_widths=settings.widths,
            step_costs=costs,
            draft_costs=draft_costs,
            drafting_parts=executor.steps.drafting_parts,
            tree_depth=settings.caps.max_tree_depth,
            hidden_size=model.config.hidden_size,
            has_lm_head=model.has_lm_head,
            explain=explain,
        )
        return executor

    def _grammars(self, model_path: Path) -> GrammarCompiler:
        settings, config = self.settings, self.settings.config
        folder = tokenizer_folder(config, model_path)
        source = VocabularySource(folder, settings.target.vocab_size, union(settings.stop_ids))
        spaces = not config.constrained_json_disable_any_whitespace
        # A clock of one rank decides for all: its result is what the engine reads.
        first = self.comm.rank == 0
        return GrammarCompiler(source, CompileOptions(spaces, follow_limit=first))

    def _load(self, model_path: Path) -> CausalLM:
        settings = self.settings
        positions = settings.limits.max_positions
        with self.memory.stage("weights", "use a device with more, or stop what else uses it"):
            load_format = settings.config.load_format
            where = settings.dtype, settings.device
            if settings.config.model_impl == TRANSFORMERS:
                model = load_transformers_target(model_path, *where, load_format)
            else:
                quantization = settings.config.quantization
                ep_size = settings.config.ep_size
                place = WeightPlacement(
                    *where,
                    self.comm,
                    quantization,
                    ep_size=ep_size,
                    fixed_order=settings.fixed_order,
                    allocate=False,
                )
                model = load_target_at(place, model_path, load_format, positions, settings.kv_dtype)
            self._load_draft(model)
        return model

    def _load_draft(self, model: CausalLM) -> None:
        settings = self.settings
        context = DraftContext(
            config=settings.config,
            caps=settings.caps,
            target=TargetHandle(
                settings.target,
                model.embed,
                model.embedding_rows,
                model.compute_logits,
                model.compute_argmax,
                model.head_logits,
            ),
            device=settings.device,
            dtype=settings.dtype,
            max_positions=settings.limits.max_positions,
            max_running_requests=settings.limits.slots,
            comm=self._draft_comm,
            keeps_float32=settings.keeps_float32,
        )
        with one_line_error(type(self.algorithm), ".load"):
            self.algorithm.load(context)

    @property
    def _draft_comm(self) -> Communicator:
        return self.comm if self.settings.config.draft_ranks > 1 else SINGLE_RANK

    def _tables(self) -> SlotTables:
        limits, device = self.settings.limits, self.settings.device
        tables = SlotTables(limits, device)
        context = SlotContext(
            limits.slots + 1, limits.chunked_prefill_size, limits.context_length, device
        )
        tables.states += slot_tensors(self.algorithm, context).values()
        return tables

    def _deferred(self) -> DeferredObserve | None:
        settings, capacity = self.settings, self.settings.limits.max_pending_observe
        if not capacity:
            return None
        return DeferredObserve(
            settings.limits.slots + 1,
            capacity,
            settings.target.hidden_size,
            settings.caps.reads_hidden_states,
            len(settings.caps.target_layers),
            settings.dtype,
            settings.device,
        )

    def _estimator(self, tables: SlotTables) -> Estimator | None:
        settings = self.settings
        if not settings.limits.ragged or settings.caps.makes_trees:
            return None
        slots, drafts = settings.limits.slots, settings.caps.num_drafts
        estimator = Estimator.new(slots, drafts, settings.device)
        tables.states += estimator.by_slot
        return estimator

    def _demand(self) -> KVDemand:
        settings, config, limits = self.settings, self.settings.config, self.settings.limits
        snapshots: int | None = None
        if config.max_mamba_cache_size is not None:
            snapshots = config.max_mamba_cache_size - limits.slots
        if config.disable_radix_cache:
            snapshots = 0
        return KVDemand(
            layouts=[each.layout for each in settings.attention if each.window is None],
            window_layouts=[each.layout for each in settings.attention if each.window is not None],
            slot_window_pages=limits.decode_window_pages,
            min_window_pages=limits.max_window_pages,
            page_size=limits.page_size,
            max_tokens=limits.slots * (limits.context_length + limits.overshoot),
            min_tokens=1 + limits.overshoot,
            num_slots=limits.slots + 1,
            num_verify_tokens=limits.max_verify_tokens,
            num_snapshots=snapshots,
        )

    def _step(self, model: CausalLM, tables: SlotTables, budget: KVBudget) -> DeviceStep:
        settings, limits = self.settings, self.settings.limits
        rows, width = limits.slots + 1, limits.max_verify_tokens

        def build(setup: AttentionSetup, pools: ModelPools | None = None) -> ModelAttention:
            windowed = setup.window is not None
            pages = budget.num_window_pages if windowed else budget.num_pages
            shape = PoolShape(pages, limits.page_size, rows, width, budget.num_snapshots, windowed)
            return setup.build(shape, settings.device, pools)

        target = build(settings.attention[0])
        shared = target.pools if settings.caps.reads_target_kv else None
        draft_attention = next((build(each, shared) for each in settings.attention[1:]), None)
        return DeviceStep(
            model, self.algorithm, self.settings.caps, tables, target, draft_attention
        )

    def _profile(self, make_step: Callable[[KVBudget], DeviceStep]) -> ProfilingRun:
        """Measures activation and graph memory on a GPU, with KV pools of one page."""
        settings = self.settings
        if settings.device.type != "cuda":
            return ProfilingRun()
        fix = "lower chunked_prefill_size, max_running_requests or cuda_graph_max_bs"
        with self.memory.stage("profiling run", fix), progress("profiling run"):
            step = make_step(KVBudget(num_pages=1, num_window_pages=1))
            self.piece_buckets = self._choose_piece_buckets(step)
            executor, graphs = DeviceExecutor(step), self._graphs(step)
            largest = self.agreement.largest
            return profile_run(executor, settings.limits, settings.widths, graphs, largest)

    def _choose_piece_buckets(self, step: DeviceStep) -> list[int]:
        settings, config, limits = self.settings, self.settings.config, self.settings.limits
        off = config.enable_piecewise_cuda_graph is False
        # Ranks would measure other buckets each.
        if off or not settings.graphs or self.comm.size > 1:
            return []
        if not step.captures_pieces:
            if setting := config.asks_for_pieces:
                log.warning(
                    "%s has no effect: %s cannot be captured in pieces around its attention.",
                    setting,
                    settings.target.architecture,
                )
            return []
        asked = config.piecewise_cuda_graph_max_tokens
        most = min(limits.chunked_prefill_size, limits.slots * limits.context_length)
        buckets = token_buckets(min(most, asked or DEFAULT_MAX_TOKENS))
        if asked is not None:
            return buckets
        begin = time.perf_counter()
        buckets = host_bound_buckets(step, buckets)
        seconds = time.perf_counter() - begin
        log.info("prefills to capture in pieces: tokens %s, measured in %.1f s", buckets, seconds)
        return buckets

    def _graphs(self, step: DeviceStep) -> CudaGraphSteps | None:
        """The graphs of `step`, to be captured; None if graphs are disabled."""
        settings = self.settings
        if not settings.graphs:
            return None
        largest = min(settings.limits.slots, settings.config.cuda_graph_max_bs or MAX_GRAPH_BATCH)
        return CudaGraphSteps(
            step, settings.limits.max_positions, largest, settings.widths, self.piece_buckets
        )

    def _steps(self, step: DeviceStep) -> StepExecutor:
        settings = self.settings
        graphs = self._graphs(step)
        if graphs is None:
            records = CpuGraphSteps.serves(step) and self.comm.size == 1
            if records and not settings.config.disable_cuda_graph:
                return CpuGraphSteps(step, settings.limits.max_positions)
            return EagerSteps(step)
        fix = "lower mem_fraction_static or cuda_graph_max_bs, or set disable_cuda_graph"
        if self.piece_buckets:
            fix = f"turn enable_piecewise_cuda_graph off, {fix}"
        capturing = progress("capturing graphs", graphs.count)
        with self.memory.stage("graphs", fix), capturing as stage:
            graphs.capture(lambda name: stage.advance(detail=name))
        return graphs

    def _layout_check(self, step: DeviceStep) -> RowLayoutCheck | None:
        """None: the draft has one row layout only, or its weights or acceptance are made up."""
        made_up = step.simulate is not None or self.settings.config.load_format in DUMMY_FORMATS
        if step.caps.other_row_layout is None or made_up:
            return None
        check = RowLayoutCheck(step, self.settings.limits.max_positions)
        check.warm_up()
        return check

    def _costs(self, executor: DeviceExecutor) -> dict[int, list[float]] | None:
        settings = self.settings
        if not settings.config.speculative_adaptive or len(settings.widths) == 1:
            return None
        with progress("measuring step costs"):
            largest = settings.limits.slots
            slowest = self.agreement.largest
            return measure_step_costs(executor, settings.widths, largest, slowest)

    def _draft_costs(self, executor: DeviceExecutor) -> dict[int, dict[int, float]] | None:
        settings = self.settings
        if not settings.limits.ragged:
            return None
        return measure_draft_costs(executor, settings.limits.slots, self.agreement.largest)

    def _simulated(self) -> SimulatedAcceptance | None:
        settings = self.settings
        config = settings.config
        if config.speculative_simulate_accept_length is None:
            return None
        if settings.caps.makes_trees:
            raise ConfigError("speculative_simulate_accept_length works with chains, not trees.")
        return SimulatedAcceptance.of(
            accept_lengths(config.speculative_simulate_accept_length),
            settings.caps.num_verify_tokens,
            settings.limits.slots + 1,
            settings.device,
            by_chance=config.speculative_simulate_accept_method == "chance",
        )


def _explain(
    settings: Settings, budget: KVBudget, piece_buckets: list[int], memory: dict[str, int]
) -> dict[str, Any]:
    limits, (target, *draft) = settings.limits, settings.attention

    def paged(setup: AttentionSetup) -> int:
        pages = budget.num_pages if setup.window is None else budget.num_window_pages
        return setup.layout.token_bytes * pages * limits.page_size

    kv = {"kv_target": paged(target)}
    if target.layout.has_recurrent_state:
        states = target.layout.slot_bytes(limits.max_verify_tokens)
        kv["states"] = (limits.slots + 1) * states
        kv["snapshots"] = budget.num_snapshots * target.layout.state_bytes
    if draft:
        kv["kv_draft"] = paged(draft[0])
    return {
        "architecture": settings.target.architecture,
        "model_impl": settings.config.model_impl,
        "device": str(settings.device),
        "tp_size": settings.config.tp_size,
        "ep_size": settings.config.ep_size,
        "threads": None if settings.threads is None else asdict(settings.threads),
        "dtype": dtype_name(settings.dtype),
        "kv_cache_dtype": dtype_name(settings.kv_dtype),
        "algorithm": settings.config.speculative_algorithm or "NONE",
        "stop_token_ids": {name: list(ids) for name, ids in settings.stop_ids.items()},
        "draft": settings.caps.draft_summary,
        "num_verify_tokens": limits.max_verify_tokens,
        "deterministic_inference": settings.fixed_order,
        "same_text": what_holds(settings),
        "ragged_verify": str(settings.ragged),
        "attention": target.explain(),
        "draft_attention": draft[0].explain() if draft else None,
        "slots": limits.slots,
        "page_size": limits.page_size,
        "context_length": limits.context_length,
        "overlap_depth": limits.overlap_depth,
        "kv_pages": budget.num_pages - 1,
        "kv": budget.describe(limits.page_size),
        "kv_bytes_per_token": budget.token_bytes,
        "kv_window": limits.window,
        "kv_window_pages": budget.num_window_pages - 1,
        "kv_bytes_per_window_token": budget.window_token_bytes,
        "state_snapshots": budget.num_snapshots,
        "piecewise_cuda_graph_tokens": piece_buckets,
        "memory_bytes": kv | memory,
    }
