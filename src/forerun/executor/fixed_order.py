"""Whether a GPU computes every sum of the target in one order: `enable_deterministic_inference`."""

from __future__ import annotations

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import DenseKV
from forerun.layers.moe import Experts
from forerun.models.base import CausalLM
from forerun.models.registry import TRANSFORMERS


def has_fixed_order(config: EngineConfig, model: CausalLM, device: torch.device) -> bool:
    """Whether logits on this GPU are to depend on the tokens before them alone.

    Args:
        model: the target; its weights may be on the meta device.

    Raises:
        ConfigError: it was asked for, and part of the model has no kernels for it.
    """
    if not config.enable_deterministic_inference or device.type != "cuda":
        return False
    reasons = _missing(config, model)
    if reasons:
        raise ConfigError(
            f"enable_deterministic_inference cannot be had on a GPU: {'; '.join(reasons)}. Drop it"
            " (dtype float32 makes differences rare)."
        )
    return True


def _missing(config: EngineConfig, model: CausalLM) -> list[str]:
    """What has no kernels whose sums have one order."""
    layers = model.kv_layout(torch.bfloat16).layers
    asked = (
        (config.model_impl == TRANSFORMERS, "model_impl transformers"),
        (config.tp_size > 1, "sums across ranks (tp_size)"),
        (config.quantization is not None, f"GEMMs of {config.quantization} weights"),
        (any(model.modules(Experts)), "mixtures of experts"),
        (not all(isinstance(each, DenseKV) for each in layers), "layers that keep no K and V"),
    )
    return [f"{what} have no fixed order of sums yet" for missing, what in asked if missing]
