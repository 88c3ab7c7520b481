"""Settings of `forerun bench serving`, under SGLang's names where SGLang has them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forerun.cli.counts import check_counts
from forerun.core.errors import ConfigError, nearest, shown

BACKENDS: Final = ("sglang", "openai", "openai-chat")
DATASETS: Final = ("python", "word-problems", "random", "sharegpt")
GOALS: Final = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}  # e2el: vLLM's name
AT_LEAST_ONE: Final = (
    "num_prompts",
    "output_len",
    "random_input_len",
    "random_output_len",
    "max_concurrency",
)


def setting(default: Any, help: str, panel: str) -> Any:
    return field(default=default, metadata={"help": help, "panel": panel})


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """One benchmark. `check()` before use."""

    base_url: str | None = setting(None, "Server; overrides --host and --port", "Server")
    host: str = setting("127.0.0.1", "Host of the server", "Server")
    port: int = setting(30000, "Port of the server", "Server")
    backend: str = setting("sglang", f"API to use ({', '.join(BACKENDS)})", "Server")
    model: str | None = setting(None, "Model name to send; default: the server's first", "Server")
    api_key: str | None = setting(None, "Bearer token; default: $OPENAI_API_KEY", "Server")
    timeout: float = setting(3600.0, "Seconds until a request counts as failed", "Server")
    flush_cache: bool = setting(False, "Empty the server's prefix cache before a run", "Server")

    dataset_name: str = setting("python", f"Prompts ({', '.join(DATASETS)})", "Requests")
    dataset_path: str | None = setting(None, "ShareGPT-format JSON file", "Requests")
    num_prompts: int = setting(100, "Requests of a run", "Requests")
    output_len: int | None = setting(
        None, "New tokens of a request; default: 128, sharegpt: as recorded", "Requests"
    )
    random_input_len: int = setting(1024, "Most prompt tokens of --dataset-name random", "Requests")
    random_output_len: int = setting(1024, "Most new tokens of --dataset-name random", "Requests")
    random_range_ratio: float = setting(
        0.0, "Random lengths are uniform from this fraction of the most; 1: exact", "Requests"
    )
    tokenizer: str | None = setting(
        None, "Folder or Hub name, for token counts; default: as the server says", "Requests"
    )
    seed: int = setting(1, "Seed of prompts, lengths and arrivals", "Requests")
    disable_ignore_eos: bool = setting(False, "Let requests end at the EOS token", "Requests")
    disable_stream: bool = setting(False, "Ask for whole answers, without streaming", "Requests")
    extra_request_body: str | None = setting(
        None, "JSON object merged into every request", "Requests"
    )

    request_rate: float = setting(math.inf, "Requests per second; inf: all at once", "Load")
    burstiness: float = setting(
        1.0, "Shape of the gamma distribution of gaps; 1: Poisson, below: bursts", "Load"
    )
    max_concurrency: int | None = setting(
        None, "Most requests in flight; those due wait in the client", "Load"
    )
    sweep: tuple[float, ...] = setting(
        (), "Per cent of the saturation throughput to run at: --sweep 50 80 95", "Load"
    )
    warmup_requests: int = setting(1, "Requests before the run, not counted", "Load")
    goodput: tuple[str, ...] = setting(
        (), "Goals in ms of a good request: --goodput ttft:500 tpot:20 e2e:2000", "Load"
    )

    def check(self) -> None:
        """
        Raises:
            ConfigError: a value is unknown or out of range.
        """
        _choose("--backend", self.backend, BACKENDS)
        _choose("--dataset-name", self.dataset_name, DATASETS)
        check_counts(**{name: vars(self)[name] for name in AT_LEAST_ONE})
        if self.warmup_requests < 0:
            raise ConfigError(f"--warmup-requests must be >= 0, got {self.warmup_requests}.")
        if not 0.0 <= self.random_range_ratio <= 1.0:
            raise ConfigError(
                f"--random-range-ratio must be between 0 and 1, got {self.random_range_ratio}."
            )
        for name in ("request_rate", "burstiness", "timeout"):
            if not vars(self)[name] > 0:  # NaN too
                raise ConfigError(f"{_flag(name)} must be > 0, got {vars(self)[name]}.")
        if not math.isfinite(self.burstiness):
            raise ConfigError("--burstiness must be finite.")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 1 and 65535, got {self.port}.")
        self._check_sweep()
        if (self.dataset_name == "sharegpt") != (self.dataset_path is not None):
            raise ConfigError("--dataset-name sharegpt and --dataset-path FILE go together.")
        if self.dataset_path is not None and not Path(self.dataset_path).is_file():
            raise ConfigError(f"--dataset-path {self.dataset_path}: there is no such file.")
        self.goals()
        self.extra()

    def _check_sweep(self) -> None:
        if any(not 0 < percent < math.inf for percent in self.sweep):
            raise ConfigError("--sweep takes percentages above 0, such as --sweep 50 80 95.")
        if self.sweep and self.request_rate != math.inf:
            raise ConfigError("--sweep chooses the request rates; drop --request-rate.")

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"

    def goals(self) -> dict[str, float]:
        """Seconds by metric ("ttft", "tpot", "e2e"), from `goodput`.

        Raises:
            ConfigError: not METRIC:MILLISECONDS.
        """
        goals = {}
        for item in self.goodput:
            name, _, value = item.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in GOALS or not limit > 0:
                raise ConfigError(
                    f"--goodput takes METRIC:MILLISECONDS with ttft, tpot or e2e, got {item!r}."
                )
            goals[GOALS[name]] = limit / 1000
        if self.disable_stream and goals.keys() - {"e2e"}:
            raise ConfigError("--goodput ttft and tpot need streaming; drop --disable-stream.")
        return goals

    def extra(self) -> dict[str, Any]:
        """`extra_request_body`, parsed.

        Raises:
            ConfigError: not a JSON object.
        """
        if self.extra_request_body is None:
            return {}
        try:
            value = json.loads(self.extra_request_body)
        except ValueError as error:
            raise ConfigError(f"--extra-request-body is not JSON: {error}.") from None
        if not isinstance(value, dict):
            raise ConfigError(f"--extra-request-body must be a JSON object, got {shown(value)}.")
        return value


def _choose(flag: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"Unknown {flag} {value!r}.{nearest(value, known)} Known: {', '.join(known)}."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
