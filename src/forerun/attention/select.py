"""The one place where attention backends and the page size are chosen, and the choice explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.attention.base import AttentionBackend
from forerun.attention.capabilities import AttentionNeed
from forerun.core.errors import ConfigError, nearest


def _torch_native() -> type[AttentionBackend]:
    from forerun.attention.torch_native import TorchNative

    return TorchNative


def _triton() -> type[AttentionBackend]:
    from forerun.attention.triton import TritonAttention

    return TritonAttention


# Fastest first, for target and draft alike; a backend's module is imported only when it is asked.
# On ROCm this order makes `triton` the default: whatever is put before it must refuse ROCm.
BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "triton": _triton,
    "torch_native": _torch_native,
}


@dataclass(frozen=True)
class BackendChoice:
    """The backend chosen for a need, and why each faster one was not."""

    backend: type[AttentionBackend]
    need: AttentionNeed
    refused: dict[str, list[str]]

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
    """For every backend, why it cannot serve the need; an empty list: it can."""
    return {name: load().why_not(need) for name, load in BACKENDS.items()}


def select(need: AttentionNeed, wanted: str | None, flag: str) -> BackendChoice:
    """The wanted backend, or the first in order that can serve.

    Raises:
        ConfigError: unknown name, or nothing can serve; lists every reason. `flag` is the setting
            named in the message.
    """
    if wanted is not None:
        if wanted not in BACKENDS:
            hint = nearest(wanted, BACKENDS)
            raise ConfigError(f"Unknown {flag} {wanted!r}.{hint} Known: {', '.join(BACKENDS)}.")
        reasons = BACKENDS[wanted]().why_not(need)
        if reasons:
            raise ConfigError(
                f"{flag} {wanted} cannot serve {need.phase.value} of this model:"
                f" {'; '.join(reasons)}."
            )
        return BackendChoice(BACKENDS[wanted](), need, {})
    refused: dict[str, list[str]] = {}
    for name, load in BACKENDS.items():
        backend = load()
        reasons = backend.why_not(need)
        if not reasons:
            return BackendChoice(backend, need, refused)
        refused[name] = reasons
    listing = " ".join(f"{name}: {'; '.join(reasons)}." for name, reasons in refused.items())
    raise ConfigError(f"No attention backend can serve {need.phase.value} of this model. {listing}")


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
