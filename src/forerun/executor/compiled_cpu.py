"""Compiled steps for a CPU, behind the seam of device graphs: `bound`, `holds`, `padded`, `run`.

As with a device graph a step is traced on the padding slot, whatever Python it went through, for
one
batch size, width and bound. What the trace shares with the outside is written in place, and oneDNN
holds some weights in a form of its own: these operations stay as they are, and what lies between
them is compiled by Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from forerun.attention.base import HostBatch
from forerun.attention.model_attention import StepBuffers
from forerun.core.errors import ConfigError
from forerun.executor.step import DeviceStep
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import Draft

OPAQUE = ("mkldnn",)  # namespaces of operations on tensors that only they can read
_Key = tuple[int, int, int, SamplingFlags]  # batch size, width, bound, sampling

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


class CompiledSteps:
    """The compiled decode steps of one engine, each made when it is first needed."""

    bound = None  # what runs beside them is not compiled

    def __init__(self, step: DeviceStep, positions: int) -> None:
        """`positions`: the most rows any request can have."""
        self._step = step
        self._positions = positions
        self._made: dict[str, Callable[..., Any]] = {}
        self._steps: dict[_Key, Callable[..., Any]] = {}
        self._buffers: dict[_Key, StepBuffers | None] = {}

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of which to measure the cost; all are held."""
        return [1 << n for n in range((self._step.tables.padding_slot).bit_length())]

    def holds(self, batch: int) -> bool:
        return True

    def padded(self, slots: Sequence[int]) -> Sequence[int]:
        return slots

    def run(
        self,
        slots: Sequence[int],
        width: int,
        flags: SamplingFlags,
        draft: Draft | None = None,
        host: HostBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Drawn tokens [B, W] and how many are committed [B], as `DeviceStep.decode`."""
        tables = self._step.tables
        index = tables.upload(slots, torch.int64)
        longest = int(tables.kv_len[index].max()) + self._step.caps.kv_reserve  # no wait: a CPU
        key = (len(slots), width, self._bound(longest), flags.widened())
        if key not in self._steps:
            padding_slot = torch.full_like(index, tables.padding_slot)
            self._steps[key] = self._compile(padding_slot, key, draft)
        buffers = self._buffers[key]
        if buffers is not None:
            buffers.begin(host)
        drawn, new = self._steps[key](index, *_tensors(draft))
        return drawn, new

    def _bound(self, longest: int) -> int:
        """Powers of two, so that few steps are compiled; attention reads as many rows."""
        return min(max(64, 1 << (longest - 1).bit_length()), self._positions)

    def _compile(self, slots: Tensor, key: _Key, draft: Draft | None) -> Callable[..., Any]:
        _, width, bound, flags = key
        buffers = self._buffers[key] = self._step.plan_buffers(len(slots))

        def decode(slots: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            outside = Draft(*given) if given else None
            return self._step.decode(slots, bound, width, flags, outside, buffers)

        if buffers is not None:  # allocates them: the trace shall only read them
            decode(slots, *_tensors(draft))
        traced = make_fx(decode)(slots, *_tensors(draft))
        if error := self._step.guard.take_error():
            raise error
        return _pieces(traced, self._made)


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
