"""Bytes of single tokens in the three kinds of vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from forerun.llm.text import text_ends
from forerun.llm.token_bytes import TokenBytes

TEXT = "d\u00e9j\u00e0 \U0001f600"


def tokenizer(vocabulary: list[str], decoder: Any) -> Any:
    model = models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.decoder = decoder
    inner.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def byte_level() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    return tokenizer(["<unk>", *sorted(ByteLevel.alphabet())], decoders.ByteLevel())


def sentencepiece() -> Any:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "\u2581d", "\u00e9j", "<0x", *fallback]
    decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return tokenizer(pieces, decoder)


@pytest.mark.parametrize("made", [byte_level, sentencepiece])
def test_every_byte_has_a_token(made: Any) -> None:
    tok = made()
    spell = TokenBytes(tok)
    ids = range(len(tok))
    of_byte = {spell.of(i): i for i in ids if len(spell.of(i)) == 1}
    assert len(of_byte) == 256
    tokens = [of_byte[bytes([byte])] for byte in TEXT.encode()]
    assert tok.decode(tokens) == TEXT
    assert spell.text(tokens[1]) == "\ufffd"
    assert spell.of(tok.convert_tokens_to_ids("<|end|>")) == b"<|end|>"
    assert spell.of(len(tok) + 5) == b""
    # Characters end where their last byte does.
    ends = text_ends(tok, tokens)
    assert ends == [len(TEXT.encode()[: i + 1].decode(errors="ignore")) for i in range(len(tokens))]


def test_pieces_of_sentencepiece_keep_their_space() -> None:
    spell = TokenBytes(sentencepiece())
    assert [spell.text(i) for i in (1, 2, 3)] == [" d", "\u00e9j", "<0x"]


def test_other_vocabularies_are_decoded() -> None:
    tok = tokenizer(["<unk>", "one", "two"], decoders.Fuse())
    assert [TokenBytes(tok).of(i) for i in (1, 2, 3)] == [b"one", b"two", b"<|end|>"]
