"""What becomes of requests when a replica dies, where replicas run; no engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.engine.metrics import EngineMetrics, combined
from forerun.server.engines import placement
from forerun.server.engines.client import EngineState
from forerun.server.engines.messages import Abort, Advance, Submit, ToEngine
from forerun.server.engines.placement import place_replicas
from forerun.server.engines.replicas import Replicas
from forerun.server.engines.routing import Load, Router
from forerun.server.generation import Call, Generation, Place
from forerun.server.http.errors import EngineUnavailable
from forerun.server.prompt import Prompt
from tests.golden_engine import CASES, golden_llm

PARAMS = SamplingParams()


class Link:
    """Of an engine that never answers."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def close(self, at_once: bool) -> None:
        return None


@pytest.fixture
def replicas() -> Any:
    made = Replicas(EngineConfig(device="cpu"), Path("model"), count=2)
    made._router = Router("cache_aware", 4)
    for index in range(2):
        made._router.add(index, 1000)
    for client in made.clients:
        client._link, client.state = Link(), EngineState.READY  # type: ignore[assignment]
    return made


def started(replicas: Replicas, *rids: str, stream: bool = False) -> Call:
    """A call of one generation per id."""
    ones = []
    for rid in rids:
        request = Request(rid, (1, 2), PARAMS, seed=0, stop_ids=frozenset())
        ones.append(Generation(request, None, Place(rid, 0, 0), stream=stream))
        ((ones[-1].replica, _),) = replicas.place([Prompt([len(ones)], PARAMS)])
    call = Call(ones, stream, replicas.abort)
    replicas.submit(call)
    return call


def advance(replicas: Replicas, generation: Generation, tokens: list[int]) -> None:
    client = replicas.clients[generation.replica]
    client._advance(
        Advance(generation.rid, tokens, [], [], 0, 0, number=generation.number), now=1.0
    )


def die(replicas: Replicas, index: int) -> None:
    client = replicas.clients[index]
    client.state = EngineState.RESTARTING
    client._lose("The engine process ended.")


def submitted(replicas: Replicas, index: int) -> list[str]:
    link: Any = replicas.clients[index]._link
    return [r.rid for m in link.sent if isinstance(m, Submit) for r in m.requests]


def test_a_request_that_nobody_has_seen_runs_again_elsewhere(replicas: Replicas) -> None:
    whole, stream = started(replicas, "whole"), started(replicas, "stream", stream=True)
    (one,), (two,) = whole.generations, stream.generations
    one.replica, two.replica = 0, 1
    advance(replicas, one, [7, 8])  # has arrived, and waits for its end
    assert (submitted(replicas, 0), submitted(replicas, 1)) == (["whole"], ["stream"])
    die(replicas, 0)
    assert submitted(replicas, 1) == ["stream", "whole"]
    assert (one.record.output, one.replica, one.restarts) == ([], 1, 1)
    assert whole.error is None
    advance(replicas, one, [7])
    assert one.record.output == [7]
    assert replicas.metrics.retried == 1
    assert replicas.clients[0].load == Load()
    die(replicas, 1)  # none is left
    assert [str(call.error) for call in (whole, stream)] == [
        "The engine process ended. The request was lost."
    ] * 2
    assert replicas.num_requests == 0
    assert replicas.metrics.finished["error"] == 2


def test_a_stream_that_was_shown_fails(replicas: Replicas) -> None:
    call = started(replicas, "shown", stream=True)
    advance(replicas, call.generations[0], [7])
    assert call.generations[0].take() is not None
    die(replicas, 0)
    assert isinstance(call.error, EngineUnavailable)
    assert submitted(replicas, 1) == []


def test_a_request_runs_again_once(replicas: Replicas) -> None:
    """It may be what the replica died of."""
    call = started(replicas, "deadly")
    die(replicas, 0)
    replicas.clients[0].state = EngineState.READY  # it is back
    die(replicas, 1)
    assert isinstance(call.error, EngineUnavailable)


def test_a_call_fails_as_a_whole(replicas: Replicas) -> None:
    """A part of it on another replica is ended, and counts as an error, not as an abort."""
    call = started(replicas, "here", "there", stream=True)
    here, there = call.generations
    assert (here.replica, there.replica) == (0, 1)
    advance(replicas, here, [7])
    here.take()
    die(replicas, 0)
    call.close()
    link: Any = replicas.clients[1]._link
    assert [message.rids for message in link.sent if isinstance(message, Abort)] == [["there"]]
    assert replicas.metrics.finished["error"] == 2
    assert sum(replicas.metrics.aborted.values()) == 0


def test_nothing_runs_again_while_the_server_ends(replicas: Replicas) -> None:
    call = started(replicas, "late")
    link: Any = replicas.clients[1]._link
    asyncio.run(replicas.close())
    assert "shutting down" in str(call.error)
    assert link.sent == []


def test_a_replica_that_died_before_the_request_was_sent_is_not_used(replicas: Replicas) -> None:
    request = Request("one", (1, 2), PARAMS, seed=0, stop_ids=frozenset())
    generation = Generation(request, None, Place("one", 0, 0), stream=False)
    die(replicas, 0)
    replicas.submit(Call([generation], False, replicas.abort))
    assert submitted(replicas, 1) == ["one"]
    die(replicas, 1)
    with pytest.raises(EngineUnavailable, match="restarting"):
        replicas.place([Prompt([1], PARAMS)])


def test_loads_follow_requests(replicas: Replicas) -> None:
    call = started(replicas, "a", "b", "c")
    assert [client.load for client in replicas.clients] == [Load(2, 4), Load(1, 2)]
    advance(replicas, call.generations[0], [7])  # its prompt is done
    assert replicas.clients[0].load == Load(2, 2)
    call.close()
    assert [client.load for client in replicas.clients] == [Load(), Load()]


def test_counters_never_go_back(replicas: Replicas) -> None:
    llm = golden_llm("DFLASH")
    with llm:
        llm.generate(input_ids=[CASES[0]["prompt"]], sampling_params={"max_new_tokens": 9})
        metrics = llm.engine.metrics()
    for client in replicas.clients:
        client.snapshot = metrics
    both = replicas.engine_metrics()
    assert both is not None
    assert both.decode_tokens == 2 * metrics.decode_tokens > 0
    assert both.accepted == [2 * count for count in metrics.accepted]
    assert both.steps_by_width == {w: 2 * n for w, n in metrics.steps_by_width.items()}
    assert both.decode_seconds.counts == [2 * n for n in metrics.decode_seconds.counts]
    assert both.load["num_pages"] == 2 * metrics.load["num_pages"]
    assert both.load["page_size"] == metrics.load["page_size"]
    die(replicas, 0)
    one = replicas.engine_metrics()
    assert one is not None
    assert one.load == metrics.load
    assert without_load(one) == without_load(both)
    assert combined([metrics]) == metrics


def without_load(metrics: EngineMetrics) -> dict[str, Any]:
    counters = vars(metrics).copy()
    for name in ("load", "waiting_by_priority", "mixed_prefill_tokens"):
        counters.pop(name)
    return counters


def test_where_replicas_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(placement, "resolve_device", lambda name: gpu)
    places = place_replicas(EngineConfig(), 2)
    assert [place.config.device for place in places] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="dp_size 3 needs 3 GPUs, and this machine shows 2"):
        place_replicas(EngineConfig(), 3)
    with pytest.raises(ConfigError, match="'cuda:1' is one GPU, and dp_size 2 needs 2"):
        place_replicas(EngineConfig(device="cuda:1"), 2)
    assert place_replicas(EngineConfig(device="cuda:1"), 1)[0].config.device == "cuda:1"
    with pytest.raises(ConfigError, match="dp_size 2 of tp_size 2 needs 4 GPUs"):
        place_replicas(EngineConfig(tp_size=2), 2)
    nodes = EngineConfig(tp_size=2, nnodes=2, dist_init_addr="a:1")
    with pytest.raises(ConfigError, match="dp_size 2 is not available with nnodes 2"):
        place_replicas(nodes, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    places = place_replicas(EngineConfig(tp_size=2), 2)
    assert [place.config.device for place in places] == ["cuda:0", "cuda:2"]
