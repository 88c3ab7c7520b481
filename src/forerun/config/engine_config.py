"""The engine's settings: one frozen dataclass, from which command-line flags are generated.

Every field is a keyword of `LLM(...)` and, with dashes, a flag. Names follow SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from forerun.config.nodes import Nodes
from forerun.core.checks import of_type
from forerun.core.errors import ConfigError, divisors, nearest, shown
from forerun.core.unsupported import setting_refusal

MAX_INT64 = 2**63 - 1


def _setting(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """Settings as given by the user. `executor/resolve.py` fills in what depends on the model or
    the machine."""

    model_path: str | None = _setting(
        None,
        "Target model: a folder or org/name[@revision] on the Hugging Face Hub; default: the"
        " bundled model",
    )
    tokenizer_path: str | None = _setting(
        None, "Tokenizer: a folder or org/name[@revision]; default: the model's"
    )
    skip_tokenizer_init: bool = _setting(False, "Load no tokenizer; input and output are token ids")
    load_format: str = _setting(
        "auto",
        "auto: safetensors; dummy: random weights as in SGLang and vLLM; dummy_normal: random"
        " weights like those of an untrained model",
        ("auto", "dummy", "dummy_normal"),
    )
    model_impl: str = _setting(
        "auto",
        "auto: Forerun's own models; transformers: those of transformers with Forerun's attention,"
        " for architectures that Forerun lacks (slower: no fusion, no CUDA graphs)",
        ("auto", "transformers"),
    )
    dtype: str = _setting(
        "auto",
        "Dtype of weights; auto: the checkpoint's, or float32 where bfloat16 is slow",
        ("auto", "bfloat16", "float32"),
    )
    quantization: str | None = _setting(
        None,
        "fp8: the target's linears and experts in 8 bits (e4m3), with a scale per output, quantized"
        " while they are loaded; int8: weights and, while they are multiplied, activations, in"
        " groups of 32 with a scale (CPUs only); weights of a GGUF file, AWQ or GPTQ stay as they"
        " are. Checkpoints in FP8 need neither",
        ("fp8", "int8"),
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "Dtype of the K/V cache; auto: as dtype. fp8_e4m3 holds twice the tokens"
        " of bfloat16, with the K/V scales that the target's checkpoint has",
        ("auto", "bfloat16", "float32", "fp8_e4m3"),
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N (NVIDIA and AMD)")
    tp_size: int = _setting(
        1, "Tensor parallelism: GPUs (on a CPU: processes) that share the target's weights"
    )
    ep_size: int = _setting(
        1,
        "With tp_size: groups of ranks among which experts are divided whole, instead of each"
        " expert by columns among all",
    )
    nnodes: int = _setting(
        1, "Machines over which the tp_size ranks are spread evenly; the same command on each"
    )
    node_rank: int = _setting(
        0, "With nnodes: the number of this machine. Node 0 schedules and serves"
    )
    dist_init_addr: str | None = _setting(
        None, "With nnodes: HOST:PORT of node 0, where the others join. For trusted networks only"
    )
    dist_timeout: int = _setting(
        300,
        "With tp_size: seconds that a rank waits for the others in one operation, and a node for"
        " others to join",
    )
    disable_custom_all_reduce: bool = _setting(
        False, "With tp_size on NVIDIA GPUs: sums across ranks go through NCCL alone"
    )
    context_length: int | None = _setting(
        None, "Maximum tokens of prompt and output; default: the model's"
    )
    page_size: int | None = _setting(
        None,
        "Tokens per K/V page; default: the attention backends' preference",
        (1, 16, 32, 64, 128, 256),
    )
    mem_fraction_static: float = _setting(
        0.85, "Fraction of device memory for weights and K/V cache (at most 4 GiB of K/V on a CPU)"
    )
    max_total_tokens: int | None = _setting(None, "Tokens in the K/V cache; default: from memory")
    max_running_requests: int | None = _setting(None, "Default: 256 on a GPU, 32 on a CPU")
    chunked_prefill_size: int = _setting(2048, "Maximum prompt tokens per step")
    max_prefill_tokens: int | None = _setting(
        None, "Maximum prompt tokens per step, if smaller than chunked_prefill_size"
    )
    max_mixed_step_ms: int = _setting(
        200,
        "While requests decode, prompt tokens per step are limited so that a step takes about this"
        " many milliseconds at most; 0: no such limit",
    )
    max_first_gap_ms: int = _setting(
        5000,
        "While prompts wait, a request waits for its second token so many milliseconds at most; 0:"
        " it decodes at once",
    )
    schedule_policy: str = _setting(
        "fcfs",
        "Order within a priority; fcfs: of arrival; lpm: longest cached prefix first",
        ("fcfs", "lpm"),
    )
    schedule_low_priority_values_first: bool = _setting(
        False, "Requests of a low priority value go first, as in vLLM; default: of a high one"
    )
    disable_radix_cache: bool = _setting(False, "Disable the prefix cache")
    max_mamba_cache_size: int | None = _setting(
        None,
        "Recurrent states: one per running request, the others for the prefix cache; default: from"
        " memory",
    )
    mamba_full_memory_ratio: float | None = _setting(
        None,
        "Memory for recurrent states in the prefix cache, relative to that for K/V; default: four"
        " states per running request, at most 0.1",
    )
    mamba_ssm_dtype: str = _setting(
        "float32",
        "Dtype of linear attention's states between steps. bfloat16 takes half the memory; the"
        " output may then depend on how many tokens a step commits, and so on the drafts",
        ("float32", "bfloat16"),
    )
    mamba_track_interval: int = _setting(
        256,
        "Tokens between two recurrent states that a request in decode keeps for the prefix cache, a"
        " multiple of page_size: its text can be continued from the last one",
    )
    attention_backend: str | None = _setting(
        None, "For phases without one of their own; default: the fastest supported"
    )
    prefill_attention_backend: str | None = _setting(
        None, "For prefill; default: attention_backend"
    )
    decode_attention_backend: str | None = _setting(
        None, "For decode and verify steps; default: attention_backend"
    )
    disable_cuda_graph: bool = _setting(False, "Run steps without CUDA graphs")
    cuda_graph_max_bs: int | None = _setting(
        None, "Largest captured batch size; default: max_running_requests, at most 256"
    )
    enable_piecewise_cuda_graph: bool | None = _setting(
        None,
        "On a GPU: run prefills that are not captured whole in pieces around attention. Default:"
        " on one GPU, for models that can be captured so",
    )
    piecewise_cuda_graph_max_tokens: int | None = _setting(
        None,
        "Largest prefill, in tokens per step, that is captured in pieces; default: up to where"
        " running its kernels takes longer than launching them (measured), at most 2048",
    )
    disable_overlap_schedule: bool = _setting(
        False, "Wait for the result of each step before scheduling the next one"
    )
    constrained_json_disable_any_whitespace: bool = _setting(
        False, "JSON of json_schema: no spaces and line breaks but those that json.dumps writes"
    )
    pooling_type: str | None = _setting(
        None,
        "Embeddings: hidden state of the last token or of the first one, or the mean; default: as"
        " the folder's 1_Pooling/config.json says, else last",
        ("last", "mean", "cls"),
    )
    score_type: str = _setting(
        "auto",
        "Scores of pairs of texts; cosine: similarity of their embeddings; yes_no: probability that"
        " the model answers yes (Qwen3-Reranker); auto: cosine for embedding models and where yes"
        " or no is no token, else yes_no",
        ("auto", "cosine", "yes_no"),
    )
    enable_trace: bool = _setting(False, "Export OpenTelemetry spans of requests and steps")
    otlp_traces_endpoint: str = _setting(
        "localhost:4317", "OTLP collector (gRPC, unless OTEL_EXPORTER_OTLP_PROTOCOL says HTTP)"
    )
    enable_deterministic_inference: bool | None = _setting(
        None,
        "A token's logits depend on the tokens before it alone, to the last bit: not on the batch,"
        " drafts, chunks, pages or cache. Our kernels for CPUs do so in any case; on a GPU it is"
        " off by default, and weights in bfloat16, FP8 and 4 bits have it",
    )
    random_seed: int = _setting(0, "Seed of requests without a sampling_seed")
    log_level: str = _setting(
        "warning", "Level of Python's logging", ("debug", "info", "warning", "error", "critical")
    )
    speculative_algorithm: str | None = _setting(
        None, "Drafting algorithm; default: plain decoding"
    )
    speculative_draft_model_path: str | None = _setting(
        None, "Draft model: a folder or org/name[@revision]"
    )
    speculative_draft_tp_size: int | None = _setting(
        None,
        "With tp_size: 1 has the whole draft model on every rank; tp_size divides it as the target"
        " (not every algorithm); default: divided if that is faster, which it is on GPUs from a"
        " hidden size of 2048 on",
    )
    speculative_num_draft_tokens: int | None = _setting(
        None, "Tokens verified per request and step (drafts + 1); default: the algorithm's"
    )
    speculative_draft_model_quantization: str | None = _setting(
        None,
        "fp8, int8: the draft's linears in 8 bits, as quantization does with the target's; unquant:"
        " as its checkpoint has them; default: unquant, but int8 on a CPU where the weights are in"
        " 16 bits or less and dtype is not float32 (STANDALONE: unquant)",
        ("fp8", "int8", "unquant"),
    )
    speculative_draft_kv_cache_dtype: str | None = _setting(
        None,
        "Dtype of the draft's K/V cache, as kv_cache_dtype; default: that of the target's",
        ("auto", "bfloat16", "float32", "fp8_e4m3"),
    )
    speculative_draft_window_size: int | None = _setting(
        None, "Context tokens that the draft attends to, and whose K/V it keeps; default: all"
    )
    speculative_draft_attention_backend: str | None = _setting(
        None, "For the draft; default: the target's where it can serve, else the fastest supported"
    )
    speculative_attention_mode: str | None = _setting(
        None,
        "Which backend runs passes of several tokens per request (verify, draft extend, draft"
        " blocks); default: decode",
        ("prefill", "decode"),
    )
    speculative_simulate_accept_length: str | float | None = _setting(
        None,
        "Benchmarks only: simulate this mean accept length, or one of several (1.3,5) for each"
        " request; drafts and verification still run",
    )
    speculative_simulate_accept_method: str = _setting(
        "even",
        "How steps get a simulated length. even: each as close to the mean as whole tokens allow;"
        " chance: each draft is accepted with one probability",
        ("even", "chance"),
    )
    speculative_adaptive: bool = _setting(
        True, "Choose the number of verified tokens per step by expected throughput"
    )
    speculative_ragged_verify: bool | None = _setting(
        None,
        "Divide the tokens that a step verifies among its requests by what their drafts promise,"
        " instead of as many for each; needs speculative_adaptive. Default: where it was measured"
        " to be faster (GPUs, chains of drafts)",
    )
    speculative_fallback: bool = _setting(
        False, "Continue with plain decoding if the algorithm fails, instead of aborting requests"
    )
    # Options declared by the algorithm, by name.
    algorithm_options: Mapping[str, Any] = field(default_factory=dict, metadata={"hidden": True})

    def __post_init__(self) -> None:
        if self.kv_cache_dtype == "fp8_e5m2":
            raise ConfigError(
                "kv_cache_dtype fp8_e5m2 is not supported: its two mantissa bits are too few for"
                " K/V; use fp8_e4m3."
            )
        if self.quantization in ("awq", "gptq", "compressed-tensors", "mxfp4"):
            raise ConfigError(
                f"quantization {self.quantization} is that of a checkpoint, which says so itself;"
                " drop the setting."
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
        ratio = self.mamba_full_memory_ratio
        if ratio is not None and not 0 <= ratio < math.inf:
            raise ConfigError(f"mamba_full_memory_ratio must be >= 0, got {ratio}.")
        for name in ("max_mixed_step_ms", "max_first_gap_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {shown(getattr(self, name))}.")
        self._check_piecewise()
        _ = self.nodes  # raises ConfigError
        if self.speculative_draft_tp_size not in (None, 1, self.tp_size):
            raise ConfigError(
                f"speculative_draft_tp_size must be 1 or tp_size, {self.tp_size}, got"
                f" {self.speculative_draft_tp_size}."
            )
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"ep_size {self.ep_size} does not divide tp_size {self.tp_size}, the ranks that"
                f" share the experts; take {divisors(self.tp_size)}, or change tp_size."
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
            kind = kinds[0] if isinstance(value, str) or float not in kinds else float
            value = of_type(kind, spec.name, value, ConfigError)
            if isinstance(value, str) and not value.strip():  # an unset variable of a shell
                raise ConfigError(f"{spec.name} is empty; leave it out, or give it a value.")
            object.__setattr__(self, spec.name, value)
            if isinstance(value, int) and not -MAX_INT64 <= value <= MAX_INT64:
                raise ConfigError(f"{spec.name} must fit in 64 bits, got {shown(value)}.")

    def _check_piecewise(self) -> None:
        if self.enable_piecewise_cuda_graph and self.disable_cuda_graph:
            raise ConfigError(
                "enable_piecewise_cuda_graph is set with disable_cuda_graph; drop one of them."
            )
        if self.piecewise_cuda_graph_max_tokens and self.enable_piecewise_cuda_graph is False:
            raise ConfigError(
                "piecewise_cuda_graph_max_tokens is set with enable_piecewise_cuda_graph off; drop"
                " one of them."
            )

    @property
    def asks_for_pieces(self) -> str | None:
        """The setting that asks for prefills in captured pieces; None: nothing does."""
        names = ("enable_piecewise_cuda_graph", "piecewise_cuda_graph_max_tokens")
        return next((name for name in names if getattr(self, name)), None)

    @property
    def draft_ranks(self) -> int:
        """Ranks that share the draft's weights; `resolve_draft` sets more than one by default."""
        return self.speculative_draft_tp_size or 1

    @property
    def nodes(self) -> Nodes:
        return Nodes.of(self.nnodes, self.node_rank, self.tp_size, self.dist_init_addr)

    @classmethod
    def settings(cls) -> list[Field[Any]]:
        """Fields that are keywords and flags."""
        return [f for f in fields(cls) if not f.metadata.get("hidden")]

    @classmethod
    def of(cls, values: Mapping[str, Any], options: Mapping[str, Any]) -> EngineConfig:
        """Makes it from keywords: settings and the algorithm's options (name → default).

        Raises:
            ConfigError: unknown keyword; the message suggests the nearest known one.
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
                names = [*known, *options]
                ours, why = setting_refusal(name, names)
                if ours is not None:
                    why = f"it is called {ours} here"
                advice = f".{nearest(name, names)}" if why is None else f": {why}."
                raise ConfigError(f"Unknown setting {shown(name)}{advice}")
        return cls(**settings, algorithm_options=chosen)

    def required_draft_path(self) -> Path:
        """`speculative_draft_model_path`, of an algorithm that cannot do without.

        Raises:
            ConfigError: it is not set.
        """
        if self.speculative_draft_model_path is None:
            raise ConfigError(
                "This algorithm needs a draft model; set speculative_draft_model_path."
            )
        return Path(self.speculative_draft_model_path).expanduser()


_POSITIVE = (
    "tp_size",
    "ep_size",
    "nnodes",
    "dist_timeout",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_mamba_cache_size",
    "mamba_track_interval",
    "cuda_graph_max_bs",
    "piecewise_cuda_graph_max_tokens",
    "speculative_num_draft_tokens",
    "speculative_draft_window_size",
)

assert all(f.default is not MISSING for f in EngineConfig.settings())
