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
        if (value is None and type(None) in kinds) or (float in kinds and value == 5):
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
        ({"tensor_parallel_size": 2}, "'tensor_parallel_size': it is called tp_size here."),
        ({"enable_lora": True}, "'enable_lora': adapters cannot be loaded; merge the adapter"),
        ({"speculative_algorithm": " "}, "speculative_algorithm is empty; leave it out"),
        ({"otlp_traces_endpoint": ""}, "otlp_traces_endpoint is empty; leave it out"),
        (
            {"speculative_num_steps": 3},
            "num_steps is set without speculative_algorithm",
        ),
        (
            {"speculative_algorithm": "DFLASH", "speculative_eagle_topk": 4},
            "no option of DFLASH (its own are speculative_dflash_block_size, speculative_draft",
        ),
        ({"speculative_ngram_max_match": "4"}, "speculative_ngram_max_match must be an integer"),
        ({"nnodes": 0}, "nnodes must be >= 1, got 0."),
        ({"nnodes": 2, "node_rank": 2, "tp_size": 2}, "number the nodes from 0 to 1, and"),
        ({"node_rank": -1}, "node_rank -1 is not a node of nnodes 1"),
        (
            {"nnodes": 4, "tp_size": 6},
            "does not divide tp_size 6, the ranks of all nodes together; take nnodes 1, 2, 3, 6,",
        ),
        ({"quantization": "awq"}, "that of a checkpoint, which says so itself; drop the setting"),
        ({"nnodes": 2}, "take nnodes 1, or change tp_size."),
        ({"tp_size": 3**39, "ep_size": 2}, "take 1, 3, 9, 27, 81, 243, 729, or"),
        ({"nnodes": 2, "tp_size": 2}, "needs dist_init_addr: HOST:PORT of node 0, the same on all"),
        ({"dist_init_addr": "a:1"}, "dist_init_addr is set without nnodes; set that too"),
        *(
            ({"nnodes": 2, "tp_size": 2, "dist_init_addr": text}, "must be HOST:PORT of node 0")
            for text in ("10.0.0.1", "a:0", "a:65536", "::1:5", "tcp://a:1", " a:1")
        ),
        (
            {"piecewise_cuda_graph_max_tokens": 64, "enable_piecewise_cuda_graph": False},
            "piecewise_cuda_graph_max_tokens is set with enable_piecewise_cuda_graph off; drop",
        ),
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


def test_ranks_are_spread_evenly_over_nodes() -> None:
    config = EngineConfig(tp_size=16, nnodes=2, node_rank=1, dist_init_addr="[fd00::1]:5000")
    assert (config.nodes.ranks, config.nodes.ranks_of(0)) == (range(8, 16), range(8))
    assert config.nodes.address == ("fd00::1", 5000)
    assert EngineConfig(tp_size=4).nodes.ranks == range(4)


def test_numpy_and_whole_numbers_are_taken() -> None:
    config = EngineConfig(
        max_running_requests=np.int64(4),  # type: ignore[arg-type]
        speculative_simulate_accept_length=2,
    )
    assert type(config.max_running_requests) is int
    assert config.speculative_simulate_accept_length == 2.0
