"""The engine's settings: one frozen dataclass, from which the command-line flags are made.

Every field is a keyword of `LLM(...)` and, with dashes, a flag. Names are SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from forerun.core.checks import of_type
from forerun.core.errors import ConfigError, nearest, shown

MAX_INT64 = 2**63 - 1


def _setting(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """As the user gave it; what depends on the model or the machine is resolved by the engine."""

    model_path: str | None = _setting(
        None,
        "Target: a Hugging Face folder, or org/name[@revision] on the Hub; none: the bundled one",
    )
    tokenizer_path: str | None = _setting(
        None, "Folder or org/name[@revision] of the tokenizer, if not the model's"
    )
    skip_tokenizer_init: bool = _setting(False, "Work on token ids alone")
    load_format: str = _setting(
        "auto",
        "Weights from safetensors, or random where a config is enough (dummy: as SGLang and vLLM"
        " fill theirs; dummy_normal: like an untrained model)",
        ("auto", "dummy", "dummy_normal"),
    )
    dtype: str = _setting(
        "auto",
        "Of weights and K/V; auto: the checkpoint's, float32 where the CPU lacks fast bfloat16",
        ("auto", "bfloat16", "float32"),
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "Of stored K/V, target and draft; auto: dtype's. fp8_e4m3 holds twice the tokens",
        ("auto", "bfloat16", "float32", "fp8_e4m3"),
    )
    device: str = _setting("auto", "auto, cpu, or cuda (NVIDIA and AMD), with an index if wanted")
    context_length: int | None = _setting(None, "Tokens of prompt and output; none: the model's")
    page_size: int | None = _setting(
        None,
        "Tokens per K/V page; none: what the attention backend prefers",
        (1, 16, 32, 64, 128, 256),
    )
    mem_fraction_static: float = _setting(
        0.85,
        "Fraction of the device's memory for weights and K/V (on a CPU, K/V takes at most 4 GiB)",
    )
    max_total_tokens: int | None = _setting(
        None, "Capacity of the K/V pools in tokens; none: from memory"
    )
    max_running_requests: int | None = _setting(None, "Slots; none: 256 on a GPU, 32 on a CPU")
    chunked_prefill_size: int = _setting(2048, "Prompt tokens per step, over all requests")
    disable_radix_cache: bool = _setting(False, "Do not share the K/V of common prefixes")
    max_state_snapshots: int | None = _setting(
        None, "Recurrent states the prefix cache keeps; none: from memory. 0: no prefix is shared"
    )
    attention_backend: str | None = _setting(
        None, "Of the target; none: the fastest that supports it"
    )
    prefill_attention_backend: str | None = _setting(
        None, "Of the target's prompts; none: attention_backend"
    )
    decode_attention_backend: str | None = _setting(
        None, "Of the target's decode and verify steps; none: attention_backend"
    )
    disable_cuda_graph: bool = _setting(False, "Launch the kernels of a step one by one")
    cuda_graph_max_bs: int | None = _setting(
        None, "Largest batch size captured as a CUDA graph; none: max_running_requests, at most 256"
    )
    cpu_graph: bool = _setting(False, "On a CPU: compile the decode step (needs a C++ compiler)")
    disable_overlap_schedule: bool = _setting(
        False, "Wait for each step's result before the next is scheduled"
    )
    enable_trace: bool = _setting(False, "OpenTelemetry spans of requests and their steps")
    otlp_traces_endpoint: str = _setting(
        "localhost:4317", "OTLP collector that spans are sent to (gRPC)"
    )
    random_seed: int = _setting(0, "Seeds the requests without a sampling_seed")
    log_level: str = _setting(
        "warning", "Python's logging level", ("debug", "info", "warning", "error", "critical")
    )
    speculative_algorithm: str | None = _setting(None, "How to draft; none: plain decoding")
    speculative_draft_model_path: str | None = _setting(
        None, "Folder or org/name[@revision] of the draft model"
    )
    speculative_num_draft_tokens: int | None = _setting(
        None, "Tokens verified per request and step: drafts + 1; none: the draft's own"
    )
    speculative_draft_window_size: int | None = _setting(
        None, "Context positions the draft attends to; none: all"
    )
    speculative_draft_attention_backend: str | None = _setting(
        None, "Of the draft; none: the fastest that supports it"
    )
    speculative_simulate_accept_length: float | None = _setting(
        None, "Benchmarks only: simulate this mean accept length; drafts and verification still run"
    )
    speculative_adaptive: bool = _setting(
        True, "Choose for every step how many tokens it verifies, down to plain decoding"
    )
    speculative_fallback: bool = _setting(
        False, "Go on with plain decoding when the algorithm fails; otherwise its requests end"
    )
    # Options that algorithms declare themselves, by name.
    algorithm_options: Mapping[str, Any] = field(default_factory=dict, metadata={"hidden": True})

    def __post_init__(self) -> None:
        if self.kv_cache_dtype == "fp8_e5m2":
            raise ConfigError(
                "kv_cache_dtype fp8_e5m2 is not supported: two bits of mantissa lose more of K/V"
                " than its range wins; use fp8_e4m3."
            )
        self._check_types()
        for spec in self.settings():
            value, choices = getattr(self, spec.name), spec.metadata.get("choices")
            if choices and value not in (spec.default, *choices):
                raise ConfigError(
                    f"{spec.name} must be one of {', '.join(map(str, choices))}, got"
                    f" {shown(value)}."
                )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {shown(value)}.")
        if self.max_state_snapshots is not None and self.max_state_snapshots < 0:
            raise ConfigError(
                f"max_state_snapshots must be >= 0, got {shown(self.max_state_snapshots)}."
            )
        if not 0 < self.mem_fraction_static < 1:
            raise ConfigError(
                f"mem_fraction_static must be between 0 and 1, got {self.mem_fraction_static}."
            )

    def _check_types(self) -> None:
        """Every setting against its annotation: bool, int, float or str, or one of them or None."""
        hints = get_type_hints(EngineConfig)
        for spec in self.settings():
            kinds = get_args(hints[spec.name]) or (hints[spec.name],)
            value = getattr(self, spec.name)
            if value is None and type(None) in kinds:
                continue
            value = of_type(kinds[0], spec.name, value, ConfigError)
            object.__setattr__(self, spec.name, value)
            if isinstance(value, int) and not -MAX_INT64 <= value <= MAX_INT64:
                raise ConfigError(f"{spec.name} must fit in 64 bits, got {shown(value)}.")

    @classmethod
    def settings(cls) -> list[Field[Any]]:
        """The fields that are keywords and flags."""
        return [f for f in fields(cls) if not f.metadata.get("hidden")]

    @classmethod
    def of(cls, values: Mapping[str, Any], options: Mapping[str, Any]) -> EngineConfig:
        """Sorts keywords into settings and algorithm options (name → default).

        Raises:
            ConfigError: an unknown keyword, with the nearest known one.
        """
        known = [f.name for f in cls.settings()]
        chosen = dict(options)
        settings: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                settings[name] = value
            elif name in options:
                chosen[name] = value
            else:
                raise ConfigError(
                    f"Unknown setting {shown(name)}.{nearest(name, [*known, *options])}"
                )
        return cls(**settings, algorithm_options=chosen)


_POSITIVE = (
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "cuda_graph_max_bs",
    "speculative_num_draft_tokens",
    "speculative_draft_window_size",
)

assert all(f.default is not MISSING for f in EngineConfig.settings())
