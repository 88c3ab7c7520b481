"""Heads over a DFlash body under all conditions: the output of plain decoding, on one rank or two.

Grammars are over the bundled tokenizer, whose first tokens stand for those of the target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import SamplingParams
from forerun.config.engine_config import EngineConfig
from forerun.core.logprobs import LogprobParams
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.executor.build import build_executor
from forerun.llm.bundled import bundled
from forerun.models.dflash_config import load_dflash_config
from forerun.models.heads.base import BodySizes
from forerun.speculative.registry import all_options
from tests.covering import some_of
from tests.engine.test_golden_heads import HEADS, NAMES, QUICK, cases, pair
from tests.engine_runs import run_together
from tests.golden_engine import golden_llm
from tests.models.support import CPU_F32
from tests.thread_ranks import ThreadRanksExecutor

pytest.importorskip("xgrammar")

TOKENIZER = {"skip_tokenizer_init": False, "tokenizer_path": str(bundled("target"))}
FREE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
    {"temperature": 1.0, "sampling_seed": 2, "frequency_penalty": 0.4},
]
HELD: list[dict[str, Any]] = [
    {"temperature": 0.0, "regex": "[a-z ]{4,40}"},
    {"temperature": 0.8, "sampling_seed": 3, "ebnf": 'root ::= "(" root ")" root | [a-f]*'},
    {"temperature": 0.9, "sampling_seed": 4},
]
NEW = 16
# Heads without a reference pair: random ones over the body of such a pair.
RANDOM: dict[str, dict[str, Any]] = {
    "lilicorr": {
        "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 8, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 4,
        "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 10.0,
    },
    "xpress": {"xpress_rank": 8, "xpress_mlp_ratio": 2, "num_jacobi_passes": 3},
}  # fmt: skip
BODY = "causal-zlab-full-b8"
ALL = [*NAMES, *RANDOM]
Output = tuple[list[int], list[float]]  # ids and their log-probabilities


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The draft of every name."""
    made = {name: tmp_path_factory.mktemp(name) for name in RANDOM}
    for name, folder in made.items():
        config = json.loads((HEADS / BODY / "config.json").read_text())
        config["dflash_config"] |= RANDOM[name]
        (folder / "config.json").write_text(json.dumps(config))
        head = load_dflash_config(folder).head
        assert head is not None
        sizes = BodySizes(config["hidden_size"], 512, 512, config["block_size"], 1e-6)
        weights = head.build(sizes, CPU_F32, {}).weights()
        draw = torch.Generator().manual_seed(0)
        for weight in weights.values():
            weight.normal_(0, 0.1, generator=draw)
        body = load_file(HEADS / BODY / "model.safetensors")
        save_file({**body, **weights}, folder / "model.safetensors")
    return {name: HEADS / name for name in NAMES} | made


@cache
def prompts() -> list[list[int]]:
    """Two share a beginning of some pages."""
    text = [token for case in cases(NAMES[0])[:6] for token in case["prompt"]]
    return [text[:70], text[:52], cases(NAMES[0])[7]["prompt"]]


def requests(engine: Engine, grammars: bool, logprobs: bool) -> list[Request]:
    return [
        engine.make_request(
            list(prompt),
            SamplingParams.of({**kind, "max_new_tokens": NEW}),
            logprobs=LogprobParams(top=2) if logprobs else None,
        )
        for prompt, kind in zip(prompts(), HELD if grammars else FREE, strict=True)
    ]


def outputs(made: Sequence[Request]) -> list[Output]:
    assert all(request.finish and request.finish.type != "abort" for request in made)
    return [(each.output, [entry.logprob for entry in each.output_logprobs]) for each in made]


@cache
def plain(grammars: bool, logprobs: bool) -> list[Output]:
    """One request at a time, without drafts and prefix cache."""
    with golden_llm(None, HEADS / "target", disable_radix_cache=True, **TOKENIZER) as llm:
        made = requests(llm.engine, grammars, logprobs)
        for request in made:
            run_together(llm.engine, [request])
        return outputs(made)


def hold(got: list[Output], grammars: bool, logprobs: bool) -> None:
    for (ids, values), (wanted, known) in zip(got, plain(grammars, logprobs), strict=True):
        assert ids == wanted and len(values) == (len(ids) if logprobs else 0)
        assert values == pytest.approx(known, abs=1e-4)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("logprobs", [False, True], ids=["ids", "logprobs"])
@pytest.mark.parametrize("grammars", [False, True], ids=["free", "grammars"])
@pytest.mark.parametrize("preempts", [False, True], ids=["roomy", "preempted"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("name", ALL)
def test_output_equals_plain_decoding(
    name: str,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    preempts: bool,
    grammars: bool,
    logprobs: bool,
    folders: dict[str, Path],
) -> None:
    """Greedy and sampled requests in one batch, the second time with hits of the prefix cache."""
    settings = {"page_size": page_size, "chunked_prefill_size": chunk}
    with pair(folders[name], overlap_depth=overlap_depth, **settings, **TOKENIZER) as llm:
        for warm in (False, True):
            made = requests(llm.engine, grammars, logprobs)
            run_together(llm.engine, made, preempts)
            hold(outputs(made), grammars, logprobs)
            if warm and page_size < 256:
                assert made[0].cached_tokens >= len(prompts()[0]) - page_size
        assert llm.engine.stats()["spec_decode_num_accepted_tokens"] > 0
        llm.engine.check()


# --- ranks --------------------------------------------------------------------------------------


TEAMS = list(product(NAMES, (1, 2)))


def accepted_on(ranks: int, name: str, grammars: bool, **settings: Any) -> int:
    """Accepted drafts; the output is that of plain decoding."""
    common = {
        "model_path": str(HEADS / "target"), "dtype": "float32", "device": "cpu", "page_size": 16,
        "speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(HEADS / name),
        "speculative_adaptive": False, "max_running_requests": 4, "tp_size": ranks,
    }  # fmt: skip
    options = {option.name: option.default for option in all_options()}
    config = EngineConfig.of({**common, **TOKENIZER, **settings}, options)
    make = build_executor if ranks == 1 else ThreadRanksExecutor
    engine = Engine(config, make(config, HEADS / "target", None))
    try:
        for _ in range(2):
            made = requests(engine, grammars, logprobs=True)
            run_together(engine, made)
            hold(outputs(made), grammars, logprobs=True)
        engine.check()
        return int(engine.stats()["spec_decode_num_accepted_tokens"])
    finally:
        engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "draft_ranks"),
    some_of(TEAMS, *(TEAMS.index((name, 2)) for name in QUICK[:1])),
)
def test_two_ranks_accept_as_many_drafts(name: str, draft_ranks: int) -> None:
    """With the draft whole on each rank (1), and divided (2)."""
    for grammars in (False, True):
        alone = accepted_on(1, name, grammars)
        assert accepted_on(2, name, grammars, speculative_draft_tp_size=draft_ranks) == alone > 0
