"""What must be the same on all nodes, so that their ranks compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import shown
from forerun.core.version import __version__, source_digest
from forerun.models.safetensors_files import fingerprint
from forerun.platform.device import device_name, resolve_device

# Each node has its own, or they say nothing about what is computed. `device` says where GPUs begin;
# that they are of one kind is compared by their name.
OWN_SETTINGS = {
    "device", "model_path", "tokenizer_path", "speculative_draft_model_path", "node_rank",
    "dist_init_addr", "log_level", "enable_trace", "otlp_traces_endpoint",
}  # fmt: skip
FIX = "Run the same versions and settings, with the same models, on machines of one kind."


def node_facts(config: EngineConfig, model_path: Path) -> dict[str, str]:
    """Name -> value.

    Raises:
        ConfigError: a model cannot be read, or there is no such device.
    """
    settings = {f.name: shown(vars(config)[f.name]) for f in config.settings()}
    for name, value in config.algorithm_options.items():
        settings[name] = shown(value)
    weights = config.load_format == "auto"
    models = {"the model's fingerprint": fingerprint(model_path, weights)}
    if config.speculative_draft_model_path is not None:
        draft = Path(config.speculative_draft_model_path)
        models["the draft model's fingerprint"] = fingerprint(draft, weights)
    return {
        "forerun": f"{__version__} (source {source_digest()})",
        "torch": str(torch.__version__),
        "the device": device_name(resolve_device(config.device)),
        **models,
        **{name: value for name, value in settings.items() if name not in OWN_SETTINGS},
    }


def differences(first: tuple[str, Mapping[str, str]], other: tuple[str, Mapping[str, str]]) -> str:
    """Says in words how two nodes (name, facts) differ; "" if they do not."""
    (here, own), (there, given) = first, other
    found = [
        f"{name} is {own.get(name, 'missing')} on {here} and {given.get(name, 'missing')} on"
        f" {there}"
        for name in [*own, *(name for name in given if name not in own)]
        if own.get(name) != given.get(name)
    ]
    return f"Nodes differ: {'; '.join(found)}. {FIX}" if found else ""
