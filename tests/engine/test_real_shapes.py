"""A few layers in the shapes of real models, in bfloat16: kernels of real sizes serve any batch.

The toys of other tests are too small for those, and the texts of random weights prove nothing: so
what a token's log-probabilities are is held to those of its request alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.llm.bundled import preset as bundled_preset
from forerun_bench.one_batch import random_prompts

BATCHES = (1, 7, 16, 33, 64, 100)
PROMPT, WATCHED = 24, range(0, 1000, 20)
PRESETS = ("qwen3-8b", "qwen3-30b-a3b", "qwen3.5-9b", "deepseek-v2-lite", "gpt-oss-20b")


def shallow(name: str, folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of a preset, of four layers."""
    config = json.loads((bundled_preset(name)[0] / "config.json").read_text())
    config |= {"num_hidden_layers": 4, **changes}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def watched(llm: LLM, prompts: list[list[int]]) -> tuple[list[int], torch.Tensor]:
    """The first token after each prompt, and log-probabilities [B, n] of what may follow it."""
    outs = llm.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        return_logprob=True,
        token_ids_logprob=list(WATCHED),
    )
    assert [out.meta_info["finish_reason"]["type"] for out in outs] == ["length"] * len(prompts)
    second = [out.meta_info["output_token_ids_logprobs"][1] for out in outs]
    values = [[value for value, *_ in token] for token in second]
    return [out.output_ids[0] for out in outs], torch.tensor(values)


def hold(folder: Path, batches: Sequence[int], **settings: Any) -> None:
    settings |= {
        "max_running_requests": max(batches),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
    }
    with LLM(folder, speculative_algorithm="NONE", **settings) as llm:
        prompts = random_prompts(1000, max(batches), PROMPT)
        each = [watched(llm, [prompt]) for prompt in prompts]
        alone = torch.cat([values for _, values in each])
        spread = (alone - alone.mean(1, keepdim=True)).std()
        for batch in batches:
            llm.engine.flush_cache()
            tokens, found = watched(llm, prompts[:batch])
            same = [i for i, token in enumerate(tokens) if token == each[i][0][0]]
            assert len(same) > 0.7 * batch  # others are near ties
            error = (found - alone[:batch])[same].square().mean().sqrt()
            assert error < 0.1 * spread, f"batch {batch}: {error} of {spread}"


def test_the_same_on_a_cpu(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 1000}
    hold(shallow("qwen3.5-9b", tmp_path, **sizes), (1, 7, 16), device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRESETS)
def test_any_batch_is_as_its_requests_alone(name: str, tmp_path: Path) -> None:
    hold(shallow(name, tmp_path), BATCHES, device="cuda", max_total_tokens=1 << 14)
