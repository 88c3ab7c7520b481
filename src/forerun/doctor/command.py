"""`forerun doctor`: what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun import __version__
from forerun.attention.capabilities import AttentionNeed, LayerMask, Mask, Phase
from forerun.attention.select import survey
from forerun.cli.flags import Values, config_flags, engine_flags_without, with_flags
from forerun.cli.output import print_json
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.doctor.determinism import Sizes, run_check
from forerun.doctor.draft import explain_draft, fits_target, is_usable
from forerun.kernels.cpu import library
from forerun.kernels.gemm import gemm_int4_sm90
from forerun.kernels.gemm.config import GemmConfig, TritonGemmConfig
from forerun.kernels.gemm.dispatch import TUNED, choose_fp8_gemm, choose_gemm
from forerun.kernels.moe.config import choose_moe_fp8_sm90, choose_moe_mxfp4_sm90, choose_moe_sm90
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of, have_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import onednn_serves, skinny_serves
from forerun.layers.linear import LinearBase
from forerun.llm.bundled import PAIR, preset
from forerun.llm.hub import config_folder
from forerun.models.formats.gguf import describe_gguf
from forerun.models.gguf import GGUF
from forerun.models.registry import model_class
from forerun.models.stop_ids import stop_ids
from forerun.platform import cpu_threads
from forerun.platform import device as machine
from forerun.speculative.registry import algorithm_names

GIB = 2**30


TOKENS = (16, 32, 64, 128, 256, 512)  # the largest count of each bucket shown

Shape = tuple[int, int]


OWN = ("model_path", "speculative_draft_model_path")  # flags of the engine that are declared here


@with_flags(sizes=lambda: config_flags(Sizes), engine=engine_flags_without(*OWN))
def doctor(
    model_path: Annotated[
        str | None,
        typer.Option(help="A model (folder or Hub name): how each of its GEMMs is computed"),
    ] = None,
    preset_name: Annotated[
        str | None,
        typer.Option("--preset", help="The same for a known model, as `forerun bench` has them"),
    ] = None,
    draft_path: Annotated[
        str | None,
        typer.Option(
            "--speculative-draft-model-path",
            help="A draft (folder or Hub name): its kind, layers, what it reads, what is unknown."
            " Exit code 1: weights or target do not fit",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
    determinism: Annotated[
        bool,
        typer.Option(
            "--determinism",
            help="Run the model (default: the bundled pair; of a preset with random weights) in"
            " batches, chunks, with drafts and so on, and compare the bits of all"
            " log-probabilities with plain decoding. Exit code 1: some differ",
        ),
    ] = False,
    *,
    sizes: Values,
    engine: Values,
) -> None:
    """Devices, dtypes, attention backends and why they cannot run, GEMM dispatch, versions."""
    if model_path is not None and preset_name is not None:
        raise ConfigError("--model-path and --preset name two models; give one of them.")
    if determinism:
        paths = {"model_path": model_path, "speculative_draft_model_path": draft_path}
        if preset_name is not None:
            paths["model_path"] = str(preset(preset_name)[0])
            engine = {"load_format": "dummy_normal", **engine}
        given = {name: path for name, path in paths.items() if path is not None}
        run_check({**given, **engine}, Sizes(**sizes), json)
        return
    for name in (*sizes, *engine):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} is set without --determinism; set that too, or drop it.")
    report = _survey(model_path, preset_name, draft_path)
    if json:
        print_json(report)
    else:
        _show(report, Console(highlight=False))
    if "draft" in report and not is_usable(report["draft"]):
        raise typer.Exit(1)


def _survey(
    model_path: str | None, preset_name: str | None, draft_path: str | None
) -> dict[str, Any]:
    folder = None
    if preset_name is not None:
        folder = preset(preset_name)[0]
    elif model_path is not None:
        folder = config_folder("model_path", model_path)
    report = survey_machine(model_shapes(folder) if folder is not None else ())
    if folder is not None:
        report["stop_token_ids"] = model_stop_ids(folder)
        if (folder / GGUF).exists():
            report["weights"] = describe_gguf(folder, machine.resolve_device("auto"))
    if draft_path is not None:
        name = "speculative_draft_model_path"
        draft = config_folder(name, draft_path)
        report["draft"] = explain_draft(draft)
        fits = None if folder is None else fits_target(draft, load_model_config(folder))
        report["draft"] |= {} if fits is None else {"fits_the_target": fits}
    return report


def model_shapes(folder: Path) -> list[Shape]:
    """The weight matrices [N, K] of a target as they are stored (fused), from its config alone."""
    config = load_model_config(folder)
    place = WeightPlacement(torch.bfloat16, torch.device("meta"))
    model = model_class(config)(config, place, max_positions=1)
    shapes = (linear.weight.shape for linear in model.modules(LinearBase))
    return list(dict.fromkeys((n, k) for n, k in shapes))


def model_stop_ids(folder: Path) -> dict[str, list[int]]:
    """The ids that end a generation of a target, by the file that names them."""
    found = stop_ids(folder, folder, load_model_config(folder).vocab_size)
    return {name: list(ids) for name, ids in found.items()}


def survey_machine(shapes: Iterable[Shape] = ()) -> dict[str, Any]:
    """The report, as JSON values; `shapes`: weight matrices to list."""
    shapes = list(shapes)
    devices = [_device(device) | {"gemms": _gemms(device, shapes)} for device in _devices()]
    return {
        "forerun": __version__,
        "versions": machine.versions(),
        "default_device": str(machine.resolve_device("auto")),
        "devices": devices,
        "why_no_gpu": machine.why_no_gpu(),
        "algorithms": algorithm_names(),
        "bundled": _bundled(),
    }


@dataclass(frozen=True)
class Ask:
    """A use of attention for which backends are checked."""

    name: str
    masks: frozenset[LayerMask]
    phase: Phase = Phase.DECODE
    mla: bool = False


ASKS = (
    Ask("prefill", frozenset({LayerMask()}), Phase.PREFILL),
    Ask("decode", frozenset({LayerMask()})),
    Ask("block draft", frozenset({LayerMask(Mask.BLOCK)}), Phase.VERIFY),
    Ask("token tree", frozenset({LayerMask(Mask.CUSTOM)}), Phase.VERIFY),
    Ask("MLA decode", frozenset({LayerMask()}), mla=True),
)


def _devices() -> list[torch.device]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def _device(device: torch.device) -> dict[str, Any]:
    free, total = machine.memory(device)
    fast = machine.fast_bf16(device)
    dtype = torch.bfloat16 if fast else torch.float32
    return {
        "device": str(device),
        "name": machine.device_name(device),
        "memory_free_bytes": free,
        "memory_total_bytes": total,
        "dtypes": {"bfloat16": "fast" if fast else "slow", "float32": "fast"},
        "auto_dtype": machine.dtype_name(dtype),  # of a half-precision checkpoint
        "threads": _threads() if device.type == "cpu" else None,
        "attention": {ask.name: survey(_need(device, dtype, ask)) for ask in ASKS},
    }


def _threads() -> dict[str, Any]:
    """Intra-op threads by model size."""
    limit, fixed_order = cpu_threads.SMALL_WEIGHTS, library.why_missing() is None
    small, large = (cpu_threads.CpuThreads.choose(size, fixed_order) for size in (0, limit))
    return {"small_model_bytes": limit, "small": asdict(small), "large": asdict(large)}


def _need(device: torch.device, dtype: torch.dtype, ask: Ask) -> AttentionNeed:
    """Qwen3-8B's shape (for MLA DeepSeek-V3's), so that only the backend and the machine matter."""
    return AttentionNeed(
        device=device.type,
        arch=machine.gpu_arch(device),
        dtype=dtype,
        head_dim=576 if ask.mla else 128,
        num_heads=128 if ask.mla else 32,
        num_kv_heads=1 if ask.mla else 8,
        masks=ask.masks,
        phase=ask.phase,
        mla=ask.mla,
        latent_dim=512 if ask.mla else 0,
        dense=not ask.mla,
    )


def _gemms(device: torch.device, shapes: list[Shape]) -> dict[str, Any]:
    """GEMM dispatch: the library or our kernels, by matrix and token count."""
    if device.type != "cuda":
        return {"library": _cpu_gemms()}
    library = {"library": "hipBLAS" if machine.is_rocm() else "cuBLAS"}
    probe = torch.empty(1, 8, dtype=torch.bfloat16, device=device)
    if not have_triton("cuda") or not skinny_serves(probe):
        return library
    launch = bool(pdl_options(probe)["PDL"])
    return library | {"programmatic_launch": launch} | gemm_choices(gpu_of(device), shapes)


def _cpu_gemms() -> str:
    """What computes GEMMs on a CPU, and why not our kernels."""
    reason = library.why_missing()
    if reason is None:
        return "own kernels in C++, weights packed"
    plain = "oneDNN, weights packed" if onednn_serves(torch.empty(1, 8)) else "plain"
    return f"{plain}; no kernels in C++: {reason}"


def gemm_choices(gpu: GpuInfo, shapes: list[Shape]) -> dict[str, Any]:
    """Chooses by tokens, for `shapes` and those tuned for this GPU; None: the library."""
    tuned = TUNED.get(0 if gpu.amd else gpu.capability, {})
    out: list[dict[str, Any]] = []
    for n, k in dict.fromkeys((*shapes, *tuned)):
        chosen = {tokens: choose_gemm(n, k, tokens, gpu) for tokens in TOKENS}
        choices = {str(tokens): _choice(c) if c else None for tokens, c in chosen.items()}
        fp8 = {tokens: choose_fp8_gemm(n, k, tokens, gpu) for tokens in TOKENS}
        fp8_choices = {str(tokens): _choice(c) if c else None for tokens, c in fp8.items()}
        entry = {"n": n, "k": k, "tuned": (n, k) in tuned, "choices": choices}
        out.append(entry | {"fp8_choices": fp8_choices})
    kernels = {"int4": _int4_kernel(gpu), "experts": _expert_kernels(gpu)}
    return {"cuda": nvrtc.available(), **kernels, "matrices": out}


def _int4_kernel(gpu: GpuInfo) -> str:
    """What multiplies up to 128 tokens by 4-bit integers."""
    config = gemm_int4_sm90.choose_config(4096, 4096, False, gpu, torch.bfloat16)
    return "triton" if config is None else "cuda"


def _expert_kernels(gpu: GpuInfo) -> dict[str, str]:
    """What computes experts of Qwen3-30B-A3B's size for up to 128 tokens, by their weights."""
    sizes = 1, 2048, 768, torch.bfloat16, gpu  # tokens, hidden size, width
    chosen = {
        "bfloat16": choose_moe_sm90(*sizes),
        "fp8": choose_moe_fp8_sm90(*sizes),
        "mxfp4": choose_moe_mxfp4_sm90(*sizes),
    }
    return {name: "triton" if config is None else "cuda" for name, config in chosen.items()}


def _choice(config: GemmConfig) -> dict[str, Any]:
    kernel = "triton" if isinstance(config, TritonGemmConfig) else "cuda"
    return {"kernel": kernel, **asdict(config)}


def _bundled() -> dict[str, Any]:
    """The bundled models of this installation."""
    models = sorted(path.parent.name for path in PAIR.glob("*/config.json"))
    return {"present": "target" in models, "models": models, "folder": str(PAIR)}


def _show(report: dict[str, Any], console: Console) -> None:
    found = report["versions"]
    console.print(f"[bold]forerun {report['forerun']}[/]")
    console.print("  ".join(f"{name} {version or '–'}" for name, version in found.items()))
    for entry in report["devices"]:
        console.print()
        _show_device(entry, console, default=entry["device"] == report["default_device"])
    console.print()
    if report["why_no_gpu"]:
        console.print(f"GPU         none: {escape(report['why_no_gpu'])}")
    console.print(f"algorithms  {', '.join(report['algorithms'])}")
    bundled = report["bundled"]
    models = ", ".join(bundled["models"]) if bundled["models"] else "not in this installation"
    console.print(f"bundled     {models}")
    if "stop_token_ids" in report:
        console.print(f"stop ids    {_describe_stops(report['stop_token_ids'])}")
    if "weights" in report:
        console.print(f"weights     {report['weights']}")
    for name, value in report.get("draft", {}).items():
        console.print(f"draft       {name.replace('_', ' ')}: {escape(str(value))}")


def _describe_stops(ids: dict[str, list[int]]) -> str:
    said = [f"{', '.join(map(str, some))} ({name})" for name, some in ids.items() if some]
    return "; ".join(said) or "none: generations end at their longest length only"


def _show_device(entry: dict[str, Any], console: Console, default: bool) -> None:
    free, total = entry["memory_free_bytes"] / GIB, entry["memory_total_bytes"] / GIB
    mark = "  [green](default)[/]" if default else ""
    console.print(f"[bold]{entry['device']}[/]  {escape(entry['name'])}{mark}")
    console.print(f"  memory  {free:.1f} GiB free of {total:.1f}")
    if entry["threads"] is not None:
        console.print(f"  threads {_describe_threads(entry['threads'])}")
    dtypes = ", ".join(f"{name} {speed}" for name, speed in entry["dtypes"].items())
    console.print(f"  dtypes  {dtypes}; auto takes {entry['auto_dtype']} for half precision")
    _show_attention(entry["attention"], console)
    _show_gemms(entry["gemms"], console)


def _show_attention(verdicts: dict[str, dict[str, list[str]]], console: Console) -> None:
    """What each backend can serve, then every reason why not, once."""
    table = Table("  attention", *verdicts, box=None, padding=(0, 2, 0, 0))
    reasons = Table.grid(padding=(0, 2, 0, 0))
    for backend in verdicts[ASKS[0].name]:
        found = {ask: refused[backend] for ask, refused in verdicts.items()}
        marks = ("[yellow]no[/]" if refused else "[green]yes[/]" for refused in found.values())
        table.add_row(f"  {backend}", *marks)
        said = [escape(reason) for reason in _once(found)]
        if said:
            reasons.add_row(f"  {backend}", "\n".join(said))
    console.print(table)
    console.print(reasons)


def _once(found: dict[str, list[str]]) -> list[str]:
    """Reasons of all uses on one line, then each other one with the uses that it is about."""
    asks: dict[str, list[str]] = {}
    for ask, refused in found.items():
        for reason in refused:
            asks.setdefault(reason, []).append(ask)
    always = [reason for reason, where in asks.items() if len(where) == len(found)]
    some = [
        f"{', '.join(where)}: {reason}" for reason, where in asks.items() if reason not in always
    ]
    return ["; ".join(always), *some] if always else some


def _describe_threads(threads: dict[str, Any]) -> str:
    small, large = threads["small"], threads["large"]
    if small == large:
        return f"{large['count']} ({large['reason']})"
    count = f"1 to {small['count']}" if small["tuned"] else small["count"]
    return f"{count} ({small['reason']}); else {large['count']} ({large['reason']})"


def _show_gemms(gemms: dict[str, Any], console: Console) -> None:
    console.print(f"  GEMMs  {escape(gemms['library'])}", soft_wrap=True)
    if "matrices" not in gemms:
        return
    for said, on in (
        ("programmatic dependent launch", gemms["programmatic_launch"]),
        ("compiler for kernels in CUDA C++ (NVRTC)", gemms["cuda"]),
    ):
        console.print(f"  {said}: {'[green]on[/]' if on else '[yellow]off[/]'}")
    table = Table(box=None, padding=(0, 1, 0, 2))
    for head in ("tokens up to", *map(str, TOKENS)):
        table.add_column(head, no_wrap=True)
    for entry in gemms["matrices"]:
        shape = f"{entry['n']} x {entry['k']}"
        table.add_row(shape, *(_who(c, entry["tuned"]) for c in entry["choices"].values()))
        table.add_row("  in FP8", *(_who(c, False) for c in entry["fp8_choices"].values()))
    console.print(table)
    console.print("  own: a kernel tuned for this matrix; default: untuned; +C++: that for Hopper")
    int4 = "C++" if gemms["int4"] == "cuda" else "Triton"
    console.print(f"  4-bit integers (AWQ, GPTQ, compressed-tensors): up to 128 tokens in {int4}")
    console.print("  in FP8: the weight in 8 bits; the library then quantizes tokens too")
    experts = ", ".join(
        f"{w} {'C++' if k == 'cuda' else 'Triton'}" for w, k in gemms["experts"].items()
    )
    console.print(f"  experts (MoE), up to 128 tokens: {experts}; more in Triton")


def _who(config: dict[str, Any] | None, tuned: bool) -> str:
    if config is None:
        return "library"
    language = "+C++" if config["kernel"] == "cuda" else ""
    return f"[green]{'own' if tuned else 'default'}{language}[/]"
