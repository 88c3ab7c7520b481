"""`forerun doctor`: what this machine can do, and for what it cannot, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun import __version__
from forerun.attention.base import AttentionNeed, LayerMask, Mask
from forerun.attention.select import survey
from forerun.cli.output import print_json
from forerun.llm.bundled import PAIR
from forerun.platform import device as machine
from forerun.speculative.registry import algorithm_names

GIB = 2**30


def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
) -> None:
    """Devices, dtypes, attention backends with the reasons against them, versions, models."""
    report = survey_machine()
    if json:
        print_json(report)
    else:
        _show(report, Console(highlight=False))


def survey_machine() -> dict[str, Any]:
    """Everything that is shown, as JSON values."""
    devices = [_device(device) for device in _devices()]
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
    """A use that backends are asked about."""

    name: str
    masks: frozenset[LayerMask]


ASKS = (
    Ask("target", frozenset({LayerMask()})),
    Ask("block draft", frozenset({LayerMask(Mask.BLOCK)})),
    Ask("token tree", frozenset({LayerMask(Mask.CUSTOM)})),
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
        "auto_dtype": str(dtype).removeprefix("torch."),  # of a half-precision checkpoint
        "attention": {ask.name: survey(_need(device, dtype, ask)) for ask in ASKS},
    }


def _need(device: torch.device, dtype: torch.dtype, ask: Ask) -> AttentionNeed:
    """A common shape (Qwen3-8B's), so that the answer is about the backend and the machine."""
    return AttentionNeed(
        device=device.type,
        dtype=dtype,
        head_dim=128,
        num_heads=32,
        num_kv_heads=8,
        page_size=16,
        masks=ask.masks,
    )


def _bundled() -> dict[str, Any]:
    """Which bundled models this installation has."""
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


def _show_device(entry: dict[str, Any], console: Console, default: bool) -> None:
    free, total = entry["memory_free_bytes"] / GIB, entry["memory_total_bytes"] / GIB
    mark = "  [green](default)[/]" if default else ""
    console.print(f"[bold]{entry['device']}[/]  {escape(entry['name'])}{mark}")
    console.print(f"  memory  {free:.1f} GiB free of {total:.1f}")
    dtypes = ", ".join(f"{name} {speed}" for name, speed in entry["dtypes"].items())
    console.print(f"  dtypes  {dtypes}; auto takes {entry['auto_dtype']} for half precision")
    table = Table("attention", *(ask.name for ask in ASKS), box=None, padding=(0, 2))
    for backend in entry["attention"][ASKS[0].name]:
        table.add_row(backend, *(_verdict(entry["attention"][ask.name][backend]) for ask in ASKS))
    console.print(table)


def _verdict(reasons: list[str]) -> str:
    return f"[yellow]{escape('; '.join(reasons))}[/]" if reasons else "[green]yes[/]"
