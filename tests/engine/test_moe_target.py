"""A small random Qwen3-MoE in the equality matrix, with every kind of draft."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from forerun import LLM
from forerun.core.errors import ConfigError
from tests.engine.test_matrix import GREEDY, NEW, SEEDED, generate, params
from tests.golden_engine import poison_on_release
from tests.models.support import random_hf, save
from tests.models.test_dflash import ZLAB, random_weights

VOCAB, BLOCK = 96, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,  # a random model that repeats itself: n-grams find something
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGET = Qwen3MoeConfig(
    **SIZES,
    num_hidden_layers=5,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    mlp_only_layers=[1],
    experts_implementation="eager",
)
DENSE = LlamaConfig(**SIZES, num_hidden_layers=1)
ALGORITHMS = [None, "NGRAM", "STANDALONE", "DFLASH", "DDTREE"]
FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("moe")
    FOLDERS["target"] = save(random_hf(TARGET), root / "target")
    FOLDERS["STANDALONE"] = save(random_hf(DENSE, seed=1), root / "dense")
    FOLDERS["DFLASH"] = FOLDERS["DDTREE"] = root / "block"
    FOLDERS["DFLASH"].mkdir()
    config = {**ZLAB, "num_target_layers": TARGET.num_hidden_layers}
    (FOLDERS["DFLASH"] / "config.json").write_text(json.dumps(config))
    save_file(random_weights(), FOLDERS["DFLASH"] / "model.safetensors")


def moe_llm(algorithm: str | None = None, **settings: Any) -> LLM:
    if algorithm in FOLDERS:
        settings.setdefault("speculative_draft_model_path", str(FOLDERS[algorithm]))
    settings = {"device": "cpu", "dtype": "float32", **settings}
    settings = {"speculative_adaptive": False, "skip_tokenizer_init": True, **settings}
    llm = LLM(FOLDERS["target"], speculative_algorithm=algorithm, **settings)
    poison_on_release(llm)
    return llm


@cache
def prompts() -> list[list[int]]:
    """Three prompts with a common prefix of some pages, and two short ones."""
    draw = random.Random(3)
    stem = [draw.randrange(VOCAB) for _ in range(60)]
    return [stem[:54], stem[:37], stem[:50], stem[5:8], stem[9:10]]


@cache
def reference(sampled: bool, device: str = "cpu") -> list[list[int]]:
    """Plain decoding, one prompt at a time, without prefix cache."""
    with moe_llm(disable_radix_cache=True, device=device) as llm:
        kind = SEEDED if sampled else GREEDY
        return [
            llm.generate(input_ids=p, sampling_params=params(kind, i)).output_ids
            for i, p in enumerate(prompts())
        ]


def test_plain_decoding_equals_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        FOLDERS["target"], dtype=torch.float32, experts_implementation="eager"
    )
    outputs = reference(False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in output:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output == ids[len(prompt) :]
    assert len({token for output in outputs for token in output}) > 10  # a text, not one token


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_output_equals_plain_decoding(
    algorithm: str | None, page_size: int, chunk: int, overlap_depth: int, tight: bool
) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk}
    if algorithm == "DDTREE":
        settings["speculative_ddtree_budget"] = 12
    if tight:
        settings["max_total_tokens"] = 128
    with moe_llm(algorithm, overlap_depth=overlap_depth, **settings) as llm:
        preempted = 0
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            kinds = [params(chosen, i) for i in range(len(prompts()))]
            llm.engine.flush_cache()
            for _ in ("cold", "prefix hits"):
                got = generate(llm, prompts(), kinds, tight)
                assert [o[0] for o in got] == reference(bool(sampled))
                preempted += sum(o[1] for o in got)
        assert (preempted > 0) == tight
        llm.engine.check()


def test_drafts_are_accepted() -> None:
    """Otherwise the matrix would hold for drafts that are never kept."""
    with moe_llm("STANDALONE", speculative_draft_model_path=str(FOLDERS["target"])) as llm:
        out = llm.generate(input_ids=prompts()[0], sampling_params=params(GREEDY, 0))
        assert out.output_ids == reference(False)[0]
        assert out.meta_info["spec_accept_length"] > 2.5


def test_experts_in_fp8_give_the_same_output_with_every_draft() -> None:
    """They are kept in e4m3, which no kernel on a CPU reads."""
    outputs = []
    for algorithm in (None, "NGRAM", "DFLASH"):
        chunk = 512 if algorithm is None else 4
        with moe_llm(algorithm, quantization="fp8", chunked_prefill_size=chunk) as llm:
            # 2 linears of attention in 5 layers and 2 of a dense MLP, and 4 layers of experts
            assert llm.explain()["quantized_weights"] == {"dequantized when loaded": 16}
            kinds = [params(GREEDY, i) for i in range(len(prompts()))]
            outputs.append([o[0] for o in generate(llm, prompts(), kinds, False)])
    assert outputs[0] == outputs[1] == outputs[2]


def test_expert_sizes_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = {**TARGET.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 20}))
    with pytest.raises(ConfigError, match=r"expert width 20 is not supported.* multiples of 8"):
        LLM(tmp_path, skip_tokenizer_init=True)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_output_equals_plain_decoding_on_a_gpu(algorithm: str | None, graph: bool) -> None:
    settings: dict[str, Any] = {"device": "cuda", "disable_cuda_graph": not graph}
    with moe_llm(algorithm, page_size=16, max_running_requests=6, **settings) as llm:
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            kinds = [params(chosen, i) for i in range(len(prompts()))]
            for _ in ("cold", "prefix hits"):
                got = generate(llm, prompts(), kinds, False)
                assert [o[0] for o in got] == reference(bool(sampled), "cuda")
        llm.engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_do_not_wait_for_the_gpu(dtype: str) -> None:
    with moe_llm("NGRAM", device="cuda", dtype=dtype, max_running_requests=2) as llm:
        launch = llm.engine.executor.launch

        def strict(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm.engine.executor.launch = strict  # type: ignore[method-assign]
        for prompt in (prompts()[0], [*range(90)]):
            out = llm.generate(input_ids=prompt, sampling_params=params(GREEDY, 0))
            assert len(out.output_ids) == NEW
