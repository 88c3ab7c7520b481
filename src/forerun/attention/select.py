"""The one place where attention backends and the page size are chosen, and the choice explained."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from forerun.attention.base import AttentionBackend
from forerun.attention.capabilities import AttentionNeed, Phase
from forerun.core.errors import ConfigError, nearest
from forerun.kernels.attention import prefill_sm90
from forerun.kernels.attention.tiles import SM90_LATENT_PAGE, LatentShape, why_unfit_for_mla_sm90

log = logging.getLogger("forerun")


def _backend(module: str, name: str) -> Callable[[], type[AttentionBackend]]:
    return lambda: vars(importlib.import_module(module))[name]


# All backends; a backend's module is imported only when it is asked.
BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "triton": _backend("forerun.attention.triton", "TritonAttention"),
    "fa3": _backend("forerun.attention.fa3", "Fa3"),
    "fa4": _backend("forerun.attention.fa4", "Fa4"),
    "flashmla": _backend("forerun.attention.flashmla", "FlashMla"),
    "trtllm_mha": _backend("forerun.attention.trtllm_mha", "TrtllmMha"),
    "flashinfer": _backend("forerun.attention.flashinfer", "FlashInfer"),
    "flashinfer_mla": _backend("forerun.attention.flashinfer_mla", "FlashInferMla"),
    "cpu": _backend("forerun.attention.cpu", "CpuAttention"),
    "torch_native": _backend("forerun.attention.torch_native", "TorchNative"),
}

# Defaults: the first of these that can serve (reasons: docs/add-an-attention-backend.md); after
# them the other backends, in the order of `BACKENDS`. What our own kernels for Hopper compute goes
# to `triton` first (`_sm90_kernel_serves`). On ROCm `triton` must stay the default: whatever is
# put before it refuses other architectures than its own.
PREFILL_ORDER: tuple[str, ...] = ("fa3", "triton")
STEP_ORDER: tuple[str, ...] = ("triton",)  # decode, verify, draft extend
MLA_PREFILL_ORDER: tuple[str, ...] = ("fa3", "triton")
MLA_STEP_ORDER: tuple[str, ...] = ("fa3", "flashmla", "triton")


class Force(Enum):
    """How binding a name in the settings is for one phase."""

    PHASE = "phase"  # named for this phase: refused if it cannot serve
    MODEL = "model"  # named for all phases of a model: those it is not made for get the next one
    DEFAULT = "default"  # named for something else and taken over: may fall back for any reason


@dataclass(frozen=True)
class Wanted:
    """What the settings say about one phase of one model."""

    name: str | None = None  # of a backend; None: the fastest that can serve
    flag: str = "attention_backend"  # the setting that says it
    force: Force = Force.PHASE
    model: str = "the target"  # or "the draft", for messages

    @property
    def binding(self) -> bool:
        return self.name is not None and self.force is not Force.DEFAULT


@dataclass(frozen=True)
class BackendChoice:
    """The backend chosen for a need, and why each that comes before it was not."""

    backend: type[AttentionBackend]
    need: AttentionNeed
    refused: dict[str, list[str]]
    instead_of: Wanted | None = None  # what was wanted and cannot serve

    @property
    def page_sizes(self) -> tuple[int, ...] | None:
        """Page sizes it can work with; None: any."""
        return self.backend.capabilities.page_sizes

    @property
    def preferred_page_size(self) -> int:
        return self.backend.preferred_page_size(self.need)

    def supports_page_size(self, page_size: int) -> bool:
        return self.page_sizes is None or page_size in self.page_sizes

    def explain(self) -> str:
        lines = [f"{self.backend.name}: chosen"]
        lines += [f"{name}: {'; '.join(reasons)}" for name, reasons in self.refused.items()]
        return "\n".join(lines)


def survey(need: AttentionNeed) -> dict[str, list[str]]:
    """Says of every backend why it cannot serve the need; an empty list: it can."""
    return {name: load().why_not(need) for name, load in BACKENDS.items()}


def default_order(need: AttentionNeed) -> list[str]:
    """All backends, in the order in which they are tried for this need."""
    if need.mla:
        first = MLA_PREFILL_ORDER if need.phase is Phase.PREFILL else MLA_STEP_ORDER
    else:
        first = PREFILL_ORDER if need.phase is Phase.PREFILL else STEP_ORDER
    if _sm90_kernel_serves(need):
        first = ("triton", *first)
    return list(dict.fromkeys((*first, *BACKENDS)))


def _sm90_kernel_serves(need: AttentionNeed) -> bool:
    """Whether `triton` has a kernel for Hopper that is as fast as the libraries' in this phase.

    Prefill over K and V: `prefill_sm90.py`, where pages hold whole blocks of 64 tokens; with
    smaller pages it issues more loads, and it has no sinks. Decode, verify and draft extend over
    latent rows: `mla_sm90.py`, with pages of 64, and for up to 16 rows the Triton kernel.
    """
    stored, sizes = need.kv_dtype or need.dtype, need.page_sizes
    if need.arch != "sm_90" or need.sinks or need.mla == (need.phase is Phase.PREFILL):
        return False
    if need.mla:
        rope_dim = need.head_dim - need.latent_dim
        shape = LatentShape(need.latent_dim, rope_dim, need.dtype, stored, SM90_LATENT_PAGE)
        fits = sizes is None or SM90_LATENT_PAGE in sizes
        return fits and why_unfit_for_mla_sm90(shape) is None
    if sizes is not None and all(size % 64 for size in sizes):
        return False
    return prefill_sm90.why_unfit_on_hopper(need.dtype, stored, need.head_dim, 64) is None


def select(need: AttentionNeed, wanted: Wanted) -> BackendChoice:
    """The wanted backend, or the first in order that can serve.

    A name that is not binding (`Force`) may fall back; `log_fallbacks` says so.

    Raises:
        ConfigError: unknown name; a binding name that cannot serve (lists those that can); nothing
            can serve (lists every reason).
    """
    refused: dict[str, list[str]] = {}
    if wanted.name is not None:
        backend = _known(wanted)
        reasons = backend.why_not(need)
        if not reasons:
            return BackendChoice(backend, need, {})
        other_phase = need.phase not in backend.phases_on(need.arch)
        if wanted.force is Force.PHASE or (wanted.force is Force.MODEL and not other_phase):
            raise ConfigError(_refusal(need, wanted, reasons))
        refused[wanted.name] = reasons
    choice = _first(need, wanted, refused)
    return choice if wanted.name is None else replace(choice, instead_of=wanted)


def log_fallbacks(choices: Iterable[BackendChoice]) -> None:
    """One warning for all phases of a model that fell back alike: the reasons, and what serves."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for choice in choices:
        if (wanted := choice.instead_of) is None:
            continue
        assert wanted.name is not None
        phase = choice.need.phase.value
        reasons = "; ".join(choice.refused[wanted.name])
        key = (wanted.flag, wanted.name, wanted.model, reasons, choice.backend.name)
        alike.setdefault(key, []).append(phase)
    for (flag, name, model, reasons, backend), phases in alike.items():
        text = "%s %s does not serve %s of %s (%s); %s does."
        log.warning(text, flag, name, ", ".join(phases), model, reasons, backend)


def _known(wanted: Wanted) -> type[AttentionBackend]:
    assert wanted.name is not None
    if wanted.name not in BACKENDS:
        hint = nearest(wanted.name, BACKENDS)
        raise ConfigError(
            f"Unknown {wanted.flag} {wanted.name!r}.{hint} Known: {', '.join(BACKENDS)}."
        )
    return BACKENDS[wanted.name]()


def _refusal(need: AttentionNeed, wanted: Wanted, reasons: Sequence[str]) -> str:
    able = [name for name in default_order(need) if not BACKENDS[name]().why_not(need)]
    others = f"These can: {', '.join(able)}." if able else "No other backend can either."
    return (
        f"{wanted.flag} {wanted.name} cannot serve {need.phase.value} of {wanted.model}:"
        f" {'; '.join(reasons)}. {others}"
    )


def _first(need: AttentionNeed, wanted: Wanted, refused: dict[str, list[str]]) -> BackendChoice:
    for name in default_order(need):
        if name in refused:
            continue
        backend = BACKENDS[name]()
        reasons = backend.why_not(need)
        if not reasons:
            reasons = backend.why_broken(need)
            if reasons:
                log.warning("Attention backend %s is passed over: %s", name, "; ".join(reasons))
        if not reasons:
            return BackendChoice(backend, need, refused)
        refused[name] = reasons
    listing = " ".join(f"{name}: {'; '.join(reasons)}." for name, reasons in refused.items())
    raise ConfigError(
        f"No attention backend can serve {need.phase.value} of {wanted.model}. {listing}"
    )


def choose_page_size(choices: Sequence[BackendChoice], wanted: int | None) -> int:
    """A page size that every chosen backend supports: all pools share one page space.

    Args:
        choices: the target's decode backend first; its preference counts first.
        wanted: the setting `page_size`, if it was given.

    Raises:
        ConfigError: a backend does not support `wanted`, or they have no page size in common.
    """
    limits = {
        c.backend.name: f"{c.backend.name} supports {', '.join(map(str, c.page_sizes))}"
        for c in choices
        if c.page_sizes is not None
    }
    if wanted is not None:
        refusing = [c.backend.name for c in choices if not c.supports_page_size(wanted)]
        if refusing:
            reasons = "; ".join(limits[name] for name in dict.fromkeys(refusing))
            raise ConfigError(
                f"page_size {wanted} does not fit the attention backends: {reasons}."
                " Choose another page_size or attention backend, or leave page_size out."
            )
        return wanted
    candidates = [c.preferred_page_size for c in choices]
    candidates += sorted({size for c in choices for size in c.page_sizes or ()}, reverse=True)
    for size in candidates:
        if all(c.supports_page_size(size) for c in choices):
            return size
    raise ConfigError(
        f"The attention backends have no page size in common: {'; '.join(limits.values())}."
        " Choose others (prefill_attention_backend, decode_attention_backend,"
        " speculative_draft_attention_backend)."
    )
