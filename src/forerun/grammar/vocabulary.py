"""The target's vocabulary as the grammar compiler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.errors import RequestError

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

PACKAGE = "Structured output needs the package xgrammar: pip install 'forerun[grammar]'."


@dataclass(frozen=True)
class VocabularySource:
    """Where the vocabulary comes from; read when the first grammar is compiled."""

    folder: Path  # of the tokenizer
    vocab_size: int  # columns of the logits
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of every token id; the stop tokens are the model's EOS."""

    # Special tokens (<|im_start|>, ...) match no text. Structural tags may name them.
    text: TokenizerInfo
    full: TokenizerInfo

    @classmethod
    def load(cls, source: VocabularySource) -> Vocabulary:
        """
        Raises:
            RequestError: xgrammar is not installed, there is no tokenizer, or no EOS.
        """
        xgrammar = import_xgrammar()
        if not source.eos_token_ids:
            raise RequestError("A grammar needs an EOS token, which the model's config lacks.")
        tokenizer = _tokenizer(source.folder)
        eos = list(source.eos_token_ids)
        full = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=source.vocab_size, stop_token_ids=eos
        )
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        text = xgrammar.TokenizerInfo(
            [b"" if i in special else token for i, token in enumerate(full.decoded_vocab)],
            xgrammar.VocabType.RAW,
            vocab_size=source.vocab_size,
            stop_token_ids=eos,
            add_prefix_space=full.add_prefix_space,
        )
        return cls(text, full)


def import_xgrammar() -> Any:
    """
    Raises:
        RequestError: it is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(PACKAGE) from error
    return xgrammar


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"A grammar needs a tokenizer; none loads from {folder}: {reason}"
        ) from None
