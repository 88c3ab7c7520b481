"""The formats of weights, one a line, and which of them a config asks for."""

from __future__ import annotations

from collections.abc import Callable

from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.models.formats.base import Spec, WeightFormat, given
from forerun.models.formats.fp8 import Fp8Format, Fp8Rows
from forerun.models.formats.int4 import Awq, Gptq, PackQuantized
from forerun.models.formats.mxfp4 import Mxfp4

# Each reads `quantization_config`, returns None where that is another's, and raises a ConfigError
# where a variant of its own is not supported. `FORMATS.append` adds one.
FORMATS: list[Callable[[Spec], WeightFormat | None]] = [
    Fp8Format.from_config,
    Awq.from_config,
    Gptq.from_config,
    PackQuantized.from_config,
    Mxfp4.from_config,
]

# What the setting `quantization` makes of plain weights while they are loaded.
ONLINE: dict[str | None, WeightFormat] = {"fp8": Fp8Rows()}


def weight_format(config: ModelConfig, quantization: str | None = None) -> WeightFormat | None:
    """How the checkpoint's matrices are quantized; None: not at all.

    Raises:
        ConfigError: in another way, or in one that the setting `quantization` does not apply to.
    """
    raw = config.raw.get("quantization_config")
    if not raw:
        return None
    spec = given(raw)
    method = spec.get("quant_method", "unknown")
    if method == "compressed-tensors" and not spec.get("config_groups"):
        return None  # K/V alone (`kv_cache_scheme`)
    found = next(filter(None, (from_config(spec) for from_config in FORMATS)), None)
    if found is not None:
        if quantization is not None:
            found.check_quantization(quantization)
        return found
    details = [f"{k} {spec[k]}" for k in ("fmt", "format", "quant_algo", "bits") if k in spec]
    raise ConfigError(
        f"The checkpoint is quantized ({', '.join([str(method), *details])}); use the bfloat16 or"
        " float32 checkpoint, one in FP8 (quant_method fp8, compressed-tensors float-quantized) or"
        " in 4 bits (awq, gptq, compressed-tensors pack-quantized)."
    )
