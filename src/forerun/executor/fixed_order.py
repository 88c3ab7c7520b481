"""Whether every sum of the target is computed in one order: `enable_deterministic_inference`.

On a CPU our kernels do so in any case; on a GPU kernels of their own do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor.attention_setup import AttentionSetup
from forerun.kernels.cpu import library
from forerun.models.base import CausalLM
from forerun.models.olmo2 import AllHeadsNorm
from forerun.models.registry import TRANSFORMERS, target_class
from forerun.platform.device import dtype_name

if TYPE_CHECKING:
    from forerun.executor.resolve import Settings

_PACKAGE = __name__.partition(".")[0]


def has_fixed_order(
    config: EngineConfig, model: CausalLM, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether logits are to depend on the tokens before them alone, because that was asked for.

    Args:
        model: the target; its weights may be on the meta device.
        dtype: of its plain weights.

    Raises:
        ConfigError: it was asked for, and part of the model has no kernels for it.
    """
    if not config.enable_deterministic_inference:
        return False
    on_gpu = device.type == "cuda"
    missing = _missing_on_gpu(config, model, dtype) if on_gpu else _missing_on_cpu(config)
    reasons = missing + _missing_in(type(model))
    if reasons:
        where = "GPU" if on_gpu else "CPU"
        raise ConfigError(
            f"enable_deterministic_inference cannot be had on a {where}: {'; '.join(reasons)}. Drop"
            " it (dtype float32 makes differences rare)."
        )
    return True


def cpu_has_fixed_order(
    config: EngineConfig, model: type[CausalLM], attention: AttentionSetup
) -> bool:
    """Whether it is so on this CPU, asked for or not; `attention`: of the target."""
    missing = _missing_on_cpu(config) + _missing_in(model)
    return not missing and _attends_in_fixed_order(attention)


def _attends_in_fixed_order(attention: AttentionSetup) -> bool:
    return all(c.backend.capabilities.fixed_order for c in attention.choices.values())


def what_holds(settings: Settings) -> str:
    """How equal the text of a seed is, with any drafts, batch, chunks, pages and cache."""
    config, dtype = settings.config, settings.dtype
    if settings.fixed_order:
        ranks = f" with tp_size {config.tp_size}" if config.tp_size > 1 else ""
        return f"every bit is equal{ranks}: a token's logits depend on the tokens before it alone"
    near_ties = "rare in float32" if dtype == torch.float32 else f"common in {dtype_name(dtype)}"
    parts = "passes and batches of other sizes round differently, so texts part at near ties"
    return f"{parts}, {near_ties}; enable_deterministic_inference {_cure(settings)}"


def _cure(settings: Settings) -> str:
    """What the mode would do where it was not asked for."""
    if settings.device.type == "cpu":
        missing = _missing_on_cpu(replace(settings.config, enable_deterministic_inference=True))
        if not _attends_in_fixed_order(settings.attention[0]):
            missing.append("the attention backend's sums depend on the batch")
    else:
        missing = [] if settings.dtype == torch.bfloat16 else ["it needs bfloat16"]
    missing += _missing_in(target_class(settings.target, settings.config.model_impl))
    return f"cannot be had: {'; '.join(missing)}" if missing else "makes every bit equal"


def _missing_on_cpu(config: EngineConfig) -> list[str]:
    """What is computed by PyTorch, whose sums depend on sizes and threads."""
    reason = library.why_missing()
    missing = [] if reason is None else [f"there are no kernels in C++ ({reason})"]
    asked = (
        (config.model_impl == TRANSFORMERS, "model_impl transformers"),
        # Ranks add up in their order where they are asked to.
        (
            config.tp_size > 1 and not config.enable_deterministic_inference,
            "sums across ranks (tp_size)",
        ),
        (config.mamba_ssm_dtype != "float32", f"mamba_ssm_dtype {config.mamba_ssm_dtype}"),
    )
    return missing + [f"{what}: no fixed order of sums yet" for wanted, what in asked if wanted]


def _missing_in(model: type[CausalLM]) -> list[str]:
    """Models of other packages compute as they like; most have layers of PyTorch."""
    if model.__module__.partition(".")[0] == _PACKAGE:
        return []
    return [f"{model.__qualname__} is not one of Forerun's models: no fixed order of sums"]


def _missing_on_gpu(config: EngineConfig, model: CausalLM, dtype: torch.dtype) -> list[str]:
    """What has no kernels whose sums have one order."""
    asked = (
        (config.model_impl == TRANSFORMERS, "model_impl transformers"),
        (dtype != torch.bfloat16, f"GEMMs of {dtype_name(dtype)} weights"),
        (config.mamba_ssm_dtype != "float32", f"mamba_ssm_dtype {config.mamba_ssm_dtype}"),
        (
            config.tp_size > 1 and any(model.modules(AllHeadsNorm)),
            "norms over the heads of all ranks (tp_size)",
        ),
    )
    return [f"{what} have no fixed order of sums yet" for missing, what in asked if missing]
