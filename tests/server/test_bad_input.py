"""What clients must not send: refused at once, in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.support import ENGINE, LONG, PROMPT, LiveServer, flags

JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES = "/v1/responses"
SECONDS = 2.0  # far more than an answer takes, also on a busy machine


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message of a refusal, after a look at its shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"].endswith("_error")
    assert "\n" not in error["message"]
    assert response.elapsed.total_seconds() < SECONDS
    return str(error["message"])


ASKED = [{"role": "user", "content": "x"}]
# (path, body, words of the message)
BODIES: list[tuple[str, Any, str]] = [
    (COMPLETIONS, {"promt": "x"}, "Did you mean 'prompt'"),
    (COMPLETIONS, {}, "prompt is missing"),
    (COMPLETIONS, [], "must be a JSON object"),
    (COMPLETIONS, {"prompt": []}, "empty list"),
    (COMPLETIONS, {"prompt": [[]]}, "The prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1: input should be a valid string, got 1"),
    (COMPLETIONS, {"prompt": [[1], [2, "a"]]}, "prompt.1.1: input should be a valid integer"),
    (COMPLETIONS, {"prompt": [10**30]}, "outside the vocabulary"),
    (COMPLETIONS, {"prompt": [4096 * 99]}, "outside the vocabulary"),
    (COMPLETIONS, {"prompt": [-1]}, "outside the vocabulary"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature must be >= 0"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature: "),
    (COMPLETIONS, {"prompt": "x", "temperature": 10**400}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p must be in"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be >= 1"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**9}, "max_tokens can be at most"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n must be in"),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}, "n must be in [1, 128]"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "64 bits"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "non-empty"),
    (COMPLETIONS, {"prompt": "x", "stop": ["y"] * 40}, "at most 32"),
    (COMPLETIONS, {"prompt": "x", "stop": 5}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["y", 5]}, "stop.1: input should be a valid string"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs: input should be less"),
    (COMPLETIONS, {"prompt": "x", "top_logprobs": 2}, "top_logprobs is not supported"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999": 1}}, "outside the vocabulary"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias.1"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}}, "at most 1024"),
    (COMPLETIONS, {"prompt": "x", "frequency_penalty": 3}, "frequency_penalty must be in [-2, 2]"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens must be >= 0"),
    (COMPLETIONS, {"prompt": "x", "seed": 10**23}, "seed must fit in 64 bits"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": -1}, "min_tokens must be in [0, max_tokens]"),
    (
        COMPLETIONS,
        {"prompt": "x", "min_tokens": 1, "stop_token_ids": list(range(30))},
        "min_tokens works with",
    ),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usag": True}}, "include_usage"),
    (COMPLETIONS, {"prompt": "a b " * 40_000}, "maximum context length is 4096"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3, "n": 2}, "use n > 1 and choose"),
    (COMPLETIONS, {"prompt": "x" * 5_000_000}, "at least"),
    (CHAT, {"messages": []}, "messages is empty"),
    (CHAT, {"messages": [5]}, "messages.0"),
    (CHAT, {"messages": [{"role": "user"}]}, "'role' and 'content'"),
    (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "'role' and 'content'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "must be text"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "'user' message must be text"),
    (CHAT, {"prompt": "x"}, "Unknown parameter 'prompt'"),
    (CHAT, {"messages": ASKED, "max_tokens": 10**6}, "max_tokens can be at most"),
    (CHAT, {"messages": ASKED, "max_completion_tokens": 0}, "max_completion_tokens must be >= 1"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 5000}]}, "shorten the prompt"),
    (
        CHAT,
        {"messages": ASKED, "max_tokens": 1, "max_completion_tokens": 2},
        "give one",
    ),
    (
        CHAT,
        {"messages": ASKED, "tools": [{"type": "function"}]},
        "tools.0.function is missing",
    ),
    (
        CHAT,
        {"messages": ASKED, "tool_choice": "required"},
        "there are no tools",
    ),
    (COMPLETIONS, {"prompt": "x", "tools": [{}]}, "tools belong to"),
    (RESPONSES, {"input": "x", "background": True, "store": False}, "does not go with store"),
    (RESPONSES, {"input": [5]}, "input.0: input should be a valid dictionary, got 5"),
    (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens must be >= 1"),
    (RESPONSES, {"input": "x", "max_output_tokens": 10**6}, "max_output_tokens can be at most"),
    (RESPONSES, {"messages": ASKED}, "Unknown parameter 'messages'"),
    (GENERATE, {}, "either text or input_ids"),
    (GENERATE, {"text": "x", "input_ids": [1]}, "either text or input_ids"),
    (GENERATE, {"text": []}, "list of prompts is empty"),
    (GENERATE, {"text": "x", "sampling_params": {"temprature": 1}}, "Did you mean 'temperature'"),
    (GENERATE, {"text": "x", "sampling_params": {"max_tokens": 1}}, "max_new_tokens"),
    (GENERATE, {"text": "x", "sampling_params": {"regex": 5}}, "regex must be a string"),
    (GENERATE, {"text": "x", "sampling_params": {"n": 2, "temperature": 0}}, "n > 1"),
    (GENERATE, {"text": ["x"], "sampling_params": [{}, {}]}, "2 sampling_params for 1 prompts"),
    (GENERATE, {"text": ["x", "y"], "rid": ["a", "a"]}, "is running already"),
    (GENERATE, {"text": ["x", "y"], "rid": "a"}, "1 rids for 2 prompts"),
    (GENERATE, {"text": "x", "rid": "a\nb"}, "printable"),
    (GENERATE, {"text": "x", "rid": "r" * 999}, "at most 256"),
    (GENERATE, {"text": "x", "top_logprobs_num": 2}, "set return_logprob=True"),
    (GENERATE, {"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "must be in [0, 20]"),
    (GENERATE, {"text": "x", "return_logprob": [True]}, "return_logprob must be true or false"),
    (GENERATE, {"text": ["x"], "return_logprob": [True, False]}, "2 values of return_logprob"),
    (GENERATE, {"text": "x", "return_logprob": True, "logprob_start_len": 9}, "must be below"),
    (GENERATE, {"text": "x", "return_logprob": True, "token_ids_logprob": [-1]}, "vocabulary"),
    (GENERATE, {"text": "x", "sampling_params": {"logit_bias": [1]}}, "must be a mapping"),
    (GENERATE, {"text": "x", "sampling_params": {"presence_penalty": 9}}, "must be in [-2, 2]"),
    (GENERATE, {"text": "x", "image_data": "y"}, "image_data is not supported"),
    ("/abort_request", {}, "Give a rid"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), BODIES, ids=range(len(BODIES)))
def test_invalid_parameters(server: LiveServer, path: str, body: Any, words: str) -> None:
    assert words in refused(server.http.post(path, json=body))


RAW: list[tuple[bytes, str]] = [
    (b"", "body"),
    (b"{", "not valid JSON"),
    (b"nope", "not valid JSON"),
    (b'{"prompt": "x", "temperature": NaN}', "finite"),
    (b'{"prompt": "x", "temperature": 1e999}', "finite"),
    (b'{"prompt": "x", "max_tokens": Infinity}', "max_tokens"),
    (b'{"prompt": "\xff\xfe"}', "not UTF-8 at byte 12"),
    (b'{"prompt": "\\ud800"}', "lone surrogate"),
    (b'{"prompt": "x", "\\ud800": 1}', "Unknown parameter"),
    (b'{"prompt": "x", "model": "\\ud800"}', "does not exist"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": ' + b"9" * 10_000 + b"}", "too many digits"),
    (b'{"prompt": "x"', "not valid JSON"),
    (b"\x00" * 64, "not valid JSON"),
]


@pytest.mark.parametrize(("body", "words"), RAW, ids=range(len(RAW)))
def test_malformed_bodies(server: LiveServer, body: bytes, words: str) -> None:
    for path in (COMPLETIONS, CHAT, GENERATE):
        response = server.http.post(path, content=body, headers=JSON)
        message = refused(response, 404 if "does not exist" in response.text else 400)
        assert path != COMPLETIONS or words in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "stop": 3}, "stop"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (GENERATE, {"text": {"a": 1}}, "text"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias.1"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens.1"),
        (CHAT, {"messages": ASKED, "tools": [{"type": "function"}]}, "tools.0.function"),
    ],
)
def test_the_parameter_is_named(server: LiveServer, path: str, body: Any, param: str) -> None:
    response = httpx.post(server.url + path, json=body)
    assert refused(response).startswith(param)
    assert response.json()["error"]["param"] == param


def test_an_id_that_is_no_text_is_refused(server: LiveServer) -> None:
    for name in ("conversation", "previous_response_id"):
        body = b'{"input": "x", "' + name.encode() + b'": "\\ud800"}'
        assert "lone surrogate" in refused(server.http.post(RESPONSES, content=body, headers=JSON))


def test_a_rid_that_is_no_text_is_refused(server: LiveServer) -> None:
    body = b'{"text": "x", "rid": "\\ud800"}'
    assert "printable" in refused(server.http.post(GENERATE, content=body, headers=JSON))


def test_what_changes_nothing_is_accepted(server: LiveServer) -> None:
    few = {"prompt": "x", "max_tokens": 2, "temperature": 1, "top_k": 0}
    for body in (few | {"best_of": 2, "n": 2}, few | {"best_of": 1}):
        assert server.http.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 5000}),
        (COMPLETIONS, {"prompt": [1] * 5000}),
        (COMPLETIONS, {"prompt": "x" * 5_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 3000}]}),
    ],
)
def test_too_long_for_the_context(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    """Clients look for this code, or for these words."""
    error = server.http.post(path, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens")


def test_another_content_type_is_refused(server: LiveServer) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d` sends
    message = refused(server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers))
    assert "application/json" in message


def test_a_list_with_one_invalid_prompt_is_refused_as_a_whole(server: LiveServer) -> None:
    body = {"input_ids": [[1, 2], [10**6]], "sampling_params": LONG}
    refused(server.http.post(GENERATE, json=body))
    assert server.wait_idle(1)["num_running_reqs"] == 0


MANY = 200_000
LARGE: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"input_ids": [""] * MANY}),
    (GENERATE, {"input_ids": [[1, ""]] * MANY}),
    (GENERATE, {"input_ids": [1] * MANY}),
    (GENERATE, {"input_ids": [[1]] * MANY}),
    (GENERATE, {"text": [1] * MANY}),
    (GENERATE, {"text": ["x"] * MANY}),
    (GENERATE, {"text": "x", "sampling_params": [1] * MANY}),
    (GENERATE, {"text": "x", "return_logprob": True, "token_ids_logprob": [1] * MANY}),
    (COMPLETIONS, {"prompt": ["x"] * MANY}),
    (COMPLETIONS, {"prompt": "x", "stop": [1] * MANY}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): "" for i in range(MANY)}}),
    (COMPLETIONS, {"prompt": "x", "temperature": [[1] * 9] * MANY}),
    (COMPLETIONS, {"prompt": "x", "x" * MANY: 1}),
    (COMPLETIONS, {"prompt": "x", "model": "x" * MANY}),
    (CHAT, {"messages": [1] * MANY}),
    (CHAT, {"messages": [{"role": "x" * 10 * MANY, "content": "x"}]}),
    (CHAT, {"messages": ASKED, "tools": [{"type": "function", "x": 1}] * MANY}),
    (CHAT, {"messages": ASKED, "chat_template_kwargs": {str(i): 1 for i in range(MANY)}}),
    (RESPONSES, {"input": [1] * MANY}),
    (RESPONSES, {"input": "x", "metadata": {str(i): 1 for i in range(MANY)}}),
]


@pytest.mark.parametrize(("path", "body"), LARGE, ids=range(len(LARGE)))
def test_large_values_are_refused_without_looking_at_all_of_them(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    """An error for every item, or a prompt for every one, would take many seconds."""
    refused(server.http.post(path, json=body), 404 if "model" in body else 400)


def test_unknown_paths_and_methods(server: LiveServer) -> None:
    assert "There is no '/v1/complet'" in refused(server.http.post("/v1/complet", json={}), 404)
    assert "does not take GET; it takes POST." in refused(server.http.get(COMPLETIONS), 405)
    several = {GENERATE: "POST, PUT", "/flush_cache": "GET, POST", "/v1/files/x": "DELETE, GET"}
    for path, methods in several.items():
        response = server.http.patch(path)
        assert f"it takes {methods}." in refused(response, 405)
        assert response.headers["allow"] == methods
    message = refused(server.http.post(COMPLETIONS, json={"model": "bundeld", "prompt": "x"}), 404)
    assert "Did you mean 'bundled'" in message


def test_errors_have_the_classes_of_the_openai_client(server: LiveServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bundled", prompt="x", temperature=-1)
    assert "temperature" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def mutated(rng: random.Random) -> bytes:
    """A valid body with a few bytes changed, dropped or repeated."""
    data = bytearray(json.dumps({"prompt": PROMPT, "max_tokens": 2, "temperature": 0}).encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 20)]
    return bytes(data)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_random_bodies_are_answered_or_refused(server: LiveServer, count: int) -> None:
    rng = random.Random(count)
    seen = set()
    for _ in range(count):
        body = mutated(rng)
        status = server.http.post(COMPLETIONS, content=body, headers=JSON).status_code
        assert status in (200, 400, 404), (status, body)
        seen.add(status)
    assert 400 in seen
    server.wait_idle()


# --- a server with narrow limits ------------------------------------------------------------------

KEY = "s3cret-key"


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    limits = flags(
        **{**ENGINE, "max_running_requests": 2, "max_total_tokens": 12288},
        max_body_bytes=20_000,
        max_n=2,
        max_queued_requests=1,
        request_timeout=1.5,
        served_model_name="tiny",
        enable_metrics=False,
    )
    with LiveServer(*limits, key=KEY, FORERUN_API_KEY=KEY) as live:
        yield live


@pytest.mark.exhaustive
def test_everything_but_health_needs_the_key(narrow: LiveServer) -> None:
    paths = [
        *("/v1/models", "/server_info", "/openapi.json", "/metrics", "/nope", "/health/"),
        "/health_generate",
    ]
    with httpx.Client(base_url=narrow.url) as bare:
        assert bare.get("/health").status_code == 200
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            for path in paths:
                response = bare.get(path, headers=header)
                assert "API key" in refused(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
            for path, methods in narrow.get("/openapi.json")["paths"].items():
                for method in methods if path != "/health" else ():
                    response = bare.request(method, path, headers=header)
                    assert response.status_code == 401, (method, path)
            assert bare.post("/flush_cache", headers=header).status_code == 401
    assert narrow.http.get("/metrics").status_code == 404  # --no-enable-metrics
    assert narrow.get("/v1/models")["data"][0]["id"] == "tiny"
    assert KEY not in narrow.http.get("/server_info").text
    assert KEY not in narrow.output
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="wrong").models.list()


@pytest.mark.exhaustive
def test_large_bodies_are_refused_before_they_are_read(narrow: LiveServer) -> None:
    body = json.dumps({"prompt": "x" * 30_000}).encode()
    message = refused(narrow.http.post(COMPLETIONS, content=body, headers=JSON), 413)
    assert "--max-body-bytes" in message
    chunked = narrow.http.post(COMPLETIONS, content=iter([body[:9000]] * 4), headers=JSON)
    assert "--max-body-bytes" in refused(chunked, 413)


@pytest.mark.exhaustive
def test_a_full_queue_is_429_with_retry_after(narrow: LiveServer) -> None:
    assert "n must be in [1, 2]" in refused(narrow.http.post(GENERATE, json=sampled(n=3)))
    too_many = {"text": [PROMPT] * 4}
    assert "4 completions in one request" in refused(narrow.http.post(GENERATE, json=too_many))
    with narrow.http.stream("POST", GENERATE, json={**sampled(n=2), "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        # One more may wait; it ends with the other two.
        full = narrow.http.post(GENERATE, json=sampled(n=2))
        assert "The queue is full" in refused(full, 429)
        assert int(full.headers["retry-after"]) > 0
    narrow.wait_idle()
    with pytest.raises(openai.RateLimitError):
        hold = narrow.client(max_retries=0)
        with narrow.http.stream("POST", GENERATE, json={**sampled(n=2), "stream": True}) as busy:
            lines = busy.iter_lines()
            next(lines)
            hold.completions.create(model="tiny", prompt=PROMPT, n=2)
    narrow.wait_idle()


def sampled(**params: Any) -> dict[str, Any]:
    return {"text": PROMPT, "sampling_params": {**LONG, "temperature": 1.0, **params}}


@pytest.mark.exhaustive
def test_the_deadline_ends_a_request(narrow: LiveServer) -> None:
    started = time.monotonic()
    body = {"text": PROMPT, "sampling_params": LONG}
    response = narrow.http.post(GENERATE, json=body)
    assert response.status_code == 504
    assert "--request-timeout" in response.json()["error"]["message"]
    assert 1 < time.monotonic() - started < 4
    with narrow.http.stream("POST", GENERATE, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        last = [line for line in stream.iter_lines() if line][-1]
    assert "--request-timeout" in json.loads(last.removeprefix("data: "))["error"]["message"]
    narrow.wait_idle(2)
