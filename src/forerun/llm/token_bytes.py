"""The bytes of single tokens, which may be a part of a character.

`decode` of a single token would lose them, and in some tokenizers the space that it begins with.
"""

from __future__ import annotations

from typing import Any

_SPACE = "\u2581"  # of SentencePiece: a space in a token
_BYTE_TOKEN = "<0x0A>"  # SentencePiece with byte fallback has one for every byte


class TokenBytes:
    """Bytes of token ids: byte-level BPE (GPT-2's alphabet), SentencePiece, or as decoded."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of Hugging Face's transformers."""
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        alphabet = _alphabet()
        self._added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._byte_fallback = _BYTE_TOKEN in vocabulary
        byte_level = not self._byte_fallback and vocabulary.keys() >= alphabet.keys()
        self._alphabet = alphabet if byte_level else {}

    def of(self, token: int) -> bytes:
        """Empty for ids that the tokenizer does not know: a model's vocabulary may be padded."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._alphabet and self._alphabet.keys() >= set(piece):
            return bytes(self._alphabet[character] for character in piece)
        if self._alphabet or not self._byte_fallback:
            return str(self._tokenizer.decode([token])).encode()
        if len(piece) == len(_BYTE_TOKEN) and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return str(piece).replace(_SPACE, " ").encode()

    def text(self, token: int) -> str:
        """Decodes it, with U+FFFD for bytes that are not a character of their own."""
        return self.of(token).decode(errors="replace")


def _alphabet() -> dict[str, int]:
    """The bytes of byte-level BPE's characters (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + at): byte for at, byte in enumerate(others)}
