"""Observes what the parts of a target compute for every token, and compares runs bit by bit.

A token's logits are to be a pure function of the tokens before it. So rows of a forward are known
by these tokens, whatever batch, chunk or verify pass computes them: a run to learn from leaves a
fingerprint per token and part of the model, and other runs are compared with these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from forerun import LLM
from forerun.attention.base import AttentionContext
from forerun.executor.device_executor import device_step
from forerun.executor.step.device_step import DeviceStep
from forerun.kernels.speculation.tree import unpack_bits
from forerun.layers.attention import KVLayer
from forerun.layers.linear import LinearBase
from forerun.layers.mla import LatentAttention
from forerun.layers.module import Module
from forerun.layers.moe import Experts

GEMM_METHODS = ("__call__", "add_rms_norm", "silu_and_mul", "split_k_partials")
ATTENTION = (KVLayer, LatentAttention)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

Key = tuple[int, int]  # of a token: its position, and a hash of the tokens up to it


@dataclass(frozen=True)
class Difference:
    """The first part of the model whose output has other bits."""

    part: str  # its path in the model, and what computes it
    after: str | None  # the last part before it with equal bits
    position: int  # of the first token that differs
    forward: str  # which forward computed it, such as "verify pass, 2 x 8"


class _Part:
    """Fingerprints of one part's output, and where a later run differs."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.known: dict[Key, int] = {}
        self.first: tuple[int, str] | None = None  # position and forward of a difference

    def compare(self, key: Key, fingerprint: int, forward: str) -> None:
        if self.known.get(key, fingerprint) == fingerprint:
            return
        if self.first is None or key[0] < self.first[0]:
            self.first = key[0], forward


class LayerObserver:
    """Fingerprints by part, in the order in which a forward computes them."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._rows: list[Key] | None = None  # of the forward that is running
        self._ends: list[Key] = []  # of those of its tokens that the last layer continues with
        self._forward, self._backend, self._learns = "", "", False

    @contextmanager
    def watch(self, llm: LLM, learn: bool = False) -> Iterator[None]:
        """Observes the target of an engine that runs in this process and captures nothing.

        `learn`: keeps what it computes, to compare the next runs with.

        Raises:
            ConfigError: its target is in other processes.
        """
        step = device_step(llm.engine.executor)
        self._learns = learn
        for part in self._parts.values():
            part.first = None
        with ExitStack() as patches:
            patches.enter_context(self._watch_forward(step))
            for objects, method, kernel in _observed(step.model):
                patches.enter_context(self._watch_calls(objects, method, kernel))
            yield

    def difference(self) -> Difference | None:
        """Returns the first part that differed in the last run; None: all bits were equal."""
        last: str | None = None
        for name, part in self._parts.items():
            if part.first is not None:
                position, forward = part.first
                return Difference(f"{name} ({part.kernel})", last, position, forward)
            last = f"{name} ({part.kernel})"
        return None

    @contextmanager
    def _watch_forward(self, step: DeviceStep) -> Iterator[None]:
        forward = step.model.forward

        @wraps(forward)
        def watched(
            ids: Tensor, at: Tensor, ctx: AttentionContext, *more: Any, **named: Any
        ) -> Any:
            rows = more[1] if len(more) > 1 else named.get("rows")
            self._rows = _keys(step, ids, ctx)
            self._ends = [] if rows is None else [self._rows[row] for row in rows.tolist()]
            self._forward, self._backend = _describe(ctx), ctx.backend.name
            try:
                return forward(ids, at, ctx, *more, **named)
            finally:
                self._rows = None

        vars(step.model)["forward"] = watched
        try:
            yield
        finally:
            del vars(step.model)["forward"]

    @contextmanager
    def _watch_calls(self, names: dict[int, str], method: str, kind: type[Any]) -> Iterator[None]:
        """Observes a method of the objects of one class; `names` by id."""
        call, own = getattr(kind, method), method in vars(kind)
        running: set[int] = set()

        @wraps(call)
        def watched(part: Any, *args: Any, **named: Any) -> Any:
            if self._rows is None or id(part) not in names or id(part) in running:
                return call(part, *args, **named)
            running.add(id(part))
            try:
                output = call(part, *args, **named)
            finally:
                running.discard(id(part))
            self._see(names[id(part)], part, method, output)
            return output

        setattr(kind, method, watched)
        try:
            yield
        finally:
            if own:
                setattr(kind, method, call)
            else:
                delattr(kind, method)

    def _see(self, name: str, part: Any, method: str, output: Any) -> None:
        kernel = type(part).__name__
        if isinstance(part, ATTENTION):
            kernel = f"attention backend {self._backend}"
        elif method != "__call__":
            kernel = f"{kernel}.{method}"
        dim = 1 if isinstance(part, Experts) else 0
        for label, tensor in _tensors(name, output):
            self._compare(label, kernel, tensor, dim)

    def _compare(self, label: str, kernel: str, tensor: Tensor, dim: int) -> None:
        assert self._rows is not None
        if tensor.dim() < dim + 2:
            return
        count = tensor.shape[dim]
        rows = next((each for each in (self._rows, self._ends) if len(each) == count), None)
        if rows is None:
            return
        prints = zip(rows, fingerprints(tensor.movedim(dim, 0)), strict=True)
        if self._learns:
            self._parts.setdefault(label, _Part(kernel)).known.update(prints)
        elif label in self._parts:
            for key, fingerprint in prints:
                self._parts[label].compare(key, fingerprint, self._forward)


def fingerprints(rows: Tensor) -> list[int]:
    """rows [T, ...] of any dtype -> 64 bits of each, equal for equal bits."""
    flat = rows.reshape(len(rows), -1).contiguous()
    bits = flat.view(BITS[flat.element_size()]).long()
    factors = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 0x9E3779B97F4A7C1 | 1
    mixed = (bits + 0x632BE59BD9B4E01) * factors
    hashed: list[int] = (mixed ^ (mixed >> 29)).sum(1).tolist()
    return hashed


def _observed(model: Module) -> Iterator[tuple[dict[int, str], str, type[Any]]]:
    """(names by id, method, class) of modules and of the GEMMs of linears."""
    found: dict[tuple[type[Any], str], dict[int, str]] = {}

    def add(part: object, name: str, methods: tuple[str, ...]) -> None:
        for method in methods:
            found.setdefault((type(part), method), {})[id(part)] = name

    for name, module in model.named_modules(Module):
        if isinstance(module, LinearBase):
            add(module.gemm, name[:-1], GEMM_METHODS)
        elif callable(module):
            add(module, name[:-1], ("__call__",))
    for (kind, method), names in found.items():
        yield names, method, kind


def _tensors(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, with a label each; nothing of what is not computed yet."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, tuple):
        for index, each in enumerate(output):
            yield from _tensors(f"{name}[{index}]", each)
    elif is_dataclass(output) and not isinstance(output, type):
        for each in fields(output):
            value = getattr(output, each.name)
            if isinstance(value, Tensor):
                yield f"{name}.{each.name}", value


def _keys(step: DeviceStep, ids: Tensor, ctx: AttentionContext) -> list[Key]:
    """A key for each token of a forward."""
    batch = ctx.batch
    assert batch.slots is not None
    starts, tokens = batch.start.tolist(), ids.tolist()
    texts = step.tables.history[batch.slots].tolist()
    counts = _counts(ctx)
    keys, first = [], 0
    for request, (start, count) in enumerate(zip(starts, counts, strict=True)):
        before, own = texts[request][:start], tokens[first : first + count]
        for seen in _ancestors(batch.tree, request, count):
            text = (*before, *(own[i] for i in seen))
            keys.append((len(text) - 1, hash(text)))
        first += count
    return keys


def _ancestors(tree: Tensor | None, request: int, count: int) -> list[list[int]]:
    """Which tokens of a pass each of its tokens sees, itself the last."""
    if tree is None:
        return [list(range(i + 1)) for i in range(count)]
    seen = unpack_bits(tree[request : request + 1], count)[0].tolist()
    return [[i for i in range(count) if row[i]] for row in seen[:count]]


def _counts(ctx: AttentionContext) -> list[int]:
    batch = ctx.batch
    if batch.ragged is not None:
        return [count for _, count in batch.ragged]
    if batch.rows is not None:
        return [int(width) for width in batch.rows.widths.tolist()]
    assert batch.q_len is not None
    return [batch.q_len] * len(batch.start)


def _describe(ctx: AttentionContext) -> str:
    """What kind of forward it is, with its sizes."""
    counts, batch = _counts(ctx), ctx.batch
    if batch.ragged is not None:
        return f"prefill of {' + '.join(map(str, counts))} tokens"
    if batch.rows is not None:
        return f"verify pass of {' + '.join(map(str, counts))} tokens"
    kind = "decode step" if batch.q_len == 1 else "verify pass"
    return f"{kind}, {len(counts)} x {batch.q_len} tokens"
