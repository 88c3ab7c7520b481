"""`forerun train evaluate`: what a draft is worth, by dataset and temperature.

The draft serves: prompts run on an engine with it and on a plain one, in turns, so that a slow
phase of the machine affects both. Accept lengths are those of its full width in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun import LLM, RequestOutput, SamplingParams
from forerun.core.errors import ConfigError, shown
from forerun.doctor.draft import explain_draft
from forerun.evals.acceptance import Acceptance
from forerun.evals.compare import Comparison, compare
from forerun.evals.prompts import PYTHON, WORDS, Prompt, chat_encoder, python_prompts, word_prompts
from forerun.evals.scoring import run_all
from forerun.llm.prompts import chat_ids
from forerun_train.data.records import (
    DataError,
    Message,
    data_files,
    parse_prompt,
    parse_record,
    raw_lines,
)
from forerun_train.prompts import HELD_OUT, TOPICS, generate

TEXT_TOKENS = 256  # of a text without turns: the prompt is its first half, at most so many tokens
BUNDLED = (WORDS, PYTHON)


@dataclass(frozen=True)
class Dataset:
    """Prompts of one kind."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Score:
    """Of a dataset at a temperature. Without `comparison`, only acceptance was measured."""

    dataset: Dataset
    temperature: float
    outputs: tuple[RequestOutput, ...]  # with the draft, of all repetitions
    acceptance: Acceptance
    comparison: Comparison | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        out: dict[str, Any] = {
            "dataset": self.dataset.name,
            "temperature": self.temperature,
            "prompts": len(self.dataset.prompts),
            **self.acceptance.as_dict(),
        }
        if self.comparison is not None:
            out |= {
                "speedup": self.comparison.speedup,
                "plain_tok_s": self.comparison.plain_tok_s,
                "spec_tok_s": self.comparison.spec_tok_s,
                "identical": sum(each.identical for each in self.comparison.prompts),
            }
        return out


@dataclass(frozen=True)
class Sampling:
    """How the datasets are run."""

    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 256
    seed: int = 0
    repetitions: int = 1

    def params(self, temperature: float) -> SamplingParams:
        """Of one temperature; the seed makes plain and drafted texts equal."""
        return SamplingParams(
            temperature=temperature, sampling_seed=self.seed, max_new_tokens=self.max_new_tokens
        )


def algorithm_of(draft: str | Path) -> str:
    """The algorithm that serves a draft.

    Raises:
        ConfigError: there is no such folder, or no algorithm reads it.
    """
    folder = Path(draft).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is not the folder of a draft (there is no config.json); a training run"
            " exports its draft to OUTPUT/draft."
        )
    names = explain_draft(folder).get("algorithms") or ()
    if not names:
        raise ConfigError(f"no algorithm serves {folder}; name one with --speculative-algorithm.")
    return str(names[0])


def open_dataset(name: str, tokenizer: Any, count: int, seed: int) -> Dataset:
    """Prompts of a file, of a topic's held-out ones (`forerun train prompts`), or bundled ones.

    Raises:
        ConfigError: there is neither such a file nor such a dataset, or a line is bad.
    """
    if name in TOPICS:
        encode = chat_encoder(tokenizer)
        texts = [each["messages"][0]["content"] for each in generate([name], count, seed, HELD_OUT)]
        found = [
            Prompt(f"{name} {i}", name, text, tuple(encode(text)))
            for i, text in enumerate(texts, 1)
        ]
    elif name == WORDS:
        found = word_prompts(chat_encoder(tokenizer), count)
    elif name == PYTHON:
        found = python_prompts(lambda text: list(tokenizer.encode(text)), count)
    else:
        return Dataset(Path(name).stem, tuple(_file_prompts(name, tokenizer, count)))
    return Dataset(name, tuple(found))


def _file_prompts(path: str, tokenizer: Any, count: int) -> list[Prompt]:
    if not Path(path).expanduser().exists():
        known = ", ".join((*TOPICS, *BUNDLED))
        raise ConfigError(f"{shown(path)} is neither a file nor a dataset; datasets: {known}.")
    prompts: list[Prompt] = []
    for file in data_files(path):
        for number, _, line in raw_lines(file):
            if len(prompts) == count:
                return prompts
            prompts.append(_prompt(line, f"{file}:{number}", tokenizer))
    if not prompts:
        raise ConfigError(f"{path} has no prompts.")
    return prompts


def _prompt(line: bytes, where: str, tokenizer: Any) -> Prompt:
    """A conversation up to its last answer; without answers, up to the first user's turn."""
    name = Path(where).stem
    try:
        record = parse_record(line, where)
    except DataError:
        record = parse_prompt(line, where)
    if record.text is not None:
        ids = tokenizer(record.text, verbose=False)["input_ids"]
        kept = ids[: max(1, min(TEXT_TOKENS, len(ids) // 2))]
        return Prompt(where, name, tokenizer.decode(kept), tuple(kept))
    messages = _asked(record.messages)
    (ids,), _ = chat_ids(tokenizer, list(messages))
    return Prompt(where, name, str(messages[-1]["content"]), tuple(ids))


def _asked(messages: Sequence[Message]) -> Sequence[Message]:
    roles = [each["role"] for each in messages]
    if "assistant" in roles:
        return messages[: len(roles) - 1 - roles[::-1].index("assistant")]
    return messages[: roles.index("user") + 1]


def compared(
    plain: LLM,
    spec: LLM,
    datasets: Sequence[Dataset],
    sampling: Sampling,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Scores with speeds: one prompt at a time, plain and with the draft in turns."""
    scores = []
    for dataset in datasets:
        for temperature in sampling.temperatures:
            found = compare(
                plain,
                spec,
                dataset.prompts,
                sampling.params(temperature),
                sampling.repetitions,
                lambda _: on_prompt(),
            )
            scores.append(Score(dataset, temperature, found.outputs, found.acceptance, found))
    return scores


def accepted(
    spec: LLM,
    datasets: Sequence[Dataset],
    sampling: Sampling,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Scores without speeds: the prompts of a dataset run in batches."""
    scores = []
    for dataset in datasets:
        for temperature in sampling.temperatures:
            outputs = run_all(spec, dataset.prompts, sampling.params(temperature), on_prompt)
            total = Acceptance.total(Acceptance.of(each.meta_info) for each in outputs)
            scores.append(Score(dataset, temperature, tuple(outputs), total))
    return scores


def confidences(llm: LLM) -> Mapping[str, Any]:
    """How often drafts of each confidence were accepted, by mode; empty: the draft has none."""
    return llm.stats().get("confidence") or {}
