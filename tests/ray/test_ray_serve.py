"""Ray Serve on this machine: two replicas on CPUs, a killed one, a rolling update.

Skipped without Ray. It takes minutes, most of them for starting replicas.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM
from tests.server.support import PROMPT, wait_for

openai = pytest.importorskip("openai")
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from forerun.ray import deployment  # noqa: E402

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "speculative_adaptive": False,
    "speculative_algorithm": "DFLASH",
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}


class Application:
    """Clients of the application."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def generate(self, text: str, **params: Any) -> dict[str, Any]:
        body = {"text": text, "sampling_params": {**GREEDY, **params}}
        answer: dict[str, Any] = self.http.post("/generate", json=body).raise_for_status().json()
        return answer


@pytest.fixture(scope="module")
def app() -> Iterator[Application]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    serve.start(http_options={"port": port})
    run()
    made = Application(port)
    yield made
    made.http.close()
    serve.shutdown()
    ray.shutdown()


def run(**more: Any) -> None:
    """Deploys, or updates what is deployed."""
    made = deployment({**SETTINGS, "num_replicas": 2, **more})
    serve.run(made, name="forerun", route_prefix="/")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as made:
        yield made


def long_text(subject: str) -> str:
    return f"# {subject}\n" + f"def {subject}(a, b):\n    return a + b\n\n" * 12


def test_answers_are_those_of_an_engine(app: Application, llm: LLM) -> None:
    want = llm.generate(PROMPT, GREEDY)
    assert [app.generate(PROMPT)["output_ids"] for _ in range(3)] == [want.output_ids] * 3
    stream = app.client().completions.create(
        model="bundled",
        prompt=PROMPT,
        max_tokens=30,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    parts = [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == want.text
    assert len(parts) > 3  # they come as they are made
    assert app.http.get("/health").json() == {"status": "ok"}


def test_errors_are_those_of_the_server(app: Application) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        app.client().completions.create(model="other", prompt="x")
    assert app.http.post("/generate", content=b"{").status_code == 400
    assert app.http.get("/none").status_code == 404


def test_prompts_go_where_their_prefix_is(app: Application) -> None:
    """Each prompt is computed once, and found in its replica's cache ever after."""
    cached = [
        [app.generate(long_text(name))["meta_info"]["cached_tokens"] for name in ("a", "b", "c")]
        for _ in range(4)
    ]
    assert all(tokens > 100 for row in cached[1:] for tokens in row), cached


def test_a_client_that_leaves_ends_its_request(app: Application) -> None:
    body = {"text": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 3500}, "stream": True}
    with app.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())

    def idle() -> bool:  # the replicas are asked in turns
        return all(app.http.get("/v1/loads").json()["num_requests"] == 0 for _ in range(4))

    wait_for(idle, 5)


class Clients:
    """Requests in the background, one after the other, until they are stopped."""

    def __init__(self, app: Application, want: list[int], count: int) -> None:
        self.app, self.want = app, want
        self.answered, self.failed = 0, []  # type: ignore[var-annotated]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self.app.url, timeout=120) as http:
            while not self._stop.is_set():
                body = {"text": PROMPT, "sampling_params": GREEDY}
                answer = http.post("/generate", json=body)
                if answer.status_code == 200 and answer.json()["output_ids"] == self.want:
                    self.answered += 1
                else:
                    self.failed.append(answer.text)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def engine_actor(app: Application) -> int:
    """The process of a replica: the parent of its engine's."""
    engine = app.http.get("/server_info").json()["engine_pid"]
    status = Path(f"/proc/{engine}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))


def _stream(app: Application, text: str) -> Any:
    """Several seconds long."""
    return app.client().completions.create(
        model="bundled",
        prompt=text,
        max_tokens=1000,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "speculative": False},
    )


def _end(stream: Any) -> str | None:
    """The error that a stream ends with."""
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        return str(error)
    return None


def test_a_killed_replica_under_load(app: Application, llm: LLM) -> None:
    """What was not sent yet runs on the other one; capacity comes back."""
    want = llm.generate(PROMPT, GREEDY).output_ids
    streams = [_stream(app, long_text(name)) for name in ("one", "two")]  # one on each
    for stream in streams:
        next(stream)
    clients = Clients(app, want, 3)
    wait_for(lambda: clients.answered > 5, 60)
    victim = engine_actor(app)
    os.kill(victim, signal.SIGKILL)
    before = clients.answered
    wait_for(lambda: clients.answered > before + 10, 60)
    ends = [_end(stream) for stream in streams]
    assert sorted(end is None for end in ends) == [False, True], ends
    assert "The replica has died" in next(end for end in ends if end is not None)

    wait_for(lambda: len({engine_actor(app) for _ in range(8)} - {victim}) == 2, 180)
    clients.stop()
    assert clients.failed == []


def test_a_rolling_update_fails_no_request(app: Application, llm: LLM) -> None:
    want = llm.generate(PROMPT, GREEDY).output_ids
    clients = Clients(app, want, 2)
    wait_for(lambda: clients.answered > 3, 60)
    old = app.http.get("/server_info").json()["max_total_num_tokens"]
    run(max_total_tokens=8192)
    time.sleep(1)
    new = {app.http.get("/server_info").json()["max_total_num_tokens"] for _ in range(6)}
    clients.stop()
    assert new == {8192} and old == 16384
    assert clients.failed == []
    assert clients.answered > 10
