"""Lines of data, their labels and their packing, against transformers' masks and properties."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.models.tokenizer import load_tokenizer
from forerun_train.data import records
from forerun_train.data.packing import PackedBatch, PackedStream
from forerun_train.data.records import DataError, open_records, parse_prompt, parse_record
from forerun_train.data.rendering import Document, Renderer
from tests.property_examples import examples

# ChatML, with and without markers, and one that drops the reasoning of earlier turns, as Qwen3's.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETFUL = UNMARKED.replace(
    "{{ m['content'] }}<|im_end|>{% else",
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}"
    "{% endif %}<|im_end|>{% else",
)
REFUSES = "{% for m in messages %}{{ raise_exception('no ' + m['role']) }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(bundled("target"))


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": messages, **more}


def written(path: Path, lines: Sequence[Any]) -> Path:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def one(renderer: Renderer, line: dict[str, Any]) -> list[Document]:
    (found,) = renderer.documents([parse_record(json.dumps(line).encode(), "f:1")])
    if isinstance(found, DataError):
        raise found
    return found


# --- lines ----------------------------------------------------------------------------------------


def test_every_form_is_the_same_conversation() -> None:
    forms = [
        chat("a", "b"),
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "response": "b"},
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
        ]},
    ]  # fmt: skip
    found = {json.dumps(parse_record(json.dumps(form).encode(), "f:1").messages) for form in forms}
    assert found == {json.dumps(chat("a", "b")["messages"])}
    system = {**forms[1], "system": "be kind"}
    first = parse_record(json.dumps(system).encode(), "f:1").messages[0]
    assert first == {"role": "system", "content": "be kind"}
    assert parse_record(b'{"text": "abc"}', "f:1").text == "abc"


@pytest.mark.parametrize(
    "line, message",
    [
        ("", "an empty line"),
        ("{oops", "not JSON: Expecting property name"),
        (r'{"text": "a \ud800 b"}', r"\\ud800 is half a character"),
        (r'{"messages": [{"role": "user", "content": "\udfff"}]}', r"\\udfff is half a character"),
        ("[1]", r"must be an object, got \[1\]"),
        ('{"instruction": "a"}', "unknown form: needs 'messages', .* has 'instruction'"),
        ("{}", "unknown form: .* has nothing"),
        ('{"prompt": "a"}', "unknown form"),
        ('{"messages": []}', "list of turns is empty"),
        ('{"messages": "a"}', "must be a list, got 'a'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no turn is the assistant's"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "answers nothing"),
        ('{"messages": [{"role": "narrator", "content": "a"}]}', "unknown role 'narrator'"),
        ('{"messages": [{"role": "user"}]}', "content of a message must be text, got None"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text parts"),
        ('{"messages": ["a"]}', "a message needs 'role'"),
        ('{"conversations": [{"from": "alien", "value": "a"}]}', "unknown role 'alien'"),
        ('{"conversations": [{"role": "user"}]}', "a turn needs 'from' and 'value'"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "value must be text, got 3"),
        ('{"prompt": "a", "response": 3}', "response must be text"),
        ('{"prompt": " ", "response": "b"}', "prompt is empty"),
        ('{"text": ""}', "text is empty"),
        (json.dumps(chat("a", "")), "the assistant's turns are empty"),
        (json.dumps({**chat("a", "b"), "tools": "x"}), "tools must be a list of objects, got 'x'"),
        (json.dumps({**chat("a", "b"), "tools": [1]}), r"tools must be .*, got \[1\]"),
    ],
)
def test_a_bad_line_is_named_in_one_line(tmp_path: Path, line: str, message: str) -> None:
    good = chat("a", "b")
    path = written(tmp_path / "data.jsonl", [good, line, good, chat("c", "d")])
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}") as caught:
        open_records(path, 0.5, 0)
    assert "\n" not in str(caught.value)
    assert "--max-errors" in str(caught.value)
    train, validation = open_records(path, 0.5, 0, max_errors=1)
    assert len(train) + len(validation) == 3
    assert train.skipped.count == 1
    assert "data.jsonl:2" in str(train.skipped)


def test_bytes_that_are_no_utf_8_are_named_by_their_line(tmp_path: Path) -> None:
    """Raw halves of characters among them, which Python's JSON would let through."""
    path = tmp_path / "data.jsonl"
    for text in (b"\xed\xa0\x80", b"\xff"):
        path.write_bytes(b'{"text": "a"}\n{"text": "c ' + text + b'"}\n{"text": "e"}\n')
        with pytest.raises(DataError, match=r"data\.jsonl:2: not JSON: 'utf-8' codec can't decode"):
            open_records(path, 0.5, 0)
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')  # a byte order mark
    assert sum(map(len, open_records(path, 0.5, 0))) == 2


def test_what_would_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            open_records(path, 0.5, 0)
    monkeypatch.setattr(records, "MAX_LINE", 1 << 20)
    long = tmp_path / "long.txt"
    long.write_text('{"text": "a"}\n' + json.dumps({"text": "b" * (1 << 20)}) + "\n")
    with pytest.raises(DataError, match=r"long\.txt:2: a line of more than 1 MiB"):
        open_records(long, 0.5, 0)


def test_all_bad_lines_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ["{", chat("a", "b"), "}", "[]"])
    with pytest.raises(DataError, match=r"a\.jsonl:1: .* It is the first of 3 bad lines"):
        open_records(path, 0.5, 0, max_errors=2)


@pytest.mark.parametrize("ending", ["", "\n", "\n\n \n"])
def test_records_are_read_from_their_places(tmp_path: Path, ending: str) -> None:
    """Any line end, text that is not ASCII, a last line without a newline, and several files."""
    lines = [json.dumps(chat(f"ä{i}", "ü" * i + "."), ensure_ascii=False) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines[:25]) + ending, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[25:]) + ending, encoding="utf-8")
    (tmp_path / "c.txt").write_text("not data")
    train, validation = open_records(tmp_path, 0.3, 1)
    texts = [
        records[i].messages[0]["content"]
        for records in (train, validation)
        for i in range(len(records))
    ]
    assert sorted(texts) == sorted(f"ä{i}" for i in range(40))


def test_the_split_is_one_of_lines(tmp_path: Path) -> None:
    """It does not depend on a line's place or on other lines, and has about the share asked for."""

    def held(path: Path, seed: int = 0) -> set[str]:
        _, validation = open_records(path, 0.2, seed)
        return {validation[i].messages[0]["content"] for i in range(len(validation))}

    lines = [chat(f"q{i}", "a") for i in range(500)]
    whole = held(written(tmp_path / "a.jsonl", lines))
    assert 60 < len(whole) < 140
    assert held(written(tmp_path / "b.jsonl", lines[::-1])) == whole
    first = {f"q{i}" for i in range(250)}
    assert held(written(tmp_path / "c.jsonl", lines[:250])) == whole & first
    assert held(tmp_path / "a.jsonl", seed=1) != whole


def test_each_side_has_a_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [chat("a", "b"), chat("c", "d")])
    for share in (1e-9, 1 - 1e-9):
        train, validation = open_records(path, share, 0)
        assert len(train) == len(validation) == 1
    with pytest.raises(ConfigError, match="1 usable lines; two are needed"):
        open_records(written(tmp_path / "b.jsonl", [chat("a", "b")]), 0.1, 0)
    with pytest.raises(ConfigError, match="there is no such file"):
        open_records(tmp_path / "none.jsonl", 0.1, 0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"no file that ends in \.jsonl"):
        open_records(tmp_path / "folder", 0.1, 0)


def test_prompts_lose_their_answers() -> None:
    record = parse_prompt(json.dumps(chat("a", "b", "c", id=7, topic="t")).encode(), "f:1")
    assert [each["content"] for each in record.messages] == ["a", "c"]
    assert (record.given_id, record.topic) == ("7", "t")
    assert parse_prompt(b'{"prompt": "a"}', "f:1").messages[0]["content"] == "a"
    for line in (b'{"text": "a"}', b'{"messages": [{"role": "system", "content": "a"}]}'):
        with pytest.raises(DataError, match=r"^f:1: "):
            parse_prompt(line, "f:1")


# --- labels ---------------------------------------------------------------------------------------

TURNS = st.lists(
    st.text(st.sampled_from("ab cäé\n .,1<>|😀"), min_size=1, max_size=12).filter(str.strip),
    min_size=2,
    max_size=7,
)


@examples(60)
@given(TURNS)
def test_labels_are_those_of_transformers(tokenizer: Any, turns: list[str]) -> None:
    """Found by prefixes, they are what markers in the same template say."""
    line = chat(*turns)
    want = tokenizer.apply_chat_template(
        line["messages"],
        chat_template=CHATML,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    length = len(want["input_ids"])
    for template in (CHATML, UNMARKED):
        (found,) = one(Renderer(tokenizer, template), line)
        assert found.ids.tolist() == want["input_ids"][: len(found.ids)]
        labels = found.labels.tolist()
        assert labels + [False] * (length - len(labels)) == [
            bool(m) for m in want["assistant_masks"]
        ]


def test_markers_and_prefixes_give_the_same_text(tokenizer: Any) -> None:
    (document,) = one(Renderer(tokenizer, UNMARKED), chat("Hi.", "Hello!", "Bye?", "See you."))
    text = tokenizer.decode(document.ids[document.labels])
    assert text == "Hello!<|im_end|>See you.<|im_end|>"


def test_the_end_of_a_cut_off_answer_is_no_label(tokenizer: Any) -> None:
    for template in (CHATML, UNMARKED):
        (document,) = one(Renderer(tokenizer, template), chat("a", "b", "c", "d", truncated=True))
        assert tokenizer.decode(document.ids[document.labels]) == "b<|im_end|>d"


def test_a_turn_that_later_turns_change_is_a_document_of_its_own(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, FORGETFUL)
    line = chat("a", "hm</think>b", "c", "so</think>d")
    first, second = one(renderer, line)
    assert tokenizer.decode(first.ids[first.labels]) == "hm</think>b<|im_end|>"
    assert tokenizer.decode(second.ids[second.labels]) == "so</think>d<|im_end|>"
    whole = tokenizer.apply_chat_template(line["messages"], chat_template=FORGETFUL, tokenize=False)
    assert tokenizer.decode(second.ids) == whole
    assert len(one(renderer, chat("a", "b", "c", "d"))) == 1


def test_a_generation_prompt_that_goes_further_than_the_answer(tokenizer: Any) -> None:
    """Some templates open the reasoning in the prompt, and do not write it with the answer."""
    template = UNMARKED.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    (document,) = one(Renderer(tokenizer, template), chat("a", "b"))
    assert tokenizer.decode(document.ids[document.labels]) == "b<|im_end|>"


def test_every_token_of_a_text_counts(tokenizer: Any) -> None:
    (document,) = one(Renderer(tokenizer, None), {"text": "def f(x):\n    return x"})
    assert document.ids.tolist() == tokenizer("def f(x):\n    return x")["input_ids"]
    assert document.labels.all()


def test_what_a_template_refuses(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^f:1: the chat template fails: no user"):
        one(Renderer(tokenizer, REFUSES), chat("a", "b"))
    with pytest.raises(ConfigError, match="not valid Jinja: line 1: Expected an expression"):
        Renderer(tokenizer, "{% for m in %}")
    with pytest.raises(ConfigError, match=r"template none\.jinja cannot be read: .* in Jinja\."):
        Renderer.of(tokenizer, "none.jinja")
    file = tmp_path / "t.jinja"
    file.write_text(UNMARKED)
    assert Renderer.of(tokenizer, str(file)).template == UNMARKED
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="has no chat template; give one with --template"):
        one(Renderer(bare), chat("a", "b"))
    assert len(one(Renderer(bare), {"text": "abc"})) == 1


def test_tokens_that_the_target_lacks(tokenizer: Any) -> None:
    """A tokenizer of another model: no id reaches the embedding that is not in it."""
    ids = one(Renderer(tokenizer), {"text": "def f(x): return x"})[0].ids
    highest = int(ids.max())
    one(Renderer(tokenizer, None, highest + 1), {"text": "def f(x): return x"})
    with pytest.raises(
        DataError, match=f"^f:1: token .* has id {highest}, .* ends at {highest - 1}"
    ):
        one(Renderer(tokenizer, None, highest), {"text": "def f(x): return x"})


# --- packing --------------------------------------------------------------------------------------


def texts(tmp_path: Path, lengths: Sequence[int], name: str = "t.jsonl") -> Path:
    """Documents that are told apart by their first words."""
    lines = [
        {"text": f"d{i} " + "a b c d e f g h "[: 2 * length]} for i, length in enumerate(lengths)
    ]
    return written(tmp_path / name, lines)


def stream(path: Path, tokenizer: Any, **given: Any) -> PackedStream:
    train, _ = open_records(path, 0.1, 0)
    options = {"seq_len": 24, "batch_size": 4, "seed": 0, **given}
    return PackedStream(train, Renderer.of(tokenizer, None), **options)


def documents_of(batch: PackedBatch) -> list[tuple[int, ...]]:
    """The tokens of every document of a batch."""
    out = []
    for ids, numbers in zip(batch.input_ids, batch.document_ids, strict=True):
        out += [tuple(ids[numbers == n].tolist()) for n in range(int(numbers.max()) + 1)]
    return out


def same(one: PackedBatch, other: PackedBatch) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@examples(25)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=2, max_size=30),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_what_packing_keeps(
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    batch_size: int,
    seed: int,
) -> None:
    path = texts(tmp_path_factory.mktemp("packing"), lengths)
    train, _ = open_records(path, 0.1, 0)
    whole = {tuple(tokenizer(train[i].text)["input_ids"][:24]): 0 for i in range(len(train))}
    batches = list(islice(stream(path, tokenizer, batch_size=batch_size, seed=seed), 12))
    for batch in batches:
        assert batch.input_ids.shape == (batch_size, 24)
        dtypes = (torch.int64, torch.bool, torch.int32, torch.int64)
        assert tuple(each.dtype for each in vars(batch).values()) == dtypes
        padding = batch.document_ids < 0
        assert torch.equal(batch.loss_mask, ~padding)  # every token of a text is a label
        assert not batch.position_ids[padding].any()
        for row in range(batch_size):
            numbers = batch.document_ids[row]
            real = numbers[numbers >= 0]
            assert len(real) and (numbers[: len(real)] >= 0).all()  # padding is at the end
            assert real[0] == 0 and ((real.diff() == 0) | (real.diff() == 1)).all()
            for n in range(int(real[-1]) + 1):
                positions = batch.position_ids[row][numbers == n]
                assert torch.equal(positions, torch.arange(len(positions)))
        for document in documents_of(batch):
            assert document in whole  # whole, or cut at seq_len; nothing is divided
            whole[document] += 1


def test_every_document_comes_once_an_epoch(tokenizer: Any, tmp_path: Path) -> None:
    path = texts(tmp_path, [3 + i % 9 for i in range(60)])
    train, _ = open_records(path, 0.1, 0)
    batches = islice(stream(path, tokenizer, batch_size=1), 400)
    seen = [document for batch in batches for document in documents_of(batch)]
    counts = Counter(seen[: len(train) * 10])
    assert len(counts) == len(train)
    assert set(counts.values()) <= {9, 10, 11}  # some wait at both ends
    assert seen[: len(train)] != seen[len(train) : 2 * len(train)]  # shuffled anew


def test_rows_are_filled(tokenizer: Any, tmp_path: Path) -> None:
    path = texts(tmp_path, [1 + i * 7 % 13 for i in range(200)])
    batches = list(islice(stream(path, tokenizer, seq_len=96), 30))
    filled = np.mean([(b.document_ids >= 0).float().mean().item() for b in batches])
    assert filled > 0.95


@pytest.mark.parametrize("taken", [1, 5, 37])
def test_a_stream_goes_on_from_its_state(tokenizer: Any, tmp_path: Path, taken: int) -> None:
    path = texts(tmp_path, [2 + i * 5 % 17 for i in range(30)])
    whole = list(islice(stream(path, tokenizer), taken + 20))
    first = stream(path, tokenizer)
    for _ in islice(first, taken):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    second = stream(path, tokenizer)
    second.load_state_dict(state)
    assert all(map(same, islice(second, 20), whole[taken:]))


def test_ranks_share_the_batches_of_one(tokenizer: Any, tmp_path: Path) -> None:
    """And a state of two ranks serves one or four."""
    path = texts(tmp_path, [2 + i * 5 % 17 for i in range(30)])
    whole = list(islice(stream(path, tokenizer), 12))
    ranks = [stream(path, tokenizer, rows=slice(2 * rank, 2 * rank + 2)) for rank in range(2)]
    parts = [list(islice(each, 6)) for each in ranks]
    for batch, *halves in zip(whole, *parts, strict=False):
        for name, value in vars(batch).items():
            assert torch.equal(value, torch.cat([vars(half)[name] for half in halves]))
    lanes = {k: v for each in ranks for k, v in each.state_dict()["lanes"].items()}
    for size in (1, 4):
        own = [slice(rank * 4 // size, (rank + 1) * 4 // size) for rank in range(size)]
        later = [stream(path, tokenizer, rows=rows) for rows in own]
        for each in later:
            each.load_state_dict({"lanes": lanes})
        for batch, *pieces in zip(whole[6:], *later, strict=False):
            joined = torch.cat([piece.input_ids for piece in pieces])
            assert torch.equal(batch.input_ids, joined)
    with pytest.raises(ConfigError, match="another batch size"):
        stream(path, tokenizer, batch_size=8).load_state_dict({"lanes": lanes})


def test_records_that_the_template_refuses(tokenizer: Any, tmp_path: Path) -> None:
    lines = [chat(f"a{i}", "b", "c", "d") if i else chat("x", "y") for i in range(12)]
    path = written(tmp_path / "a.jsonl", lines)
    file = tmp_path / "t.jinja"
    file.write_text(
        "{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}" + UNMARKED
    )
    train, _ = open_records(path, 0.1, 0)
    renderer = Renderer.of(tokenizer, str(file))
    with pytest.raises(DataError, match=r"a\.jsonl:\d+: the chat template fails: long.*max-errors"):
        next(iter(PackedStream(train, renderer, 32, 1, 0)))
    train, _ = open_records(path, 0.1, 0, max_errors=11)
    next(iter(PackedStream(train, renderer, 32, 1, 0)))
    assert 0 < train.skipped.count <= 11


def test_answers_behind_the_length_give_nothing(tokenizer: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [chat("word " * 200 + str(i), "b") for i in range(4)])
    with pytest.raises(ConfigError, match="no record has a label within seq_len 24"):
        next(iter(stream(path, tokenizer)))
