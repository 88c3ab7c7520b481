"""Whether the tokens of a step are divided among its requests: `speculative_ragged_verify`.

Set, it is followed or refused. Not set, it is decided here, and `explain()` says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.attention.select import BACKENDS
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.models.base import CausalLM
from forerun.speculative.base import SpecCaps

# By type of device: whether steps with chains of drafts are ragged if nothing is set, and why. With
# `_unmeasured` the one place to change when other figures are in.
DEFAULTS: dict[str, tuple[bool, str]] = {
    "cpu": (False, "on a CPU one width was as fast or faster at 1, 4 and 16 requests"),
    "cuda": (
        True,
        "on an H200 it made 1.07 to 1.4 times the tokens of one width from 64 requests on",
    ),
}


@dataclass(frozen=True)
class RaggedChoice:
    """What was decided."""

    ragged: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on' if self.ragged else 'off'}: {self.reason}"


def choose_ragged(
    config: EngineConfig, caps: SpecCaps, device: torch.device, target: CausalLM
) -> RaggedChoice:
    """Decides for an algorithm with these capabilities on this device.

    Raises:
        ConfigError: it was asked for, and something else that was set forbids it.
    """
    asked, missing = config.speculative_ragged_verify, _missing(config, caps, target)
    if asked and missing is not None:
        raise ConfigError(f"speculative_ragged_verify {missing}.")
    if asked is not None:
        return RaggedChoice(asked, "speculative_ragged_verify is set")
    unfit = missing or _gains_nothing(config, caps) or _unmeasured(config)
    if unfit is not None:
        return RaggedChoice(False, f"it {unfit}")
    return RaggedChoice(*DEFAULTS[device.type])


def _missing(config: EngineConfig, caps: SpecCaps, target: CausalLM) -> str | None:
    """What it cannot do without."""
    if caps.num_drafts == 0:
        return "needs drafts; set speculative_algorithm"
    if not config.speculative_adaptive:
        return "needs speculative_adaptive; turn it on"
    if not all(layer.ragged for layer in target.kv_layout(torch.bfloat16).recurrent):
        architecture = target.config.architecture
        return f"needs recurrent layers that serve it, which those of {architecture} do not"
    return None


def _unmeasured(config: EngineConfig) -> str | None:
    """What it has not been timed with."""
    kinds = {
        "AMD GPUs": torch.version.hip is not None,
        "disable_cuda_graph": config.disable_cuda_graph,
        "enable_deterministic_inference": config.enable_deterministic_inference,
    }
    found = next((kind for kind, has in kinds.items() if has), None)
    return None if found is None else f"has not been measured with {found}"


def _gains_nothing(config: EngineConfig, caps: SpecCaps) -> str | None:
    """Why it is not chosen unasked: by what else was set, that goes first."""
    if caps.makes_trees:
        return "divides trees evenly, which one width does too"
    named = [config.attention_backend, config.decode_attention_backend]
    if config.speculative_attention_mode == "prefill":
        named.append(config.prefill_attention_backend)
    if caps.observes_packed:
        named.append(config.speculative_draft_attention_backend)
    for name in named:
        if name in BACKENDS and not BACKENDS[name]().capabilities.ragged_steps:
            return f"needs an attention backend that serves it, and {name} was named"
    return None
