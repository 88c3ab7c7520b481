"""Compiles grammars in threads of their own, with limits, and keeps the last ones.

A compilation cannot be interrupted. An estimate says what is small: that is compiled in a thread
at once. What is costly waits for a turn (`turns.py`), has a thread of low priority, and is tried in
another process before (`trials.py`) if it may not end. A thread that exceeds its time, since the
estimate was wrong, goes on at the lowest priority; while there are `MAX_LATE` of those, everything
is tried in another process first.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from forerun.core.errors import BusyError, RequestError, shown
from forerun.core.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar
from forerun.grammar.bitmask import allows_any, new_bitmask
from forerun.grammar.compile_process import MAX_GRAMMAR_BYTES, NICENESS, Job, PatternError
from forerun.grammar.cost import estimate
from forerun.grammar.counts import split_ebnf, split_regex
from forerun.grammar.json_schema import exact_schema, exact_tag, patterns, patterns_of_tag
from forerun.grammar.mask_threads import lower_priority
from forerun.grammar.turns import Turns
from forerun.grammar.vocabulary import Vocabulary, VocabularySource, import_xgrammar

if TYPE_CHECKING:
    import xgrammar

    from forerun.grammar.trials import Trials

log = logging.getLogger("forerun")
COMPILE_SECONDS = 10.0  # of a grammar; CPU time, if it is tried in another process
WAIT_SECONDS = 30.0  # until one that has to wait, or is slowed down by other work, is refused
MAX_THREADS = 4  # small grammars at a time
# Seconds that a grammar is expected to take: more is costly, and more may not end.
SMALL, CERTAIN = 0.5, 5.0
PATIENCE = 2.0  # seconds after which a small grammar is not counted any more
MAX_LATE = 4  # threads that are over their time
MAX_COMPILED, MAX_COMPILED_BYTES = 512, 1 << 30  # in the cache
_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is \w+: )?")
# A rule or a directive of Lark's notation at the beginning of a line.
_LARK = re.compile(
    r"^\s*(%(ignore|import|declare|llguidance)\b|[?!]?[A-Za-z_]\w*(\.\d+)?\s*:(?!:=))", re.MULTILINE
)


@dataclass(frozen=True)
class CompileOptions:
    any_whitespace: bool = True  # between the tokens of JSON; False: as json.dumps writes it
    seconds: float = COMPILE_SECONDS
    wait_seconds: float = WAIT_SECONDS
    follow_limit: bool = True  # a request whose grammar takes too long to follow ends


@dataclass(frozen=True)
class _Task:
    """A grammar that is compiled, and who waits for it."""

    grammar: Grammar
    future: Future[xgrammar.CompiledGrammar]
    job: Job
    info: xgrammar.TokenizerInfo


@dataclass
class GrammarCompiler:
    """Thread-safe. The vocabulary is read by `vocabulary`, at the latest with the first grammar."""

    source: VocabularySource
    options: CompileOptions = field(default_factory=CompileOptions)

    def __post_init__(self) -> None:
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._threads, self._turns = threading.Semaphore(MAX_THREADS), Turns()
        self._compiled: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._late: set[Grammar] = set()  # their threads are over their time
        self._trials: Trials | None = None
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

    def compile(self, grammar: Grammar, client: str = "") -> xgrammar.CompiledGrammar:
        """Waits for the compiled grammar.

        Args:
            client: who asks for it. Costly grammars of a client are compiled one after another.

        Raises:
            RequestError: it is invalid, nothing matches it, or it takes too long.
            BusyError: it cannot be compiled now, because of others or other work.
        """
        import_xgrammar()
        future, new = self._future(grammar)
        if new:
            self._make(grammar, future, client)
        elif not future.done() and grammar not in self._late:
            wait([future], self.options.wait_seconds)
            if not future.done() and grammar not in self._late:
                raise BusyError("The same grammar is being compiled; try again later.")
        else:
            wait([future], self.options.seconds)
        if not future.done():
            raise RequestError(
                f"Compiling the {grammar.kind} takes longer than {self.options.seconds:g} s;"
                " simplify it."
            )
        return future.result()

    def compile_again(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """`compile`, of a grammar that has been compiled but may not be kept any more."""
        import_xgrammar()
        future, new = self._future(grammar)
        if new:
            task = self._task(grammar, future)
            if task is not None:
                self._start(task)
        return future.result()

    def close(self) -> None:
        """Ends the processes."""
        if self._trials is not None:
            self._trials.close()

    def _future(self, grammar: Grammar) -> tuple[Future[xgrammar.CompiledGrammar], bool]:
        """The result; whether it is new, so that it must be made."""
        with self._lock:
            future = self._compiled.get(grammar)
            new = future is None
            if future is None:
                future = self._compiled[grammar] = Future()
            self._compiled.move_to_end(grammar)
        return future, new

    def _make(
        self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar], client: str
    ) -> None:
        """Sets the result or an exception; it is late if there is none afterwards."""
        task = self._task(grammar, future)
        if task is None:
            return
        started = False
        try:
            seconds = estimate(task.job, self.source.vocab_size)
            must_be_tried = len(self._late) >= MAX_LATE
            if seconds <= SMALL and not must_be_tried:
                with self._permit():
                    thread, started = self._start(task), True
                    wait([future], min(PATIENCE, self.options.seconds))
                    self._leave(task, thread)
                wait([future], max(0.0, self.options.seconds - PATIENCE))
                return
            with self._turns.turn(client, self.options.wait_seconds):
                limit = self.options.seconds
                if seconds > CERTAIN or must_be_tried:
                    self._try(task)
                    limit = self.options.wait_seconds  # it ends: whatever the time is, wait for it
                thread, started = self._start(task, NICENESS), True
                wait([future], limit)
                self._leave(task, thread)
        except Exception as error:
            if started:
                raise
            self._fail(grammar, future, error)
        except BaseException:  # Ctrl-C
            if not started:
                self._fail(grammar, future, BusyError("The compilation was interrupted."))
            raise

    def _task(self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar]) -> _Task | None:
        """None: it cannot be compiled, which is the result."""
        try:
            return _Task(grammar, future, *self._job(grammar))
        except Exception as error:  # noqa: BLE001  raised again by `compile`
            self._fail(grammar, future, _refusal(grammar, error))
            return None

    @contextmanager
    def _permit(self) -> Iterator[None]:
        if not self._threads.acquire(timeout=self.options.seconds):
            raise BusyError("Other grammars are taking too long to compile; try again later.")
        try:
            yield
        finally:
            self._threads.release()

    def _try(self, task: _Task) -> None:
        """
        Raises:
            RequestError, BusyError: it takes too much, or too long now.
        """
        from forerun.grammar.trials import Trials  # POSIX only

        with self._lock:
            self._trials = self._trials or Trials()
        self._trials.run(task.job, task.info, self.options.seconds, self.options.wait_seconds)

    def _start(self, task: _Task, niceness: int = 0) -> threading.Thread:
        args = (task, niceness)
        thread = threading.Thread(target=self._run, args=args, name="forerun-grammar", daemon=True)
        thread.start()
        return thread

    def _leave(self, task: _Task, thread: threading.Thread) -> None:
        """Stops waiting for it: what is not done yet may go on."""
        with self._lock:
            if task.future.done():
                return
            self._late.add(task.grammar)
        if thread.native_id is not None:
            lower_priority(thread.native_id)

    def _run(self, task: _Task, niceness: int) -> None:
        if niceness:
            lower_priority(threading.get_native_id(), niceness)
        try:
            compiled = self._compile(task)
        except Exception as error:  # noqa: BLE001  raised again by `compile`
            self._fail(task.grammar, task.future, _refusal(task.grammar, error))
        else:
            with self._lock:
                self._evict(compiled.memory_size_bytes)
            task.future.set_result(compiled)
        with self._lock:
            self._late.discard(task.grammar)

    def _fail(
        self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar], error: Exception
    ) -> None:
        """A grammar that was refused is compiled again when it is asked for again."""
        with self._lock:
            del self._compiled[grammar]
        future.set_exception(error)

    def _compile(self, task: _Task) -> xgrammar.CompiledGrammar:
        xgrammar, kind = import_xgrammar(), task.grammar.kind
        compiled = task.job.compile(task.info)
        size = compiled.memory_size_bytes
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"The {kind} takes {size >> 20} MiB when it is compiled; at most"
                f" {MAX_GRAMMAR_BYTES >> 20} are allowed."
            )
        first = new_bitmask(1, self.source.vocab_size)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(first)
        if not allows_any(first[0]):
            raise RequestError(f"No text of this tokenizer matches the {kind}.")
        return compiled

    def _job(self, grammar: Grammar) -> tuple[Job, xgrammar.TokenizerInfo]:
        """
        Raises:
            RequestError: it is not supported.
            RuntimeError, ValueError, TypeError: it is invalid.
        """
        text, spaces, vocabulary = grammar.text, self.options.any_whitespace, self.vocabulary()
        if grammar.kind == STRUCTURAL_TAG:
            tag = exact_tag(_structural_tag(json.loads(text)), spaces)
            given = tuple(patterns_of_tag(tag))
            job = Job("compile_structural_tag", json.dumps(tag), patterns=given)
            return job, vocabulary.tokenizer_info(tag)
        if grammar.kind == JSON_SCHEMA:
            schema = exact_schema(json.loads(text))
            given = tuple(patterns(schema))
            job = Job("compile_json_schema", json.dumps(schema), spaces, given)
        elif grammar.kind == REGEX:
            job = Job("compile_regex", split_regex(text))
        else:
            assert grammar.kind == EBNF
            job = Job("compile_grammar", split_ebnf(text))
        return job, vocabulary.tokenizer_info()

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
    if isinstance(error, PatternError):
        return RequestError(
            f"json_schema: the pattern {shown(error.pattern)} is not supported:"
            f" {_reason(error.reason)}."
        )
    if isinstance(error, RuntimeError | ValueError | TypeError):  # what xgrammar raises
        if grammar.kind == EBNF and _LARK.search(grammar.text):
            return RequestError(
                "ebnf is invalid: it looks like a grammar of Lark; write it as GBNF, with rules"
                ' such as root ::= "yes" | "no".'
            )
        return RequestError(f"{grammar.kind} is invalid: {_reason(error)}.")
    return error


def _reason(error: Exception) -> str:
    """What xgrammar says, on one line and without the places in its source."""
    text = " ".join(_PREFIX.sub("", str(error)).split())
    return text.rstrip(".")[:200]
