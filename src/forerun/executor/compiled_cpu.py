"""Decode steps compiled for a CPU by TorchInductor.

Like a CUDA graph, a step is traced on the padding slot for one batch size, W and bucket of lengths.
In-place writes to shared tensors and oneDNN operations on weights in an opaque layout run eagerly;
the subgraphs between them are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from forerun.attention.model_attention import StepBuffers
from forerun.core.errors import ConfigError
from forerun.executor.step import DeviceStep
from forerun.executor.step_inputs import DecodeOutput, PrefillBatch, PrefillTokens, StepShape
from forerun.executor.steps import DecodeBatch, DeferredBatch, EagerSteps
from forerun.speculative.base import Draft

OPAQUE_NAMESPACES = ("mkldnn",)  # operations on tensors with an opaque layout
EAGER_OPERATIONS = ("aten::_grouped_mm",)  # Inductor takes it in bfloat16 only
SLOW_TO_COMPILE = ("aten::cumsum",)  # its consumers become nested loops: minutes per step
MIN_OPERATIONS = 2  # smallest subgraph that is compiled


def check_usable(device: torch.device) -> None:
    """Compiles a small function, bypassing all caches.

    Raises:
        ConfigError: the device is not a CPU, or there is no working C++ compiler.
    """
    if device.type != "cpu":
        raise ConfigError(f"cpu_graph compiles steps for a CPU, and this is {device}; drop it.")
    x = torch.ones(64)
    graph = make_fx(lambda x: x.sin() + x)(x)
    try:
        with inductor.patch(force_disable_caches=True):
            torch._inductor.compile(graph, [x])(x)
    except (RuntimeError, OSError) as error:
        reason = [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]
        raise ConfigError(
            f"cpu_graph needs a working C++ compiler ({type(error).__name__}: {reason[0]});"
            " install g++ or name one in CXX, or drop cpu_graph."
        ) from None


class CompiledCpuSteps:
    """The compiled decode steps of one executor; each is compiled on first use."""

    captured = False

    def __init__(self, step: DeviceStep, kv_len_ub: int) -> None:
        """`kv_len_ub`: largest number of KV slots of a request."""
        self.step = step
        self._kv_len_ub = kv_len_ub
        self._eager = EagerSteps(step)
        self._compiled_graphs: dict[str, Callable[..., Any]] = {}
        self._steps: dict[_Key, Callable[..., Any]] = {}
        self._buffers: dict[_Key, StepBuffers | None] = {}

    def measured_batches(self, largest: int) -> list[int]:
        """Empty: steps are compiled on first use, which is too slow for measuring at start."""
        return []

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        width = batch.num_verify_tokens
        deferred = width == 1 and self.step.deferred is not None
        if batch.shape.edits_logits:
            return self._eager.decode(batch)
        if self.step.algorithm.observes and not (self.step.captures_drafts or deferred):
            return self._eager.decode(batch)
        draft = self._eager.propose(batch)
        bound = self._bucket(batch.kv_len_ub)
        key = _Key(len(batch.slots), StepShape(width, bound, batch.flags.widened()))
        if key not in self._steps:
            self._steps[key] = self._compile(key, draft)
        slots = self.step.tables.upload(batch.slots, torch.int64)
        buffers = self._buffers[key]
        if buffers is not None:
            buffers.begin(batch.lengths)
        sampled, num_committed = self._steps[key](slots, *_tensors(draft))
        return DecodeOutput(sampled, num_committed)

    def observe_deferred(self, batch: DeferredBatch) -> None:
        self._eager.observe_deferred(batch)

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        return self._eager.prefill(batch)

    def _bucket(self, kv_len_ub: int) -> int:
        """The next power of two, so that few steps are compiled; attention reads up to there."""
        return min(max(64, 1 << (kv_len_ub - 1).bit_length()), self._kv_len_ub)

    def _compile(self, key: _Key, draft: Draft | None) -> Callable[..., Any]:
        buffers = self._buffers[key] = self.step.plan_buffers(key.batch)

        def decode(slots: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            eager_draft = Draft(*given) if given else None
            out = self.step.decode(slots, key.shape, eager_draft, buffers)
            return out.sampled, out.num_committed

        tables = self.step.tables
        slots = tables.upload([tables.padding_slot] * key.batch, torch.int64)
        with self.step.dummy_steps():
            if buffers is not None:  # allocates them, so that the trace only reads them
                decode(slots, *_tensors(draft))
            traced = make_fx(decode)(slots, *_tensors(draft))
        if error := self.step.algorithm.take_error():
            raise error
        return _compile_subgraphs(traced, self._compiled_graphs)


@dataclass(frozen=True)
class _Key:
    """What a compiled step is specialised to. Whether drafts are trees never changes."""

    batch: int
    shape: StepShape


def _tensors(draft: Draft | None) -> list[Tensor]:
    if draft is None:
        return []
    return [draft.tokens] if draft.parents is None else [draft.tokens, draft.parents]


def _compile_subgraphs(
    traced: fx.GraphModule, cache: dict[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Splits the trace at operations that must not be compiled; compiles the rest on first use."""
    shared = _lift_tensors(traced)
    inputs_and_views = _inputs_and_views(traced.graph)
    index, last = 0, False
    partition: dict[fx.Node, int] = {}  # odd: not compiled
    for node in traced.graph.nodes:
        eager = node.op == "call_function" and _must_run_eagerly(node, inputs_and_views)
        if eager != last and node.op == "call_function":
            index, last = index + 1, eager
        partition[node] = 2 * index + eager
    module = split_module(
        traced, nn.Module(), lambda node: partition[node], keep_original_order=True
    )
    for name, part in list(module.named_children()):
        assert isinstance(part, fx.GraphModule)
        if int(name.removeprefix("submod_")) % 2 == 0 and _worth_compiling(part):
            module.set_submodule(name, _Subgraph(part, cache))
    return lambda *inputs: module(*inputs, *shared)


class _Subgraph(nn.Module):
    """Compiled for the shapes of its first call; all later calls have the same.

    Most layers of a model have equal subgraphs, so `cache` shares what is compiled.
    """

    def __init__(self, graph: fx.GraphModule, cache: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._graph, self._cache = graph, cache
        self._compiled: Callable[..., Any] | None = None

    def forward(self, *inputs: Tensor) -> Any:
        if self._compiled is None:
            shapes = [(x.dtype, x.shape, x.stride()) for x in inputs]
            key = f"{_canonical(self._graph.graph)} {shapes}"
            if key not in self._cache:
                self._cache[key] = torch._inductor.compile(self._graph, list(inputs))
            self._compiled = self._cache[key]
        return self._compiled(*inputs)


def _canonical(graph: fx.Graph) -> str:
    """The operations of a graph as text, with numbered nodes instead of names."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda other: number[other])
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args}")
    return "\n".join(lines)


def _lift_tensors(traced: fx.GraphModule) -> list[Tensor]:
    """Turns tensors that the trace holds (weights, pools, tables) into inputs; returns them."""
    buffers = dict(traced.named_buffers(remove_duplicate=False))
    nodes = [node for node in traced.graph.nodes if node.op == "get_attr"]
    last = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    tensors: list[Tensor] = []
    placeholders: dict[str, fx.Node] = {}
    for node in nodes:
        name = str(node.target)
        if name not in placeholders:
            with traced.graph.inserting_after(last):
                last = placeholders[name] = traced.graph.placeholder(f"shared_{len(placeholders)}")
            tensors.append(buffers[name])
        node.replace_all_uses_with(placeholders[name])
        traced.graph.erase_node(node)
    traced.recompile()
    return tensors


def _inputs_and_views(graph: fx.Graph) -> set[fx.Node]:
    """Inputs of the graph, and views of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        views = node.op == "call_function" and _aliases(node) and node.args[0] in found
        if views or node.op == "placeholder":
            found.add(node)
    return found


def _schema(node: fx.Node) -> Any:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _aliases(node: fx.Node) -> bool:
    """Whether its result may be its first argument or a view of it."""
    schema = _schema(node)
    return schema is None or _views(schema)


def _must_run_eagerly(node: fx.Node, shared: set[fx.Node]) -> bool:
    """Whether it writes to a shared tensor, reads an opaque layout or cannot be compiled."""
    schema = _schema(node)
    if schema is None:
        return False
    writes = schema.is_mutable and node.args[0] in shared
    opaque = schema.name.partition("::")[0] in OPAQUE_NAMESPACES
    return writes or opaque or schema.name in EAGER_OPERATIONS


def _worth_compiling(part: fx.GraphModule) -> bool:
    """Whether a subgraph computes enough to be compiled, and compiles quickly."""
    schemas = [_schema(node) for node in part.graph.nodes if node.op == "call_function"]
    if any(schema is not None and schema.name in SLOW_TO_COMPILE for schema in schemas):
        return False
    computing = [s for s in schemas if s is not None and (s.is_mutable or not _views(s))]
    return len(computing) >= MIN_OPERATIONS


def _views(schema: Any) -> bool:
    return any(result.alias_info is not None for result in schema.returns)
