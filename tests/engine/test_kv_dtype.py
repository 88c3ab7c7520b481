"""`kv_cache_dtype`: the output may depend on the dtype of K/V, but not on the drafter."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.evals.acceptance import Acceptance
from forerun.evals.word_problems import problems
from forerun.models.safetensors_files import SINGLE
from tests.golden_engine import CASES, golden_llm
from tests.models.support import family, save

PROMPTS = [case["prompt"] for case in CASES]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_p": 0.9}


def texts(algorithm: str | None, kv: str, **settings: Any) -> list[list[int]]:
    """Greedy and seeded outputs, the same without and with cached prefixes."""
    params = [GREEDY] * len(PROMPTS) + [{**SEEDED, "sampling_seed": i} for i in range(len(PROMPTS))]
    with golden_llm(algorithm, kv_cache_dtype=kv, **settings) as llm:
        cold, warm = (
            [o.output_ids for o in llm.generate(input_ids=PROMPTS * 2, sampling_params=params)]
            for _ in range(2)
        )
        llm.engine.check()
    assert cold == warm
    return cold


@cache
def plain(kv: str) -> list[list[int]]:
    return texts(None, kv, disable_radix_cache=True)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("kv", "algorithm", "chunk", "page_size"),
    [
        ("fp8_e4m3", None, 16, 16),
        ("fp8_e4m3", "DFLASH", 8, 1),
        ("fp8_e4m3", "DFLASH", 512, 16),
        ("fp8_e4m3", "NGRAM", 16, 16),
        ("bfloat16", "DFLASH", 16, 1),
    ],
)
def test_output_equals_plain_decoding(
    kv: str, algorithm: str | None, chunk: int, page_size: int
) -> None:
    got = texts(algorithm, kv, chunked_prefill_size=chunk, page_size=page_size)
    assert got == plain(kv)


def test_the_setting_reaches_both_pools_and_the_budget() -> None:
    cells = {}
    for kv in ("auto", "float32", "bfloat16", "fp8_e4m3"):
        with golden_llm("DFLASH", kv_cache_dtype=kv) as llm:
            step = llm.engine.executor.step
            assert step.draft_attention is not None
            pools = step.attention.pools, step.draft_attention.pools
            assert len({pool.dense.dtype for pool in pools}) == 1
            chosen = llm.explain()
            cells[chosen["kv_cache_dtype"]] = chosen["kv_bytes_per_token"]
            sizes = chosen["memory_bytes"]["kv_target"], chosen["memory_bytes"]["kv_draft"]
            assert sizes == tuple(pool.dense.nbytes for pool in pools)
    assert cells == {
        "float32": cells["float32"],
        "bfloat16": cells["float32"] // 2,
        "float8_e4m3fn": cells["float32"] // 4,
    }


def test_fp8_changes_the_output() -> None:
    """Otherwise the tests above would not show that K/V is stored in fp8."""
    assert plain("fp8_e4m3") != plain("float32")


@pytest.mark.exhaustive
def test_scales_of_a_checkpoint(tmp_path: Path) -> None:
    """The same text from stored scales as from weights that were divided before."""
    names = ("self_attn.k_scale", "self_attn.v_scale")
    model = family("qwen2")
    scaled, divided = save(model, tmp_path / "scaled"), save(model, tmp_path / "divided")
    weights = load_file(scaled / SINGLE)
    layers = {name.split("self_attn.")[0] for name in weights if "self_attn." in name}
    own = {f"{layer}{name}": torch.tensor(2.0**-6) for layer in layers for name in names}
    save_file({**weights, **own}, scaled / SINGLE)
    for layer in layers:
        for part, factor in (("q", 2.0**-6), ("k", 2.0**6), ("v", 2.0**6), ("o", 2.0**-6)):
            for name in (f"{layer}self_attn.{part}_proj.{kind}" for kind in ("weight", "bias")):
                if name in weights:
                    weights[name] *= factor
    save_file(weights, divided / SINGLE)
    out: list[list[int]] = []
    for folder, count in ((scaled, len(layers)), (divided, 0)):
        with LLM(str(folder), skip_tokenizer_init=True, kv_cache_dtype="fp8_e4m3") as llm:
            assert llm.explain()["kv_scales"] == count
            out.append(llm.generate(input_ids=[5, 6, 7], sampling_params=GREEDY).output_ids)
    assert out[0] == out[1]


@pytest.mark.exhaustive
def test_fp8_does_not_reduce_acceptance() -> None:
    asked = problems(12)
    chats = [[{"role": "user", "content": problem.question}] for problem in asked]
    mean = {}
    for kv in ("float32", "fp8_e4m3"):
        own = {"dtype": "float32", "kv_cache_dtype": kv, "speculative_adaptive": False}
        with LLM(speculative_algorithm="DFLASH", **own) as llm:
            outs = llm.chat(chats, {"temperature": 0, "max_new_tokens": 96})
        counts = [Acceptance.of(out.meta_info) for out in outs]
        steps = sum(sum(count.histogram) for count in counts)
        mean[kv] = sum(len(out.output_ids) for out in outs) / steps
    assert mean["fp8_e4m3"] > 0.95 * mean["float32"]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"fp8_e5m2 is not supported: .*use fp8_e4m3"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="must be one of auto, bfloat16, float32, fp8_e4m3"):
        EngineConfig(kv_cache_dtype="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_output_equals_plain_decoding_on_a_gpu(graph: bool) -> None:
    settings = {"device": "cuda", "max_running_requests": 16, "max_total_tokens": 8192}
    want = texts(None, "fp8_e4m3", disable_cuda_graph=True, **settings)
    for algorithm in (None, "DFLASH", "NGRAM"):
        assert texts(algorithm, "fp8_e4m3", disable_cuda_graph=not graph, **settings) == want
