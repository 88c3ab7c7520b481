"""Small random hybrids (Qwen3-Next, Qwen3.5) in the equality matrix, with every kind of draft."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import SSM
from tests.chain_models import random_eagle3
from tests.engine.test_matrix import GREEDY, NEW, SEEDED, generate, params
from tests.engine.test_moe_target import SIZES, VOCAB, prompts
from tests.golden_engine import poison_on_release
from tests.models.support import FAMILIES, random_hf, save
from tests.models.test_dflash import ZLAB, random_weights
from tests.ragged import SETTINGS, divide_at_random
from tests.support_cells import passed
from tests.toy_algorithms import Oracle, register_toys

LAYERS = 5  # drafts read layers up to the fourth
KINDS = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
BEAMS = {"speculative_num_steps": 3, "speculative_eagle_topk": 3}
TREES: dict[str, dict[str, Any]] = {
    "DDTREE": {"speculative_ddtree_budget": 12},
    "NEXTN": BEAMS,
    "EAGLE3": BEAMS,
    "STANDALONE": BEAMS,
    "TOY-ORACLE-TREES": {},
}
CHAINS = [None, "NGRAM", "NEXTN", "STANDALONE", "DFLASH", "TOY-ORACLE"]
CELLS = [*((name, {}) for name in CHAINS), *TREES.items()]
IDS = [*map(str, CHAINS), *(f"{name} tree" for name in TREES)]
FOLDERS: dict[str, Path] = {}


def config_of(kind: str) -> PreTrainedConfig:
    of, changes = FAMILIES[kind]
    types = [*["linear_attention"] * 3, "full_attention", "linear_attention"]
    return of(**{**SIZES, **changes, "num_hidden_layers": LAYERS, "layer_types": types})


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    register_toys()
    root = tmp_path_factory.mktemp("hybrids")
    FOLDERS["STANDALONE"] = root / "dense"
    save(random_hf(LlamaConfig(**SIZES, num_hidden_layers=1), seed=1), FOLDERS["STANDALONE"])
    FOLDERS["DFLASH"] = FOLDERS["DDTREE"] = root / "block"
    FOLDERS["DFLASH"].mkdir()
    config = {**ZLAB, "num_target_layers": LAYERS}
    (FOLDERS["DFLASH"] / "config.json").write_text(json.dumps(config))
    save_file(random_weights(), FOLDERS["DFLASH"] / "model.safetensors")
    FOLDERS["EAGLE3"] = random_eagle3(root / "eagle3", SIZES["hidden_size"], VOCAB, [1, 3])
    for kind in KINDS:
        FOLDERS[kind] = save(random_hf(config_of(kind)), root / kind)
        add_mtp_layer(FOLDERS[kind])


def add_mtp_layer(folder: Path) -> None:
    """Of random weights, in the shape of the fourth layer."""
    weights = load_file(folder / "model.safetensors")
    size = weights["model.norm.weight"].shape[0]
    layer = {n: w for n, w in weights.items() if n.startswith("model.layers.3.")}
    made = {n.replace("model.layers.3.", "mtp.layers.0."): w.flip(0) for n, w in layer.items()}
    made["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.eye(size)), 1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        made[f"mtp.{name}.weight"] = weights["model.norm.weight"].clone()
    made = {name: weight.contiguous() for name, weight in made.items()}
    save_file({**weights, **made}, folder / "model.safetensors")


def hybrid_llm(kind: str, algorithm: str | None = None, **settings: Any) -> LLM:
    if algorithm in FOLDERS:
        settings.setdefault("speculative_draft_model_path", str(FOLDERS[algorithm]))
    settings = {"device": "cpu", "dtype": "float32", **settings}
    settings = {"speculative_adaptive": False, "skip_tokenizer_init": True, **settings}
    llm = LLM(FOLDERS[kind], speculative_algorithm=algorithm, **settings)
    poison_on_release(llm)
    return llm


@cache
def reference(kind: str, sampled: bool, device: str = "cpu") -> list[list[int]]:
    """Plain decoding, one prompt at a time, without prefix cache."""
    how = SEEDED if sampled else GREEDY
    with hybrid_llm(kind, disable_radix_cache=True, device=device) as llm:
        return [
            llm.generate(input_ids=p, sampling_params=params(how, i)).output_ids
            for i, p in enumerate(prompts())
        ]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_equals_transformers(kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        FOLDERS[kind], dtype=torch.float32, experts_implementation="eager"
    )
    outputs = reference(kind, False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for output in outputs for token in output}) > 10  # a text, not one token


@pytest.mark.exhaustive
@pytest.mark.covering(0, 3)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512)])
@pytest.mark.parametrize(("algorithm", "own"), CELLS, ids=IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_plain_decoding(
    kind: str,
    algorithm: str | None,
    own: dict[str, Any],
    page_size: int,
    chunk: int,
    overlap_depth: int,
    tight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"page_size": page_size, "chunked_prefill_size": chunk, **own}
    hold(kind, algorithm, tight, monkeypatch, overlap_depth=overlap_depth, **settings)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("algorithm", "own"), CELLS[1:], ids=IDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_output_of_ragged_passes(
    kind: str,
    algorithm: str | None,
    own: dict[str, Any],
    tight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    division = divide_at_random(monkeypatch)
    settings = {"page_size": 16, "overlap_depth": int(not tight), **SETTINGS, **own}
    hold(kind, algorithm, tight, monkeypatch, **settings)
    assert any(len(set(widths)) > 1 for widths in division.seen)


def hold(
    kind: str,
    algorithm: str | None,
    tight: bool,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> None:
    """One cell of the matrix."""
    page_size, device = settings["page_size"], settings.get("device", "cpu")
    if tight:
        settings["max_total_tokens"] = 128
    asked = prompts()
    with hybrid_llm(kind, algorithm, **settings) as llm:
        preempted = 0
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            want = reference(kind, bool(sampled), device)
            answers = {tuple(p): o for p, o in zip(asked, want, strict=True)}
            monkeypatch.setattr(Oracle, "answers", answers)
            kinds = [params(chosen, i) for i in range(len(asked))]
            llm.engine.flush_cache()
            for warm in (False, True):
                got = generate(llm, asked, kinds, tight)
                assert [o[0] for o in got] == want
                preempted += sum(o[1] for o in got)
                if warm and not tight:
                    assert all(o[2] >= len(p) - page_size for o, p in zip(got, asked, strict=True))
        assert (preempted > 0) == tight
        llm.engine.check()
        passed(llm, __file__)


@pytest.mark.parametrize("algorithm", ["TOY-ORACLE", "TOY-ORACLE-TREES"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_accepted(kind: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the matrix would hold for states that are never committed."""
    want = reference(kind, False)
    answers = {tuple(p): o for p, o in zip(prompts(), want, strict=True)}
    monkeypatch.setattr(Oracle, "answers", answers)
    with hybrid_llm(kind, algorithm) as llm:
        out = llm.generate(input_ids=prompts()[0], sampling_params=params(GREEDY, 0))
        assert out.output_ids == want[0]
        assert out.meta_info["spec_accept_length"] > 2.5


def test_hybrid_drafts_are_refused() -> None:
    draft = str(FOLDERS["qwen3.5"])
    with pytest.raises(ConfigError, match=r"\(Qwen3_5ForCausalLM\) has recurrent layers"):
        hybrid_llm("qwen3.5", "STANDALONE", speculative_draft_model_path=draft)


def test_long_texts_do_not_drift() -> None:
    """Many commits after one another: 60 steps, with drafts and without."""
    how = {"temperature": 0.0, "max_new_tokens": 3 * NEW, "ignore_eos": True}
    with hybrid_llm("qwen3.5") as plain, hybrid_llm("qwen3.5", "NGRAM") as drafted:
        prompt = prompts()[3]
        want = plain.generate(input_ids=prompt, sampling_params=how).output_ids
        assert drafted.generate(input_ids=prompt, sampling_params=how).output_ids == want


def test_states_in_bfloat16() -> None:
    """A restored snapshot has the roundings of the state it was copied from."""
    settings: dict[str, Any] = {"page_size": 16, "max_running_requests": 4}
    settings |= {"max_total_tokens": 512, "max_mamba_cache_size": 8}
    sizes: dict[torch.dtype, list[int]] = {}
    asked = max(prompts(), key=len)
    for dtype in ("float32", "bfloat16"):
        with hybrid_llm("qwen3.5", mamba_ssm_dtype=dtype, **settings) as llm:
            outs = [llm.generate(input_ids=asked, sampling_params=params(GREEDY, 0)) for _ in "ab"]
            assert outs[0].output_ids == outs[1].output_ids
            assert [bool(out.meta_info["cached_tokens"]) for out in outs] == [False, True]
            (pool,) = llm.engine.executor.step.attention.pools.states
            for kept in (pool.state[SSM], pool.snapshots[SSM]):
                sizes.setdefault(kept.dtype, []).append(kept.nbytes)
    assert sizes[torch.float32] == [2 * size for size in sizes[torch.bfloat16]]


def test_the_dtype_of_states_needs_linear_attention() -> None:
    with pytest.raises(ConfigError, match=r"bfloat16: LlamaForCausalLM has no linear attention"):
        LLM(FOLDERS["STANDALONE"], skip_tokenizer_init=True, mamba_ssm_dtype="bfloat16")


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize(("chunk", "overlap_depth"), [(4, 0), (512, 1)])
@pytest.mark.parametrize(("algorithm", "own"), CELLS, ids=IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_plain_decoding_on_a_gpu(
    kind: str,
    algorithm: str | None,
    own: dict[str, Any],
    chunk: int,
    overlap_depth: int,
    graph: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": chunk, **own}
    settings |= {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    hold(kind, algorithm, chunk == 4, monkeypatch, overlap_depth=overlap_depth, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["NGRAM", "DDTREE"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_wait_for_the_gpu(kind: str, algorithm: str, dtype: str) -> None:
    settings = {"device": "cuda", "dtype": dtype, "max_running_requests": 2}
    settings |= {"page_size": 16, "mamba_track_interval": 16}
    with hybrid_llm(kind, algorithm, **settings) as llm:
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
        assert llm.engine.metrics().tracked_states
