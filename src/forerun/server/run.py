"""Runs a server until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import uvicorn

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.engine.tracing import start_tracing
from forerun.llm.setup import load_tokenizer
from forerun.platform.garbage import freeze_loaded
from forerun.platform.open_files import allow_connections
from forerun.server.app import build_app
from forerun.server.engines.replicas import Replicas
from forerun.server.logs import set_up_logging
from forerun.server.service import Service
from forerun.server.settings import ServerSettings
from forerun.server.text import TextService
from forerun.server.tracing import ServerTracing

log = logging.getLogger("forerun")

TICK = 0.05  # seconds between two looks at whether the last request has ended
GRACE_SECONDS = 5  # for connections to close once all requests have ended
KEEP_ALIVE_SECONDS = 75
CIPHERS = "TLSv1"  # uvicorn's default: ciphers of TLS 1.0 and newer; OpenSSL drops the old ones

OnReady = Callable[[str, dict[str, Any]], None]


def run_server(
    settings: ServerSettings, config: EngineConfig, target: Path, on_ready: OnReady
) -> int:
    """Serves until a signal, or until the engine has died too often. Returns the exit code.

    Args:
        config: with local paths.
        target: folder of the target.
        on_ready: called with the URL and what was chosen at start (`Engine.explain`).

    Raises:
        ConfigError: a setting, model or address cannot be used.
        ServerStartError: the engine process ended before it was ready.
    """
    slots = settings.dp_size * (config.max_running_requests or 0)
    allow_connections(slots + settings.max_queued_requests)
    with _bind(settings) as bound:
        service = make_service(settings, config, target)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_Run(service, on_ready).run(bound))
        finally:
            service.close()


def make_service(settings: ServerSettings, config: EngineConfig, target: Path) -> Service:
    """A server without an address; its engines are not started yet.

    Raises:
        ConfigError: a setting or model cannot be used.
    """
    set_up_logging(config.log_level, settings.log_format)
    spans = start_tracing(config)
    text = TextService(load_tokenizer(config, target))
    engine = Replicas(
        config,
        target,
        settings.dp_size,
        settings.load_balance_method,
        settings.log_format,
        settings.watchdog_timeout,
    )
    service = Service(settings, engine, text, ServerTracing(spans) if spans else None)
    _ = service.embedder  # refuses what cannot be read
    return service


def _bind(settings: ServerSettings) -> socket.socket:
    """The listening socket, before anything is loaded.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened on ({error.strerror or error});"
            " choose another --port or --host."
        ) from None
    return bound


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """httptools where there is one; h11 has limits of its own."""
    try:
        from forerun.server.http.protocol import LimitedProtocol
    except ImportError:
        return "h11"
    return LimitedProtocol


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class _Run:
    """One run of a server. The first signal drains, the second one ends at once."""

    def __init__(self, service: Service, on_ready: OnReady) -> None:
        self._service, self._engine, self._on_ready = service, service.engine, on_ready
        self._signals = 0
        self._stop = asyncio.Event()
        self._server: _Server | None = None

    async def run(self, bound: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if self._service.api_keys is not None:
            loop.add_signal_handler(signal.SIGHUP, self._service.api_keys.reload)
        try:
            self._server = _Server(self._uvicorn_config())
            if not await self._start():
                return 130
            return await self._serve(self._server, bound)
        finally:
            await self._engine.close(at_once=self._signals > 1)

    async def _start(self) -> bool:
        """Builds the engines; False if a signal came first."""
        starting = asyncio.ensure_future(self._engine.start())
        await self._first(starting)
        if starting.done():
            starting.result()
            return True
        self._signals = 2  # nothing is served yet: there is nothing to wait for
        starting.cancel()
        await asyncio.wait({starting})
        return False

    async def _serve(self, server: _Server, bound: socket.socket) -> int:
        serving = asyncio.ensure_future(server.serve([bound]))
        gave_up = asyncio.ensure_future(self._engine.gave_up())
        listening = asyncio.ensure_future(server.listening.wait())
        try:
            await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            host, port = bound.getsockname()[:2]
            url = self._service.settings.url(host, port)
            freeze_loaded()
            for begin in self._service.when_ready:
                begin()
            self._on_ready(url, self._service.explain)
            await self._first(serving, gave_up)
            if gave_up.done():
                log.critical("%s The server ends.", gave_up.result())
            elif self._stop.is_set():
                await self._drain()
            server.should_exit = True
            await serving
            return 1 if gave_up.done() or self._signals > 1 else 0
        finally:
            for task in (gave_up, listening):
                task.cancel()

    async def _drain(self) -> None:
        """Waits for the requests in flight; new ones get 503 meanwhile."""
        for stop in self._service.when_stopping:
            stop()
        self._service.draining = True
        if self._engine.num_requests:
            log.warning(
                "Stopping after %d requests; a second signal stops at once.",
                self._engine.num_requests,
            )
        await self._until_no_requests()
        end = time.monotonic() + GRACE_SECONDS
        while self._engine.num_questions and self._signals < 2 and time.monotonic() < end:
            await asyncio.sleep(TICK)
        self._engine.end_questions()
        await self._until_no_requests()  # those whose grammars were being compiled

    async def _until_no_requests(self) -> None:
        """Waits until no request runs, or for a second signal."""
        while self._engine.num_requests and self._signals < 2:
            await asyncio.sleep(TICK)

    async def _first(self, *futures: asyncio.Future[Any]) -> None:
        """Waits for one of the futures, or a signal."""
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({*futures, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1 and self._server is not None:
            self._server.force_exit = True

    def _uvicorn_config(self) -> uvicorn.Config:
        """
        Raises:
            ConfigError: the TLS files do not load.
        """
        settings, level = self._service.settings, self._engine.config.log_level
        config = uvicorn.Config(
            build_app(self._service),
            # It warns of every malformed request, which any client could fill a disk with.
            log_level="error" if level == "warning" else level,
            log_config=None,  # its messages go where ours go
            access_log=False,  # `request_log.py` has a line for each request
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            http=_protocol(),
            ws="none",
            lifespan="off",
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile_password=settings.ssl_keyfile_password,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
            ssl_ciphers=settings.ssl_ciphers or CIPHERS,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"The TLS files cannot be used: {error}") from error
        return config
