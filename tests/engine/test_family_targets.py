"""Small random models of each kind of family in the equality matrix, with every kind of draft.

What is new in a kind: windows in some layers with a RoPE of their own, (1 + w) norms and caps on
logits (Gemma); heads of another size in some layers, normed values, and in the second kind
embeddings per layer, shared K/V and experts beside the MLP (Gemma 4); norms after attention and MLP
(OLMo 3); a window in all layers with a partial,
scaled RoPE (Phi-3); routing besides partial RoPE (GLM-4-MoE); multipliers (Granite); attention
sinks, experts with biases (gpt-oss).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor.resolve import _with_transformers
from tests.covering import some_of
from tests.engine.test_matrix import GREEDY, SEEDED, generate, params
from tests.engine.test_moe_target import SIZES, prompts
from tests.golden_engine import poison_on_release
from tests.models.support import FAMILIES, random_hf, save
from tests.models.test_dflash import ZLAB, random_weights
from tests.models.test_transformers_model import OTHERS
from tests.ragged import SETTINGS, divide_at_random

LAYERS = 5  # drafts read layers up to the fourth
SLIDING = {"layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]}
GEMMA4 = {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]}
GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "eager",
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": SLIDING,
    "gemma3-linear-softcap": SLIDING,
    "gemma4": GEMMA4,
    "glm4-moe": {},
    "gpt-oss": SLIDING,
    "granite": {},
    "olmo3": SLIDING,
    "phi4-mini": {"sliding_window": 9},
    "transformers": SLIDING,  # model_impl transformers: Cohere 2, which is no family of Forerun's
    "gemma4-per-layer": {**GEMMA4, **GEMMA4_MOE},
}
# What `make test` runs of each; the last kind has the parts of others.
KIND_PARAMS = [*list(KINDS)[:-1], pytest.param("gemma4-per-layer", marks=pytest.mark.exhaustive)]
ALGORITHMS = [None, "NGRAM", "STANDALONE", "DFLASH", "DDTREE"]


def config_of(kind: str) -> PreTrainedConfig:
    of, changes = OTHERS["cohere2"] if kind == "transformers" else FAMILIES[kind]
    changes = {k: v for k, v in changes.items() if k != "tie_word_embeddings"}
    return of(**{**SIZES, **changes, **KINDS[kind], "num_hidden_layers": LAYERS})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    save(random_hf(LlamaConfig(**SIZES, num_hidden_layers=1), seed=1), root / "STANDALONE")
    (root / "block").mkdir()
    config = {**ZLAB, "num_target_layers": LAYERS}
    (root / "block" / "config.json").write_text(json.dumps(config))
    save_file(random_weights(), root / "block" / "model.safetensors")
    for name in ("DFLASH", "DDTREE"):
        (root / name).symlink_to(root / "block")
    for kind in KINDS:
        save(random_hf(config_of(kind)), root / kind)
    return root


def family_llm(root: Path, kind: str, algorithm: str | None = None, **settings: Any) -> LLM:
    if algorithm is not None and (root / algorithm).exists():
        settings.setdefault("speculative_draft_model_path", str(root / algorithm))
    if algorithm == "DDTREE":
        settings["speculative_ddtree_budget"] = 12
    if kind == "transformers":
        settings.setdefault("model_impl", "transformers")
    settings = {"device": "cpu", "dtype": "float32", **settings}
    settings = {"speculative_adaptive": False, "skip_tokenizer_init": True, **settings}
    llm = LLM(root / kind, speculative_algorithm=algorithm, **settings)
    poison_on_release(llm)
    return llm


@cache
def reference(root: Path, kind: str, sampled: bool, device: str = "cpu") -> list[list[int]]:
    """Plain decoding, one prompt at a time, without prefix cache."""
    how = SEEDED if sampled else GREEDY
    with family_llm(root, kind, disable_radix_cache=True, device=device) as llm:
        return [
            llm.generate(input_ids=p, sampling_params=params(how, i)).output_ids
            for i, p in enumerate(prompts())
        ]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_plain_decoding_equals_transformers(root: Path, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        root / kind, dtype=torch.float32, attn_implementation="eager"
    )
    prompt, output = prompts()[2], reference(root, kind, False)[2]
    ids = list(prompt)
    with torch.no_grad():
        for _ in output:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert output == ids[len(prompt) :]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_output_equals_plain_decoding(
    root: Path,
    kind: str,
    algorithm: str | None,
    page_size: int,
    chunk: int,
    tight: bool,
    overlap_depth: int,
) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk}
    if tight:
        settings["max_total_tokens"] = 128
    hold(root, kind, algorithm, tight, overlap_depth=overlap_depth, **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    some_of([("gemma2", "DFLASH"), ("gemma4", "NGRAM"), ("gpt-oss", "DDTREE")], 0),
)
def test_output_of_ragged_passes(
    root: Path, kind: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    division = divide_at_random(monkeypatch)
    hold(root, kind, algorithm, True, page_size=16, max_total_tokens=128, **SETTINGS)
    assert any(len(set(widths)) > 1 for widths in division.seen)


def hold(root: Path, kind: str, algorithm: str | None, tight: bool, **settings: Any) -> None:
    """One cell of the matrix."""
    with family_llm(root, kind, algorithm, **settings) as llm:
        preempted = 0
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            kinds = [params(chosen, i) for i in range(len(prompts()))]
            llm.engine.flush_cache()
            for _ in ("cold", "prefix hits"):
                got = generate(llm, prompts(), kinds, tight)
                assert [o[0] for o in got] == reference(root, kind, bool(sampled))
                preempted += sum(o[1] for o in got)
        assert (preempted > 0) == tight
        llm.engine.check()


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(kind, {}) for kind in KINDS if kind != "transformers"]
    + [("granite", {"model_impl": "transformers"})],
)
def test_drafts_are_accepted(root: Path, kind: str, settings: dict[str, Any]) -> None:
    """Otherwise the matrix would hold for drafts that are never kept."""
    settings = {**settings, "speculative_draft_model_path": str(root / kind)}
    with family_llm(root, kind, "STANDALONE", **settings) as llm:
        out = llm.generate(input_ids=prompts()[0], sampling_params=params(GREEDY, 0))
        assert out.output_ids == reference(root, kind, False)[0]
        assert out.meta_info["spec_accept_length"] > 2.5


def test_transformers_modules_come_with_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with family_llm(root, "transformers") as llm:
        assert llm.explain()["model_impl"] == "transformers"
    assert "model_impl transformers" in caplog.text and "several times" in caplog.text
    for asked in (
        EngineConfig(enable_piecewise_cuda_graph=True),
        EngineConfig(piecewise_cuda_graph_max_tokens=64),
    ):
        with pytest.raises(ConfigError, match=r"piecewise.* is not available with model_impl"):
            _with_transformers(asked, root / "transformers")
    with pytest.raises(ConfigError, match="or set model_impl transformers"):
        family_llm(root, "transformers", model_impl="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_plain_decoding_on_a_gpu(
    root: Path, kind: str, algorithm: str | None, graph: bool
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "disable_cuda_graph": not graph}
    with family_llm(root, kind, algorithm, max_running_requests=6, **settings) as llm:
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            kinds = [params(chosen, i) for i in range(len(prompts()))]
            for _ in ("cold", "prefix hits"):
                got = generate(llm, prompts(), kinds, False)
                assert [o[0] for o in got] == reference(root, kind, bool(sampled), "cuda")
        llm.engine.check()
