"""The command `forerun train prompts`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.output import dim
from forerun.core.errors import ConfigError
from forerun_train.prompts import SPLITS, TOPICS, TRAIN, generate


def prompts(
    output: Annotated[Path, typer.Option(help="JSONL file for the prompts")],
    count: Annotated[int, typer.Option(help="Number of prompts")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds give other prompts")] = 0,
    topics: Annotated[
        str, typer.Option(help=f"Topics, in turn: of {', '.join(TOPICS)}")
    ] = ",".join(TOPICS),
    split: Annotated[
        str, typer.Option(help=f"{' or '.join(SPLITS)}: words, code and problems differ")
    ] = TRAIN,
) -> None:
    """Writes prompts made of word lists, generated problems and the code that is installed."""
    names = [name.strip() for name in topics.split(",") if name.strip()]
    lines = generate(names, count, seed, split)
    counts: Counter[str] = Counter()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w", encoding="utf-8") as file:
            for line in lines:
                counts[line["topic"]] += 1
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.") from None
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    dim(f"{output}: {listed}")
