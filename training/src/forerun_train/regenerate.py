"""`forerun train regenerate`: the target answers prompts, so that a draft learns its own words.

Every answer is one line of the output, written when it is there. A run that was killed goes on
where it was: answered prompts are skipped, and half a last line is dropped. What decides the
answers is kept beside the output, and a run with other settings is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from forerun import RequestOutput, SamplingParams, __version__
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, ExecutorError, RequestError, shown
from forerun_train.data.records import (
    DataError,
    Message,
    Record,
    Skipped,
    data_files,
    line_key,
    parse_prompt,
    raw_lines,
)
from forerun_train.files import read_object, write_text

SEEDS = 2**63  # seeds of answers are below


class Chat(Protocol):
    """What is needed of `forerun.LLM`: any thread may ask, and all requests run in one batch."""

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams, *, tools: Any
    ) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Prompt:
    """A conversation that lacks its answers."""

    id: str
    key: int  # seeds its answers
    record: Record


@dataclass
class Counts:
    """What a run did."""

    answered: int = 0
    kept: int = 0  # answered by an earlier run
    refused: int = 0
    first_refusal: str | None = None
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tok_s(self) -> float:
        """Generated tokens per second, of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Regeneration:
    """What decides the answers; kept beside them."""

    target: str
    sampling: SamplingParams
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the engine
    data: str = ""

    def sidecar(self) -> dict[str, Any]:
        """As JSON has it. What only speed depends on may change from run to run."""
        return {
            "target": self.target,
            "sampling": {name: _plain(value) for name, value in asdict(self.sampling).items()},
            "engine": {name: _plain(value) for name, value in self.settings.items()},
            "data": self.data,
            "forerun": __version__,
        }


WRITTEN = {"target": str, "sampling": dict, "engine": dict}  # of a sidecar
FIXED = ("target", "sampling")  # of a sidecar: what a resumed run may not change
FIXED_ENGINE = (  # and of the engine's settings those that decide which weights compute, and how
    "tokenizer_path", "load_format", "model_impl", "dtype", "quantization", "kv_cache_dtype",
)  # fmt: skip


def read_prompts(path: str | Path, max_errors: int = 0) -> tuple[list[Prompt], Skipped]:
    """The prompts of a JSONL file or folder; of equal lines without ids one is kept.

    Raises:
        ConfigError: there is no such file, too many lines are bad, or two prompts have one id.
    """
    skipped = Skipped(max_errors)
    prompts: dict[str, Prompt] = {}
    for file in data_files(path):
        for number, _, line in raw_lines(file):
            try:
                record = parse_prompt(line, f"{file}:{number}")
            except DataError as error:
                skipped.add(error)
                continue
            key = line_key(line)
            name = record.given_id or f"{key:016x}"
            before = prompts.get(name)
            if before is not None and record.given_id is not None:
                raise DataError(
                    f"{record.where}: id {shown(name)} is that of {before.record.where} too; ids"
                    " tell which prompts are answered, so each may be used once."
                )
            prompts[name] = before or Prompt(name, key, record)
    skipped.check()
    if not prompts:
        raise ConfigError(f"{path} has no prompts.")
    return list(prompts.values()), skipped


class Answers:
    """The output: lines of answered prompts, and beside it what they were made with."""

    def __init__(self, path: Path, made_with: Regeneration) -> None:
        """Opens the output of an earlier run, or a new one.

        Raises:
            ConfigError: it was made with other settings, or cannot be written.
        """
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a JSONL file for the answers.")
        self.path, self.sidecar = path, path.with_name(path.name + ".json")
        wanted = made_with.sidecar()
        try:
            if path.exists() and path.stat().st_size:
                self._check(wanted)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._lock()
            write_text(self.sidecar, json.dumps(wanted, indent=1) + "\n")
            self.done = self._answered()
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.") from None

    def _lock(self) -> None:
        """Keeps other processes out for as long as the file is open."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"{self.path} is being written by another process; wait for it, or name another"
                " output."
            ) from None

    def _check(self, wanted: Mapping[str, Any]) -> None:
        try:
            before = read_object(self.sidecar, WRITTEN, "Name another output.")
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} exists, and {self.sidecar.name}, which says how it was made, is not"
                " beside it; name another output."
            ) from None
        for name, was, now in _differences(before, wanted):
            raise ConfigError(
                f"{self.path} was made with {name} {shown(was)}, not {shown(now)}; use that again,"
                " or name another output."
            )

    def _answered(self) -> set[str]:
        """The ids in the output, from which half a last line is cut off."""
        done, end = set(), 0
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(str(json.loads(line)["id"]))
                except (ValueError, KeyError, TypeError):
                    self._file.close()
                    raise ConfigError(
                        f"{self.path}:{number}: not a line of this command; name another output."
                    ) from None
                end += len(line)
            file.truncate(end)
        return done

    def add(self, line: Mapping[str, Any]) -> None:
        """Writes a line, which is then safe from an end of this process."""
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Waits until the disk has it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _differences(before: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Any]:
    """What may not change and did: (name, what it was, what it is)."""
    defaults = EngineConfig()
    for name in FIXED_ENGINE:
        was, now = (each["engine"].get(name, getattr(defaults, name)) for each in (before, wanted))
        if was != now:
            yield name, was, now
    for name in FIXED:
        was, now = before.get(name), wanted[name]
        if isinstance(was, dict) and isinstance(now, dict):
            for key in sorted({*was, *now}):
                if was.get(key) != now.get(key):
                    yield key, was.get(key), now.get(key)
        elif was != now:
            yield name, was, now


def answer(llm: Chat, prompt: Prompt, sampling: SamplingParams) -> tuple[dict[str, Any], int]:
    """A line of the output, and how many tokens were generated for it.

    Every user's turn is answered in order; an answer that is cut off ends the conversation.

    Raises:
        RequestError: the engine refuses the prompt.
        ExecutorError: the engine has failed.
    """
    record, messages, tokens, truncated = prompt.record, [], 0, False
    reasons = []
    base = sampling.sampling_seed or 0
    for at, turn in enumerate(record.messages):
        messages.append(dict(turn))
        following = record.messages[at + 1 : at + 2]
        if turn["role"] not in ("user", "tool") or (following and following[0]["role"] == "tool"):
            continue
        seed = (base * 1_000_003 + prompt.key + at) % SEEDS
        params = replace(sampling, sampling_seed=seed)
        output: RequestOutput = llm.chat(messages, params, tools=record.tools)
        if output.error is not None:
            raise ExecutorError(output.error)
        tokens += len(output.output_ids)
        reason = (output.finish_reason or {}).get("type")
        reasons.append(reason)
        messages.append({"role": "assistant", "content": output.text})
        truncated = reason == "length"
        if truncated:
            break
    line: dict[str, Any] = {"id": prompt.id, "messages": messages, "finish_reasons": reasons}
    if record.tools is not None:
        line["tools"] = record.tools
    if record.topic is not None:
        line["topic"] = record.topic
    if truncated:
        line["truncated"] = True
    return line, tokens


def regenerate(
    llm: Chat,
    prompts: Sequence[Prompt],
    answers: Answers,
    sampling: SamplingParams,
    in_flight: int,
    on_done: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Answers the prompts that have no answer yet, `in_flight` of them at a time.

    Raises:
        ExecutorError: the engine has failed; what is written is kept.
    """
    left = [prompt for prompt in prompts if prompt.id not in answers.done]
    counts = Counts(kept=len(prompts) - len(left))
    started, stop = time.perf_counter(), threading.Event()

    def ask(prompt: Prompt) -> tuple[dict[str, Any], int] | str | None:
        if stop.is_set():
            return None
        try:
            return answer(llm, prompt, sampling)
        except RequestError as error:
            return f"{prompt.record.where}: {error}"

    with ThreadPoolExecutor(in_flight, thread_name_prefix="prompts") as pool:
        try:
            for future in _in_order_of_end(pool, ask, left, 2 * in_flight):
                _book(counts, answers, future.result())
                counts.seconds = time.perf_counter() - started
                on_done(counts)
        except (
            BaseException
        ):  # Ctrl-C too: what is in flight is given up, or it would be waited for
            stop.set()
            llm.close()
            raise
    return counts


def _book(counts: Counts, answers: Answers, found: tuple[dict[str, Any], int] | str | None) -> None:
    if isinstance(found, str):
        counts.refused += 1
        counts.first_refusal = counts.first_refusal or found
    elif found is not None:
        line, tokens = found
        answers.add(line)
        counts.answered += 1
        counts.tokens += tokens


def _in_order_of_end(
    pool: ThreadPoolExecutor, work: Callable[[Prompt], Any], items: Sequence[Prompt], ahead: int
) -> Iterator[Future[Any]]:
    """Futures when they are done, with `ahead` of them submitted at a time."""
    done: SimpleQueue[Future[Any]] = SimpleQueue()
    for number, item in enumerate(items):
        pool.submit(work, item).add_done_callback(done.put)
        if number + 1 >= ahead:
            yield done.get()
    for _ in items[max(len(items) - ahead + 1, 0) :]:
        yield done.get()


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
