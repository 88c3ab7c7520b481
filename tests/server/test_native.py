"""`/generate` and the endpoints about the server, as SGLang's clients use them."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import Any

import httpx
import pytest

from forerun import LLM, __version__
from tests.server.support import LONG, PROMPT, LiveServer, wait_for

GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
TIMES = ("id", "e2e_latency", "cached_tokens")  # what differs between two runs


def figures(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name not in TIMES}


def events(server: LiveServer, **body: Any) -> list[Any]:
    """The JSON of a stream's events."""
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {"sampling_seed": 8, "max_new_tokens": 50},
        {"sampling_seed": 8, "max_new_tokens": 50, "stop": ["self", "("], "min_new_tokens": 3},
    ],
)
def test_text_ids_and_figures_equal_the_engine(
    server: LiveServer, llm: LLM, params: dict[str, Any]
) -> None:
    want = llm.generate(PROMPT, params)
    got = server.generate(text=PROMPT, sampling_params=params)
    assert (got["text"], got["output_ids"]) == (want.text, want.output_ids)
    assert figures(got["meta_info"]) == figures(want.meta_info)
    assert got["meta_info"]["e2e_latency"] > 0
    streamed = events(server, input_ids=want.prompt_token_ids, sampling_params=params)
    last = streamed[-1]
    assert (last["text"], last["output_ids"]) == (want.text, want.output_ids)
    assert figures(last["meta_info"]) == figures(want.meta_info)
    for before, after in pairwise(streamed):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])


def test_batches_are_lists(server: LiveServer, llm: LLM) -> None:
    texts = [PROMPT, "import "]
    params = [GREEDY, {**GREEDY, "max_new_tokens": 5}]
    want = [output.text for output in llm.generate(texts, params)]
    got = server.generate(text=texts, sampling_params=params, rid=["one", "two"])
    assert [answer["text"] for answer in got] == want
    assert [answer["meta_info"]["id"] for answer in got] == ["one", "two"]
    assert [a["text"] for a in server.generate(text=texts[:1], sampling_params=GREEDY)] == want[:1]
    samples = {"sampling_seed": 1, "n": 2, "max_new_tokens": 5}
    want = [output.text for output in llm.generate(PROMPT, samples)]
    assert [a["text"] for a in server.generate(text=PROMPT, sampling_params=samples)] == want
    ends: dict[int, str] = {}
    for answer in events(server, text=texts, sampling_params=params):
        ends[answer["index"]] = answer["text"]
    assert [ends[0], ends[1]] == [output.text for output in llm.generate(texts, params)]


def test_the_payload_of_a_benchmark_client_is_taken(server: LiveServer) -> None:
    answers = events(
        server,
        text=PROMPT,
        sampling_params={**GREEDY, "ignore_eos": True},
        stream_options={"include_usage": True},
        lora_path=None,
        return_logprob=False,
        logprob_start_len=-1,
        image_data=None,
    )
    assert answers[-1]["meta_info"]["completion_tokens"] == 24


def test_information(server: LiveServer) -> None:
    assert server.http.post("/flush_cache").status_code == 200
    assert server.get("/server_info")["internal_states"][0]["avg_spec_accept_length"] is None
    answer = server.generate(text=PROMPT, sampling_params=GREEDY)
    for path in ("/server_info", "/get_server_info"):
        info = server.get(path)
        # The first token comes from the prefill and belongs to no verify step.
        steps = answer["meta_info"]["spec_verify_ct"]
        state = info["internal_states"][0]
        assert state["avg_spec_accept_length"] == pytest.approx(23 / steps, abs=16 / steps)
        assert info["speculative_algorithm"] == "DFLASH"
        assert info["version"] == __version__
        assert info["max_total_num_tokens"] == 24576
        assert "api_key" not in info
        assert info["explain"]["tools"].startswith("hermes (as set, but the chat template")
        assert info["explain"]["grammars"] in server.output  # as every other choice
    for path in ("/model_info", "/get_model_info"):
        assert server.get(path)["is_generation"] is True
        assert server.get(path)["model_path"].endswith("target")
    assert server.get("/health") == server.get("/health_generate") == {"status": "ok"}
    assert server.get("/openapi.json")["paths"]["/v1/chat/completions"]


def test_flushing_empties_the_cache_but_not_while_requests_run(server: LiveServer) -> None:
    ids = list(range(100, 164))
    again = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    server.generate(**again)
    assert server.generate(**again)["meta_info"]["cached_tokens"] > 0
    server.wait_idle()
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert server.get("/v1/loads")["num_cached_pages"] == 0
    assert server.generate(**again)["meta_info"]["cached_tokens"] == 0
    body = {"text": PROMPT, "sampling_params": LONG, "stream": True, "rid": "busy"}
    with server.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        next(lines)
        for method in ("GET", "POST"):
            busy = server.http.request(method, "/flush_cache")
            assert busy.status_code == 400
            assert "while requests run" in busy.json()["error"]["message"]
    server.wait_idle()
    assert server.http.get("/flush_cache").status_code == 200


def test_abort_request_answers_with_what_there_is(server: LiveServer) -> None:
    answers: list[Any] = []
    body = {"text": PROMPT, "sampling_params": {**LONG, "temperature": 1, "n": 2}, "rid": "mine"}
    thread = threading.Thread(target=lambda: answers.append(server.generate(**body)))
    thread.start()
    server.wait_running(2)
    wait_for(lambda: server.http.post("/abort_request", json={"rid": "other"}).is_success, 5)
    assert server.get("/v1/loads")["num_running_reqs"] == 2
    assert server.http.post("/abort_request", json={"rid": "mine"}).is_success
    thread.join(10)
    for answer in answers[0]:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < 3500
    server.wait_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
def test_abort_request_takes_the_id_of_an_answer(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    body |= {"max_tokens": 3500, "ignore_eos": True, "temperature": 1, "stream": True}
    ident, reasons = None, []
    with server.http.stream("POST", path, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            reasons += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]
            if ident is None:
                ident = event["id"]
                assert server.http.post("/abort_request", json={"rid": ident}).is_success
    assert reasons == ["abort"] * body.get("n", 1)
    server.wait_idle()


def test_abort_all(server: LiveServer) -> None:
    ended: list[Any] = []
    body = {"text": PROMPT, "sampling_params": LONG}
    threads = [
        threading.Thread(target=lambda: ended.append(server.generate(**body))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    server.wait_running(3)
    server.http.post("/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join(10)
    assert [a["meta_info"]["finish_reason"]["type"] for a in ended] == ["abort"] * 3
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, path: str, stream: bool) -> None:
    """Nothing runs afterwards, although the text would take several seconds more."""
    openai = {"max_tokens": 3500, "temperature": 0, "ignore_eos": True, "stream": stream}
    bodies = {
        "/generate": {"text": PROMPT, "sampling_params": LONG, "stream": stream},
        "/v1/completions": {"prompt": PROMPT, **openai},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **openai},
    }
    before = tokens(server)
    if stream:
        with server.http.stream("POST", path, json=bodies[path]) as response:
            lines = response.iter_lines()
            for _ in range(8):
                next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(path, json=bodies[path], timeout=0.3)
    server.wait_idle(2)
    assert 0 < tokens(server) - before < 3000


def tokens(server: LiveServer) -> int:
    """Tokens of all decode steps since the start."""
    return server.get("/server_info")["internal_states"][0]["decode_tokens"]
