"""Ways to put a model on GPUs: memory, steps, the requests per second that they serve, costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor.memory import RESERVED_BYTES, gpu_kv_bytes
from forerun.plan.step_time import Deployment

CONTEXT_BYTES = 1 << 30  # of the driver and loaded kernels, on every GPU
BATCHES = (1, 8, 32, 128)  # whose steps are shown


@dataclass(frozen=True)
class Traffic:
    """What is to be served."""

    rate: float  # requests per second, of all replicas
    input_len: int
    output_len: int

    @property
    def context(self) -> int:
        """Mean length of a request that decodes."""
        return self.input_len + self.output_len // 2


@dataclass(frozen=True)
class Load:
    """One replica at a rate: the batch that it settles at."""

    batch_size: int
    ttft_seconds: float  # mean, from arrival to the first token
    tpot_seconds: float  # mean between tokens


@dataclass(frozen=True)
class Row:
    """One way: `tp` GPUs per replica, with whole experts in `ep` groups."""

    tp: int
    ep: int
    replicas: int
    speculative: bool
    weight_bytes: float  # per GPU
    kv_bytes: float  # per GPU, left for K/V
    kv_tokens: int  # per replica
    requests: int  # that run together in a replica
    step_seconds: dict[int, float]  # by batch size, as far as it fits
    max_rate: float  # requests per second, of all replicas
    load: Load | None  # None: the rate is not held
    dollars_per_hour: float
    dollars_per_million: float  # output tokens, at the rate; at the highest one if it is not held

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.load is not None}


def make_rows(
    deployment: Deployment, count: int, traffic: Traffic, config: EngineConfig, tps: Sequence[int]
) -> list[Row]:
    """A row per way of using `count` GPUs; with speculation two, the plain one first.

    Raises:
        ConfigError: the model fits in none of the ways.
    """
    rows: list[Row] = []
    for tp in tps:
        spec = replace(deployment, tp=tp)
        plain = replace(spec, speculation=None)
        ways = [plain] if spec.speculation is None else [plain, spec]
        rows += [row for way in ways if (row := _row(way, count // tp, traffic, config))]
    if rows:
        return rows
    size = deployment.model.weight_bytes / 2**30
    raise ConfigError(
        f"The weights of {size:.0f} GiB leave no memory for a request of"
        f" {traffic.input_len + traffic.output_len} tokens on {max(tps)} x {deployment.gpu.name};"
        " take more or larger GPUs, --quantization fp8, or shorter requests."
    )


def possible_tps(deployment: Deployment, count: int, asked: int | None) -> list[int]:
    """Numbers of GPUs per replica: the one that was asked for, or `ep` times all powers of two.

    Raises:
        ConfigError: the one that was asked for is not possible, or none is.
    """
    model = deployment.model
    sizes = [deployment.ep * 2**n for n in range(count.bit_length())]
    possible = [tp for tp in sizes if tp <= count and model.divides(tp)]
    for name, size in (("tp_size", asked or 1), ("ep_size", deployment.ep)):
        if size > count:
            raise ConfigError(f"{name} {size} is more than the {count} GPUs; raise --count.")
    if asked is None and possible:
        return possible
    tp = asked or deployment.ep
    if not model.divides(tp):
        known = ", ".join(map(str, possible))
        raise ConfigError(
            f"tp_size {tp} does not divide {model.num_heads} heads and"
            f" {model.num_kv_heads or 1} K/V heads; take"
            f" {f'one of {known}' if possible else 'another ep_size'}."
        )
    return [tp]


def _row(way: Deployment, replicas: int, traffic: Traffic, config: EngineConfig) -> Row | None:
    """None: it does not fit."""
    model, gpu = way.model, way.gpu
    weights = model.weight_bytes / way.tp + _draft_bytes(way)
    total = int(gpu.memory_bytes)
    free = total - CONTEXT_BYTES - int(weights)
    slots = config.max_running_requests or 256
    kv_bytes = gpu_kv_bytes(config, free, total, RESERVED_BYTES)
    kv_bytes -= slots * model.layout.slot_bytes(1) // way.tp
    kv_tokens = kv_bytes * model.kv_shards(way.tp) // max(model.layout.token_bytes, 1)
    requests = min(slots, max(kv_tokens, 0) // (traffic.input_len + traffic.output_len))
    if requests < 1:
        return None
    shown = [batch for batch in BATCHES if batch <= requests]
    steps = {batch: way.step_seconds(batch, traffic.context) for batch in shown}
    max_rate = 1 / _seconds_per_request(way, traffic, requests)
    load = settle(way, traffic, traffic.rate / replicas, requests)
    price = replicas * way.tp * gpu.dollars_per_hour
    served = traffic.rate if load is not None else max_rate * replicas
    return Row(
        tp=way.tp,
        ep=way.ep,
        replicas=replicas,
        speculative=way.speculation is not None,
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        requests=requests,
        step_seconds=steps,
        max_rate=max_rate * replicas,
        load=load,
        dollars_per_hour=price,
        dollars_per_million=1e6 * price / 3600 / (served * traffic.output_len),
    )


def _draft_bytes(way: Deployment) -> float:
    """Returns bytes of each GPU."""
    draft = None if way.speculation is None else way.speculation.draft
    return 0 if draft is None else draft.weight_bytes / draft.ranks_of(way.tp)


def _seconds_per_request(way: Deployment, traffic: Traffic, batch_size: int) -> float:
    """Returns a replica's time that a request takes while `batch_size` decode together."""
    steps = traffic.output_len / way.tokens_per_step
    decode = steps * way.step_seconds(batch_size, traffic.context) / batch_size
    return way.prefill_seconds(traffic.input_len) + decode


def settle(way: Deployment, traffic: Traffic, rate: float, requests: int) -> Load | None:
    """The smallest batch whose throughput is a replica's rate; None: there is none.

    Prompts take their share of the time. A new one waits for those before it, as in a queue with
    random arrivals and one server (M/D/1), and for the step that runs.
    """

    def is_held(batch_size: int) -> bool:  # the larger the batch, the less of the time each takes
        return rate * _seconds_per_request(way, traffic, batch_size) <= 1

    batch = 1 + bisect_left(range(1, requests + 1), True, key=is_held)
    if batch > requests:
        return None
    prefill = way.prefill_seconds(traffic.input_len)
    busy = rate * prefill  # part of the time, below 1
    step = way.step_seconds(batch, traffic.context)
    waiting = prefill * busy / (2 * (1 - busy))
    tpot = step / way.tokens_per_step / (1 - busy)
    return Load(batch, waiting + step / 2 + prefill, tpot)
