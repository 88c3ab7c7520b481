"""Priorities and deadlines over HTTP, on a server with one slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM
from tests.server.support import ENGINE, LONG, PROMPT, LiveServer, flags, wait_for
from tests.server.test_metrics import scrape

SHORT = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 5}


@pytest.fixture(scope="module")
def busy() -> Iterator[LiveServer]:
    settings = {**ENGINE, "max_running_requests": 1, "schedule_policy": "lpm"}
    with LiveServer(*flags(**settings, max_mixed_step_ms=20, queue_timeout=20.0)) as live:
        yield live


@contextmanager
def held(server: LiveServer) -> Iterator[None]:
    """The slot is taken."""
    server.wait_idle()
    body = {"text": PROMPT, "sampling_params": LONG, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()  # it closes the stream when it is collected
        next(lines)
        yield
        lines.close()


def waits(server: LiveServer, count: int) -> None:
    wait_for(lambda: server.get("/v1/loads")["num_waiting_reqs"] == count, 10)


@pytest.mark.exhaustive
def test_the_highest_priority_goes_first(busy: LiveServer, llm: LLM) -> None:
    """On every endpoint; the text is that of `LLM`."""
    client = busy.client()
    completion = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "model": "bundled"}
    calls: dict[str, Callable[[], Any]] = {
        "first": lambda: busy.generate(text=PROMPT, sampling_params=SHORT)["text"],
        "low": lambda: busy.generate(text=PROMPT, sampling_params=SHORT, priority=-3)["text"],
        "high": lambda: (
            client.completions.create(**completion, extra_body={"priority": 40}).choices[0].text
        ),
        "middle": lambda: busy.generate(text=PROMPT, sampling_params=SHORT, priority=2)["text"],
    }
    ended: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda name=name, call=call: ended.append((name, call())))
        for name, call in calls.items()
    ]
    with held(busy):
        for count, thread in enumerate(threads, 1):
            thread.start()
            waits(busy, count)
        by_priority = wait_for(lambda: queued(busy, 4), 5)
        assert by_priority == {"0": 1, "-3": 1, ">10": 1, "2": 1}
    for thread in threads:
        thread.join()
    assert [name for name, _ in ended] == ["high", "middle", "first", "low"]
    assert {text for _, text in ended} == {llm.generate(PROMPT, SHORT).text}
    busy.wait_idle()
    assert queued(busy, 0) == {"0": 0}


def queued(server: LiveServer, count: int) -> dict[str, float] | None:
    """Waiting requests by priority, if there are so many: the engine's figures are a bit late."""
    prefix = "forerun_queue_reqs_by_priority{"
    found = {name[len(prefix) : -1]: n for name, n in scrape(server).items() if prefix in name}
    return found if sum(found.values()) == count else None


@pytest.mark.exhaustive
def test_who_waits_too_long_gets_503(busy: LiveServer) -> None:
    before = scrape(busy)
    with held(busy):
        started = time.monotonic()
        for stream in (False, True):
            body = {"text": PROMPT, "queue_timeout": 0.2, "stream": stream}
            response = busy.http.post("/generate", json=body)
            # The head of a stream is sent before the request has a slot.
            assert response.status_code == (200 if stream else 503)
            assert "queue_timeout of 0.2 s" in response.text
            assert '"code":"queue_timeout"' in response.text
            assert stream or int(response.headers["retry-after"]) > 0
        assert 0.4 <= time.monotonic() - started < 15
        with pytest.raises(openai.InternalServerError, match="waited longer"):
            busy.client(max_retries=0).completions.create(
                model="bundled", prompt=PROMPT, extra_body={"queue_timeout": 0.1}
            )
    busy.wait_idle()
    after = scrape(busy)
    after.subtract(before)
    assert after["forerun_requests_aborted_total{queue_timeout}"] == 3
    # A slot in time is enough.
    done = busy.generate(
        text=PROMPT, sampling_params=LONG | {"max_new_tokens": 300}, queue_timeout=5
    )
    assert done["meta_info"]["completion_tokens"] == 300


@pytest.mark.exhaustive
def test_a_request_may_bring_its_own_deadline(busy: LiveServer) -> None:
    started = time.monotonic()
    body = {"text": PROMPT, "sampling_params": LONG, "request_timeout": 0.3}
    response = busy.http.post("/generate", json=body)
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
    assert time.monotonic() - started < 15
    busy.wait_idle(5)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/generate", {"text": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_wrong_values_are_refused(server: LiveServer, path: str, prompt: dict[str, Any]) -> None:
    for wrong in (
        {"priority": 1.5},
        {"priority": 2**40},
        {"priority": "high"},
        {"queue_timeout": 0},
        {"request_timeout": -1},
    ):
        response: httpx.Response = server.http.post(path, json={**prompt, **wrong})
        assert response.status_code == 400, (wrong, response.text)
        assert next(iter(wrong)) in response.json()["error"]["message"]


@pytest.mark.exhaustive
def test_settings_are_shown(busy: LiveServer) -> None:
    info = busy.get("/server_info")
    assert info["schedule_policy"] == "lpm" and info["max_mixed_step_ms"] == 20
    assert info["queue_timeout"] == 20.0
