"""An engine process that hangs is noticed, described, killed and replaced."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.executor import ExecutorInfo
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.platform.stacks import offer_stacks
from forerun.server.engines import link as engine_link
from forerun.server.engines.client import EngineClient, EngineState
from forerun.server.engines.messages import Ping, Pong, Ready, Shutdown, decode_to_engine, encode
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.engines.placement import Placement
from forerun.server.engines.process import EngineTask
from forerun.server.engines.watchdog import Watchdog
from forerun.server.generation import Call, Generation, Place
from forerun.server.http.errors import EngineUnavailable
from forerun.server.settings import ServerSettings
from tests.golden_engine import golden_llm
from tests.server.support import ENGINE, LONG, PROMPT, LiveServer, flags, wait_for
from tests.server.test_life import exists, in_background

TIMEOUT = 0.6  # seconds


def watched(answers: Callable[[int], bool], seconds: float) -> float | None:
    """How long a process lives that answers some of the questions; None: longer than `seconds`."""

    async def run() -> float | None:
        watchdog, asked = Watchdog(0.1), 0

        def ask() -> None:
            nonlocal asked
            if answers(asked):
                watchdog.heard()
            asked += 1

        began = time.monotonic()
        try:
            await asyncio.wait_for(watchdog.watch(ask), seconds)
        except TimeoutError:
            return None
        return time.monotonic() - began

    return asyncio.run(run())


def test_silence_is_noticed_within_the_timeout() -> None:
    silent = watched(lambda number: False, 5)
    assert silent is not None and 0.09 <= silent < 1
    assert watched(lambda number: True, 0.3) is None
    some = watched(lambda number: number < 20, 5)
    assert some is not None and some >= 0.18  # answers to 20 questions, then silence


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    async def run() -> None:
        watchdog = Watchdog(0.1)
        watching = asyncio.ensure_future(watchdog.watch(lambda: None))
        await asyncio.sleep(0)
        time.sleep(0.2)  # twice the timeout, in which no answer could be read
        await asyncio.sleep(0.001)
        assert not watching.done()
        await asyncio.wait_for(watching, 5)

    asyncio.run(run())


def test_the_setting_is_checked() -> None:
    assert ServerSettings().watchdog_timeout == 300  # SGLang's
    assert ServerSettings(watchdog_timeout=0).watchdog_timeout == 0
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="watchdog_timeout must be"):
            ServerSettings(watchdog_timeout=wrong)


# --- a process that answers, and then hangs -------------------------------------------------------


def fake_engine(task: EngineTask, info: ExecutorInfo) -> None:
    """Ready at once; answers signs of life and nothing else."""
    os.setpgid(0, 0)
    offer_stacks(task.folder)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind(task.inbox)
    outbox.connect(task.outbox)
    rank = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    rank.start()
    (task.folder / "rank").write_text(str(rank.pid))
    outbox.send(encode(Ready(info)))
    while not isinstance(message := decode_to_engine(inbox.recv()), Shutdown):
        if isinstance(message, Ping):
            outbox.send(encode(Pong()))
    os.killpg(0, signal.SIGKILL)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are started as engines."""
    with golden_llm("DFLASH") as llm:
        info = llm.engine.info
    processes: list[Any] = []

    def start(task: EngineTask) -> Any:
        context = multiprocessing.get_context("fork")
        processes.append(context.Process(target=fake_engine, args=(task, info)))
        processes[-1].start()
        return processes[-1]

    monkeypatch.setattr(engine_link, "start_engine", start)
    return processes


def test_an_engine_that_hangs_is_replaced(
    started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        client = EngineClient(
            Placement(EngineConfig()), Path("m"), ServerMetrics(), watchdog_timeout=TIMEOUT
        )
        await client.start()
        await asyncio.sleep(2 * TIMEOUT)
        assert (client.state, client.restarts) == (EngineState.READY, 0)  # idle, and alive
        rank = int((client._folder / "rank").read_text())
        request = Request("r", (1, 2), SamplingParams(), seed=0, stop_ids=frozenset())
        call = Call([Generation(request, None, Place("r", 0, 0), False)], False, client.abort)
        client.submit(call.generations, call)
        for pid in (started[0].pid, rank):  # a stopped rank cannot see that its engine ends
            os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"not answered for 0.6 s \(watchdog_timeout\)"):
            await call.wait()
        assert time.monotonic() - stopped < 2 * TIMEOUT
        states = [client.state]
        async with asyncio.timeout(20):
            while states[-1] is not EngineState.READY:
                await asyncio.sleep(0.02)
                states.append(client.state)
        assert states[0] is EngineState.RESTARTING
        assert len(started) == 2 and client.restarts == client.metrics.watchdog_restarts == 1
        assert not started[0].is_alive()
        assert not running(rank)
        await client.close()

    with caplog.at_level(logging.ERROR, "forerun"):
        asyncio.run(run())
    where = [m for m in caplog.messages if m.startswith("Where the engine hangs")]
    assert len(where) == 2 and all("T (stopped)" in text for text in where)
    assert "in fake_engine" in where[0]


def running(pid: int) -> bool:
    """It may be a zombie that nobody has waited for."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_without_a_timeout_nothing_is_asked(started: list[Any]) -> None:
    async def run() -> None:
        client = EngineClient(
            Placement(EngineConfig()), Path("m"), ServerMetrics(), watchdog_timeout=0
        )
        await client.start()
        assert client._link is not None and not client._link.hangs
        await client.close()

    asyncio.run(run())


# --- real engines ---------------------------------------------------------------------------------

BODY = {"text": PROMPT, "sampling_params": LONG}
SMALL: dict[str, Any] = {**ENGINE, "max_total_tokens": 8192, "max_running_requests": 2}
# The first steps record what later ones repeat: 2 s, or more beside other work.
SECONDS = 8.0


def hang_and_recover(live: LiveServer, victim: int) -> str:
    """The process is stopped while a request runs. Returns what the request's client is told."""
    seeded = {"text": PROMPT, "sampling_params": {"max_new_tokens": 40, "sampling_seed": 5}}
    want = live.generate(**seeded)["output_ids"]
    engine = live.get("/server_info")["engine_pid"]
    thread, answers = in_background(lambda: live.http.post("/generate", json=BODY))
    live.wait_running()
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: live.http.get("/health").status_code == 503, 2 * SECONDS)
    thread.join(10)
    wait_for(lambda: live.http.get("/health").status_code == 200, 90)
    assert not exists(victim) and not exists(engine)
    assert live.generate(**seeded)["output_ids"] == want
    assert 'forerun_watchdog_restarts_total{model_name="bundled"} 1.0' in (
        live.http.get("/metrics").text
    )
    answer: httpx.Response = answers[0]
    assert answer.status_code == 503
    return str(answer.json()["error"]["message"])


@pytest.mark.exhaustive
def test_a_stopped_engine_is_replaced() -> None:
    with LiveServer(*flags(**SMALL, watchdog_timeout=SECONDS)) as live:
        told = hang_and_recover(live, live.get("/server_info")["engine_pid"])
        assert "has not answered for 8 s" in told
        assert "T (stopped)" in live.output
        assert "in run_engine" in live.output


@pytest.mark.exhaustive
def test_a_stopped_rank_ends_its_engine() -> None:
    """The other rank waits for it in a collective, and the engine for both."""
    with LiveServer(*flags(**SMALL, watchdog_timeout=SECONDS, tp_size=2)) as live:
        engine = live.get("/server_info")["engine_pid"]
        children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        ranks = [int(p) for p in children if b"spawn_main" in cmdline(int(p))]
        assert len(ranks) == 2
        assert "has not answered for 8 s" in hang_and_recover(live, ranks[1])
        assert live.output.count("in run_rank") >= 2


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
