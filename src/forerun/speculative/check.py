"""What an algorithm must be: its name, its class, its caps, its rows. Each refusal says the fix.

Built-in algorithms and those of others go through the same checks.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import LayerMask, Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.tree import MAX_NODES
from forerun.kvcache.layouts import DenseKV, ModelLayout
from forerun.speculative.base import (
    Option,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)

log = logging.getLogger("forerun")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")
_LONGEST_NAME = 32
_OPTION = re.compile(r"speculative(_[a-z0-9]+)+")
_OPTION_TYPES = (int, float, str, bool)
# How the engine calls them, by position.
_CALLS = {
    "resolve": ("config", "target", "dtype"),
    "load": ("ctx",),
    "create_future_map": ("ctx",),
    "supports_target_verify_for_draft": (),
    "propose": ("step",),
    "observe": ("step",),
}


def check_name(name: object) -> str:
    """The name in upper case, as the table has it.

    Raises:
        ConfigError: it is not one word that can be typed on a command line.
    """
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be an algorithm's name: letters and digits, with - or _ between them,"
            f" {_LONGEST_NAME} at most, a letter first."
        )
    return name.upper()


# --- the class ------------------------------------------------------------------------------


def check_class(name: str, cls: object) -> type[SpeculativeAlgorithm]:
    """The class itself.

    Raises:
        ConfigError: it lacks or misdeclares something.
    """
    if not (inspect.isclass(cls) and issubclass(cls, SpeculativeAlgorithm)):
        raise ConfigError(f"Algorithm {name}: {cls!r} is not a subclass of SpeculativeAlgorithm.")

    def refuse(what: str) -> None:
        raise ConfigError(f"Algorithm {name}: {cls.__name__}{what}.")

    if missing := sorted(cls.__abstractmethods__):
        refuse(f" lacks {', '.join(missing)}")
    if not isinstance(inspect.getattr_static(cls, "resolve"), classmethod):
        refuse(".resolve must be a classmethod: it is asked before there is an instance")
    for method, arguments in _CALLS.items():
        if wrong := _why_not_callable(cls, method, arguments):
            refuse(wrong)
    if not _takes(cls, 0):
        refuse(" must be made without arguments; what it needs comes with load(ctx)")
    if not isinstance(cls.bundled_draft, str | None):
        refuse(f".bundled_draft must be a folder's name or None, got {cls.bundled_draft!r}")
    if wrong := _why_not_options(cls.options):
        refuse(wrong)
    return cls


def _why_not_callable(cls: type, method: str, arguments: tuple[str, ...]) -> str | None:
    kind = inspect.getattr_static(cls, method)
    function = kind.__func__ if isinstance(kind, classmethod | staticmethod) else kind
    first = "cls" if method == "resolve" else "self"
    expected = f"def {method}({', '.join((first, *arguments))})"
    if not inspect.isfunction(function) or isinstance(kind, staticmethod):
        return f".{method} must be a method: {expected}"
    if method != "resolve" and isinstance(kind, classmethod):
        return f".{method} must be a method of the instance: {expected}"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return f".{method} must return its result at once: neither async nor a generator"
    if not _takes(function, 1 + len(arguments)):
        return f".{method}{inspect.signature(function)} cannot be called as {expected}"
    return None


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether `count` arguments by position are what it needs."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _why_not_options(options: object) -> str | None:
    if not isinstance(options, tuple) or not all(isinstance(o, Option) for o in options):
        return f".options must be a tuple of Option, got {options!r}"
    settings = {setting.name for setting in EngineConfig.settings()}
    seen: set[str] = set()
    for option in options:
        if wrong := _why_not_option(option):
            return f": option {option.name!r} {wrong}"
        if option.name in settings:
            return f": option {option.name!r} is a setting of the engine; choose another name"
        if option.name in seen:
            return f" declares option {option.name!r} twice"
        seen.add(option.name)
    return None


def _why_not_option(option: Option) -> str | None:
    if not isinstance(option.name, str) or not _OPTION.fullmatch(option.name):
        return "must be named speculative_..., in lower case"
    if option.type not in _OPTION_TYPES:
        return f"is of type {option.type!r}; it can be int, float, str or bool"
    if option.default is not None and not _is_a(option.default, option.type):
        return f"has the default {option.default!r}, which is no {option.type.__name__}"
    if option.type is bool and option.default is None:
        return "is a switch: its default must be True or False"
    if not isinstance(option.help, str) or not option.help.strip():
        return "needs a line of help"
    return None


def _is_a(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def check_shared_options(
    name: str, cls: type[SpeculativeAlgorithm], others: Iterable[type[SpeculativeAlgorithm]]
) -> None:
    """An option of two algorithms is one flag.

    Raises:
        ConfigError: they declare it differently.
    """
    known = {option.name: (option, other) for other in others for option in other.options}
    for option in cls.options:
        theirs, other = known.get(option.name, (option, cls))
        if theirs != option:
            raise ConfigError(
                f"Algorithm {name}: option {option.name!r} is declared by {other.__name__} too, and"
                " differently; choose another name."
            )


# --- the values -----------------------------------------------------------------------------


def resolve_caps(
    algorithm: SpeculativeAlgorithm, config: EngineConfig, target: ModelConfig, dtype: torch.dtype
) -> SpecCaps:
    """What the algorithm needs for these settings.

    Raises:
        ConfigError: its own; or it failed, or needs what cannot be.
    """
    name = type(algorithm).__name__
    try:
        caps = algorithm.resolve(config, target, dtype)
    except ConfigError:
        raise
    except Exception as error:  # anybody's code
        log.debug("%s.resolve failed", name, exc_info=error)
        raise ConfigError(
            f"{name}.resolve failed: {type(error).__name__}: {error}. Its author can fix that; use"
            " another speculative_algorithm."
        ) from error
    check_caps(name, caps, target)
    return caps


def check_caps(name: str, caps: object, target: ModelConfig) -> None:
    """`name`: of the class that returned `caps`.

    Raises:
        ConfigError: no engine could do that.
    """
    if not isinstance(caps, SpecCaps):
        raise ConfigError(f"{name}.resolve must return SpecCaps, got {caps!r}.")
    for wrong in (_why_not_numbers(caps), _why_not_rows(caps, target), _why_not_draft(caps)):
        if wrong:
            raise ConfigError(f"{name}.resolve: {wrong}.")


def _why_not_numbers(caps: SpecCaps) -> str | None:
    for field in ("num_drafts", "kv_reserve", "draft_heads", "prefix_lookahead"):
        if not _is_a(value := vars(caps)[field], int):
            return f"{field} must be an integer, got {value!r}"
    for field in ("flexible", "needs_host_tokens", "deferred_observe"):
        if not _is_a(value := vars(caps)[field], bool):
            return f"{field} must be True or False, got {value!r}"
    return None


def _why_not_rows(caps: SpecCaps, target: ModelConfig) -> str | None:
    drafts = caps.num_drafts
    if drafts < 0:
        return f"num_drafts must be >= 0, got {drafts}"
    if caps.kv_reserve < drafts + 1:
        return (
            f"kv_reserve {caps.kv_reserve} is less than the {drafts + 1} rows that a step of"
            f" {drafts} drafts writes; it must be num_drafts + 1 at least"
        )
    if drafts >= target.max_position:
        return f"num_drafts {drafts} do not fit the target's {target.max_position} positions"
    if caps.verify_mask not in (Mask.CAUSAL, Mask.CUSTOM):
        return f"verify_mask must be Mask.CAUSAL, or Mask.CUSTOM for trees, got {caps.verify_mask}"
    if caps.makes_trees and not 1 <= drafts < MAX_NODES:
        return f"a tree has 1 to {MAX_NODES - 1} drafts, got num_drafts {drafts}"
    if caps.tree_depth is not None and not (caps.makes_trees and 1 <= caps.tree_depth <= drafts):
        return f"tree_depth {caps.tree_depth} is for trees, from 1 to the {drafts} drafts of one"
    if caps.prefix_lookahead not in (0, 1):
        return f"prefix_lookahead must be 0 or 1, got {caps.prefix_lookahead}"
    if caps.needs_host_tokens and drafts == 0:
        return "needs_host_tokens is for what proposes, but num_drafts is 0"
    layers = caps.target_layers
    if not isinstance(layers, tuple) or not all(_is_a(layer, int) for layer in layers):
        return f"target_layers must be a tuple of integers, got {layers!r}"
    outside = [layer for layer in layers if not 0 <= layer < target.num_layers]
    if outside:
        return f"target_layers names layer {outside[0]}; the target has {target.num_layers}"
    return None


def _why_not_draft(caps: SpecCaps) -> str | None:
    layout, masks = caps.draft_kv, caps.draft_attention
    if layout is None:
        extra = [f for f in ("draft_heads", "draft_attention") if vars(caps)[f]]
        return f"{extra[0]} is set without draft_kv" if extra else None
    if not isinstance(layout, ModelLayout):
        return f"draft_kv must be a ModelLayout, got {layout!r}"
    if layout.has_recurrent_state:
        return "draft_kv has recurrent layers; drafts keep K/V, or rows of create_future_map"
    if layout.token_bytes < 1 or any(layer.token_bytes < 1 for layer in layout.paged):
        return f"draft_kv is empty: {layout}"
    heads = max((h.num_kv_heads for h in layout.paged if isinstance(h, DenseKV)), default=1)
    if caps.draft_heads < 1 or caps.draft_heads % heads:
        return (
            f"draft_heads must be a multiple of draft_kv's {heads} key-value heads,"
            f" got {caps.draft_heads}"
        )
    if not isinstance(masks, tuple) or not all(isinstance(mask, LayerMask) for mask in masks):
        return f"draft_attention must be a tuple of LayerMask, got {masks!r}"
    if len(masks) != layout.num_layers:
        return f"draft_attention has {len(masks)} masks for draft_kv's {layout.num_layers} layers"
    if any(mask.mask is Mask.CUSTOM for mask in masks):
        return "draft_attention is CAUSAL or BLOCK; CUSTOM is for the verify pass"
    return None


def slot_rows(algorithm: SpeculativeAlgorithm, ctx: SlotContext) -> list[Tensor]:
    """The rows that the algorithm keeps, `ctx.slots` of each.

    Raises:
        ConfigError: they are not that.
    """
    slots, device = ctx.slots, ctx.device
    state = algorithm.create_future_map(ctx)
    where = f"{type(algorithm).__name__}.create_future_map"
    if not isinstance(state, SlotState):
        raise ConfigError(f"{where} must return a SlotState, got {state!r}.")
    for name, rows in state.rows.items():
        if not isinstance(rows, Tensor) or rows.dim() < 1 or rows.shape[0] != slots:
            got = list(rows.shape) if isinstance(rows, Tensor) else repr(rows)
            raise ConfigError(f"{where}: {name!r} must be a tensor [{slots}, ...], got {got}.")
        if rows.device.type != device.type:
            raise ConfigError(f"{where}: {name!r} is on {rows.device}, the engine on {device}.")
    return list(state.rows.values())
