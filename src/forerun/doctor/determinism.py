"""`forerun doctor --determinism`: whether a token has the same bits however it is computed.

Texts are generated one by one by plain decoding, from a few random tokens each: the reference.
Then parts of them are prompts, and the rest is generated again in other ways: in batches, with
drafts, in chunks, over other pages, after prefix hits and preemptions. The log-probabilities of
every token, of prompts and of what is generated, must be those of the reference, bit for bit.

Where they differ, the way and the reference run again under observation (`observer.py`), which
names the first layer and kernel whose output differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun import LLM
from forerun.cli.output import print_json
from forerun.cli.settings import without_speculation
from forerun.cli.tables import wide_console
from forerun.core.errors import ConfigError, ForerunError
from forerun.doctor.observer import LayerObserver
from forerun.speculative.registry import algorithm_names, get_algorithm

LOOKUPS = ("NGRAM", "SUFFIX")  # algorithms without a draft model
# Settings that change what a verify pass looks like, by algorithm; of others: its width.
FORMS: dict[str, list[dict[str, Any]]] = {
    "DDTREE": [{"speculative_ddtree_budget": 6}, {"speculative_ddtree_budget": 32}],
    "EAGLE3": [{"speculative_num_draft_tokens": 4}, {"speculative_eagle_topk": 3}],
}
WIDTHS = [{"speculative_num_draft_tokens": 3}, {"speculative_num_draft_tokens": 8}]
TOP = 4  # most probable tokens whose log-probabilities are compared too
SLOTS = 8  # requests at once, so that prompts start while others decode

Progress = Callable[[str], None]


def _size(default: int, help: str) -> Any:
    return field(default=default, metadata={"help": help, "panel": "Determinism"})


@dataclass(frozen=True)
class Sizes:
    """How much is tried.

    Raises:
        ConfigError: a size is too small.
    """

    requests: int = _size(8, "Texts, each computed in every way")
    tokens: int = _size(64, "Tokens of a text, at least 16")
    seed: int = _size(0, "Of texts, batches and where prompts end")
    ways: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Only ways whose name contains this; may be repeated",
            "panel": "Determinism",
        },
    )

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("tokens", 16)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Way:
    """A way to compute the texts, that must not change a bit."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    scores: bool = False  # whole texts as prompts, nothing generated
    scores_prompts: bool = True  # log-probabilities of prompts too, which no prefix hit has
    twice: bool = False  # the second time with prefix hits
    tight: bool = False  # pages for a few requests only: others are preempted


@dataclass(frozen=True)
class Text:
    """One text of the reference."""

    ids: list[int]
    prompt: int  # how many of them were given
    sampling: dict[str, Any]
    logprobs: list[tuple[Any, ...]]  # of ids[prompt:], each with those of the most probable tokens


@dataclass
class Found:
    """What came of a way. Compared are tokens up to the first that is another one."""

    name: str
    refused: str | None = None  # why this model or machine cannot do it
    requests: int = 0
    differing_requests: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    other_texts: int = 0  # requests whose text is another one
    accept_length: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    first: dict[str, Any] | None = None  # where the first difference comes from

    @property
    def equal(self) -> bool:
        return self.differing_requests == 0


def check_determinism(
    settings: Mapping[str, Any], sizes: Sizes, progress: Progress = lambda name: None
) -> dict[str, Any]:
    """Runs all ways.

    Args:
        settings: of the engine, as keywords of `LLM`.
        progress: called with the name of what runs next.

    Returns:
        The report, as JSON values; `deterministic` is whether no bit differs.

    Raises:
        ConfigError: invalid settings.
    """
    chosen = ways(settings, sizes)
    progress("plain decoding, one request at a time")
    check = Check(reference_settings(settings), sizes)
    found = []
    for number, way in enumerate(chosen, start=1):
        progress(f"{number} of {len(chosen)}: {way.name}")
        each = check.run(way)
        if not each.equal:
            progress(f"{way.name}: where")
            each.first = check.locate(way)
        found.append(each)
    names = "architecture", "device", "dtype", "tp_size"
    return {
        **{name: check.chosen[name] for name in names},
        **asdict(sizes),
        "ways": [asdict(each) | {"equal": each.equal} for each in found],
        "deterministic": all(each.equal for each in found),
    }


def ways(settings: Mapping[str, Any], sizes: Sizes) -> list[Way]:
    """What is tried; each comes with `settings` without their speculation.

    Raises:
        ConfigError: no way has such a name.
    """
    every = _every_way(settings, sizes)
    chosen = [
        way for way in every if not sizes.ways or any(part in way.name for part in sizes.ways)
    ]
    if not chosen:
        names = "; ".join(way.name for way in every)
        raise ConfigError(f"No way has {' or '.join(sizes.ways)} in its name; there are: {names}.")
    return chosen


def _every_way(settings: Mapping[str, Any], sizes: Sizes) -> list[Way]:
    own = {name: v for name, v in settings.items() if name not in without_speculation(settings)}
    few = {"max_total_tokens": 3 * sizes.tokens}
    plain = [
        Way("batches"),
        Way("batches, without graphs", {"disable_cuda_graph": True}),
        Way("batches, prompts in chunks of 7", {"chunked_prefill_size": 7}),
        Way("pages of 1 token", {"page_size": 1}),
        Way("pages of 64 tokens", {"page_size": 64}),
        Way("prefix hits", {"disable_radix_cache": False}, scores_prompts=False, twice=True),
        Way("preemption", few, scores_prompts=False, tight=True),
        Way("scoring of whole texts", scores=True),
    ]
    return [*plain, *_drafted(settings, own, few)]


def _drafted(
    settings: Mapping[str, Any], own: Mapping[str, Any], few: Mapping[str, Any]
) -> Iterator[Way]:
    """Ways with drafts: those of the settings as they are, and others in two widths."""
    if own and "speculative_algorithm" not in own:
        raise ConfigError(f"{next(iter(own))} is set without speculative_algorithm; set it too.")
    if own:
        yield Way(f"{own['speculative_algorithm']} as configured", own)
        yield Way(
            f"{own['speculative_algorithm']}, prefix hits and chunks of 7",
            {**own, "chunked_prefill_size": 7, "disable_radix_cache": False},
            scores_prompts=False,
            twice=True,
        )
    bundled = [name for name in algorithm_names() if get_algorithm(name).bundled_draft]
    for name in (*(() if "model_path" in settings else bundled), *LOOKUPS):
        fixed = {"speculative_algorithm": name, "speculative_adaptive": False}
        for form in FORMS.get(name, WIDTHS):
            said = ", ".join(f"{key} {value}" for key, value in form.items())
            yield Way(f"{name}, {said.replace('speculative_', '')}", {**fixed, **form})
        fixed |= {"chunked_prefill_size": 16, **few}
        yield Way(f"{name}, preemption, chunks of 16", fixed, scores_prompts=False, tight=True)


def run_check(settings: Mapping[str, Any], sizes: Sizes, json: bool) -> None:
    """Runs `check_determinism` and prints its report.

    Raises:
        typer.Exit: with code 1, something differs.
    """
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        def progress(name: str) -> None:
            status.update(escape(name))
            if not console.is_terminal:
                console.print(escape(name))

        report = check_determinism(settings, sizes, progress)
    if json:
        print_json(report)
    else:
        show(report, wide_console())
    if not report["deterministic"]:
        raise typer.Exit(1)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints a line per way, and what was refused or differs."""
    heads = ("", "texts", "tokens", "differ", "tokens per pass", "preempted", "cached")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=True)
    for way in report["ways"]:
        accept = way["accept_length"]
        numbers = (
            f"{way['requests']}", f"{way['tokens']}", f"{way['differing_tokens']}",
            "" if accept is None else f"{accept:.2f}",
            f"{way['preemptions'] or ''}", f"{way['cached_tokens'] or ''}",
        )  # fmt: skip
        colour = "yellow" if way["refused"] else "green" if way["equal"] else "red"
        name = f"[{colour}]{escape(way['name'])}[/]"
        table.add_row(name, *(() if way["refused"] else numbers))
    console.print(table)
    for way in report["ways"]:
        if way["refused"]:
            said = f"[yellow]{escape(way['name'])}[/]: not run: {escape(way['refused'])}"
            console.print(said, soft_wrap=True)
        if not way["equal"]:
            said = f"[red]{escape(way['name'])}[/]: {escape(_where(way))}"
            console.print(said, soft_wrap=True)
    who = f"{report['architecture']}, {report['dtype']}, {report['device']}"
    verdict = "all bits are equal" if report["deterministic"] else "bits differ"
    console.print(f"{who}: {verdict}")


def _where(way: Mapping[str, Any]) -> str:
    first = way["first"]
    said = (
        f"{way['differing_requests']} of {way['requests']} texts have other log-probabilities,"
        f" {way['other_texts']} other tokens; first differs {first['part']}"
    )
    if "position" in first:
        said += f" at position {first['position']} ({first['forward']}), after {first['after']}"
    return said


def reference_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the reference."""
    fixed = {"skip_tokenizer_init": True, "disable_radix_cache": True}
    return {"max_running_requests": SLOTS, **without_speculation(settings), **fixed}


def _reference(llm: LLM, sizes: Sizes) -> list[Text]:
    """Texts by plain decoding, one request at a time; every second one greedy."""
    rng = random.Random(sizes.seed)
    texts = []
    for index in range(sizes.requests):
        prompt = [rng.randrange(llm.engine.info.vocab_size) for _ in range(rng.randint(1, 4))]
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "top_p": 0.95}
        sampling |= {"sampling_seed": sizes.seed + index, "ignore_eos": True}
        more = {"max_new_tokens": sizes.tokens - len(prompt)}
        out = llm.generate(
            input_ids=prompt,
            sampling_params={**sampling, **more},
            return_logprob=True,
            top_logprobs_num=TOP,
        )
        ids = [*prompt, *out.output_ids]
        texts.append(Text(ids, len(prompt), sampling, _values(out.meta_info, "output")))
    return texts


def _values(info: Mapping[str, Any], side: str) -> list[tuple[Any, ...]]:
    """(log-probability, token id, [(log-probability, token id), ...]) of every token."""
    tokens, tops = info[f"{side}_token_logprobs"], info[f"{side}_top_logprobs"]
    return [
        (value, token, tuple((v, t) for v, t, _ in top or ()))
        for (value, token, _), top in zip(tokens, tops, strict=True)
    ]


class Check:
    """The reference, and runs that are compared with it."""

    def __init__(self, plain: Mapping[str, Any], sizes: Sizes) -> None:
        """`plain`: settings of the reference, and of all runs."""
        self._plain, self._sizes = plain, sizes
        self._observer: LayerObserver | None = None  # that has learnt the reference
        with LLM(**plain) as llm:
            self.chosen = llm.explain()
            self._texts = _reference(llm, sizes)

    def run(self, way: Way) -> Found:
        """Runs all texts in this way."""
        try:
            llm = LLM(**{**self._plain, **way.settings})
        except ConfigError as error:
            return Found(way.name, refused=str(error))
        with llm:
            return _run(llm, way, self._texts, self._random(way))

    def locate(self, way: Way) -> dict[str, Any]:
        """The first part of the model that differs, as JSON values."""
        eager = {"disable_cuda_graph": True}
        try:
            observer = self._learnt(eager)
            llm = LLM(**{**self._plain, **way.settings, **eager})
            with llm, observer.watch(llm):
                found = _run(llm, way, self._texts, self._random(way))
        except ForerunError as error:
            return {"part": f"not found: {error}"}
        difference = observer.difference()
        if difference is not None:
            return asdict(difference)
        captured = "captured steps only: without graphs all bits are equal"
        return {"part": captured if found.equal else "LM head or log-probabilities"}

    def _learnt(self, eager: Mapping[str, Any]) -> LayerObserver:
        if self._observer is None:
            observer = LayerObserver()
            llm = LLM(**{**self._plain, **eager})
            with llm, observer.watch(llm, learn=True):
                _reference(llm, self._sizes)
            self._observer = observer
        return self._observer

    def _random(self, way: Way) -> random.Random:
        return random.Random(f"{self._sizes.seed} {way.name}")


def _run(llm: LLM, way: Way, texts: Sequence[Text], rng: random.Random) -> Found:
    """Runs the texts in batches of random sizes."""
    found, drafted = Found(way.name), [0, 0]
    order = list(texts)
    for _ in range(1 + way.twice):
        rng.shuffle(order)
        at = 0
        while at < len(order):
            most = min(len(order) - at, 2 * llm.engine.limits.slots)  # some wait for others to end
            size = len(order) if way.tight else rng.randint(1, most)
            batch = order[at : at + size]
            at += size
            for text, output in zip(batch, _generate(llm, way, batch, rng), strict=True):
                _compare(found, text, output.meta_info, way)
                drafted[0] += output.meta_info["completion_tokens"]
                drafted[1] += output.meta_info["spec_verify_ct"]
                found.cached_tokens += output.meta_info["cached_tokens"]
    if way.settings.get("speculative_algorithm") and drafted[1]:
        found.accept_length = drafted[0] / drafted[1]
    found.preemptions = llm.engine.metrics().preemptions
    return found


def _generate(llm: LLM, way: Way, batch: Sequence[Text], rng: random.Random) -> list[Any]:
    prompts, params, starts = [], [], []
    for text in batch:
        length = len(text.ids)
        shortest, longest = (length // 2, length - 4) if way.twice else (text.prompt, length // 2)
        given = length if way.scores else rng.randint(shortest, longest)
        prompts.append(text.ids[:given])
        params.append({**text.sampling, "max_new_tokens": length - given})
        starts.append(0 if way.scores_prompts else -1)
    outputs: list[Any] = llm.generate(
        input_ids=prompts,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=starts,
        top_logprobs_num=TOP,
    )
    return outputs


def _compare(found: Found, text: Text, info: Mapping[str, Any], way: Way) -> None:
    """Counts what differs in one request."""
    values = _values(info, "input")[1:] + _values(info, "output")
    want = text.logprobs[len(text.logprobs) - len(values) :] if values else []
    differing = 0
    if len(values) > len(text.logprobs):  # of prompt tokens that nothing generated
        values, want = values[-len(text.logprobs) :], text.logprobs
    for got, expected in zip(values, want, strict=True):
        found.tokens += 1
        differing += got != expected
        if got[1] != expected[1]:
            found.other_texts += 1
            break
    found.requests += 1
    found.differing_requests += differing > 0
    found.differing_tokens += differing
