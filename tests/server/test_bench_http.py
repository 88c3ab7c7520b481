"""`forerun bench http`: the same requests through a server and through an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.main import run
from forerun_bench.dummy_tokenizer import write_dummy_tokenizer
from forerun_bench.http import Workload, compare, over_http
from forerun_bench.serving.local import LocalServer, command_line
from tests.server.support import LiveServer

PROMPTS = [[7 + i, 8, 9, 10 + i] for i in range(6)]


@pytest.mark.covering(0)
@pytest.mark.parametrize("backend", ["openai", "sglang"])
def test_both_generate_the_same_number_of_tokens(
    server: LiveServer, llm: LLM, backend: str
) -> None:
    load = Workload.of(PROMPTS, output_len=10, concurrency=2)
    lengths = [prompt.output_len for prompt in load.prompts]
    assert len(set(lengths)) > 1 and all(5 <= length <= 10 for length in lengths)
    found = compare(llm.engine, server.url, backend, load, repetitions=1)
    (inside,), (over,) = found.in_process, found.http
    assert inside.tokens == over.tokens == sum(lengths)
    assert found.ratio == over.tok_s / inside.tok_s > 0
    for speed in (inside, over):
        assert speed.host_gap is not None and 0 < speed.host_gap < 10
    row = found.as_dict()
    assert (row["concurrency"], row["num_prompts"]) == (2, 6)
    llm.engine.check()
    server.wait_idle()


def test_a_refused_request_ends_the_benchmark(server: LiveServer) -> None:
    load = Workload.of([[1], [10**6]], output_len=2, concurrency=2)
    with pytest.raises(ConfigError, match="A request failed: HTTP 400"):
        over_http(server.url, "openai", load)


def test_settings_become_flags() -> None:
    settings = {"page_size": 64, "enable_trace": True, "speculative_adaptive": False, "dtype": None}
    assert command_line(settings) == [
        "--page-size", "64", "--enable-trace", "--no-speculative-adaptive",
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"did not start.*page_size must be one of"):
        LocalServer({"page_size": 3}).__enter__()


@pytest.mark.parametrize("vocab_size", [256, 300, 3000])
def test_the_dummy_tokenizer_has_a_text_for_every_token(tmp_path: Path, vocab_size: int) -> None:
    write_dummy_tokenizer(tmp_path, vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(vocab_size))
    assert all(tokenizer.decode([token]) for token in vocab.values())
    assert tokenizer.decode(tokenizer("for the é\n")["input_ids"]) == "for the é\n"


@pytest.mark.exhaustive
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--concurrency", "2", "3", "--num-prompts", "4", "--input-len", "8")
    settings = ("--output-len", "6", "--repetitions", "1", "--dtype", "float32", "--json")
    assert run(["bench", "http", *shape, *settings]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [row["concurrency"] for row in out["results"]] == [2, 3]
    assert out["settings"]["speculative_algorithm"] == "DFLASH"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--backend", "grpc"), "--backend must be one of openai, sglang"),
        (("--concurrency", "8", "--num-prompts", "4"), "--num-prompts must be at least"),
        (("--load-format", "dummy"), "random weights"),
    ],
)
def test_bad_arguments(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "http", *args]) == 2
    assert message in capsys.readouterr().err
