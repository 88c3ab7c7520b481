"""`forerun plan`: what a model would need and do on GPUs that are not here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from forerun.cli.flags import Flag, Values, with_flags
from forerun.cli.output import AsJson, print_json
from forerun.cli.tables import milliseconds, wide_console, yes_no
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.llm.bundled import preset as bundled_preset
from forerun.llm.hub import with_local_paths
from forerun.plan.gpus import GIB, TERA, Gpu, find_gpu
from forerun.plan.model_shape import DraftShape, ModelShape, check_ranks
from forerun.plan.plan import BATCHES, Row, Traffic, make_rows, possible_tps
from forerun.plan.step_time import Deployment, Speculation

NOTE = (
    "Estimates: bytes and operations over the GPU's ceilings, with constants fitted to one H200"
    " (docs/performance.md)."
)
TP_NOTE = (
    "tp > 1: 6.5 us per all-reduce, fitted to one step on two GPUs; 70 % of the link is an"
    " assumption."
)
EP_NOTE = (
    "ep {}: no step was measured. A step waits for the group of which most experts are read, if"
    " all are chosen equally often."
)


def _option(default: Any, help: str, kind: type = str, panel: str = "Model") -> Any:
    return field(default=default, metadata={"help": help, "type": kind, "panel": panel})


@dataclass(frozen=True)
class Options:
    """Every field is a flag. Those of the engine are named as of `forerun serve`."""

    model: str | None = _option(None, "A folder or org/name, of which only the config is read")
    preset: str | None = _option(None, "Shapes of a known model: qwen3-8b, qwen3-30b-a3b, ...")
    quantization: str | None = _option(None, "fp8: linears in 8 bits")
    kv_cache_dtype: str = _option("auto", "auto, bfloat16 or fp8_e4m3")
    mem_fraction_static: float = _option(0.85, "Of memory, for weights and K/V", float)
    max_running_requests: int = _option(256, "Per replica", int)

    gpu: str = _option("h200", "h200, h100, b200, a100 or l40s", panel="GPUs")
    count: int = _option(1, "GPUs in all", int, "GPUs")
    tp_size: int | None = _option(None, "GPUs per replica; default: all ways", int, "GPUs")
    ep_size: int = _option(1, "Groups of a replica's GPUs that have whole experts", int, "GPUs")
    read_bandwidth: float | None = _option(None, "TB/s that a kernel reads", float, "GPUs")
    gemm_rate: float | None = _option(None, "bfloat16 TFLOP/s of a large GEMM", float, "GPUs")
    gpu_memory: float | None = _option(None, "GiB", float, "GPUs")
    link_bandwidth: float | None = _option(None, "TB/s to other GPUs", float, "GPUs")
    price: float | None = _option(None, "Dollars per hour and GPU", float, "GPUs")

    rate: float = _option(1.0, "Requests per second, of all replicas", float, "Traffic")
    input_len: int = _option(1024, "Prompt tokens", int, "Traffic")
    output_len: int = _option(256, "New tokens", int, "Traffic")

    accept_length: float | None = _option(
        None, "Tokens that a step with drafts commits; default: plain only", float, "Speculation"
    )
    draft_tokens: int = _option(16, "Tokens that a step verifies", int, "Speculation")
    draft_model: str | None = _option(
        None, "Default: the preset's; with none drafts take no time", panel="Speculation"
    )
    draft_passes: int = _option(1, "Passes of the draft model per step", int, "Speculation")
    speculative_draft_tp_size: int | None = _option(
        None,
        "1: the whole draft on every GPU; N: divided among the N GPUs of a replica; default: as an"
        " engine does",
        int,
        "Speculation",
    )

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: a number is out of range.
        """
        for name in ("count", "input_len", "output_len", "draft_tokens", "draft_passes"):
            if vars(self)[name] < 1:
                raise ConfigError(f"{name} must be >= 1, got {vars(self)[name]}.")
        for name in ("rate", *CEILINGS):
            value = vars(self)[name]
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be > 0, got {value}.")
        accept = self.accept_length
        if accept is not None and not 1 <= accept <= self.draft_tokens:
            raise ConfigError(
                f"accept_length must be in [1, draft_tokens = {self.draft_tokens}], got {accept}."
            )
        for name in ("draft_model", "speculative_draft_tp_size"):
            if accept is None and vars(self)[name] is not None:
                raise ConfigError(f"{name} is set without accept_length; set that too.")

    @property
    def name(self) -> str:
        """Name of the model, as given."""
        return self.preset or str(self.model)

    @property
    def asked_tp(self) -> int | None:
        """GPUs per replica; None: all ways. A draft is divided among all of them."""
        draft_tp = self.speculative_draft_tp_size
        return draft_tp if self.tp_size is None and (draft_tp or 1) > 1 else self.tp_size

    def chosen_gpu(self) -> Gpu:
        """The one in the table, with what is given in place of its figures."""
        gpu = find_gpu(self.gpu)
        given = {name: vars(self)[option] for option, (name, _) in CEILINGS.items()}
        units = dict(CEILINGS.values())
        changed = {name: value * units[name] for name, value in given.items() if value is not None}
        of_machine = changed.keys() - {"dollars_per_hour"}
        return replace(gpu, **changed, measured=gpu.measured and not of_machine)


CEILINGS = {  # option -> field of `Gpu`, unit
    "read_bandwidth": ("read_bytes_per_second", TERA),
    "gemm_rate": ("flops", TERA),
    "gpu_memory": ("memory_bytes", float(GIB)),
    "link_bandwidth": ("link_bytes_per_second", TERA),
    "price": ("dollars_per_hour", 1.0),
}


def plan_flags() -> list[Flag]:
    """Every field of `Options`."""
    return [
        Flag(f.name, f.metadata["type"], f.default, f.metadata["help"], f.metadata["panel"])
        for f in fields(Options)
    ]


@with_flags(given=plan_flags)
def plan(as_json: AsJson = False, *, given: Values) -> None:
    """Memory, step time and cost of a model on GPUs that are not here.

    Reads the model's config and the headers of its safetensors; needs no GPU.
    """
    options = Options(**given)
    gpu = options.chosen_gpu()
    config = EngineConfig(
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        mem_fraction_static=options.mem_fraction_static,
        max_running_requests=options.max_running_requests,
        tp_size=max(options.ep_size, 1) if options.asked_tp is None else options.asked_tp,
        ep_size=options.ep_size,
        speculative_draft_tp_size=options.speculative_draft_tp_size,
    )
    if config.quantization == "int8":
        raise ConfigError("quantization int8 runs on a CPU; take fp8.")
    folder, draft = _folders(options)
    shape = ModelShape.of(folder, config.quantization, config.kv_cache_dtype)
    traffic = Traffic(options.rate, options.input_len, options.output_len)
    _check_context(shape, options.input_len + options.output_len)
    spec = None
    if options.accept_length is not None:
        spec = Speculation(options.accept_length, options.draft_tokens, _draft(options, draft))
    deployment = Deployment(shape, gpu, speculation=spec, ep=options.ep_size)
    tps = possible_tps(deployment, options.count, options.asked_tp)
    tps = _usable(tps, folder, config)
    rows = make_rows(deployment, options.count, traffic, config, tps)
    if as_json:
        print_json({"gpu": vars(gpu), "model": options.name, "rows": [r.as_dict() for r in rows]})
        return
    _print(rows, options, gpu, traffic)


def _folders(options: Options) -> tuple[Path, Path | None]:
    """Returns the folders of the model and its draft, if there is one."""
    if (options.model is None) == (options.preset is None):
        raise ConfigError("Give --model or --preset, not both or neither.")
    config = EngineConfig(
        model_path=options.model,
        speculative_draft_model_path=options.draft_model,
        load_format="dummy",  # no weights
    )
    config = with_local_paths(config)
    given = config.speculative_draft_model_path
    draft = None if given is None else Path(given)
    if options.preset is None:
        assert config.model_path is not None
        return Path(config.model_path), draft
    folder, own_draft = bundled_preset(options.preset)
    return folder, draft or own_draft


def _draft(options: Options, folder: Path | None) -> DraftShape | None:
    """None: drafts take no time.

    Raises:
        ConfigError: there is none to divide, or it cannot be divided.
    """
    ranks = options.speculative_draft_tp_size
    if folder is not None:
        return DraftShape.of(folder, options.draft_passes, ranks)
    if ranks is not None and ranks > 1:
        raise ConfigError(
            f"speculative_draft_tp_size {ranks} divides a draft model, and there is none; set"
            " draft_model, or drop it."
        )
    return None


def _usable(tps: Sequence[int], folder: Path, config: EngineConfig) -> list[int]:
    """Those of which an engine would start.

    Raises:
        ConfigError: there are none; of the first.
    """
    usable, refusals = [], []
    for tp in tps:
        try:
            check_ranks(folder, config.quantization, tp, config.ep_size)
            usable.append(tp)
        except ConfigError as error:
            refusals.append(error)
    if not usable:
        raise refusals[0]
    return usable


def _check_context(shape: ModelShape, tokens: int) -> None:
    if tokens > shape.context_length:
        raise ConfigError(
            f"--input-len and --output-len are {tokens} tokens together, over the model's"
            f" context length {shape.context_length}; lower them."
        )


def _print(rows: Sequence[Row], options: Options, gpu: Gpu, traffic: Traffic) -> None:
    console = wide_console()
    source = "measured" if gpu.measured else "not measured"
    console.print(
        f"{options.name} on {gpu.name} ({source}): read"
        f" {gpu.read_bytes_per_second / TERA:.3g} TB/s, bfloat16 GEMM"
        f" {gpu.flops / TERA:.3g} TFLOP/s, {gpu.memory_bytes / GIB:.0f} GiB, at"
        f" ${gpu.dollars_per_hour:g} an hour (an assumption: --price)",
        style="dim",
        soft_wrap=True,
    )
    console.print(_table("Memory and steps", MEMORY, [_memory_cells(row) for row in rows]))
    title = f"{traffic.rate:g} requests/s of {traffic.input_len} + {traffic.output_len} tokens"
    console.print(_table(title, SERVING, [_serving_cells(row, traffic) for row in rows]))
    for note in _notes(rows, options.count):
        console.print(note, style="dim", soft_wrap=True)


def _notes(rows: Sequence[Row], count: int) -> list[str]:
    notes, ep = [NOTE], rows[0].ep
    if any(row.tp > 1 for row in rows):
        notes.append(TP_NOTE)
    if ep > 1:
        notes.append(EP_NOTE.format(ep))
    if any(row.tp * row.replicas < count for row in rows):
        notes.append(f"{count} GPUs: those left over, where tp does not divide them, cost nothing.")
    return notes


WAY = ("tp", "replicas", "drafts")
MEMORY = (
    "weights\nGiB/GPU", "K/V\nGiB/GPU", "K/V\ntokens", "fit", *(f"x {b}\nms" for b in BATCHES),
)  # fmt: skip
SERVING = (
    "most\nreq/s", "most\ntok/s", "rate\nheld", "batch", "TTFT\nms", "TPOT\nms", "$/hour",
    "$/M\ntokens",
)  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Sequence[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in (*WAY, *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _way(row: Row) -> list[str]:
    return [str(row.tp), str(row.replicas), yes_no(row.speculative)]


def _memory_cells(row: Row) -> list[str]:
    return [
        *_way(row),
        f"{row.weight_bytes / GIB:.1f}",
        f"{row.kv_bytes / GIB:.1f}",
        f"{row.kv_tokens:,}",
        str(row.requests),
        *(milliseconds(row.step_seconds.get(batch)) for batch in BATCHES),
    ]


def _serving_cells(row: Row, traffic: Traffic) -> list[str]:
    load = row.load
    return [
        *_way(row),
        f"{row.max_rate:.3g}",
        f"{row.max_rate * traffic.output_len:,.0f}",
        yes_no(load is not None),
        "-" if load is None else str(load.batch_size),
        milliseconds(load.ttft_seconds if load else None),
        milliseconds(load.tpot_seconds if load else None),
        f"{row.dollars_per_hour:.3g}",
        f"{row.dollars_per_million:.3g}",
    ]
