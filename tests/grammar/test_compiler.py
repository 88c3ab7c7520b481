"""What is compiled, refused, cached and given up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core.errors import BusyError, RequestError
from forerun.core.grammar import MAX_GRAMMAR_LENGTH, MAX_JSON_DEPTH, Grammar
from forerun.core.plan import SlotGrammar
from forerun.core.sampling_params import SamplingParams
from forerun.grammar import compile_process
from forerun.grammar import compiler as module
from forerun.grammar.compile_process import Job
from forerun.grammar.compiler import GrammarCompiler
from forerun.grammar.cost import estimate
from forerun.grammar.state import GrammarState
from forerun.grammar.trials import Trials
from forerun.grammar.turns import MAX_WAITING, MAX_WAITING_PER_CLIENT, Turns
from forerun.grammar.vocabulary import Vocabulary, VocabularySource

xgrammar = pytest.importorskip("xgrammar")

from tests.grammar.vocab import EOS, VOCAB_SIZE, compiler, new_compiler, tokenizer  # noqa: E402


def grammar(**params: Any) -> Grammar:
    chosen = SamplingParams(**params).grammar
    assert chosen is not None
    return chosen


def matches(chosen: Grammar, text: str, by: GrammarCompiler | None = None) -> bool:
    state = GrammarState.of(SlotGrammar(chosen), (), by or compiler())
    return state.accept([*tokenizer()(text)["input_ids"], EOS[0]])


TOOL = {"begin": "<tool>", "schema": {"type": "object"}, "end": "</tool>"}


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"json_schema": {"type": "integer"}}, ["12", "-3"], ["1.5", " 1", "12 ", '"a"', ""]),
        ({"json_schema": '{"const": "é"}'}, ['"é"'], ['"e"', "é"]),
        ({"json_schema": True}, ["[1, {}]", "null"], ["[1", "x"]),
        ({"json_schema": {}}, ['{"a": []}', "3"], ["{"]),
        ({"json_object": True}, ["{}", '{"a" : [true]}'], ["[]", "1", "{} "]),
        ({"regex": "a[0-9]{2}"}, ["a12"], ["a1", "xa12", "a123"]),
        ({"ebnf": 'root ::= "<" item* ">"\nitem ::= [a-c]'}, ["<>", "<abc>"], ["<d>", "<"]),
        (
            {"structural_tag": {"structures": [TOOL], "triggers": ["<tool>"]}},
            ["hello", 'see <tool>{"a": 1}</tool> there'],
            ["<tool>1</tool>", "<tool>{}"],
        ),
        (
            {"structural_tag": {"format": {"type": "regex", "pattern": "[ab]+"}}},
            ["ab"],
            ["abc", ""],
        ),
    ],
    ids=str,
)
def test_kinds(params: dict[str, Any], good: list[str], bad: list[str]) -> None:
    chosen = grammar(**params)
    assert [text for text in good if not matches(chosen, text)] == []
    assert [text for text in bad if matches(chosen, text)] == []


def test_whitespace_in_json() -> None:
    chosen, strict = grammar(json_object=True), new_compiler(any_whitespace=False)
    assert matches(chosen, '{ "a":\n  1 }') and not matches(chosen, '{ "a":\n  1 }', strict)
    assert matches(chosen, '{"a": 1}', strict)
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = grammar(structural_tag={"format": {"type": "sequence", "elements": [content]}})
    assert matches(tag, '{ "a":\n  1 }') and not matches(tag, '{ "a":\n  1 }', strict)
    assert matches(tag, '{"a": 1}', strict) and matches(tag, '{"a":1}', strict)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object"),
        ({"json_schema": 5}, "must be a JSON object"),
        ({"json_schema": {"a": {1}}}, "not valid JSON"),
        ({"json_schema": {"minimum": float("nan")}}, "not valid JSON"),
        ({"json_schema": {"type": "foo"}}, 'Unsupported type "foo"'),
        ({"json_schema": False}, "cannot accept any value"),
        ({"json_schema": {"$ref": "#/nope"}}, "nope"),
        ({"json_schema": {"$ref": "#"}}, "$ref '#' refers to itself"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "the pattern '(?=a)b' is not"),
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "not closed"),
        ({"json_schema": {"not": {}}}, "not cannot be enforced"),
        ({"json_schema": "[" * 5000 + "]" * 5000}, "too deep"),
        ({"json_schema": {"type": "string", "enum": ["\ud800"]}}, "lone surrogate"),
        ({"regex": "(a"}, "regex is invalid"),
        ({"regex": r"(a)\1"}, "Backreference is not supported"),
        ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, "at most 131072"),
        ({"regex": 5}, "regex must be a string"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf are set"),
        ({"regex": "a", "json_object": True}, "regex and json_object are set"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"ebnf": "root = 1"}, "ebnf is invalid"),
        ({"ebnf": 'start: "yes" | "no"'}, "looks like a grammar of Lark"),
        ({"ebnf": "%llguidance {}\n\nSTART.1: /a/\n"}, "looks like a grammar of Lark"),
        ({"ebnf": 'root ::= "a: b" c'}, "ebnf is invalid: EBNF"),
        ({"ebnf": "root ::= root"}, "No text of this tokenizer matches"),
        ({"ebnf": 'other ::= "a"'}, "root"),
        ({"structural_tag": {}}, "structural_tag is invalid"),
        ({"structural_tag": True}, "must be a JSON object"),
        ({"structural_tag": {"structures": 3}}, "must be a list of objects"),
        ({"structural_tag": {"structures": [{}], "triggers": []}}, "structural_tag is invalid"),
        (
            {"structural_tag": {"structures": [{**TOOL, "schema": {"not": {}}}]}},
            "not cannot be enforced",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals_are_one_line(params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler().compile(grammar(**params))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message and len(message) < 320 and message.endswith(".")
    assert "/project" not in message and ".cc" not in message


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        pytest.param({"regex": "((a{1,100}){1,100}){1,100}"}, marks=pytest.mark.exhaustive),
        pytest.param({"regex": "a{1,1000000}"}, marks=pytest.mark.exhaustive),
        {"regex": "(a|a)*" * 50},
        {"regex": "|".join(f"w{i}" for i in range(3000))},
        {"json_schema": nested(MAX_JSON_DEPTH - 1)},
        pytest.param(
            {"json_schema": {"type": "string", "minLength": 100_000, "maxLength": 200_000}},
            marks=pytest.mark.exhaustive,
        ),
        {"json_schema": {"enum": ["[" * 3000]}},
        {"json_schema": json.loads('{"a":' * MAX_JSON_DEPTH + "1" + "}" * MAX_JSON_DEPTH)},
        {"json_schema": json.loads('{"a":' * 500 + "1" + "}" * 500)},
        {"ebnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
        {"ebnf": 'root ::= root "a" | "b"'},
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_grammars_are_compiled_or_refused_within_seconds(
    request: pytest.FixtureRequest, params: dict[str, Any]
) -> None:
    if request.node.get_closest_marker("exhaustive"):
        trial_process()  # its start does not count
    begin = time.monotonic()
    try:
        compiled = compiler().compile(grammar(**params))
    except RequestError as error:
        assert "\n" not in str(error)
    else:
        assert compiled.memory_size_bytes <= module.MAX_GRAMMAR_BYTES
    assert time.monotonic() - begin < 8


@cache
def trial_process() -> None:
    """Starts the process of `compiler()`."""
    chosen = grammar(regex="a")
    compiler()._try(module._Task(chosen, Future(), *compiler()._job(chosen)))


class Slow(GrammarCompiler):
    """Compiles when it is told to; counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.go, self.count = threading.Event(), 0

    def _compile(self, task: Any) -> Any:
        self.count += 1
        assert self.go.wait(20)
        return super()._compile(task)


def slow(seconds: float, wait_seconds: float = 30.0) -> Slow:
    options = module.CompileOptions(seconds=seconds, wait_seconds=wait_seconds)
    return Slow(compiler().source, options)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_grammar_that_takes_too_long_is_refused_and_may_be_done_later() -> None:
    by = slow(0.2)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"longer than 0\.2 s") as caught:
            by.compile(grammar(regex="a"))
        assert not isinstance(caught.value, BusyError)
    by.go.set()
    wait_for(lambda: by._compiled[grammar(regex="a")].done())
    assert by.compile(grammar(regex="a")) and by.count == 1


def test_only_some_compile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_THREADS", 1)
    monkeypatch.setattr(module, "PATIENCE", 10.0)
    by = slow(0.2)
    with ThreadPoolExecutor() as pool, by._permit():
        busy = pool.submit(by.compile, grammar(regex="b"))
        with pytest.raises(BusyError, match="Other grammars are taking too long"):
            busy.result()
    assert by.count == 0 and not by._compiled
    by.go.set()
    assert by.compile(grammar(regex="b"))


def test_threads_over_their_time_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next small grammars are compiled; after some such, all are tried in a process first."""
    tried: list[str] = []
    by = slow(0.05)
    monkeypatch.setattr(by, "_try", lambda task: tried.append(task.grammar.text))
    late = [grammar(regex=f"a{i}") for i in range(module.MAX_LATE)]
    for each in late:
        with pytest.raises(RequestError, match="longer than"):
            by.compile(each)
    assert by._late == set(late) and not tried
    by.go.set()
    wait_for(lambda: not by._late)
    assert by.compile(grammar(regex="b")) and not tried
    by._late |= {grammar(regex=f"c{i}") for i in range(module.MAX_LATE)}
    assert by.compile(grammar(regex="d")) and tried == ["d"]


LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
WORDS = "|".join(f"word{i}" for i in range(1000))


@pytest.mark.parametrize(
    ("params", "vocab_size", "low", "high"),
    [
        ({"json_schema": {"type": "boolean"}}, 150_000, 0, module.SMALL),
        ({"json_object": True}, 150_000, 0, module.SMALL),
        ({"json_schema": {"enum": WORDS.split("|")}}, 150_000, 0, module.CERTAIN),
        ({"regex": WORDS}, 150_000, 0, module.CERTAIN),
        ({"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}, 150_000, 0, module.SMALL),
        ({"regex": "[a-z]{1,20}"}, 150_000, module.SMALL, module.CERTAIN),
        ({"regex": "[a-z]{1,20}"}, VOCAB_SIZE, 0, module.SMALL),
        ({"regex": "([a-z]{1,100}){1,100}"}, VOCAB_SIZE, module.CERTAIN, 1e9),
        ({"regex": "(a|a)*" * 200}, 150_000, module.SMALL, 1e9),
        ({"ebnf": 'root ::= a{9}\na ::= [^"]{100} b\nb ::= "{9}"'}, 1000, 0.2, 1.0),
        ({"json_schema": LARGE}, VOCAB_SIZE, module.CERTAIN, 1e9),
        ({"json_schema": {**LARGE, "required": list(LARGE["properties"])}}, 6144, 0, 5),
        ({"json_schema": {"type": "string", "maxLength": 100_000}}, 6144, module.CERTAIN, 1e9),
        ({"json_schema": {"type": "string", "pattern": "^.{20000}$"}}, 6144, 5, 1e9),
    ],
    ids=lambda value: str(value)[:40],
)
def test_estimates(params: dict[str, Any], vocab_size: int, low: float, high: float) -> None:
    job, _ = compiler()._job(grammar(**params))
    assert low <= estimate(job, vocab_size) <= high


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All grammars are."""
    monkeypatch.setattr(module, "SMALL", -1.0)


@pytest.mark.usefixtures("costly")
def test_costly_grammars_of_a_client_wait_for_each_other() -> None:
    by = slow(10, 0.2)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(by.compile, grammar(regex="a"), "one")
        wait_for(lambda: by.count == 1)
        with pytest.raises(BusyError, match="Other grammars are taking too long"):
            by.compile(grammar(regex="b"), "one")
        second = pool.submit(by.compile, grammar(regex="b"), "two")
        wait_for(lambda: by.count == 2)
        by.go.set()
        assert first.result() and second.result()
    assert by.compile(grammar(regex="c"), "one") and not by._turns._running


def test_turns_are_in_order_and_their_number_is_bounded() -> None:
    turns, order, go = Turns(), list[str](), threading.Event()

    def use(client: str, name: str) -> None:
        with turns.turn(client, 10):
            order.append(name)
            assert go.wait(10)

    with ThreadPoolExecutor() as pool:
        for number in range(1 + MAX_WAITING_PER_CLIENT):
            pool.submit(use, "a", f"a{number}")
            wait_for(lambda number=number: len(turns._waiting) == number and len(order) == 1)  # type: ignore[misc]
        with pytest.raises(BusyError, match="4 of your grammars"), turns.turn("a", 10):
            pass
        pool.submit(use, "b", "b0")  # another client does not wait for them
        wait_for(lambda: order == ["a0", "b0"])
        turns._waiting += [(f"c{i}", object()) for i in range(MAX_WAITING)]
        with pytest.raises(BusyError, match="Too many grammars"), turns.turn("d", 10):
            pass
        del turns._waiting[-MAX_WAITING:]
        go.set()
    assert order == ["a0", "b0", "a1", "a2", "a3", "a4"] and not turns._running


FAKE = """
import json, os, time
from forerun.platform.limited_process import limit_cpu, serve

def answer(message):
    text = json.loads(message)["job"]["source"]
    if "endless" in text:
        time.sleep(60)
    if "burn" in text:
        limit_cpu(0)
        while True:
            pass
    if "gone" in text:
        os._exit(3)
    return b"memory" if "large" in text else b""

serve(answer, 1 << 30)
"""


@pytest.mark.exhaustive
def test_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each limit ends a process, and the next grammar has one."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(compile_process, "__file__", str(tmp_path / "fake.py"))
    by = Trials()
    info = compiler().vocabulary().tokenizer_info()

    def run(source: str) -> None:
        by.run(Job("compile_regex", source), info, 1, 10 if source != "endless" else 0.2)

    run("good")
    (first,) = by._idle
    run("good")
    assert by._idle == [first]
    for source, kind, words in (
        ("endless", BusyError, r"took longer than 0\.2 s; try again"),
        ("burn", RequestError, "takes longer than 1 s; simplify"),
        ("gone", RequestError, "exit code 3"),
        ("large", RequestError, "more than 1024 MiB"),
    ):
        with pytest.raises(kind, match=words) as caught:
            run(source)
        assert type(caught.value) is kind
        run("good")
    pid = by._idle[0][0].pid
    by.close()
    assert not Path(f"/proc/{pid}").exists()


PARENT = """
import sys, threading, time
from forerun.platform.limited_process import LimitedProcess

process = LimitedProcess(sys.argv[1])
question = b'{"job": {"source": "endless"}}'
threading.Thread(target=process.ask, args=(question, 60), daemon=True).start()
time.sleep(0.1)
print(process.pid, flush=True)
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()  # nobody may have waited for it
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_process_ends_with_its_parent_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "fake.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    wait_for(lambda: has_ended(pid))


@pytest.mark.exhaustive
def test_a_grammar_that_may_not_end_is_ended_in_its_process() -> None:
    by = new_compiler(seconds=2.0)
    try:
        with pytest.raises(RequestError, match="longer than 2 s") as caught:
            by.compile(grammar(json_schema=LARGE))
        assert not isinstance(caught.value, BusyError)
        assert not by._late and not by._compiled
        # One that ends is compiled here.
        few = grammar(regex="[a-z]{1,120}([a-z]{1,5}){1,5}")
        assert estimate(by._job(few)[0], VOCAB_SIZE) < module.CERTAIN
        by._try(module._Task(few, Future(), *by._job(few)))
        assert by._trials is not None and len(by._trials._idle) == 1
        assert by.compile(few)
    finally:
        by.close()


def test_one_compilation_for_all_who_ask() -> None:
    by = slow(10)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(by.compile, grammar(regex="a+")) for _ in range(4)]
        time.sleep(0.1)
        by.go.set()
        first, *rest = [result.result() for result in results]
    assert by.count == 1 and all(each is first for each in rest)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    by = new_compiler()
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    kept = by.compile(grammar(regex="x0"))
    for i in range(5):
        by.compile(grammar(regex=f"x{i}"))
        assert by.compile(grammar(regex="x0")) is kept  # used last
    assert set(by._compiled) == {grammar(regex=f"x{i}") for i in (0, 3, 4)}
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 1)
    by.compile(grammar(regex="y"))
    assert list(by._compiled) == [grammar(regex="y")]


def test_a_refused_grammar_is_not_kept() -> None:
    by = new_compiler()
    for _ in range(2):
        with pytest.raises(RequestError):
            by.compile(grammar(regex="("))
    assert not by._compiled


def test_the_size_of_one_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMAR_BYTES", 100)
    with pytest.raises(RequestError, match="MiB when it is compiled"):
        new_compiler().compile(grammar(json_object=True))


def test_the_vocabulary_can_be_read_before_it_is_needed(tmp_path: Path) -> None:
    by = new_compiler()
    assert by.prepare() == f"xgrammar {version('xgrammar')}"
    vocabulary = by.vocabulary()
    by.compile(grammar(regex="a"))
    assert by.vocabulary() is vocabulary
    assert new_compiler(tmp_path).prepare().startswith("none (A grammar needs a tokenizer. No")


def test_special_tokens_match_text_only_where_a_tag_names_them() -> None:
    by = new_compiler()
    special = by.vocabulary().special
    named, other = "<|im_start|>", "<|mask|>"
    assert {named, other} <= set(special.values())
    ids = {text: i for i, text in special.items()}

    def allowed(tag: dict[str, Any], before: str) -> list[str]:
        matcher = xgrammar.GrammarMatcher(by.compile(grammar(structural_tag={"format": tag})))
        assert matcher.accept_string(before)
        bitmask = torch.empty(1, VOCAB_SIZE // 32, dtype=torch.int32)
        matcher.fill_next_token_bitmask(bitmask)
        return [t for t, i in ids.items() if i not in EOS and bitmask[0, i // 32] >> i % 32 & 1]

    content = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 20}}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": named}
    assert allowed(tag, '<a>"') == [named]
    assert allowed({**tag, "end": "</a>"}, '<a>"') == []
    by_id = {"type": "tag", "begin": {"type": "token", "token": ids[named]}}
    assert allowed({**by_id, "content": content, "end": "</a>"}, "") == [named]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    assert (
        new_compiler()
        .prepare()
        .endswith("need the package xgrammar: pip install 'forerun[grammar]')")
    )
    with pytest.raises(RequestError, match=r"pip install 'forerun\[grammar\]'"):
        new_compiler().compile(grammar(regex="a"))


def test_without_a_tokenizer_or_eos(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="A grammar needs a tokenizer"):
        new_compiler(tmp_path).compile(grammar(regex="a"))
    with pytest.raises(RequestError, match="needs an EOS token"):
        Vocabulary.load(VocabularySource(tmp_path, VOCAB_SIZE, ()))
