"""Inputs of `forerun bench`: shapes, prompts, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from forerun import LLM
from forerun.cli.counts import check_counts
from forerun.cli.flags import Values
from forerun.cli.settings import bundled_algorithm
from forerun.core.errors import ConfigError
from forerun.evals.prompts import encoder, held_out, windows
from forerun.llm.bundled import preset as bundled_preset
from forerun.models.dummy_weights import DUMMY_FORMATS
from forerun.speculative.registry import get_algorithm
from forerun_bench.one_batch import Shape, random_prompts

RandomInput = Annotated[
    bool, typer.Option("--random-input", help="Random token ids instead of Python text")
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Shapes of a known model, random weights and input: deepseek-v2-lite, gpt-oss-20b,"
        " qwen3-30b-a3b, qwen3-8b, qwen3.5-9b"
    ),
]

SPARE = 256  # KV slots of a request beyond its tokens: drafts, steps in flight, a partial page


def check(
    shapes: Sequence[Shape], repetitions: int, random_input: bool, engine: Mapping[str, Any]
) -> None:
    """Checks the arguments before anything is loaded.

    Raises:
        ConfigError: they cannot be measured.
    """
    for shape in shapes:
        check_counts(**vars(shape))
    if any(shape.output_len < 2 for shape in shapes):
        raise ConfigError("--output-len must be >= 2: the first token comes from the prefill.")
    check_counts(repetitions=repetitions)
    load_format = engine.get("load_format")
    if load_format in DUMMY_FORMATS and not random_input:
        raise ConfigError(f"--load-format {load_format} has random weights; add --random-input.")


def with_preset(name: str, engine: Values) -> dict[str, Any]:
    """Settings for random weights in the shapes of a known model; `engine` overrides them.

    With its draft, if it has one, else without speculation.
    """
    target, draft = bundled_preset(name)
    settings = {"model_path": str(target), "load_format": "dummy", **engine}
    settings.setdefault("speculative_algorithm", bundled_algorithm() if draft else "NONE")
    if draft is not None and get_algorithm(settings["speculative_algorithm"]).bundled_draft:
        settings.setdefault("speculative_draft_model_path", str(draft))
    return settings


def with_room(
    settings: Mapping[str, Any], shapes: Sequence[Shape], random_input: bool
) -> dict[str, Any]:
    """Sets limits that are not given to the needs of the largest batch."""
    out = dict(settings)
    if random_input:
        out["skip_tokenizer_init"] = True
    out.setdefault("max_running_requests", max(s.batch_size for s in shapes))
    tokens = max(s.batch_size * (s.input_len + s.output_len + SPARE) for s in shapes)
    out.setdefault("max_total_tokens", tokens + (out.get("page_size") or 0))
    out.setdefault("max_mixed_step_ms", 0)  # the prefill of the batch is not to be divided by times
    return out


def make_prompts(llm: LLM, shape: Shape, random_input: bool) -> list[list[int]]:
    if random_input:
        vocab = llm.engine.info.vocab_size
        return random_prompts(vocab, shape.batch_size, shape.input_len)
    encode = encoder(llm.tokenizer)
    text = [token for row in held_out() for token in encode(row["prompt"])]
    return windows(text, shape.batch_size, shape.input_len)
