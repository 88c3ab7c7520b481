"""Compiles grammars in threads of their own, with a time limit, and keeps the last ones.

A compilation cannot be interrupted. One that exceeds the limit goes on in its thread, and at most
`MAX_THREADS` run at a time; the request is refused meanwhile.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from forerun.core.errors import RequestError, shown
from forerun.core.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar
from forerun.grammar.bitmask import allows_any, new_bitmask
from forerun.grammar.counts import split_ebnf, split_regex
from forerun.grammar.json_schema import exact_schema, exact_tag, patterns, patterns_of_tag
from forerun.grammar.vocabulary import Vocabulary, VocabularySource, import_xgrammar

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger("forerun")
COMPILE_SECONDS = 10.0
MAX_THREADS = 4  # compilations at a time
MAX_COMPILED, MAX_COMPILED_BYTES = 512, 1 << 30  # in the cache
MAX_GRAMMAR_BYTES = 256 << 20  # of one compiled grammar
_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is \w+: )?")


@dataclass(frozen=True)
class CompileOptions:
    any_whitespace: bool = True  # between the tokens of JSON; False: as json.dumps writes it
    seconds: float = COMPILE_SECONDS
    follow_limit: bool = True  # a request whose grammar takes too long to follow ends


@dataclass
class GrammarCompiler:
    """Thread-safe. The vocabulary is read by `vocabulary`, at the latest with the first grammar."""

    source: VocabularySource
    options: CompileOptions = field(default_factory=CompileOptions)

    def __post_init__(self) -> None:
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._threads = threading.Semaphore(MAX_THREADS)
        self._compiled: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._vocabulary: Vocabulary | None = None

    def vocabulary(self) -> Vocabulary:
        """Reads it, once.

        Raises:
            RequestError: as `Vocabulary.load`.
        """
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.load(self.source)
            return self._vocabulary

    def prepare(self) -> str:
        """Reads the vocabulary if that is possible. Returns what compiles grammars; or why not."""
        try:
            self.vocabulary().tokenizer_info()
        except RequestError as error:
            return f"none ({str(error).rstrip('.')})"
        except Exception as error:  # of an unusual tokenizer; requests without grammars can run
            log.warning("There are no grammars: the vocabulary cannot be read.", exc_info=error)
            return f"none ({type(error).__name__}: {_reason(error)})"
        return f"xgrammar {version('xgrammar')}"

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Waits for the compiled grammar.

        Raises:
            RequestError: it is invalid, nothing matches it, or it takes too long.
        """
        import_xgrammar()
        with self._lock:
            future = self._compiled.get(grammar)
            new = future is None
            if future is None:
                future = self._compiled[grammar] = Future()
            self._compiled.move_to_end(grammar)
        if new:
            self._start(grammar, future)
        try:
            return future.result(self.options.seconds)
        except TimeoutError:
            raise RequestError(
                f"Compiling the {grammar.kind} takes longer than {self.options.seconds:g} s;"
                " simplify it."
            ) from None

    def _start(self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar]) -> None:
        if not self._threads.acquire(timeout=self.options.seconds):
            busy = RequestError("Other grammars are taking too long to compile; try again later.")
            self._fail(grammar, future, busy)
            return
        run = partial(self._run, grammar, future)
        threading.Thread(target=run, name="forerun-grammar", daemon=True).start()

    def _run(self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar]) -> None:
        try:
            compiled = self._compile(grammar)
        except Exception as error:  # noqa: BLE001  raised again by `compile`
            self._fail(grammar, future, _refusal(grammar, error))
            return
        finally:
            self._threads.release()
        with self._lock:
            self._evict(compiled.memory_size_bytes)
        future.set_result(compiled)

    def _fail(
        self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar], error: Exception
    ) -> None:
        """A grammar that was refused is compiled again when it is asked for again."""
        with self._lock:
            del self._compiled[grammar]
        future.set_exception(error)

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        xgrammar = import_xgrammar()
        compiled = self._compile_function(grammar)()
        size = compiled.memory_size_bytes
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"The {grammar.kind} takes {size >> 20} MiB when it is compiled; at most"
                f" {MAX_GRAMMAR_BYTES >> 20} are allowed."
            )
        first = new_bitmask(1, self.source.vocab_size)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(first)
        if not allows_any(first[0]):
            raise RequestError(f"No text of this tokenizer matches the {grammar.kind}.")
        return compiled

    def _compile_function(self, grammar: Grammar) -> Callable[[], xgrammar.CompiledGrammar]:
        xgrammar, text = import_xgrammar(), grammar.text
        vocabulary = self.vocabulary()
        # A cache of one compilation: rules of the same form, as of many tools, are compiled once.
        options: Any = {"max_threads": 1, "cache_limit_bytes": MAX_GRAMMAR_BYTES}
        if grammar.kind == STRUCTURAL_TAG:
            tag = exact_tag(_structural_tag(json.loads(text)), self.options.any_whitespace)
            _check_patterns(patterns_of_tag(tag))
            compiler = xgrammar.GrammarCompiler(vocabulary.tokenizer_info(tag), **options)
            return partial(compiler.compile_structural_tag, tag)
        compiler = xgrammar.GrammarCompiler(vocabulary.tokenizer_info(), **options)
        if grammar.kind == JSON_SCHEMA:
            schema = exact_schema(json.loads(text))
            _check_patterns(patterns(schema))
            spaces = self.options.any_whitespace
            return partial(compiler.compile_json_schema, json.dumps(schema), any_whitespace=spaces)
        if grammar.kind == REGEX:
            return partial(compiler.compile_regex, split_regex(text))
        assert grammar.kind == EBNF
        return partial(compiler.compile_grammar, split_ebnf(text))

    def _evict(self, size: int) -> None:
        """Makes room for `size` bytes: drops the grammars used longest ago.

        Requests that run keep theirs.
        """
        done = [key for key, future in self._compiled.items() if future.done()]
        sizes = {key: self._compiled[key].result().memory_size_bytes for key in done}
        size += sum(sizes.values())
        for key in done:
            if len(self._compiled) <= MAX_COMPILED and size <= MAX_COMPILED_BYTES:
                return
            size -= sizes[key]
            del self._compiled[key]


def _check_patterns(given: Iterable[str]) -> None:
    """In schemas, the compiler ignores what it does not know in a regular expression."""
    for pattern in given:
        try:
            import_xgrammar().Grammar.from_regex(pattern)
        except RuntimeError as error:
            raise RequestError(
                f"json_schema: the pattern {shown(pattern)} is not supported: {_reason(error)}."
            ) from None


def _structural_tag(tag: Any) -> dict[str, Any]:
    """xgrammar's structural tag; SGLang's older form has `structures` and `triggers`."""
    if not isinstance(tag, dict):
        raise RequestError(f"structural_tag must be a JSON object, got {shown(tag)}.")
    if "structures" not in tag:
        return {"type": "structural_tag", **tag}
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(s, dict) for s in structures):
        raise RequestError("structural_tag: structures must be a list of objects.")
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": each.get("end"),
        }
        for each in structures
    ]
    triggered = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": triggered}


def _refusal(grammar: Grammar, error: Exception) -> Exception:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RuntimeError | ValueError | TypeError):  # what xgrammar raises
        return RequestError(f"{grammar.kind} is invalid: {_reason(error)}.")
    return error


def _reason(error: Exception) -> str:
    """What xgrammar says, on one line and without the places in its source."""
    text = " ".join(_PREFIX.sub("", str(error)).split())
    return text.rstrip(".")[:200]
