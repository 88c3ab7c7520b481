"""Decode steps compiled for a CPU by Inductor.

As with a CUDA graph, a step is traced on the padding slot for one batch size, W and bucket of
lengths. Writes to shared tensors happen in place, and oneDNN keeps some weights in a layout of its
own: these operations stay as they are, and what lies between them is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from forerun.attention.model_attention import StepBuffers
from forerun.core.errors import ConfigError
from forerun.core.plan import PrefillChunk
from forerun.executor.step import DecodeOutput, DeviceStep, StepShape
from forerun.executor.steps import DecodeBatch, DeferredBatch, EagerSteps
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import Draft

OPAQUE = ("mkldnn",)  # namespaces of operations on tensors that only they can read
SLOW = ("aten::cumsum",)  # what reads a scan is compiled to loops within loops: minutes a step
WORTH = 2  # operations from which on a piece is compiled


def check_usable(device: torch.device) -> None:
    """Compiles a line, past all caches.

    Raises:
        ConfigError: not a CPU, or no C++ compiler works.
    """
    if device.type != "cpu":
        raise ConfigError(f"cpu_graph compiles steps for a CPU, and this is {device}; drop it.")
    x = torch.ones(64)
    line = make_fx(lambda x: x.sin() + x)(x)
    try:
        with inductor.patch(force_disable_caches=True):
            torch._inductor.compile(line, [x])(x)
    except (RuntimeError, OSError) as error:
        reason = [text for text in str(error).splitlines() if text.strip()] or ["no reason given"]
        raise ConfigError(
            f"cpu_graph needs a working C++ compiler ({type(error).__name__}: {reason[0]});"
            " install g++ or name one in CXX, or drop cpu_graph."
        ) from None


class CompiledCpuSteps:
    """The compiled decode steps of one executor, each made when it is first needed."""

    captured = False

    def __init__(self, step: DeviceStep, kv_len_ub: int) -> None:
        """`kv_len_ub`: KV slots that any request can have."""
        self.step = step
        self._kv_len_ub = kv_len_ub
        self._eager = EagerSteps(step)
        self._compiled_graphs: dict[str, Callable[..., Any]] = {}
        self._steps: dict[_Key, Callable[..., Any]] = {}
        self._buffers: dict[_Key, StepBuffers | None] = {}

    def measured_batches(self, largest: int) -> list[int]:
        """None: steps are compiled when first needed, which is too slow to measure at start."""
        return []

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        width = batch.num_verify_tokens
        deferred = width == 1 and self.step.deferred is not None
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

    def prefill(self, chunks: Sequence[PrefillChunk], flags: SamplingFlags) -> Tensor | None:
        return self._eager.prefill(chunks, flags)

    def _bucket(self, kv_len_ub: int) -> int:
        """Powers of two, so that few steps are compiled; attention reads as many KV slots."""
        return min(max(64, 1 << (kv_len_ub - 1).bit_length()), self._kv_len_ub)

    def _compile(self, key: _Key, draft: Draft | None) -> Callable[..., Any]:
        buffers = self._buffers[key] = self.step.plan_buffers(key.batch)

        def decode(slots: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            outside = Draft(*given) if given else None
            out = self.step.decode(slots, key.shape, outside, buffers)
            return out.sampled, out.num_committed

        tables = self.step.tables
        slots = tables.upload([tables.padding_slot] * key.batch, torch.int64)
        self.step.dummy = True
        if buffers is not None:  # allocates them: the trace shall only read them
            decode(slots, *_tensors(draft))
        traced = make_fx(decode)(slots, *_tensors(draft))
        self.step.dummy = False
        if error := self.step.algorithm.take_error():
            raise error
        return _pieces(traced, self._compiled_graphs)


@dataclass(frozen=True)
class _Key:
    """What a compiled step is specialised to. Whether drafts are trees never changes."""

    batch: int
    shape: StepShape


def _tensors(draft: Draft | None) -> list[Tensor]:
    if draft is None:
        return []
    return [draft.tokens] if draft.parents is None else [draft.tokens, draft.parents]


def _pieces(traced: fx.GraphModule, made: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The trace, cut where it must not be compiled; pieces are compiled when they first run."""
    shared = _lift_tensors(traced)
    owned = _outside(traced.graph)
    piece, last = 0, False
    place: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        stays = node.op == "call_function" and _stays(node, owned)
        if stays != last and node.op == "call_function":
            piece, last = piece + 1, stays
        place[node] = 2 * piece + stays
    whole = split_module(traced, nn.Module(), lambda node: place[node], keep_original_order=True)
    for name, part in list(whole.named_children()):
        assert isinstance(part, fx.GraphModule)
        if int(name.removeprefix("submod_")) % 2 == 0 and _worth(part):
            whole.set_submodule(name, _Piece(part, made))
    return lambda *inputs: whole(*inputs, *shared)


class _Piece(nn.Module):
    """Compiled for the shapes of its first call, which are those of all.

    Most layers of a model give the same pieces: `made` holds one of each.
    """

    def __init__(self, graph: fx.GraphModule, made: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._graph, self._made = graph, made
        self._compiled: Callable[..., Any] | None = None

    def forward(self, *inputs: Tensor) -> Any:
        if self._compiled is None:
            shapes = [(x.dtype, x.shape, x.stride()) for x in inputs]
            key = f"{_spelled(self._graph.graph)} {shapes}"
            if key not in self._made:
                self._made[key] = torch._inductor.compile(self._graph, list(inputs))
            self._compiled = self._made[key]
        return self._compiled(*inputs)


def _spelled(graph: fx.Graph) -> str:
    """The operations with numbers for names."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda other: number[other])
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args}")
    return "\n".join(lines)


def _lift_tensors(traced: fx.GraphModule) -> list[Tensor]:
    """Makes inputs of all tensors the trace found outside (weights, pools, tables); lists them."""
    held = dict(traced.named_buffers(remove_duplicate=False))
    nodes = [node for node in traced.graph.nodes if node.op == "get_attr"]
    behind = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    tensors: list[Tensor] = []
    made: dict[str, fx.Node] = {}
    for node in nodes:
        name = str(node.target)
        if name not in made:
            with traced.graph.inserting_after(behind):
                behind = made[name] = traced.graph.placeholder(f"shared_{len(made)}")
            tensors.append(held[name])
        node.replace_all_uses_with(made[name])
        traced.graph.erase_node(node)
    traced.recompile()
    return tensors


def _outside(graph: fx.Graph) -> set[fx.Node]:
    """Inputs and views of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        views = node.op == "call_function" and _aliases(node) and node.args[0] in found
        if views or node.op == "placeholder":
            found.add(node)
    return found


def _schema(node: fx.Node) -> Any:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _aliases(node: fx.Node) -> bool:
    """Whether its result may be a view of its first argument, or that itself."""
    schema = _schema(node)
    return schema is None or _views(schema)


def _stays(node: fx.Node, outside: set[fx.Node]) -> bool:
    """Whether it is to run as it is: it writes to what is shared, or is opaque."""
    schema = _schema(node)
    if schema is None:
        return False
    writes = schema.is_mutable and node.args[0] in outside
    return writes or schema.name.partition("::")[0] in OPAQUE


def _worth(part: fx.GraphModule) -> bool:
    """Whether compiling a piece can gain something."""
    schemas = [_schema(node) for node in part.graph.nodes if node.op == "call_function"]
    if any(schema is not None and schema.name in SLOW for schema in schemas):
        return False
    computing = [s for s in schemas if s is not None and (s.is_mutable or not _views(s))]
    return len(computing) >= WORTH


def _views(schema: Any) -> bool:
    return any(result.alias_info is not None for result in schema.returns)
