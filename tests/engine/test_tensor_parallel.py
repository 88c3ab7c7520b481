"""Two tensor-parallel ranks give the text of one, with every algorithm.

The matrix runs ranks as threads, and every step's result is compared between them. Some tests start
processes, as the engine does.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, ExecutorError
from forerun.core.logprobs import LogprobParams
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.executor.build import build_executor
from forerun.executor.device_executor import device_step
from forerun.executor.ranks.executor import RanksExecutor
from forerun.executor.ranks.local import LocalRanks
from forerun.layers.embedding import LMHead
from forerun.llm.bundled import bundled
from forerun.speculative.registry import all_options
from forerun_bench.widths import FULL, Cell, Load, measure
from tests import chain_models
from tests.covering import some_of
from tests.engine.test_hybrid_target import add_mtp_layer, config_of
from tests.engine_runs import run_together
from tests.golden_engine import CASES, GOLDEN
from tests.models.support import _COMMON, FAMILIES, random_hf, save
from tests.models.test_dflash import ZLAB, random_weights
from tests.models.test_nextn import checkpoint
from tests.models.test_quantization import two_checkpoints
from tests.ragged import SETTINGS as RAGGED
from tests.ragged import choose_at_random
from tests.thread_ranks import ThreadRanksExecutor
from tests.toy_algorithms import register_toys
from tests.tp_models import with_a_sixth_head

NEW = 16
RANDOM_DRAFTS = {"DFLASH": "block", "DDTREE": "block", "STANDALONE": "small"}
DENSE_DRAFTS = {
    "DFLASH": GOLDEN / "draft", "DDTREE": GOLDEN / "draft", "EAGLE3": "eagle3", "NEXTN": "nextn",
    "STANDALONE": "standalone",
}  # fmt: skip
CELLS = [
    *(("dense", name) for name in (None, "DFLASH", "DDTREE", "NGRAM", "SUFFIX", "EAGLE3", "NEXTN")),
    *(("dense", name) for name in ("STANDALONE", "DFLASH,SUFFIX", "EAGLE3,SUFFIX", "NEXTN,SUFFIX")),
    *(("moe", name) for name in (None, "DFLASH", "DDTREE", "STANDALONE", "NGRAM")),
    *(("mla", name) for name in (None, "DFLASH", "DDTREE", "NEXTN", "NGRAM")),
    *(("hybrid", name) for name in (None, "DFLASH", "NEXTN", "STANDALONE", "NGRAM")),
    *(("blocks", name) for name in ("DDTREE", "NGRAM")),
    *((kind, name) for kind in ("gpt-oss", "gemma4", "olmo3") for name in ("STANDALONE", "NGRAM")),
    *(("dense", f"TOY-{name}") for name in ("TREES", "LEARNER", "SAMPLER", "EAGER")),
]  # TOY: plugins
QUICK = {("dense", "DFLASH"), ("dense", "EAGLE3"), ("moe", "DDTREE"), ("mla", "NEXTN"),
         ("hybrid", "NEXTN"), ("blocks", "DDTREE"), ("gpt-oss", "STANDALONE"),
         ("gemma4", "STANDALONE"), ("olmo3", "NGRAM"), ("dense", "TOY-LEARNER")}  # fmt: skip
WIDER = {"hidden_size": 64}  # heads of 16, the least on GPUs
FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDERS["root"] = tmp_path_factory.mktemp("ranks")
    register_toys()


@cache
def folder(name: str) -> Path:
    """A target or a draft; made when it is first used."""
    path = FOLDERS["root"] / name
    match name:
        case "dense":
            path.mkdir()
            return with_a_sixth_head(path)
        case "eagle3":
            return chain_models.eagle3(path)
        case "nextn":
            return chain_models.nextn(path)
        case "standalone":
            return chain_models.standalone(path)
        case "moe":
            kind, changes = FAMILIES["qwen3-moe"]
            changes = {**changes, "num_hidden_layers": 5, "moe_intermediate_size": 32}
            return save(random_hf(kind(**{**_COMMON, **changes})), path)
        case "blocks":
            kind, changes = FAMILIES["qwen3-moe"]
            changes = {**changes, "num_hidden_layers": 5, "moe_intermediate_size": 32}
            hf = random_hf(kind(**{**_COMMON, **changes}))
            return two_checkpoints(path, hf, block=(24, 8))[0]
        case "gpt-oss" | "gemma4" | "gemma4-moe" | "olmo3":
            kind, changes = FAMILIES["gemma4-per-layer" if name == "gemma4" else name]
            changes = changes | {
                "gpt-oss": {"intermediate_size": 192},
                "gemma4-moe": {"moe_intermediate_size": 32},
                "olmo3": WIDER,
            }.get(name, {})
            return save(random_hf(kind(**{**_COMMON, **changes})), path)
        case "mla":
            checkpoint(path, "deepseek-v3")
            return path
        case "hybrid":
            save(random_hf(config_of("qwen3.5")), path)
            add_mtp_layer(path)
            return path
        case "small":
            sizes = {**_COMMON, **WIDER, "num_hidden_layers": 1}
            return save(random_hf(LlamaConfig(**sizes), seed=1), path)
        case "block":
            return chain_models.write(path, {**ZLAB, "num_target_layers": 5}, random_weights())
        case "block of 3":
            layers = {**ZLAB["dflash_config"], "target_layer_ids": [0, 2]}
            config = {**ZLAB, "num_target_layers": 3, "dflash_config": layers}
            return chain_models.write(path, config, random_weights())
    raise AssertionError(name)


def config(kind: str, algorithm: str | None, **settings: Any) -> EngineConfig:
    common = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True,
              "speculative_adaptive": False, "max_running_requests": 4,
              "model_path": str(folder(kind))}  # fmt: skip
    if algorithm is not None:
        common["speculative_algorithm"] = algorithm
        drafts: dict[str, Any] = DENSE_DRAFTS if kind == "dense" else RANDOM_DRAFTS
        draft = drafts.get(algorithm.removesuffix(",SUFFIX"))
        if kind == "mla" and draft == "block":
            draft = "block of 3"
        if draft is not None:
            path = draft if isinstance(draft, Path) else folder(draft)
            common["speculative_draft_model_path"] = str(path)
    options = {option.name: option.default for option in all_options()}
    return EngineConfig.of({**common, **settings}, options)


@contextmanager
def engine_of(settings: EngineConfig, overlap_depth: int | None = None) -> Iterator[Engine]:
    """With ranks in threads, if there are several."""
    path = Path(str(settings.model_path))
    make = build_executor if settings.tp_size == 1 else ThreadRanksExecutor
    engine = Engine(settings, make(settings, path, overlap_depth))
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


@cache
def prompts(kind: str) -> list[list[int]]:
    """Two share a beginning of some pages."""
    if kind == "dense":
        return [list(CASES[i]["prompt"][:60]) for i in (0, 1, 2)] + [CASES[0]["prompt"][:40]]
    draw = random.Random(3)
    stem = [draw.randrange(_COMMON["vocab_size"]) for _ in range(60)]
    return [stem[:54], stem[:37], stem[5:8], stem[9:10]]


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
    {"temperature": 0.9, "sampling_seed": 2, "min_new_tokens": 6, "frequency_penalty": 0.4},
    {"temperature": 1.0, "top_k": 12, "min_p": 0.02, "sampling_seed": 3},
]


def run(engine: Engine, kind: str, rotate: int = 0, preempts: bool = False) -> list[list[int]]:
    requests: list[Request] = []
    for i, prompt in enumerate(prompts(kind)):
        asked = {**PARAMS[(i + rotate) % 4], "max_new_tokens": NEW, "ignore_eos": True}
        requests.append(engine.make_request(list(prompt), SamplingParams.of(asked)))
    run_together(engine, requests, preempts)
    return [request.output for request in requests]


@cache
def of_one_rank(kind: str, rotate: int) -> list[list[int]]:
    """Plain decoding."""
    with engine_of(config(kind, None)) as engine:
        return run(engine, kind, rotate)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.exhaustive) for cell in CELLS],
)
def test_text_of_two_ranks(kind: str, algorithm: str | None) -> None:
    """Greedy and sampled, with hits of the prefix cache and preempted requests."""
    with engine_of(config(kind, algorithm, tp_size=2, page_size=16)) as engine:
        with pytest.raises(ConfigError, match="in other processes with tp_size; drop it"):
            device_step(engine.executor)
        for rotate, preempts in ((0, False), (1, True)):
            want = of_one_rank(kind, rotate)
            assert run(engine, kind, rotate, preempts) == want
        if algorithm in ("DFLASH", "EAGLE3") and kind == "dense":
            assert engine.stats()["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.exhaustive
@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    some_of([("dense", "DFLASH"), ("moe", "DDTREE"), ("mla", "NEXTN"), ("hybrid", "DFLASH")], 0, 2),
)
def test_ragged_passes_of_two_ranks(
    kind: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_at_random(monkeypatch)
    settings = config(kind, algorithm, tp_size=2, page_size=16, **RAGGED)
    with engine_of(settings) as engine:
        for rotate, preempts in ((0, False), (1, True)):
            assert run(engine, kind, rotate, preempts) == of_one_rank(kind, rotate)


def test_a_plugin_that_fails_on_two_ranks() -> None:
    """Its requests end, or with `speculative_fallback` all ranks go on without drafts."""
    with engine_of(config("dense", "TOY-FAULTY", tp_size=2)) as engine:
        request = engine.make_request(prompts("dense")[0], SamplingParams(max_new_tokens=NEW))
        run_together(engine, [request])
        assert request.finish is not None and "Faulty.propose" in str(request.finish.message)
    settings = config("dense", "TOY-FAULTY", tp_size=2, speculative_fallback=True)
    with engine_of(settings) as engine:
        assert run(engine, "dense") == of_one_rank("dense", 0)


def test_sampled_text_from_a_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request keeps more than some tokens of a row, so no rank has all logits."""
    few = [{**each, "frequency_penalty": 0.0} for each in PARAMS]  # penalties need all logits
    few[1]["top_k"] = 40
    monkeypatch.setattr(sys.modules[__name__], "PARAMS", few)
    with engine_of(config("moe", None)) as engine:
        want = run(engine, "moe")
    with engine_of(config("moe", "NGRAM", tp_size=2)) as engine:
        gathered = Mock(side_effect=AssertionError("logits are gathered"))
        monkeypatch.setattr(LMHead, "__call__", gathered)
        assert run(engine, "moe") == want


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["moe", "gpt-oss"])
def test_text_of_two_ranks_that_divide_the_experts_whole(kind: str) -> None:
    with engine_of(config(kind, None, tp_size=2, ep_size=2, page_size=16)) as engine:
        assert run(engine, kind) == of_one_rank(kind, 0)
        assert engine.explain()["ep_size"] == 2


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("moe", "STANDALONE"),
        ("moe", "DFLASH"),
        pytest.param("moe", "DDTREE", marks=pytest.mark.exhaustive),
        ("dense", "EAGLE3"),
        ("mla", "NEXTN"),
        pytest.param("hybrid", "NEXTN", marks=pytest.mark.exhaustive),
    ],
)
def test_text_with_a_divided_draft(kind: str, algorithm: str) -> None:
    """And as many drafts are accepted as with a whole one."""
    accepted, heads = [], []
    for ranks in (1, 2):
        settings = config(kind, algorithm, tp_size=2, speculative_draft_tp_size=ranks)
        with engine_of(settings) as engine:
            assert run(engine, kind) == of_one_rank(kind, 0)
            accepted.append(engine.stats()["spec_decode_num_accepted_tokens"])
            layout = engine.executor.executors[1].step.draft_attention.pools.layout
            heads.append(getattr(layout.paged[0], "num_kv_heads", None))
    assert accepted[0] == accepted[1]
    if kind != "mla":  # whose cache has no heads
        assert heads[0] == 2 * heads[1]


@pytest.mark.exhaustive
def test_text_of_four_ranks_that_share_two_kv_heads() -> None:
    with engine_of(config("moe", "DFLASH", tp_size=4, page_size=16)) as engine:
        assert run(engine, "moe") == of_one_rank("moe", 0)


@pytest.mark.exhaustive
def test_log_probabilities_and_grammars_of_two_ranks() -> None:
    """With the bundled pair, whose tokenizer grammars need."""
    pytest.importorskip("xgrammar")
    pair = {"model_path": str(bundled("target")), "skip_tokenizer_init": False}
    draft = {"speculative_draft_model_path": str(bundled("draft"))}
    outputs: list[list[list[int]]] = []
    values: list[list[float]] = []
    for ranks in (1, 2):
        settings = config("dense", "DFLASH", tp_size=ranks, **pair, **draft)
        with engine_of(settings) as engine:
            asked = [
                SamplingParams(temperature=0.0, max_new_tokens=24, regex="[0-9]+( [a-z]{2,5}){3}"),
                SamplingParams(temperature=0.8, sampling_seed=2, max_new_tokens=24, ebnf=EBNF),
                SamplingParams(temperature=0.0, max_new_tokens=NEW, repetition_penalty=1.2),
            ]
            logprobs = LogprobParams(start_len=0, top=2)
            made = [engine.make_request([5, 6, 7], each, logprobs=logprobs) for each in asked]
            run_together(engine, made)
            assert all(request.finish and request.finish.type != "abort" for request in made)
            outputs.append([request.output for request in made])
            kept = [*made[0].output_logprobs, *made[2].output_logprobs, *made[2].prompt_logprobs]
            values.append([value for each in kept for value in (each.logprob, each.top[0][0])])
    assert outputs[0] == outputs[1]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


EBNF = 'root ::= "yes" | "no" | "per" root'


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_ranks_in_processes_simulate_the_accept_lengths_that_they_are_told() -> None:
    settings: dict[str, Any] = {
        "tp_size": 2, "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "speculative_algorithm": "NGRAM", "speculative_adaptive": True, "max_running_requests": 4,
        "speculative_simulate_accept_length": 7.0,
    }  # fmt: skip
    with LLM(folder("dense"), **settings) as llm:
        for batch in (4, 2, 4):
            cell = Cell(Load(batch, "1,7"))
            measure([(llm, (FULL,))], cell, [prompts("dense")[0]] * batch, 16, 1)
            assert cell.accept_length[FULL] == pytest.approx(4, abs=1)


@pytest.mark.exhaustive
def test_processes_give_the_same_text_and_one_that_dies_ends_the_engine() -> None:
    settings = config("dense", "DFLASH", tp_size=2, speculative_adaptive=True)
    executor = RanksExecutor.start(settings, folder("dense"))
    engine = Engine(settings, executor)
    try:
        assert run(engine, "dense") == of_one_rank("dense", 0)
        assert engine.explain()["tp_size"] == 2
        request = engine.make_request(prompts("dense")[0], SamplingParams(max_new_tokens=64))
        engine.submit(request)
        engine.step()
        ranks = executor.local.ranks
        ranks[1].process.kill()
        begin = time.monotonic()
        with pytest.raises(ExecutorError, match=r"Rank 1 ended unexpectedly \(exit code -9\)"):
            while engine.has_work:
                engine.step()
        assert time.monotonic() - begin < 5
        assert request.finish is not None and request.finish.type == "abort"
        engine.check()  # no page and no slot is lost
        for rank in ranks:
            rank.process.join(5)
            assert rank.process.exitcode is not None
        with pytest.raises(ExecutorError, match="Rank 1 ended"):
            executor.launch(None)  # type: ignore[arg-type]
    finally:
        engine.close()


@pytest.mark.exhaustive
def test_settings_that_cannot_work_are_refused_by_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"ep_size 2 divides experts, and .* has none"):
        LLM(folder("dense"), tp_size=2, ep_size=2, skip_tokenizer_init=True, device="cpu")


@pytest.mark.parametrize("ranks", [4, 4096])
def test_ranks_that_cannot_share_the_heads_are_not_started(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRanks, "start", None)
    with pytest.raises(
        ConfigError, match=rf"tp_size {ranks} does not divide .* attention heads, 6"
    ):
        LLM(folder("dense"), tp_size=ranks, skip_tokenizer_init=True, device="cpu")


def test_bad_input() -> None:
    """What a rank checks before it looks for the others."""
    from forerun.executor.tensor_parallel import check_ranks

    with pytest.raises(ConfigError, match="tp_size must be >= 1"):
        config("dense", None, tp_size=0)
    with pytest.raises(ConfigError, match=r"ep_size 4 does not divide tp_size 6.* take 1, 2, 3, 6"):
        config("moe", None, tp_size=6, ep_size=4)
    with pytest.raises(ConfigError, match="speculative_draft_tp_size must be 1 or tp_size, 4, got"):
        config("moe", "STANDALONE", tp_size=4, speculative_draft_tp_size=2)
    with pytest.raises(ConfigError, match="draft_tp_size 2 is not available with NGRAM"):
        settings = config("dense", "NGRAM", tp_size=2, speculative_draft_tp_size=2)
        ThreadRanksExecutor(settings, folder("dense"), None)
    with pytest.raises(ConfigError, match=r"speculative_draft_tp_size 2: the draft .* attention h"):
        settings = config("dense", "DFLASH", tp_size=2, speculative_draft_tp_size=2)
        ThreadRanksExecutor(settings, folder("dense"), None)
    with pytest.raises(ConfigError, match=r"ep_size 2 divides experts, and .* has none; drop it"):
        ThreadRanksExecutor(config("dense", None, tp_size=2, ep_size=2), folder("dense"), None)
    for name, value in (
        ("enable_piecewise_cuda_graph", True),
        ("piecewise_cuda_graph_max_tokens", 64),
    ):
        with pytest.raises(ConfigError, match=f"^{name} is not available with tp_size 2"):
            check_ranks(config("dense", None, tp_size=2, **{name: value}))
    with pytest.raises(ConfigError, match="model_impl transformers is not available with tp_size"):
        check_ranks(config("dense", None, tp_size=2, model_impl="transformers"))


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.executor import tensor_parallel

    monkeypatch.setattr(tensor_parallel, "resolve_device", lambda name: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = config("dense", None, tp_size=2)
    for name, fix in (("NVIDIA H200", "lower tp_size"), ("NVIDIA H200 MIG 3g.71gb", "whole GPUs")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        wrong = rf"tp_size 2 from cuda:1 on needs 3 GPUs.* shows 2; .*{fix}"
        with pytest.raises(ConfigError, match=wrong):
            tensor_parallel.rank_device(settings, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert tensor_parallel.rank_device(settings, 1) == torch.device("cuda", 2)
    nodes = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "a:1"}
    settings = config("dense", None, tp_size=4, **nodes)
    assert tensor_parallel.rank_device(settings, 3) == torch.device("cuda", 2)
    with pytest.raises(ConfigError, match=r"tp_size 6 on nnodes 2 from cuda:1 on needs 4 GPUs"):
        tensor_parallel.rank_device(config("dense", None, tp_size=6, **nodes), 3)
