"""Forerun against `transformers` on the bundled model: same weights, dtype, prompts and process.

    python benchmarks/vs_transformers.py [--json]

Every engine continues every prompt greedily, one at a time. They take turns, so that a slow spell
of the machine hits all of them; a prompt's figure is the median over its repetitions and a ratio
is the median over prompts. Whole requests are timed, the prefill included. Forerun's prefix cache
is emptied before each run; `transformers` has none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forerun import LLM, SamplingParams
from forerun.bench.environment import Environment
from forerun.bench.timing import interleaved, median
from forerun.cli.demo import SMALL, demo_prompts
from forerun.cli.settings import bundled_algorithm
from forerun.evals.prompts import Prompt
from forerun.llm.bundled import bundled
from forerun.platform.device import DTYPES, resolve_device

Generate = Callable[[Prompt], list[int]]  # the new token ids

REFERENCE = "transformers"
LOOKUP = "transformers, prompt look-up"
PLAIN = "forerun, plain"


@dataclass(frozen=True)
class Row:
    """One engine: tokens per second of each prompt, and whether it wrote what the others wrote."""

    name: str
    tok_s: tuple[float, ...]
    agrees: int  # prompts with the ids of `transformers`

    def ratio(self, other: Row) -> float:
        return median([a / b for a, b in zip(self.tok_s, other.tok_s, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--algorithm", default=bundled_algorithm())
    args = parser.parse_args()

    device = resolve_device(args.device)
    algorithm = args.algorithm.upper()
    common = {**SMALL, "dtype": args.dtype, "device": str(device)}
    model = reference(DTYPES[args.dtype], device)
    with LLM(**common) as plain, LLM(**common, speculative_algorithm=algorithm) as spec:
        prompts = demo_prompts(plain)
        tokens = args.max_new_tokens
        engines = {
            REFERENCE: by_transformers(model, device, tokens),
            LOOKUP: by_transformers(model, device, tokens, prompt_lookup_num_tokens=10),
            PLAIN: by_forerun(plain, tokens),
            f"forerun, {algorithm}": by_forerun(spec, tokens),
        }

        def flush() -> None:
            plain.engine.flush_cache()
            spec.engine.flush_cache()

        rows = measure(engines, prompts, args.repetitions, flush)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    if args.json:
        print(json.dumps(report(rows, settings, Environment.here(str(device)))))
    else:
        show(rows, len(prompts), f"{args.dtype}, {Environment.here(str(device)).line()}")


def reference(dtype: torch.dtype, device: torch.device) -> Any:
    """The bundled target as `transformers` runs it best at batch size 1: SDPA, a dynamic cache."""
    transformers_logging.disable_progress_bar()
    folder = str(bundled("target"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device).eval()


def by_transformers(model: Any, device: torch.device, tokens: int, **options: Any) -> Generate:
    def generate(prompt: Prompt) -> list[int]:
        ids = torch.tensor([prompt.ids], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                **options,
            )
        return [int(token) for token in out[0, ids.shape[1] :].tolist()]

    return generate


def by_forerun(llm: LLM, tokens: int) -> Generate:
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens)

    def generate(prompt: Prompt) -> list[int]:
        output = llm.generate(input_ids=list(prompt.ids), sampling_params=params)
        return list(output.output_ids)

    return generate


def measure(
    engines: dict[str, Generate],
    prompts: Sequence[Prompt],
    repetitions: int,
    flush: Callable[[], None],
) -> list[Row]:
    for generate in engines.values():
        generate(prompts[0])  # warm-up
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    agrees = dict.fromkeys(engines, 0)
    for prompt in prompts:
        runs = {name: _bind(generate, prompt) for name, generate in engines.items()}
        timed = interleaved(runs, repetitions, before=flush)
        expected = timed[REFERENCE][0].value
        for name, results in timed.items():
            speeds[name].append(median([len(r.value) / r.seconds for r in results]))
            agrees[name] += all(r.value == expected for r in results)
    return [Row(name, tuple(speeds[name]), agrees[name]) for name in engines]


def _bind(generate: Generate, prompt: Prompt) -> Callable[[], list[int]]:
    return lambda: generate(prompt)


def report(rows: Sequence[Row], settings: dict[str, Any], where: Environment) -> dict[str, Any]:
    first, *_, plain, spec = rows
    return {
        "engines": [
            {
                "name": row.name,
                "tok_s": median(row.tok_s),
                "tok_s_per_prompt": list(row.tok_s),
                "ratio_to_transformers": row.ratio(first),
                "prompts_identical_to_transformers": row.agrees,
            }
            for row in rows
        ],
        "plain_over_transformers": plain.ratio(first),
        "spec_over_transformers": spec.ratio(first),
        "spec_over_plain": spec.ratio(plain),
        "prompts": len(first.tok_s),
        "settings": settings,
        "environment": where.as_dict(),
    }


def show(rows: Sequence[Row], prompts: int, where: str) -> None:
    first, *_, plain, spec = rows
    table = Table(title=f"Batch size 1, whole requests, medians over {prompts} prompts")
    table.add_column("engine")
    for name in ("tok/s", "x transformers", "same ids"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{median(row.tok_s):.0f}", f"{row.ratio(first):.2f}")
        table.add_row(row.name, *figures, f"{row.agrees} of {prompts}")
    console = Console()
    console.print(table)
    console.print(where, style="dim")
    console.print(f"plain / transformers: {plain.ratio(first):.2f}")
    console.print(f"{spec.name.split(', ')[1]} / transformers: {spec.ratio(first):.2f}")


if __name__ == "__main__":
    main()
