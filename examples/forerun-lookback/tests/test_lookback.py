"""LOOKBACK in the engine: the text of plain decoding, in fewer steps, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.speculative.registry import get_algorithm
from forerun_lookback import Lookback

REPETITIVE = "def a(x):\n    return x + 1\n\ndef b(x):\n    return x + 1\n\ndef c(x):\n    return x"
PROMPTS = [REPETITIVE, "import os\nimport sys\n", "def add(a, b):\n", "class Stack:\n"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 40, "ignore_eos": True}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 1024,
    "max_running_requests": 3,
}


def rules(sampled: bool) -> list[dict[str, Any]]:
    return [{**SEEDED, "sampling_seed": i} if sampled else GREEDY for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    with LLM(**SMALL) as llm:
        return [
            [out.output_ids for out in llm.generate(PROMPTS, rules(sampled))]
            for sampled in (False, True)
        ]


@pytest.fixture(scope="module")
def suffix() -> Iterator[LLM]:
    settings = {"page_size": 16, "chunked_prefill_size": 16, "speculative_adaptive": False}
    with LLM(speculative_algorithm="LOOKBACK", **SMALL, **settings) as llm:
        yield llm
        llm.close()
        llm.engine.check()


def test_it_comes_through_its_entry_point() -> None:
    (point,) = entry_points(group="forerun.algorithms", name="LOOKBACK")
    assert point.dist is not None and point.dist.name == "forerun-lookback"
    assert get_algorithm("lookback") is Lookback


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_output_equals_plain_decoding(
    sampled: bool, suffix: LLM, plain: list[list[list[int]]]
) -> None:
    for _ in ("cold", "warm"):  # the second time the same request ids and cached prompts
        outs = suffix.generate(PROMPTS, rules(sampled))
        assert [out.output_ids for out in outs] == plain[sampled]


def test_repetitive_text_takes_few_steps(suffix: LLM) -> None:
    out = suffix.generate("x = [1, 2, 3]\n" * 8, {**GREEDY, "max_new_tokens": 60})
    assert out.meta_info["spec_accept_length"] > 2


def test_widths_that_adapt(plain: list[list[list[int]]]) -> None:
    with LLM(speculative_algorithm="LOOKBACK", **SMALL) as llm:
        assert [out.output_ids for out in llm.generate(PROMPTS, rules(False))] == plain[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculative_lookback_min_match": 0}, "speculative_lookback_min_match must be >= 1"),
        ({"speculative_lookback_max_drafts": -1}, "speculative_lookback_max_drafts must be >= 1"),
        ({"speculative_num_draft_tokens": 4}, "Set speculative_lookback_max_drafts"),
        ({"speculative_draft_model_path": "x"}, "drop speculative_draft_model_path"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(speculative_algorithm="LOOKBACK", **SMALL, **settings)


def test_the_command_line(plain: list[list[list[int]]]) -> None:
    line = [
        *("generate", REPETITIVE, "--json", "--speculative-algorithm", "LOOKBACK"),
        *("--speculative-lookback-max-drafts", "5", "--device", "cpu", "--ignore-eos"),
        *(
            "--dtype",
            "float32",
            "--max-total-tokens",
            "1024",
            "--temperature",
            "0",
            "--max-new-tokens",
            "40",
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "forerun", *line], check=True, capture_output=True, text=True
    )
    out = json.loads(done.stdout)
    assert out["output_ids"] == plain[0][0]
    assert max(out["meta_info"]["spec_accept_lengths"]) <= 6
    assert out["meta_info"]["spec_verify_ct"] < 39
