"""The target's vocabulary as the grammar compiler sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ConfigError, RequestError
from forerun.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

PACKAGE = (
    "Structured output, and tool calls that are enforced, need the package xgrammar:"
    " pip install 'forerun[grammar]'."
)
# In structural tags: what holds neither texts of the output nor token ids.
_NO_TOKENS = ("json_schema", "max_tokens", "max_chars", "min", "max", "max_whitespace_cnt", "type")
MAX_TOKENIZER_INFOS = 16  # that are kept


@dataclass(frozen=True)
class VocabularySource:
    """Where the vocabulary comes from; read when the first grammar is compiled."""

    folder: Path  # of the tokenizer
    vocab_size: int  # columns of the logits
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of every token id; the stop tokens are the model's EOS.

    Special tokens (<|im_start|>, ...) match no text, except those that a structural tag names.
    """

    source: VocabularySource
    full: TokenizerInfo  # special tokens match their text
    special: Mapping[int, str]  # their texts
    _infos: dict[frozenset[int], TokenizerInfo] = field(default_factory=dict)

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
        texts = tokenizer.convert_ids_to_tokens(sorted(special))
        pairs = zip(sorted(special), texts, strict=True)
        return cls(source, full, {i: text for i, text in pairs if text})

    def tokenizer_info(self, tag: Any = None) -> TokenizerInfo:
        """Returns it with the special tokens that a structural tag names, by text or id."""
        values = list(_values(tag))
        texts = "\n".join(value for value in values if isinstance(value, str))
        ids = {value for value in values if type(value) is int}
        named = frozenset(i for i, text in self.special.items() if i in ids or text in texts)
        info = self._infos.get(named)
        if info is None:
            while len(self._infos) >= MAX_TOKENIZER_INFOS:
                self._infos.pop(next(iter(self._infos)), None)
            info = self._infos[named] = self._build(named)
        return info

    def _build(self, named: frozenset[int]) -> TokenizerInfo:
        xgrammar = import_xgrammar()
        unmatched = self.special.keys() - named
        info: TokenizerInfo = xgrammar.TokenizerInfo(
            [b"" if i in unmatched else token for i, token in enumerate(self.full.decoded_vocab)],
            xgrammar.VocabType.RAW,
            vocab_size=self.source.vocab_size,
            stop_token_ids=list(self.source.eos_token_ids),
            add_prefix_space=self.full.add_prefix_space,
        )
        return info


def _values(value: Any) -> Iterator[Any]:
    """The texts and token ids within a structural tag's formats."""
    if isinstance(value, Mapping):
        value = [each for key, each in value.items() if key not in _NO_TOKENS]
    if isinstance(value, list):
        for each in value:
            yield from _values(each)
    else:
        yield value


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
    try:
        return load_tokenizer(folder)
    except ConfigError as error:
        raise RequestError(f"A grammar needs a tokenizer. {error}") from None
