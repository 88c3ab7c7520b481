"""The one place where an attention backend is chosen, and the choice explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.attention.base import AttentionBackend, AttentionNeed
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
    """The backend taken, and why each faster one was not."""

    backend: type[AttentionBackend]
    refused: dict[str, list[str]]

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
            raise ConfigError(f"{flag} {wanted} cannot serve this model: {'; '.join(reasons)}.")
        return BackendChoice(BACKENDS[wanted](), {})
    refused: dict[str, list[str]] = {}
    for name, load in BACKENDS.items():
        backend = load()
        reasons = backend.why_not(need)
        if not reasons:
            return BackendChoice(backend, refused)
        refused[name] = reasons
    listing = " ".join(f"{name}: {'; '.join(reasons)}." for name, reasons in refused.items())
    raise ConfigError(f"No attention backend can serve this model. {listing}")
