"""Every setting is held to its annotation."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError

WRONG: dict[type, list[Any]] = {
    bool: ["yes", 1, None, [], math.nan],
    int: ["4", 2.5, True, [], math.nan, 2**64],
    float: ["0.5", True, [], math.nan, math.inf],
    str: [5, True, [], b"auto"],
}


@pytest.mark.parametrize("name", [f.name for f in EngineConfig.settings()])
def test_values_of_another_type_are_refused(name: str) -> None:
    hint = get_type_hints(EngineConfig)[name]
    kinds = get_args(hint) or (hint,)
    assert kinds[0] in WRONG
    for value in WRONG[kinds[0]]:
        if value is None and type(None) in kinds:
            continue
        with pytest.raises(ConfigError, match=name) as caught:
            EngineConfig(**{name: value})
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
    if type(None) in kinds:
        EngineConfig(**{name: None})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_running_requests": "4"}, "max_running_requests must be an integer, got '4'."),
        ({"chunked_prefill_size": 2.5}, "chunked_prefill_size must be an integer, got 2.5."),
        ({"mem_fraction_static": "x" * 100_000}, "must be a number, got 'xxx"),
        ({"log_level": "x" * 100_000}, "log_level must be one of"),
        ({"x" * 100_000: 1}, "Unknown setting 'xxx"),
        ({"speculative_ngram_max_match": "4"}, "speculative_ngram_max_match must be an integer"),
        ({"piecewise_cuda_graph_max_tokens": 64}, "without enable_piecewise_cuda_graph; set that"),
        (
            {"enable_piecewise_cuda_graph": True, "disable_cuda_graph": True},
            "enable_piecewise_cuda_graph is set with disable_cuda_graph; drop one of them.",
        ),
    ],
)
def test_llm_refuses_them(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**settings)
    assert words in str(caught.value) and len(str(caught.value)) < 250


def test_numpy_and_whole_numbers_are_taken() -> None:
    config = EngineConfig(
        max_running_requests=np.int64(4),  # type: ignore[arg-type]
        speculative_simulate_accept_length=2,
    )
    assert type(config.max_running_requests) is int
    assert config.speculative_simulate_accept_length == 2.0
