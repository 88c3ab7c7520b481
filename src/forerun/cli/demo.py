"""`forerun demo`: plain and speculative decoding of the same prompts, side by side.

With the bundled pair, or with `--real` a model of 135 M parameters that writes English.
"""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun import LLM, SamplingParams
from forerun.cli.blocks import Decode
from forerun.cli.demo_view import Show
from forerun.cli.output import dim, fail_if_aborted, print_json
from forerun.cli.settings import bundled_algorithm
from forerun.core.errors import ConfigError
from forerun.evals.compare import Comparison, compare
from forerun.evals.environment import environment
from forerun.evals.prompts import (
    Prompt,
    chat_encoder,
    chat_prompts,
    decoder,
    encoder,
    python_prompts,
    word_prompts,
)
from forerun.llm.bundled import REAL_TARGET, real_draft
from forerun.speculative.registry import get_algorithm

WORD_PROMPTS, PYTHON_PROMPTS = 5, 3
# Settings of engines that are loaded at once and serve one request at a time.
SMALL: dict[str, Any] = {"max_running_requests": 1, "max_total_tokens": 4096}
WITHOUT_DRAFT = "NGRAM"  # what speculates where there is no draft


@dataclass(frozen=True)
class Models:
    """What both engines load, and what the speculative one has besides."""

    algorithm: str
    target: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    remark: str | None = None  # for the user


def demo(
    real: Annotated[
        bool,
        typer.Option("--real", help=f"{REAL_TARGET} from the Hub, or --model-path"),
    ] = False,
    model_path: Annotated[
        str | None, typer.Option(help="With --real: a GGUF file, a model folder, or org/name")
    ] = None,
    speculative_draft_model_path: Annotated[
        str | None, typer.Option(help="With --real: a draft that was trained for it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else")] = (
        False
    ),
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Also save the output as an SVG image")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    algorithm: Annotated[
        str | None,
        typer.Option(help="Speculative algorithm; default: the first with a bundled draft"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy; above 0, --seed applies")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling seed")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32 avoids differences by rounding; or auto, bfloat16")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")] = "auto",
    repetitions: Annotated[int, typer.Option(help="Timed runs of each prompt, both ways")] = 3,
) -> None:
    """Watch a model generate, plain and with its draft: the same text, only faster."""
    if repetitions < 1:
        raise ConfigError(f"--repetitions must be >= 1, got {repetitions}.")
    name = algorithm.upper() if algorithm else None
    if real:
        models = real_models(model_path, speculative_draft_model_path, name)
    elif model_path or speculative_draft_model_path:
        raise ConfigError("--model-path and --speculative-draft-model-path need --real; add it.")
    else:
        models = Models(name or bundled_algorithm())
    get_algorithm(models.algorithm)  # refuses an unknown name before anything is loaded
    params = SamplingParams(
        temperature=temperature, sampling_seed=seed, max_new_tokens=max_new_tokens
    )
    common = {**SMALL, **models.target, "dtype": dtype, "device": device}
    # With --json nothing is shown, but an image may still be saved.
    console = Console(file=io.StringIO()) if as_json else Console()
    with ExitStack() as stack:
        with console.status("Loading the models"):
            # The speculative one first: it refuses a draft of another target.
            spec = stack.enter_context(
                LLM(**common, **models.draft, speculative_algorithm=models.algorithm)
            )
            plain = stack.enter_context(LLM(**common))
        if models.remark is not None:
            dim(models.remark)
        prompts = chat_prompts(chat_encoder(plain.tokenizer)) if real else demo_prompts(plain)
        decode = decoder(plain.tokenizer)
        show = Show(console, models.algorithm, decode)
        show.opening()
        result = compare(plain, spec, prompts, params, repetitions, on_prompt=show.prompt)
        show.closing(result)
        if svg is not None:
            save_picture(result, models.algorithm, decode, svg)
        if as_json:
            settings = {
                **models.target,
                "algorithm": models.algorithm,
                "dtype": spec.explain()["dtype"],
                "temperature": temperature,
                "seed": seed,
                "repetitions": repetitions,
            }
            print_json({**result.as_dict(), **settings, "environment": environment(spec)})
    fail_if_aborted(result.outputs)
    if not result.identical:
        raise typer.Exit(1)


def real_models(model_path: str | None, draft: str | None, algorithm: str | None) -> Models:
    """Of `--real`. Without a draft, given or shipped, drafts are looked up in the text so far."""
    target = {"model_path": model_path or REAL_TARGET}
    shipped = real_draft() if algorithm in (None, bundled_algorithm()) else None
    if draft is None and shipped is None and algorithm is None:
        remark = f"No draft for {REAL_TARGET} is in this installation, and"
        remark += " --speculative-draft-model-path names none:"
        remark += f" {WITHOUT_DRAFT} looks drafts up in the text so far."
        return Models(WITHOUT_DRAFT, target, remark=remark)
    draft = draft or (str(shipped) if shipped else None)
    settings = {} if draft is None else {"speculative_draft_model_path": draft}
    return Models(algorithm or bundled_algorithm(), target, settings)


def demo_prompts(llm: LLM) -> list[Prompt]:
    words = word_prompts(chat_encoder(llm.tokenizer), WORD_PROMPTS)
    return words + python_prompts(encoder(llm.tokenizer), PYTHON_PROMPTS)


def save_picture(result: Comparison, algorithm: str, decode: Decode, path: Path) -> None:
    """The first prompt of each skill, the table and the summary, as SVG."""
    console = Console(
        file=io.StringIO(), record=True, width=120, force_terminal=True, color_system="truecolor"
    )
    show = Show(console, algorithm, decode, live=False)
    show.opening()
    for skill in dict.fromkeys(p.prompt.skill for p in result.prompts):
        show.prompt(next(p for p in result.prompts if p.prompt.skill == skill))
    show.closing(result)
    try:
        path.write_text(console.export_svg(title="forerun demo"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {path} cannot be written: {error.strerror}.") from None
