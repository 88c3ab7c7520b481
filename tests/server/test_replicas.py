"""A server with two replicas on CPUs: answers, routing, a replica that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from forerun import LLM
from tests.server.support import ENGINE, LONG, PROMPT, LiveServer, flags, wait_for
from tests.server.test_life import in_background
from tests.server.test_metrics import scrape

SMALL = {**ENGINE, "max_total_tokens": 8192, "max_running_requests": 4}
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SUBJECTS = ("zebra", "tower", "river", "violin")

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer(*flags(**SMALL, dp_size=2)) as server:
        yield server


def pids(live: LiveServer) -> list[int]:
    found: list[int] = live.get("/server_info")["engine_pids"]
    return found


def text(subject: str) -> str:
    """A prompt of several blocks that begins like no other."""
    return f"# {subject}\n" + f"def {subject}(a, b):\n    return a + b\n\n" * 12


def test_texts_are_those_of_one_engine(live: LiveServer, llm: LLM) -> None:
    prompts = [text(subject) for subject in SUBJECTS]
    sampled = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 20, "n": 2}
    for params in (GREEDY, sampled):
        want = llm.generate(prompts, params)
        got = live.generate(text=prompts, sampling_params=params)
        assert [each["output_ids"] for each in got] == [each.output_ids for each in want]
    assert min(load["num_cached_pages"] for load in live.get("/v1/loads")["loads"]) > 0


def test_a_prompt_goes_where_its_prefix_is(live: LiveServer) -> None:
    live.http.post("/flush_cache").raise_for_status()
    before = scrape(live)
    for _ in range(4):
        for subject in SUBJECTS[:3]:
            live.generate(text=text(subject), sampling_params=GREEDY)
    live.wait_idle()
    new = scrape(live)
    new.subtract(before)
    routed = [new[f"forerun_routed_requests_total{{{replica}}}"] for replica in (0, 1)]
    assert sorted(routed) == [4, 8]
    queries, hits = (new[f"vllm:prefix_cache_{what}_total"] for what in ("queries", "hits"))
    assert hits > 0.6 * queries  # in turns, half of them at most would be found
    assert new["forerun_routed_cached_tokens_total"] == pytest.approx(hits, rel=0.1)


def test_metrics_and_information_are_of_both(live: LiveServer) -> None:
    live.wait_idle()
    before = scrape(live)
    answers = live.generate(text=[text("first"), text("second")], sampling_params=GREEDY)
    loads = live.wait_idle()
    new, info = scrape(live), live.get("/server_info")
    assert new["forerun_replica_up{0}"] == new["forerun_replica_up{1}"] == 1
    assert loads["num_pages"] == sum(load["num_pages"] for load in loads["loads"])
    assert loads["max_running_requests"] == 8
    assert new["forerun_kv_pages{cached}"] == loads["num_cached_pages"]
    states = info["internal_states"]
    assert len(states) == len(info["engine_pids"]) == info["dp_size"] == 2
    drafts = sum(state["spec_decode_num_drafts"] for state in states)
    assert new["vllm:spec_decode_num_drafts_total"] == drafts
    new.subtract(before)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert new["forerun_request_steps_total"] == steps
    assert new["forerun_routed_requests_total{0}"] == new["forerun_routed_requests_total{1}"] == 1
    assert live.http.get("/health_generate").status_code == 200
    assert "replicas: 2; requests go by cache_aware" in live.output


def test_the_openai_client(live: LiveServer, llm: LLM) -> None:
    want = llm.generate(PROMPT, {"temperature": 0, "max_new_tokens": 40})
    stream = live.client().completions.create(
        model="bundled", prompt=[PROMPT, text("zebra")], max_tokens=40, temperature=0, stream=True
    )
    parts = [chunk.choices[0] for chunk in stream]
    assert "".join(part.text for part in parts if part.index == 0) == want.text
    assert any(part.index == 1 and part.text for part in parts)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    chosen = live.client().completions.create(
        model="bundled",
        prompt=PROMPT,
        max_tokens=30,
        extra_body={"json_schema": schema, "n": 2},
    )
    assert all('"a"' in choice.text for choice in chosen.choices)


def test_an_abort_reaches_its_replica(live: LiveServer) -> None:
    both = [{"text": text(name), "rid": name, "sampling_params": LONG} for name in ("a", "b")]
    started = [
        in_background(lambda body=body: live.http.post("/generate", json=body)) for body in both
    ]
    live.wait_running(2)
    assert [load["num_running_reqs"] for load in live.get("/v1/loads")["loads"]] == [1, 1]
    assert live.http.post("/flush_cache").status_code == 400
    live.http.post("/abort_request", json={"rid": "b"})
    started[1][0].join(10)
    assert started[1][1][0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert live.get("/v1/loads")["num_requests"] == 1
    live.http.post("/abort_request", json={"abort_all": True})
    started[0][0].join(10)
    live.wait_idle()


def test_a_killed_replica_under_load(live: LiveServer) -> None:
    """The stream that was shown fails; what nobody has seen runs again; others go on."""
    live.wait_idle()
    before = scrape(live)
    victim, other = pids(live)
    want = live.generate(text=text("whole"), sampling_params={**LONG, "max_new_tokens": 200})
    client = live.client(max_retries=0)
    greedy: dict[str, Any] = {"temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [
        client.completions.create(model="bundled", prompt=text(name), max_tokens=900, **greedy)
        for name in ("one", "two")
    ]
    for stream in streams:
        next(stream)
    body = {"text": text("whole"), "sampling_params": {**LONG, "max_new_tokens": 200}}
    whole = [in_background(lambda: live.http.post("/generate", json=body)) for _ in range(2)]
    live.wait_running(3)
    os.kill(victim, signal.SIGKILL)
    ends = [_rest(stream) for stream in streams]
    assert sorted(end is None for end in ends) == [False, True], ends
    assert "signal 9" in next(end for end in ends if end is not None)
    for thread, answers in whole:
        thread.join(60)
        assert answers[0].json()["output_ids"] == want["output_ids"]
    assert live.http.get("/health").status_code == 200
    wait_for(lambda: scrape(live)["forerun_replica_up{0}"], 90)
    new = scrape(live)
    assert pids(live)[1] == other and pids(live)[0] not in (victim, None)
    new.subtract(before)
    assert new["forerun_engine_restarts_total"] == 1
    assert new["vllm:request_success_total{error}"] == 1
    assert min(new[name] for name in new if name.endswith("_total")) == 0  # none went back
    live.generate(text=[text(str(n)) for n in range(4)], sampling_params=GREEDY)
    assert live.wait_idle()["loads"][0]["num_cached_pages"] > 0  # it takes part again


def _rest(stream: Any) -> str | None:
    """The error that a stream ends with."""
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        return str(error)
    return None
