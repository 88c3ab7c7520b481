"""Checks of an algorithm: its class, its `SpecCaps` and its per-request state.

Built-in algorithms and plugins go through the same checks.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from forerun.attention.base import LayerMask, Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.checks import of_type
from forerun.core.errors import ConfigError, ForerunError, first_line, shown
from forerun.kernels.speculation.tree import MAX_NODES
from forerun.kvcache.layouts import DenseKV, ModelLayout
from forerun.platform.device import is_out_of_memory
from forerun.speculative.base import (
    Option,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)

log = logging.getLogger("forerun")

_OPTION = re.compile(r"speculative(_[a-z0-9]+)+")
_OPTION_TYPES = (int, float, str, bool)


def check_class(
    name: str, cls: object, others: Iterable[type[SpeculativeAlgorithm]] = ()
) -> type[SpeculativeAlgorithm]:
    """Checks and returns a class. `others`: an option that two algorithms declare is one flag.

    Raises:
        ConfigError: it is not a complete algorithm, or its options cannot be flags.
    """
    if not (inspect.isclass(cls) and issubclass(cls, SpeculativeAlgorithm)):
        raise ConfigError(f"Algorithm {name}: {cls!r} is not a subclass of SpeculativeAlgorithm.")
    wrong = None
    if missing := sorted(cls.__abstractmethods__):
        wrong = f" lacks {', '.join(missing)}; define it"
    elif not isinstance(inspect.getattr_static(cls, "resolve"), classmethod):
        wrong = ".resolve must be a classmethod: it is called before there is an instance"
    elif not isinstance(cls.options, tuple) or not all(isinstance(o, Option) for o in cls.options):
        wrong = f".options must be a tuple of Option, got {cls.options!r}"
    elif len({option.name for option in cls.options}) < len(cls.options):
        wrong = ".options declares a name twice"
    else:
        known = {option.name: option for other in others for option in other.options}
        for option in cls.options:
            if why := _why_not_flag(option, known.get(option.name, option)):
                wrong = f": option {option.name!r} {why}"
    if wrong:
        raise ConfigError(f"Algorithm {name}: {cls.__name__}{wrong}.")
    return cls


def _why_not_flag(option: Option, known: Option) -> str | None:
    """`known`: the option of this name that other algorithms have declared."""
    if not isinstance(option.name, str) or not _OPTION.fullmatch(option.name):
        return "must be named speculative_..., in lower case"
    if option.name in {setting.name for setting in EngineConfig.settings()}:
        return "is a setting of the engine; choose another name"
    if option.type not in _OPTION_TYPES:
        return f"is of type {option.type!r}; it can be int, float, str or bool"
    if not isinstance(option.help, str):
        return f"has the help {shown(option.help)}; it must be text"
    if option.default is not None or option.type is bool:
        try:
            of_type(option.type, "it", option.default, ConfigError)
        except ConfigError as error:
            return f"has a wrong default: {str(error).removesuffix('.')}"
    if option != known:
        return "is declared by another algorithm too, and differently; choose another name"
    return None


def resolve_caps(
    algorithm: SpeculativeAlgorithm | type[SpeculativeAlgorithm],
    config: EngineConfig,
    target: ModelConfig,
    dtype: torch.dtype,
) -> SpecCaps:
    """The result of the algorithm's `resolve`, checked.

    Raises:
        ConfigError: raised by `resolve`; or `resolve` failed, or its result is invalid.
    """
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    with one_line_error(cls, ".resolve"):
        caps = algorithm.resolve(config, target, dtype)
    check_caps(cls.__name__, caps, target)
    missing = SpeculativeAlgorithm.propose_row_layouts
    if caps.other_row_layout is not None and cls.propose_row_layouts is missing:
        raise ConfigError(
            f"{cls.__name__}.resolve: other_row_layout needs a method propose_row_layouts; define"
            " it, or leave the field out."
        )
    return caps


@contextmanager
def one_line_error(cls: type[SpeculativeAlgorithm], method: str = "") -> Iterator[None]:
    """Calls a method of an algorithm at start, or its constructor. A plugin may raise anything.

    Raises:
        ConfigError: names class, method and exception. Errors of Forerun and lack of memory are
            passed on as they are.
    """
    name = f"{cls.__name__}{method}"
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ForerunError) or is_out_of_memory(error):
            raise
        log.debug("%s failed", name, exc_info=error)
        raise ConfigError(
            f"{name} failed: {type(error).__name__}: {first_line(error)}. Report it to its author,"
            " or use another speculative_algorithm."
        ) from error


def check_caps(name: str, caps: object, target: ModelConfig) -> None:
    """`name`: of the class that returned `caps`.

    Raises:
        ConfigError: a value is invalid for this target.
    """
    if not isinstance(caps, SpecCaps):
        raise ConfigError(f"{name}.resolve must return SpecCaps, got {shown(caps)}.")
    try:
        wrong = _why_not_verify(caps, target) or _why_not_draft(caps)
    except (TypeError, AttributeError) as error:  # a value of another type
        wrong = f"SpecCaps has a value of the wrong type ({error})"
    if wrong:
        raise ConfigError(f"{name}.resolve: {wrong}.")


def _why_not_verify(caps: SpecCaps, target: ModelConfig) -> str | None:
    drafts, most = caps.num_drafts, target.max_position
    if not isinstance(drafts, int) or not 0 <= drafts < most:
        return f"num_drafts must be 0 to {most - 1}, got {drafts!r}"
    if not isinstance(caps.kv_reserve, int) or caps.kv_reserve < drafts + 1:
        return f"kv_reserve must be num_drafts + 1 = {drafts + 1} or more, got {caps.kv_reserve!r}"
    if caps.kv_reserve > most:
        return f"kv_reserve must be {most} or less, the target's positions, got {caps.kv_reserve}"
    if caps.verify_mask not in (Mask.CAUSAL, Mask.CUSTOM):
        return f"verify_mask must be Mask.CAUSAL, or Mask.CUSTOM for trees, got {caps.verify_mask}"
    if caps.makes_trees and not 1 <= drafts < MAX_NODES:
        return f"a tree has 1 to {MAX_NODES - 1} drafts, got num_drafts {drafts}"
    if caps.tree_depth is not None and not (caps.makes_trees and 1 <= caps.tree_depth <= drafts):
        return f"tree_depth is for trees, 1 to num_drafts {drafts}, got {caps.tree_depth}"
    if not isinstance(caps.prefix_lookahead, int) or caps.prefix_lookahead < 0:
        return f"prefix_lookahead must be 0 or more, got {caps.prefix_lookahead!r}"
    for layer in caps.target_layers:
        if not 0 <= layer < target.num_layers:
            return f"target_layers names layer {layer}; the target has {target.num_layers}"
    return None


def _why_not_draft(caps: SpecCaps) -> str | None:
    layout, masks = caps.draft_kv, caps.draft_attention
    if layout is None and caps.draft_trees:
        return "draft_trees needs draft_kv"
    if layout is None and caps.reads_target_kv:
        return None if caps.draft_heads > 0 else f"draft_heads is {caps.draft_heads}"
    if caps.reads_target_kv:
        return "reads_target_kv and draft_kv exclude each other"
    if layout is None:
        extra = caps.draft_heads or caps.draft_attention or caps.draft_sinks
        return "draft_heads, draft_attention and draft_sinks need draft_kv" if extra else None
    if not isinstance(layout, ModelLayout) or not layout.token_bytes:
        return f"draft_kv must be a ModelLayout with K/V, got {layout!r}"
    if layout.has_recurrent_state:
        return "draft_kv has recurrent layers; keep their state in create_future_map"
    kv_heads = {kind.num_kv_heads for kind in layout.paged if isinstance(kind, DenseKV)}
    if caps.draft_heads < 1 or any(caps.draft_heads % heads for heads in kv_heads):
        heads = " and of ".join(map(str, sorted(kv_heads or {1})))
        return f"draft_heads must be a multiple of {heads} KV heads, got {caps.draft_heads}"
    if len(masks) != layout.num_layers:
        return f"draft_attention has {len(masks)} masks for draft_kv's {layout.num_layers} layers"
    for mask in masks:
        if not isinstance(mask, LayerMask) or mask.mask is Mask.CUSTOM:
            return f"draft_attention takes LayerMasks of CAUSAL or BLOCK, got {mask}"
    return None


def slot_tensors(algorithm: SpeculativeAlgorithm, ctx: SlotContext) -> Mapping[str, Tensor]:
    """The tensors [slots, ...] of the algorithm's `create_future_map`, checked.

    Raises:
        ConfigError: a wrong type, shape, device or layout.
    """
    with one_line_error(type(algorithm), ".create_future_map"):
        state = algorithm.create_future_map(ctx)
    where = f"{type(algorithm).__name__}.create_future_map"
    if not isinstance(state, SlotState):
        raise ConfigError(f"{where} must return a SlotState, got {shown(state)}.")
    if not isinstance(state.tensors, Mapping):
        raise ConfigError(
            f"{where}: SlotState takes a dictionary of names and tensors, got"
            f" {shown(state.tensors)}."
        )
    for name, tensor in state.tensors.items():
        got = type(tensor).__name__
        if isinstance(tensor, Tensor):
            got = f"{list(tensor.shape)} {tensor.layout} on {tensor.device}"
            placed = tensor.device == ctx.device and tensor.layout == torch.strided
            if placed and tensor.shape[:1] == (ctx.slots,):
                continue
        raise ConfigError(
            f"{where}: {name!r} must be a dense tensor [{ctx.slots}, ...] on {ctx.device},"
            f" got {got}."
        )
    return state.tensors
