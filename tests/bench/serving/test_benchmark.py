"""Whole benchmarks against a stand-in server, in virtual time: figures are exact."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import ConfigError
from forerun_bench.serving.benchmark import Benchmark, benchmark
from forerun_bench.serving.config import LoadConfig
from forerun_bench.serving.load import LEAD
from tests.bench.serving.stand_in import StandIn, virtually


def measure(server: StandIn, **settings: Any) -> Benchmark:
    values = {"num_prompts": 6, "output_len": 4, "warmup_requests": 0, **settings}

    async def work() -> Benchmark:
        listening = await server.start()
        async with listening:
            config = LoadConfig(base_url=server.url, **values)
            return await benchmark(config, lambda rate, live, seconds: None)

    return virtually(work)


@pytest.mark.parametrize("backend", ["sglang", "openai", "openai-chat"])
def test_the_figures_are_the_servers(backend: str) -> None:
    server = StandIn(first=0.25, gap=0.0625, per_chunk=2)
    (run,) = measure(server, backend=backend, request_rate=8.0).runs
    figures = run.as_dict()
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_output_tokens"] == 24
    for name, ms in {
        "ttft": 250, "itl": 31.25, "chunk_itl": 62.5, "tpot": 62.5 / 3, "e2e_latency": 312.5,
    }.items():  # fmt: skip
        assert figures[f"mean_{name}_ms"] == pytest.approx(ms), name
        assert figures[f"p99_{name}_ms"] == pytest.approx(ms), name
    assert figures["duration"] == pytest.approx(server.arrived[-1] - server.arrived[0] + 0.3125)
    assert figures["request_throughput"] == pytest.approx(6 / figures["duration"])
    assert figures["client_p99_send_delay_ms"] == pytest.approx(0, abs=1e-6)


def test_a_bound_on_the_requests_in_flight() -> None:
    server = StandIn(first=0.25, gap=0.0625)
    (run,) = measure(server, max_concurrency=2).runs
    assert run.load.peak == 2
    assert run.load.seconds == pytest.approx(3 * (0.25 + 3 * 0.0625))
    assert run.as_dict()["concurrency"] == pytest.approx(2)


def test_a_sweep_begins_with_saturation() -> None:
    server = StandIn(first=0.25, gap=0.25)
    runs = measure(server, sweep=(50.0, 80.0), num_prompts=8).runs
    saturation = runs[0].request_throughput
    assert saturation == pytest.approx(8.0)  # all at once, one second each
    assert [run.request_rate for run in runs] == pytest.approx([math.inf, 4.0, 6.4])
    assert len(server.bodies) == 24


def test_every_run_of_a_sweep_has_new_random_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    server = StandIn()
    measure(server, sweep=(90.0,), dataset_name="random", random_input_len=9,
            random_output_len=2, tokenizer=str(tmp_path))  # fmt: skip
    prompts = {tuple(body["input_ids"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies) == 12


def test_arrivals_are_those_of_the_seed() -> None:
    def gaps(seed: int) -> list[float]:
        measure(server := StandIn(), request_rate=50.0, seed=seed)
        return [b - a for a, b in pairwise(server.arrived)]

    assert gaps(1) == pytest.approx(gaps(1))
    assert gaps(1) != pytest.approx(gaps(2))


def test_warm_up_requests_are_not_counted() -> None:
    server = StandIn()
    (run,) = measure(server, warmup_requests=2, output_len=40).runs
    assert (len(run.completed), len(server.bodies)) == (6, 8)
    lengths = [body["sampling_params"]["max_new_tokens"] for body in server.bodies]
    assert lengths == [32, 32] + [40] * 6


def test_a_failed_warm_up_ends_the_benchmark() -> None:
    server = StandIn(faults={0: "500"})
    done = measure(server, warmup_requests=1)
    assert done.runs == [] and len(server.bodies) == 1
    assert str(done.warmup_failure) == "HTTP 500: no"


def test_failures_are_counted_by_kind() -> None:
    done = measure(StandIn(faults={0: "429", 2: "429", 3: "hang up"}))
    assert done.failed == 4 - 1
    assert done.runs[0].errors == {"HTTP 429": 2, "connection closed early": 1}
    assert len(done.runs[0].completed) == 3


def test_the_model_is_the_servers_first() -> None:
    server = StandIn()
    measure(server, backend="openai")
    assert {body["model"] for body in server.bodies} == {"stand-in"}
    measure(server := StandIn(), backend="openai", model="other")
    assert {body["model"] for body in server.bodies} == {"other"}
    with pytest.raises(ConfigError, match="Give --model"):
        measure(StandIn(routes={"/v1/models": (404, "")}), backend="openai")
    measure(StandIn(routes={"/v1/models": (404, "")}))  # SGLang's own API needs none


def test_the_tokenizer_is_where_the_server_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 11}')
    info = {"model_path": str(tmp_path), "is_generation": True}
    server = StandIn(routes={"/get_model_info": (200, info)})
    measure(server, dataset_name="random", random_input_len=5, random_range_ratio=1.0,
            random_output_len=4)  # fmt: skip
    for body in server.bodies:
        assert len(body["input_ids"]) == 5 and set(body["input_ids"]) <= set(range(11))


def test_flushing_a_busy_server_is_tried_again() -> None:
    busy, done = (400, "busy"), (200, "flushed")
    server = StandIn(routes={"/flush_cache": (0, [busy, busy, done])})
    measure(server, flush_cache=True)
    flushes = [at for at, path in server.asked if path == "/flush_cache"]
    assert flushes == pytest.approx([flushes[0] + 2 * i for i in range(3)])
    assert server.arrived[0] - flushes[-1] == pytest.approx(LEAD)


@pytest.mark.parametrize("answers", [[(400, "busy")] * 3, [(404, "")]])
def test_a_server_that_does_not_flush(answers: list[tuple[int, str]]) -> None:
    server = StandIn(routes={"/flush_cache": (0, list(answers))})
    with pytest.raises(ConfigError, match=f"did not flush its cache .HTTP {answers[0][0]}"):
        measure(server, flush_cache=True)
    assert server.bodies == []


METRICS = """\
# HELP vllm:spec_decode_num_drafts Verify steps with drafts.
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} {0}
vllm:spec_decode_num_drafts_total{{engine="1"}} {0}
vllm:spec_decode_num_drafts_created{{engine="0"}} {1}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {1}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 5
"""


def test_accept_length_from_the_requests() -> None:
    server = StandIn(per_chunk=2, verify_ct=True)
    (run,) = measure(server).runs
    assert run.acceptance is not None
    assert (run.acceptance.length, run.acceptance.source) == (2.0, "requests")


def test_accept_length_from_counters() -> None:
    pages = [(200, METRICS.format(10, 15.0)), (200, METRICS.format(30, 1.15e2))]
    (run,) = measure(StandIn(routes={"/metrics": (0, pages)})).runs
    assert run.acceptance is not None
    assert run.acceptance.length == pytest.approx(1 + 100 / 40)
    assert run.acceptance.source == "counters"


def test_accept_length_from_the_servers_average() -> None:
    info = {"internal_states": [{"avg_spec_accept_length": 3.25}]}
    (run,) = measure(StandIn(routes={"/get_server_info": (200, info)})).runs
    assert run.acceptance is not None
    assert (run.acceptance.length, run.acceptance.source) == (3.25, "server average")


@pytest.mark.parametrize("info", [{}, {"internal_states": []}, {"internal_states": [{}]}, "text"])
def test_no_accept_length_without_speculation(info: Any) -> None:
    (run,) = measure(StandIn(routes={"/get_server_info": (200, info)})).runs
    assert run.acceptance is None


def test_no_accept_length_without_answers() -> None:
    info = {"internal_states": [{"avg_spec_accept_length": 3.25}]}
    server = StandIn(
        routes={"/get_server_info": (200, info)}, faults=dict.fromkeys(range(6), "500")
    )
    (run,) = measure(server).runs
    assert run.acceptance is None


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_named(status: int) -> None:
    with pytest.raises(ConfigError, match="Set --api-key"):
        measure(StandIn(routes={"/v1/models": (status, "")}))


# What a bad setting is told.
REFUSED = [
    ({"backend": "sglan"}, "Did you mean 'sglang'"),
    ({"dataset_name": "pyhton"}, "Did you mean 'python'"),
    ({"num_prompts": 0}, "--num-prompts must be >= 1"),
    ({"output_len": 0}, "--output-len must be >= 1"),
    ({"max_concurrency": 0}, "--max-concurrency must be >= 1"),
    ({"warmup_requests": -1}, "--warmup-requests must be >= 0"),
    ({"random_range_ratio": 1.5}, "--random-range-ratio must be between"),
    ({"random_range_ratio": math.nan}, "--random-range-ratio must be between"),
    ({"request_rate": 0.0}, "--request-rate must be > 0"),
    ({"request_rate": math.nan}, "--request-rate must be > 0"),
    ({"burstiness": math.inf}, "--burstiness must be finite"),
    ({"timeout": 0.0}, "--timeout must be > 0"),
    ({"port": 70000}, "--port must be between"),
    ({"sweep": (50.0, -1.0)}, "--sweep takes percentages"),
    ({"sweep": (50.0,), "request_rate": 2.0}, "drop --request-rate"),
    ({"dataset_name": "sharegpt"}, "go together"),
    ({"dataset_path": "x.json"}, "go together"),
    ({"dataset_name": "sharegpt", "dataset_path": "x.json"}, "x.json: there is no such file"),
    ({"goodput": ("ttft",)}, "METRIC:MILLISECONDS"),
    ({"goodput": ("speed:5",)}, "METRIC:MILLISECONDS"),
    ({"goodput": ("ttft:0",)}, "METRIC:MILLISECONDS"),
    ({"goodput": ("ttft:5",), "disable_stream": True}, "drop --disable-stream"),
    ({"extra_request_body": "{"}, "is not JSON"),
    ({"extra_request_body": "[1]"}, "must be a JSON object"),
    ({"base_url": "localhost:8000"}, "--base-url must look like"),
    ({"base_url": "http://x:port"}, "--base-url is not a URL"),
    ({"base_url": "http://x/a b"}, "characters that HTTP does not allow"),
    ({"api_key": "a\nb"}, "characters that HTTP does not allow"),
    ({"api_key": "schlüssel ☃"}, "characters that HTTP does not allow"),
    ({"base_url": f"http://{'a' * 70}"}, "No server at aaa"),
    ({"base_url": "http://127.0.0.1:9"}, "No server at 127.0.0.1:9"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    config = LoadConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        virtually(lambda: benchmark(config, lambda rate, live, seconds: None))


def test_goals_have_vllms_name_too() -> None:
    config = LoadConfig(goodput=("ttft:500", "tpot:20", "e2el:2000"))
    assert config.goals() == {"ttft": 0.5, "tpot": 0.02, "e2e": 2.0}
