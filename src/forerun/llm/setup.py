"""Turns keywords into what an engine is built from: checked settings, folders, a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.checks import of_type
from forerun.core.errors import ConfigError
from forerun.llm.bundled import REAL_KIND, REAL_TARGET, bundled, real_draft_for
from forerun.llm.hub import with_local_paths
from forerun.models import tokenizer
from forerun.models.registry import target_class, target_config
from forerun.models.stop_ids import tokenizer_folder
from forerun.speculative.registry import all_options, get_algorithm

logger = logging.getLogger(__name__)


def checked_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Checks the settings and the options that algorithms declare, and sets the log level.

    Raises:
        ConfigError: an unknown or invalid setting, or an unknown algorithm.
    """
    settings = {
        name: str(value.expanduser().absolute()) if isinstance(value, Path) else value
        for name, value in settings.items()
    }
    options = all_options()
    config = EngineConfig.of(settings, {option.name: option.default for option in options})
    for option in options:
        value = config.algorithm_options[option.name]
        if value is not None or option.default is not None:
            of_type(option.type, option.name, value, ConfigError)
    logging.getLogger("forerun").setLevel(config.log_level.upper())
    own = [option.name for option in get_algorithm(config.speculative_algorithm).options]
    for option in options:
        if option.name not in own and config.algorithm_options[option.name] != option.default:
            raise ConfigError(_of_another(option.name, config.speculative_algorithm, own))
    return config


def _of_another(name: str, algorithm: str | None, own: Sequence[str]) -> str:
    """Why an option has no effect."""
    if algorithm is None:
        return f"{name} is set without speculative_algorithm; set it too."
    known = f"its own are {', '.join(own)}" if own else "it has none"
    return f"{name} is set, but is no option of {algorithm} ({known}); drop it."


def with_models(config: EngineConfig) -> tuple[EngineConfig, Path]:
    """The settings with local paths, and the target's folder; downloads what is missing.

    The bundled target is filled in, and with it the algorithm's bundled draft. A target of
    `REAL_TARGET`'s shape gets the draft that ships for it.

    Raises:
        ConfigError: a model cannot be found or downloaded, or the target's config is invalid or
            not supported.
    """
    config = with_local_paths(config)
    if config.model_path is not None:
        target = Path(config.model_path)
        # Before transformers, which reads it for the tokenizer and has other words for its faults.
        shape = target_config(target, config.model_impl)
        target_class(shape, config.model_impl)
        return _with_shipped_draft(config, shape), target
    target = bundled("target")
    draft = get_algorithm(config.speculative_algorithm).bundled_draft
    if draft is not None and config.speculative_draft_model_path is None:
        config = replace(config, speculative_draft_model_path=str(bundled(draft)))
    return config, target


def _with_shipped_draft(config: EngineConfig, target: ModelConfig) -> EngineConfig:
    algorithm = get_algorithm(config.speculative_algorithm)
    if algorithm.bundled_draft != REAL_KIND or config.speculative_draft_model_path is not None:
        return config
    folder = real_draft_for(target)
    if folder is None:
        return config
    logger.info("The draft is the one that ships for %s.", REAL_TARGET)
    return replace(config, speculative_draft_model_path=str(folder))


def load_tokenizer(config: EngineConfig, target: Path) -> Any:
    """The tokenizer, which any thread may use; None with `skip_tokenizer_init`.

    Raises:
        ConfigError: there is none.
    """
    if config.skip_tokenizer_init:
        return None
    folder = tokenizer_folder(config, target)
    advice = "Set tokenizer_path, or skip_tokenizer_init to work on token ids."
    return tokenizer.load_tokenizer(folder, advice)
