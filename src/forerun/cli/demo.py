"""`forerun demo`: plain and speculative decoding of the same prompts, side by side.

With the bundled pair, or with `--real` a model of 135 M parameters that writes English.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun import LLM, SamplingParams
from forerun.cli.blocks import Decode
from forerun.cli.counts import check_counts
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
from forerun.kernels.cpu import library
from forerun.layers.gemm import INT8
from forerun.llm.bundled import REAL_TARGET, real_draft
from forerun.platform.device import resolve_device
from forerun.speculative.registry import get_algorithm

WORD_PROMPTS, PYTHON_PROMPTS = 5, 3
# Settings of engines that are loaded at once and serve one request at a time.
SMALL: dict[str, Any] = {"max_running_requests": 1, "max_total_tokens": 4096}
WITHOUT_DRAFT = "NGRAM"  # what speculates where there is no draft


@dataclass(frozen=True)
class Models:
    """What is shown, on which prompts."""

    algorithm: str
    prompts: Callable[[LLM], list[Prompt]]
    target: dict[str, Any]  # settings of both engines
    draft: dict[str, Any]  # of the speculative one besides
    remark: str | None = None  # for the user


def demo(
    real: Annotated[
        bool, typer.Option("--real", help=f"{REAL_TARGET} from the Hub, or --model-path")
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
    quantization: Annotated[str | None, typer.Option(help="fp8, or int8 on a CPU")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")] = "auto",
    repetitions: Annotated[int, typer.Option(help="Timed runs of each prompt, both ways")] = 3,
) -> None:
    """Watch a model generate, plain and with its draft: the same text, only faster."""
    check_counts(repetitions=repetitions, max_new_tokens=max_new_tokens)
    name = algorithm.upper() if algorithm else None
    choose = real_models if real else bundled_models
    models = choose(model_path, speculative_draft_model_path, name)
    models = with_rounded_draft(models, device)
    asked: dict[str, Any] = {"temperature": temperature, "seed": seed, "repetitions": repetitions}
    params = SamplingParams(
        temperature=temperature, sampling_seed=seed, max_new_tokens=max_new_tokens
    )
    # With --json nothing is shown, but an image may still be saved.
    console = Console(file=io.StringIO()) if as_json else Console()
    with console.status("Loading the models"):
        common = {**SMALL, "dtype": dtype, "quantization": quantization, "device": device}
        plain, spec = loaded(models, common)
    with plain, spec:
        show = Show(console, models.algorithm, decoder(plain.tokenizer))
        show.opening()
        prompts = models.prompts(plain)
        result = compare(plain, spec, prompts, params, repetitions, on_prompt=show.prompt)
        show.closing(result)
        if svg is not None:
            save_picture(result, models.algorithm, show.decode, svg)
        if as_json:
            print_json({**result.as_dict(), **what_ran(models, spec), **asked})
    fail_if_aborted(result.outputs)
    if not result.identical:
        raise typer.Exit(1)


def what_ran(models: Models, spec: LLM) -> dict[str, Any]:
    """What ran, as JSON values."""
    explained = spec.explain()
    return {
        **models.target,
        "algorithm": models.algorithm,
        "dtype": explained["dtype"],
        "quantized_weights": explained["quantized_weights"],
        "environment": environment(spec),
    }


def bundled_models(model_path: str | None, draft: str | None, algorithm: str | None) -> Models:
    """The bundled pair.

    Raises:
        ConfigError: another target or draft is named.
    """
    if model_path or draft:
        raise ConfigError("--model-path and --speculative-draft-model-path need --real; add it.")
    name = algorithm or bundled_algorithm()
    return Models(name, demo_prompts, {}, {"speculative_algorithm": name})


def real_models(model_path: str | None, draft: str | None, algorithm: str | None) -> Models:
    """A model that writes English, with a draft: given, shipped, or else looked up in the text."""
    remark = None
    if draft is None and algorithm in (None, bundled_algorithm()):
        shipped = real_draft()
        draft = None if shipped is None else str(shipped)
    if draft is None and algorithm is None:
        algorithm = WITHOUT_DRAFT
        remark = f"No draft for {REAL_TARGET} is in this installation, and"
        remark += " --speculative-draft-model-path names none:"
        remark += f" {algorithm} looks drafts up in the text so far."
    name = algorithm or bundled_algorithm()
    own = {} if draft is None else {"speculative_draft_model_path": draft}
    return Models(
        name,
        lambda llm: chat_prompts(chat_encoder(llm.tokenizer)),
        {"model_path": model_path or REAL_TARGET},
        {"speculative_algorithm": name, **own},
        remark,
    )


def with_rounded_draft(models: Models, device: str) -> Models:
    """The same, on a CPU with the draft in 8 bits: only the target must not be rounded.

    Raises:
        ConfigError: there is no such algorithm.
    """
    rounds = get_algorithm(models.algorithm).quantizes_draft
    if not rounds or resolve_device(device).type != "cpu" or library.why_missing() is not None:
        return models
    return replace(models, draft={**models.draft, "speculative_draft_model_quantization": INT8})


def loaded(models: Models, common: Mapping[str, Any]) -> tuple[LLM, LLM]:
    """The plain engine and the speculative one, which comes first: it refuses a wrong draft."""
    spec = LLM(**common, **models.target, **models.draft)
    try:
        plain = LLM(**common, **models.target)
    except BaseException:
        spec.close()
        raise
    if models.remark is not None:
        dim(models.remark)
    return plain, spec


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
