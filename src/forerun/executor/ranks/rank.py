"""One tensor-parallel rank: a process that builds an executor and runs the plans it is sent.

All ranks run the same plans in the same order, so that their collectives meet. What depends on a
step's result must be known before the same launch on each of them: a plan is launched when the
results of all plans but the last `overlap_depth` have been read, as on the engine's side.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.config.engine_config import EngineConfig
from forerun.core.codec import decode_grammar, decode_lengths, decode_plan, decode_profile, encode
from forerun.core.errors import BusyError, ConfigError, RequestError
from forerun.core.executor import Executor
from forerun.executor.ranks.messages import (
    BUSY,
    CHECK_PROFILE,
    COMPILED,
    DISABLE_DRAFTS,
    FAILED,
    INFO,
    PLAN,
    PREPARE,
    REFUSED,
    RESULT,
    SIMULATE,
    START_PROFILE,
    STOP_PROFILE,
)
from forerun.executor.ranks.plan_ring import PlanRing, RingReader
from forerun.executor.tensor_parallel import config_of_rank
from forerun.layers.torch_communicator import HOST, RankPlace
from forerun.platform.cpu_threads import logical_cores
from forerun.platform.garbage import freeze_loaded
from forerun.platform.stacks import offer_stacks

if TYPE_CHECKING:
    from forerun.executor.device_executor import DeviceExecutor, PendingDeviceStep

POLL_SECONDS = 2e-5  # between two looks whether the device has completed a step
SPIN_SECONDS = 1e-3  # for which a rank with nothing to do looks for the next plan


@dataclass(frozen=True)
class RankTask:
    """What a rank's process is started with."""

    place: RankPlace
    config: EngineConfig
    model_path: str
    overlap_depth: int | None


def rank_tasks(
    config: EngineConfig, model_path: Path, overlap_depth: int | None, store_port: int
) -> list[RankTask]:
    """Returns the tasks of this node's ranks. `store_port`: of the `meeting_point`, on node 0."""
    nodes = config.nodes
    peer_memory = nodes.count == 1 and not config.disable_custom_all_reduce
    store = (HOST if nodes.address is None else nodes.address[0], store_port)
    tasks = []
    for rank in nodes.ranks:
        place = RankPlace(
            rank,
            config.tp_size,
            store,
            config.dist_timeout,
            peer_memory,
            fixed_order=bool(config.enable_deterministic_inference),
        )
        own = config_of_rank(config, rank)
        tasks.append(RankTask(place, own, str(model_path), overlap_depth))
    return tasks


def run_rank(
    connection: Connection, grammars: Connection, task: RankTask, ring: PlanRing, index: int
) -> None:
    """The body of the process, the reader `index` of `ring`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    offer_stacks()
    plans = RingReader(ring, index, connection)
    try:
        _serve(task, plans, connection, grammars)
    except (EOFError, BrokenPipeError):
        code = 0  # the parent has exited
    except ConfigError as error:
        code = 1
        connection.send_bytes(REFUSED + str(error).encode())
    except Exception as error:  # noqa: BLE001  raised again in the parent
        code = 1
        connection.send_bytes(FAILED + f"{type(error).__name__}: {error}".encode())
    else:
        code = 0
    # At once: other ranks may be gone, and the process group would wait for them.
    os._exit(code)


def _end_with_parent() -> None:
    """Ends this process with its parent, though it may wait in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _serve(task: RankTask, plans: RingReader, connection: Connection, grammars: Connection) -> None:
    from forerun.executor.build import build_executor
    from forerun.executor.tensor_parallel import check_ranks, rank_device
    from forerun.layers.torch_communicator import TorchCommunicator

    place = task.place
    check_ranks(task.config)
    device = rank_device(task.config, place.rank)
    plans.spin_seconds = _spin_seconds(device.type, len(task.config.nodes.ranks))
    comm = TorchCommunicator(place, device)
    executor = build_executor(task.config, Path(task.model_path), task.overlap_depth, comm)
    executor.recorder.rank = place.rank
    threading.Thread(target=_compile_grammars, args=(grammars, executor), daemon=True).start()
    freeze_loaded()
    connection.send_bytes(INFO + encode(executor.info))
    report = connection.send_bytes if place.rank == 0 else None
    _run_plans(plans, executor, report)


def _compile_grammars(connection: Connection, executor: Executor) -> None:
    """Body of a thread: answers what arrives until the parent has exited."""
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return  # the parent has exited
        try:
            if message == PREPARE:
                executor.prepare_grammars()
                answer = COMPILED + str(executor.info.explain["grammars"]).encode()
            elif message[:1] == CHECK_PROFILE:
                executor.check_profile(message[1:].decode())
                answer = COMPILED
            else:
                executor.compile_grammar(decode_grammar(message))
                answer = COMPILED
        except BusyError as error:
            answer = BUSY + str(error).encode()
        except RequestError as error:
            answer = REFUSED + str(error).encode()
        except Exception as error:  # noqa: BLE001  raised again in the parent
            answer = FAILED + f"{type(error).__name__}: {error}".encode()
        connection.send_bytes(answer)


def _spin_seconds(device: str, ranks: int) -> float:
    """0 where the cores are needed: by steps on a CPU, or with fewer than two for each of this
    machine's `ranks` and the engine.
    """
    return 0.0 if device == "cpu" or logical_cores() < 2 * (ranks + 1) else SPIN_SECONDS


def _run_plans(
    plans: RingReader, executor: DeviceExecutor, report: Callable[[bytes], None] | None
) -> None:
    depth = executor.info.limits.overlap_depth
    pending: deque[PendingDeviceStep] = deque()
    launched = False  # a step, since the last look whether the device has ended the one before

    def read_oldest(late: bool) -> None:
        result = pending.popleft().result()
        if report is not None:
            report(RESULT + encode(replace(result, late=late)))

    while True:
        # The next plan comes while the device works on this one: neither waits for the other.
        if pending and pending[0].is_done:
            read_oldest(late=launched and len(pending) > 1)
            continue
        launched = False
        message = plans.take() if pending else plans.receive()
        if message is None:
            time.sleep(POLL_SECONDS)
        elif message[:1] == PLAN:
            while len(pending) > depth:
                read_oldest(late=False)
            pending.append(executor.launch(decode_plan(message[1:])))
            launched = True
        elif message[:1] == DISABLE_DRAFTS:
            executor.disable_drafts()
        elif message[:1] == SIMULATE:
            executor.simulate_accept_lengths(decode_lengths(message[1:]))
        elif message[:1] == START_PROFILE:
            executor.start_profile(decode_profile(message[1:]))
        elif message[:1] == STOP_PROFILE:
            executor.stop_profile()
        else:
            return
