"""Settings of the HTTP server; those of the engine are in `EngineConfig`."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from forerun.core.checks import of_type
from forerun.core.errors import ConfigError, nearest, shown
from forerun.server.engines.routing import METHODS
from forerun.server.engines.watchdog import WATCHDOG_TIMEOUT
from forerun.server.http.access import Access, names_in
from forerun.server.http.api_keys import ApiKeys
from forerun.server.logs import LOG_FORMATS
from forerun.server.parsers.registry import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS

API_KEY_VARIABLE = "FORERUN_API_KEY"
ADMIN_API_KEY_VARIABLE = "FORERUN_ADMIN_API_KEY"
_TOOL_PARSERS = ", ".join((*TOOL_PARSERS, NONE))
_REASONING_PARSERS = ", ".join((*REASONING_PARSERS, NONE))


def _setting(default: Any, help: str, kind: type = str) -> Any:
    return field(default=default, metadata={"help": help, "type": kind})


# Settings of text: an unset variable of a shell would make them the current folder, no name, or
# all interfaces.
NOT_EMPTY = (
    "host", "served_model_name", "api_key_file", "response_store", "batch_folder",
    "torch_profiler_dir",
)  # fmt: skip


@dataclass(frozen=True)
class ServerSettings:
    """Every field is a flag of `forerun serve`. Names follow SGLang and, for TLS, uvicorn."""

    host: str = _setting("127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces")
    port: int = _setting(30000, "Port to listen on; 0: any free one", int)
    api_key: str | None = _setting(
        None,
        "Required as a bearer token of every request but /health and the files of the page at /;"
        f" or set {API_KEY_VARIABLE}",
    )
    api_key_file: str | None = _setting(
        None,
        "File with more API keys: NAME KEY [max_requests=N] [requests_per_minute=N], one a line;"
        " read again on SIGHUP",
    )
    admin_api_key: str | None = _setting(
        None,
        "Key for what concerns all clients (flush_cache, abort_all, profiles), which other keys may"
        f" not use then; or set {ADMIN_API_KEY_VARIABLE}",
    )
    allowed_hosts: str | None = _setting(
        None,
        "Host headers that are served: names with commas between them or as JSON, *.example.com,"
        " or *; default: localhost, 127.0.0.1 and [::1] if the server listens on those, else all",
    )
    allowed_origins: str = _setting(
        "[]", "Other origins whose pages may use the server (CORS); a list as above, * for all"
    )
    allowed_methods: str = _setting("*", "Methods that pages of other origins may use (CORS)")
    allowed_headers: str = _setting("*", "Headers that pages of other origins may send (CORS)")
    served_model_name: str | None = _setting(
        None, "Name of the model in the OpenAI API; default: model_path"
    )
    tool_call_parser: str = _setting(
        AUTO, f"Format of tool calls: {_TOOL_PARSERS}; auto: as the chat template writes them"
    )
    reasoning_parser: str = _setting(
        AUTO, f"Format of reasoning: {_REASONING_PARSERS}; auto: as the chat template shows it"
    )
    max_body_bytes: int = _setting(32 * 2**20, "Largest body of a request", int)
    max_n: int = _setting(128, "Most completions per prompt", int)
    response_store: str | None = _setting(
        None, "SQLite file for the responses of /v1/responses; default: they are kept in memory"
    )
    max_stored_responses: int = _setting(
        1000, "Most responses and conversations that are stored, per API key; 0: none", int
    )
    max_stored_bytes: int = _setting(
        64 * 2**20, "Most bytes of stored responses and conversations, per API key", int
    )
    batch_folder: str | None = _setting(
        None, "Folder for the files of /v1/files and /v1/batches; default: there are none"
    )
    max_files: int = _setting(100, "Most files, and most batches, per API key", int)
    max_files_bytes: int = _setting(2**30, "Most bytes of all files, per API key", int)
    torch_profiler_dir: str | None = _setting(
        None, "Folder for the traces of /start_profile; default: there is no profiling"
    )
    dp_size: int = _setting(
        1, "Replicas: engines that share the requests, each on a GPU (or CPUs) of its own", int
    )
    load_balance_method: str = _setting(
        "cache_aware",
        "Which replica gets a request; cache_aware: the one that probably has its prefix, unless"
        " it is much busier than others; round_robin; shortest_queue: the one with the fewest"
        " requests",
    )
    max_queued_requests: int = _setting(
        8192, "Requests that may wait besides those that run; more are refused with 429", int
    )
    request_timeout: float | None = _setting(
        None, "Seconds after which a request is ended with 504; default: none", float
    )
    queue_timeout: float | None = _setting(
        None,
        "Seconds after which a request that still waits is ended with 503; default: none",
        float,
    )
    watchdog_timeout: float = _setting(
        WATCHDOG_TIMEOUT,
        "Seconds after which an engine that does not get through its step is taken to hang, killed"
        " and started again; 0: never",
        float,
    )
    enable_metrics: bool = _setting(True, "Prometheus metrics at /metrics", bool)
    log_format: str = _setting("plain", "Of the log: plain or json")
    log_requests: bool = _setting(
        False, "Log every request in detail, as log_requests_level says, at any --log-level", bool
    )
    log_requests_level: int = _setting(
        2,
        "0: figures; 1: sampling parameters too; 2: 2,048 characters of the texts too; 3: all",
        int,
    )
    ssl_keyfile: str | None = _setting(None, "TLS: file of the private key")
    ssl_certfile: str | None = _setting(None, "TLS: file of the certificate")
    ssl_keyfile_password: str | None = _setting(None, "TLS: password of the private key")
    ssl_ca_certs: str | None = _setting(None, "TLS: file of the authorities that sign clients")
    ssl_cert_reqs: int = _setting(
        int(ssl.CERT_NONE), "TLS: certificate of the client; 0: none, 1: optional, 2: required", int
    )
    ssl_ciphers: str | None = _setting(None, "TLS: ciphers, in OpenSSL's notation")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is not None or spec.default is not None:
                of_type(spec.metadata["type"], spec.name, value, ConfigError)
        for name in NOT_EMPTY:
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(f"{name} is empty; leave it out, or give it a value.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}.")
        for name in ("max_body_bytes", "max_n", "dp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}.")
        for name in (
            "max_queued_requests",
            "max_stored_responses",
            "max_stored_bytes",
            "max_files",
            "max_files_bytes",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}.")
        for name in ("request_timeout", "queue_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be > 0, got {value}.")
        if not 0 <= self.watchdog_timeout < math.inf:
            raise ConfigError(
                f"watchdog_timeout must be >= 0 and finite, got {self.watchdog_timeout}; 0: never."
            )
        _check_name("tool_call_parser", self.tool_call_parser, TOOL_PARSERS)
        _check_name("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        if self.load_balance_method not in METHODS:
            raise ConfigError(
                f"load_balance_method must be one of {', '.join(METHODS)}, got"
                f" {shown(self.load_balance_method)}.{nearest(self.load_balance_method, METHODS)}"
            )
        self._check_log()
        self._check_keys()
        self.access()
        self._check_tls()

    def _check_log(self) -> None:
        if self.log_format not in LOG_FORMATS:
            known = " or ".join(LOG_FORMATS)
            raise ConfigError(f"log_format must be {known}, got {shown(self.log_format)}.")
        if not 0 <= self.log_requests_level <= 3:
            raise ConfigError(
                f"log_requests_level must be in [0, 3], got {self.log_requests_level}."
            )

    def _check_keys(self) -> None:
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and (not key or not key.isascii()):
                raise ConfigError(f"{name} must be non-empty ASCII text.")
        self.api_keys()

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile.")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            value = getattr(self, name)
            if value is not None and not Path(value).is_file():
                raise ConfigError(f"{name} {shown(value)} is not a file.")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServerSettings:
        """Makes them from flags; keys also from the environment.

        Raises:
            ConfigError: a value is out of range, or two values contradict each other.
        """
        variables = {"api_key": API_KEY_VARIABLE, "admin_api_key": ADMIN_API_KEY_VARIABLE}
        given = {name: os.environ.get(variable) for name, variable in variables.items()}
        return cls(**{name: key for name, key in given.items() if key} | dict(values))

    @classmethod
    def specs(cls) -> tuple[Field[Any], ...]:
        """Its fields, for flags."""
        return fields(cls)

    def public(self) -> dict[str, Any]:
        """The settings without secrets."""
        secret = ("api_key", "admin_api_key", "ssl_keyfile_password")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in secret}

    def api_keys(self) -> ApiKeys | None:
        """The keys that are needed; None: there are none.

        Raises:
            ConfigError: the file cannot be used, or two keys are equal.
        """
        if self.api_key is self.admin_api_key is self.api_key_file is None:
            return None
        return ApiKeys(self.api_key, self.admin_api_key, self.api_key_file)

    def access(self) -> Access:
        """Which hosts and origins are served.

        Raises:
            ConfigError: a list cannot be read.
        """
        hosts = (
            None if self.allowed_hosts is None else names_in("allowed_hosts", self.allowed_hosts)
        )
        origins = names_in("allowed_origins", self.allowed_origins)
        for name in ("allowed_methods", "allowed_headers"):
            names_in(name, getattr(self, name))
        return Access.of(self.host, hosts, origins)

    def url(self, host: str, port: int) -> str:
        """URL of the server, which listens on this address."""
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_name(setting: str, name: str, parsers: Collection[str]) -> None:
    known = (AUTO, NONE, *parsers)
    if name not in known:
        raise ConfigError(
            f"{setting} must be one of {', '.join(known)}, got {shown(name)}.{nearest(name, known)}"
        )


assert all(f.default is not MISSING for f in ServerSettings.specs())
