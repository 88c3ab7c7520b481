"""Tokenizers: what `tokenizer.json` says holds, whichever class tokenizer_config.json names."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.models.tokenizer import PROBES, load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SETTINGS = {
    "bos_token": SPECIAL[1],
    "eos_token": SPECIAL[2],
    "pad_token": SPECIAL[2],
    "unk_token": SPECIAL[0],
    "additional_special_tokens": SPECIAL[1:],
    "chat_template": TEMPLATE,
    "model_max_length": 2048,
    "add_prefix_space": False,
}


def save(folder: Path, digits: bool = True, **settings: object) -> Tokenizer:
    """A byte-level BPE whose merges would join digits, if its pre-tokenizer let them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("1", "2"), ("0", "0"), ("Ġ", "1"), ("h", "e")]
    words = [*SPECIAL, *letters, *(a + b for a, b in pairs)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([alone, level]) if digits else level
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return made


@pytest.mark.parametrize(
    ("kind", "digits", "replaced"),
    [
        ("GPT2Tokenizer", True, True),  # SmolLM2's files: the class knows no digits
        ("GPT2Tokenizer", False, False),
        ("PreTrainedTokenizerFast", True, False),
    ],
)
def test_ids_are_those_of_the_file(
    kind: str, digits: bool, replaced: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = save(tmp_path, digits, tokenizer_class=kind)
    with caplog.at_level(logging.WARNING, "forerun"):
        tokenizer = load_tokenizer(tmp_path)
    assert bool(caplog.messages) is replaced
    if replaced:
        (line,) = caplog.messages
        assert kind in line and "tokenizer.json" in line and "\n" not in line
    for text in (*PROBES, "12 and 100", "x<|im_end|>12<|im_start|>", "he 1200"):
        ids = made.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == made.decode(ids, skip_special_tokens=False)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.model_max_length == 2048
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    assert set(tokenizer.all_special_tokens) == set(SPECIAL)


def test_no_class_is_looked_for_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers, whose search imports much that nothing here uses."""
    for folder in (tmp_path, bundled("target")):
        if folder == tmp_path:
            save(folder, tokenizer_class="PreTrainedTokenizerFast")
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        with monkeypatch.context() as patch:
            patch.setattr(transformers, "AutoTokenizer", None)
            tokenizer = load_tokenizer(folder)
        assert type(tokenizer) is type(found)
        assert tokenizer.init_kwargs.keys() <= found.init_kwargs.keys() | {"local_files_only"}
        for name in ("special_tokens_map", "chat_template", "model_max_length", "padding_side"):
            assert getattr(tokenizer, name) == getattr(found, name), name
        assert tokenizer(list(PROBES))["input_ids"] == found(list(PROBES))["input_ids"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": 5}', "null"])
def test_a_broken_file_is_one_line(text: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"^No tokenizer loads from \S+/tokenizer\.json: .* Say so\.$"
    ):
        load_tokenizer(tmp_path, "Say so.")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_error_names_the_file_that_is_damaged(name: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / name).write_text('{"a":')
    with pytest.raises(ConfigError, match=rf"^No tokenizer loads from \S+/{name}: "):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Else every prompt would be said to be empty."""
    config = (bundled("target") / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json and no other .* Say so\.$"):
        load_tokenizer(tmp_path, "Say so.")
