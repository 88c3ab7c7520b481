"""What drafts reach, as a table, and one of them in the folder in which it ships."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OWN = ("target", "data", "initial_draft", "device")  # settings that say nothing elsewhere

Scores = dict[tuple[str, float], float]  # (dataset, temperature): accept length


def read_scores(file: Path) -> Scores:
    """The accept lengths that `forerun train evaluate --json` has printed."""
    rows = json.loads(file.read_text(encoding="utf-8"))["scores"]
    return {(row["dataset"], row["temperature"]): row["accept_length"] or 0.0 for row in rows}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(drafts: dict[str, Scores]) -> str:
    """Markdown: a row for each draft and temperature."""
    datasets = list(dict.fromkeys(dataset for scores in drafts.values() for dataset, _ in scores))
    lines = [f"| draft | T | {' | '.join(datasets)} | mean |", "|---" * (len(datasets) + 3) + "|"]
    for name, scores in drafts.items():
        for temperature in sorted({t for _, t in scores}):
            row = [scores[dataset, temperature] for dataset in datasets]
            cells = " | ".join(f"{length:.2f}" for length in (*row, mean(row)))
            lines.append(f"| {name} | {temperature:g} | {cells} |")
    return "\n".join(lines)


def pack(run: Path, output: Path, answers: str, scores: str) -> None:
    """Writes the draft of a run, without a pruned LM head: its rows are the target's.

    Args:
        answers: says what the draft has learnt.
        scores: a table of what it reaches.
    """
    from safetensors.torch import load_file

    from forerun_train.files import write_tensors, write_text

    tensors = load_file(run / "draft" / "model.safetensors")
    if "d2t" in tensors:
        tensors = {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "t2d")}
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(output / "model.safetensors", tensors, {"format": "pt"})
    write_text(output / "config.json", (run / "draft" / "config.json").read_text(encoding="utf-8"))
    newest = max((run / "checkpoints").glob("step-*/state.json"))
    state = json.loads(newest.read_text(encoding="utf-8"))
    write_text(output / "README.md", _readme(state, answers, scores))


def _readme(state: dict[str, Any], answers: str, scores: str) -> str:
    settings = {k: v for k, v in state["settings"].items() if v is not None and k not in OWN}
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: forerun
---
# Forerun's draft for SmolLM2-135M-Instruct

Embedding and LM head are the target's. Accept lengths on held-out prompts, bonus token included:

{scores}

**Data.** The target's own answers to prompts: {answers}.

**Training.** {state["step"]:,} steps in {state["progress"]["elapsed"]:.0f} s, by
`training/recipes/smollm2.py`; settings of `forerun train`:

```json
{json.dumps(settings)}
```
"""
