"""The application: an ingress that routes requests, and replicas of a whole server behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.llm.setup import checked_config
from forerun.server.settings import ServerSettings

ENGINE, INGRESS = "ForerunEngine", "Forerun"  # names of the deployments, for Serve's YAML
# Of the server's settings those that are Serve's here, and how they are set there.
SERVES_OWN = {
    "host": "http_options.host",
    "port": "http_options.port",
    "ssl_keyfile": "http_options.ssl_keyfile",
    "ssl_certfile": "http_options.ssl_certfile",
    "dp_size": "num_replicas",
    "load_balance_method": "request_router_config",
}


@dataclass(frozen=True)
class Arguments:
    """What `deployment` is given, by where it goes."""

    server: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    num_replicas: int | None = None
    autoscaling_config: dict[str, Any] | None = None
    num_gpus: float | None = None  # of a replica
    num_cpus: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """
        Raises:
            ConfigError: an unknown or invalid setting.
        """
        of_ray = {f.name for f in fields(cls)} - {"server", "engine"}
        of_server = {f.name for f in ServerSettings.specs()}
        parts: dict[str, dict[str, Any]] = {"ray": {}, "server": {}, "engine": {}}
        for name, value in given.items():
            if name in SERVES_OWN:
                raise ConfigError(f"{name} is Ray Serve's: set {SERVES_OWN[name]} there instead.")
            part = "ray" if name in of_ray else "server" if name in of_server else "engine"
            parts[part][name] = value
        ServerSettings.of(parts["server"])
        if checked_config(parts["engine"]).nnodes > 1:
            raise ConfigError("nnodes is not available with Ray Serve: an engine is one actor.")
        made = cls(parts["server"], parts["engine"], **parts["ray"])
        if made.num_replicas is not None and made.autoscaling_config is not None:
            raise ConfigError("num_replicas and autoscaling_config exclude each other; drop one.")
        return made

    @property
    def resources(self) -> dict[str, Any]:
        """Resources of a replica's actor, which has all its engine's ranks: a GPU per rank."""
        ranks = 0 if self.engine.get("device") == "cpu" else self.engine.get("tp_size", 1)
        gpus = ranks if self.num_gpus is None else self.num_gpus
        cpus = 1 if self.num_cpus is None else self.num_cpus
        return {"num_cpus": cpus, "num_gpus": gpus}

    @property
    def scaling(self) -> dict[str, Any]:
        if self.autoscaling_config is not None:
            return {"autoscaling_config": self.autoscaling_config}
        return {"num_replicas": 1 if self.num_replicas is None else self.num_replicas}


def deployment(args: dict[str, Any]) -> Any:
    """A Ray Serve application.

    Args:
        args: settings of the engine and the server, as of `forerun serve`; and `num_replicas` or
            `autoscaling_config`, `num_gpus` and `num_cpus` per replica.

    Raises:
        ConfigError: Ray is not installed, or a setting is invalid.
    """
    arguments = Arguments.of(args)
    try:
        from ray.serve.config import RequestRouterConfig

        from ray import serve
    except ImportError:
        raise ConfigError(
            "forerun.ray needs Ray Serve; install it: pip install 'forerun[ray]'."
        ) from None
    from forerun.ray.engine import Engine
    from forerun.ray.ingress import Ingress

    router = RequestRouterConfig(request_router_class="forerun.ray.prefix_router:PrefixRouter")
    slots = arguments.engine.get("max_running_requests") or DEFAULT_SLOTS
    engine = serve.deployment(Engine).options(
        name=ENGINE,
        ray_actor_options=arguments.resources | {"runtime_env": RUNTIME_ENV},
        request_router_config=router,
        max_ongoing_requests=2 * slots,  # the others wait in the ingress, for any replica
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        **arguments.scaling,
    )
    ingress = serve.deployment(Ingress).options(
        name=INGRESS,
        ray_actor_options={"num_cpus": 0, "runtime_env": RUNTIME_ENV},
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )
    return ingress.bind(engine.bind(arguments.server, arguments.engine))


DEFAULT_SLOTS = 256
MAX_REQUESTS = 10_000  # that an ingress holds
DRAIN_SECONDS = 600.0  # that a replica may take to finish its requests
HEALTH_SECONDS = 2.0
# Requests run in the actor's main thread: Serve's own threads double the CPU time of a message.
RUNTIME_ENV = {
    "env_vars": {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }
}
assert set(SERVES_OWN) <= {f.name for f in ServerSettings.specs()}
assert not {f.name for f in EngineConfig.settings()} & {"num_replicas", "num_gpus", "num_cpus"}
