"""An executor in a separate process: plans and results are sent as bytes over a pipe.

A message is a tag byte and MessagePack (`core/codec.py`). The child launches a plan as soon as it
arrives, so steps overlap as in one process. Grammars are compiled in the child too; they have a
pipe and a thread of their own, so that steps do not wait for them.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.codec import decode_grammar, decode_info, decode_plan, decode_result, encode
from forerun.core.errors import BusyError, ConfigError, ExecutorError, RequestError
from forerun.core.executor import Executor, ExecutorInfo, PendingStep
from forerun.core.grammar import Grammar
from forerun.core.plan import StepPlan, StepResult
from forerun.platform.signals import without_ctrl_c

PLAN, DISABLE_DRAFTS, CLOSE = b"p", b"d", b"c"  # to the child
INFO, RESULT, REFUSED, FAILED, BUSY = b"i", b"r", b"x", b"f", b"w"  # from the child
PREPARE = b""  # to the thread for grammars: `prepare_grammars`
COMPILED = b"g"  # from the child's thread for grammars, or REFUSED, BUSY or FAILED
WHO = "The executor process"  # in errors
COMPILING_SECONDS = 30.0  # for which a grammar waits for others
CLOSE_SECONDS = 10.0  # until a child that does not exit is killed


class ProcessExecutor:
    """The engine's side. Results arrive in the order of the plans."""

    def __init__(self, connection: Connection, grammars: Connection, process: BaseProcess) -> None:
        """Waits until the child is ready.

        Raises:
            ConfigError: the settings are invalid.
            ExecutorError: the child failed to start.
        """
        self._connection, self._grammars, self._process = connection, grammars, process
        self._compiling = threading.Lock()  # a request and its answer in `_grammars`
        self._pending: deque[RemoteStep] = deque()
        self._info = decode_info(self._receive(INFO))

    @classmethod
    def start(
        cls, config: EngineConfig, model_path: Path, overlap_depth: int | None = None
    ) -> ProcessExecutor:
        """Starts `build_executor` in a child process, with `spawn`, which CUDA requires."""
        connection, grammars, process = spawn(_serve, (config, str(model_path), overlap_depth))
        try:
            return cls(connection, grammars, process)
        except BaseException:
            process.kill()
            process.join()
            raise

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> PendingStep:
        self._send(PLAN + encode(plan))
        step = RemoteStep(self.wait)
        self._pending.append(step)
        return step

    def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        self._ask_grammars(encode(grammar))

    def prepare_grammars(self) -> None:
        self._info.explain["grammars"] = self._ask_grammars(PREPARE).decode()

    def _ask_grammars(self, message: bytes) -> bytes:
        with waiting_for(self._compiling):
            try:
                self._grammars.send_bytes(message)
                answer = self._grammars.recv_bytes()
            except (EOFError, OSError) as error:
                raise self._ended() from error
        return compiled_body(answer, WHO)

    def can_resume(self, rid: str) -> bool:
        """True: the other process holds a request again if its mask is not computed yet."""
        return True

    def disable_drafts(self) -> None:
        self._send(DISABLE_DRAFTS)

    def close(self) -> None:
        """Ends the child process; repeated calls do nothing."""
        if not self._connection.closed:
            if self._process.is_alive():
                self._send(CLOSE)
            self._process.join(CLOSE_SECONDS)
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._grammars.close()

    def wait(self, step: RemoteStep) -> StepResult:
        """Receives results up to that of `step`."""
        while step.value is None:
            self._pending.popleft().value = decode_result(self._receive(RESULT))
        return step.value

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def _receive(self, expected: bytes) -> bytes:
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        return message_body(message, expected, WHO)

    def _ended(self) -> ExecutorError:
        self._process.join(CLOSE_SECONDS)
        return ExecutorError(
            f"The executor process ended unexpectedly (exit code {self._process.exitcode})."
        )


@dataclass(eq=False)
class RemoteStep:
    """A step that another process runs."""

    wait: Callable[[RemoteStep], StepResult]
    value: StepResult | None = field(default=None)

    def result(self) -> StepResult:
        """
        Raises:
            ExecutorError: the step failed, or the process ended.
        """
        return self.wait(self)


def spawn(
    target: Callable[..., None], args: tuple[Any, ...], name: str | None = None
) -> tuple[Connection, Connection, BaseProcess]:
    """Starts `target(connection, grammars, *args)` in a process, with `spawn`, which CUDA requires.

    Returns:
        This side's ends of both pipes, and the process.
    """
    context = multiprocessing.get_context("spawn")
    connection, child_connection = context.Pipe()
    grammars, child_grammars = context.Pipe()
    process = context.Process(
        target=target, args=(child_connection, child_grammars, *args), name=name, daemon=True
    )
    with without_ctrl_c():
        process.start()
    for end in (child_connection, child_grammars):
        end.close()  # so that the child's ends of the pipes close with the child
    return connection, grammars, process


def message_body(message: bytes, expected: bytes, who: str) -> bytes:
    """
    Raises:
        ConfigError: the settings are invalid.
        ExecutorError: it is another message; `who` failed.
    """
    tag, body = message[:1], message[1:]
    if tag == REFUSED:
        raise ConfigError(body.decode())
    if tag != expected:
        raise ExecutorError(f"{who} failed: {body.decode(errors='replace')}")
    return body


@contextmanager
def waiting_for(compiling: threading.Lock) -> Iterator[None]:
    """The block asks for a grammar; one at a time does.

    Raises:
        BusyError: others take too long.
    """
    if not compiling.acquire(timeout=COMPILING_SECONDS):
        raise BusyError("Other grammars are taking too long to compile; try again later.")
    try:
        yield
    finally:
        compiling.release()


def compiled_body(answer: bytes, who: str) -> bytes:
    """
    Raises:
        RequestError: the grammar is invalid.
        BusyError: it cannot be compiled now.
        ExecutorError: `who` failed.
    """
    if answer[:1] == BUSY:
        raise BusyError(answer[1:].decode())
    if answer[:1] == REFUSED:
        raise RequestError(answer[1:].decode())
    if answer[:1] != COMPILED:
        raise ExecutorError(f"{who} failed: {answer[1:].decode()}")
    return answer[1:]


# --- the child process --------------------------------------------------------------------------


def _serve(
    connection: Connection,
    grammars: Connection,
    config: EngineConfig,
    model_path: str,
    overlap_depth: int | None,
) -> None:
    from forerun.executor.build import build_executor

    try:
        executor = build_executor(config, Path(model_path), overlap_depth)
    except ConfigError as error:
        connection.send_bytes(REFUSED + str(error).encode())
        return
    threading.Thread(target=compile_grammars, args=(grammars, executor), daemon=True).start()
    connection.send_bytes(INFO + encode(executor.info))
    try:
        _run_plans(connection, executor)
    except (EOFError, BrokenPipeError):
        return  # the parent has exited
    except Exception as error:
        connection.send_bytes(FAILED + f"{type(error).__name__}: {error}".encode())
        raise
    finally:
        executor.close()


def compile_grammars(connection: Connection, executor: Executor) -> None:
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


def _run_plans(connection: Connection, executor: Executor) -> None:
    pending: deque[PendingStep] = deque()
    while True:
        # Launch available plans before waiting for the result of an older one.
        if pending and not connection.poll():
            connection.send_bytes(RESULT + encode(pending.popleft().result()))
            continue
        message = connection.recv_bytes()
        if message[:1] == PLAN:
            pending.append(executor.launch(decode_plan(message[1:])))
        elif message[:1] == DISABLE_DRAFTS:
            executor.disable_drafts()
        else:
            return
