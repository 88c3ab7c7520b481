"""The tokenizer in a GGUF file's metadata, as tokenizer.json and tokenizer_config.json.

Two models are known: byte-level BPE ("gpt2"), whose words are cut as `tokenizer.ggml.pre` says, and
SentencePiece ("llama"), of which the scores give the order of merges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from forerun.core.errors import ConfigError, first_line, shown
from forerun.models.gguf.reader import GgufFile

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens
MAX_PIECE = 256  # characters of a token that merges are looked for in

# How byte-level BPE cuts words: the expressions of the models' published tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
BPE_KINDS = ("gpt-2", "smollm", *EXPRESSIONS)


def tokenizer_of(file: GgufFile) -> tuple[Any, dict[str, Any]]:
    """(a `tokenizers.Tokenizer`, the keys of tokenizer_config.json).

    Raises:
        ConfigError: there is none, or one of an unknown kind.
    """
    parts = _Parts(file)
    model = file.metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if not isinstance(model, str) or model not in makers:
        raise ConfigError(
            f"{file.path}: tokenizer {shown(model)} is not supported (gpt2 and llama are); set"
            " tokenizer_path to the folder of the model's tokenizer."
        )
    try:
        tokenizer = makers[model](parts)
        _add_special(tokenizer, parts)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  the library raises nothing more specific
        raise ConfigError(
            f"{file.path}: no tokenizer can be made of its lists: {first_line(error)}. Download it"
            " again, or set tokenizer_path."
        ) from None
    return tokenizer, _config(parts)


class _Parts:
    """The lists of the metadata, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self._list("tokens")
        types = file.metadata.get("tokenizer.ggml.token_type", np.ones(len(self.tokens), np.int32))
        if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu":
            raise self.wrong("token_type")
        if len(types) != len(self.tokens):
            raise self.wrong("token_type")
        self.types = list(map(int, types))

    def _list(self, key: str) -> list[str]:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list):
            raise self.wrong(key)
        return value

    @property
    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ", 1)) for merge in self._list("merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise self.wrong("merges")
        return [(pair[0], pair[1]) for pair in pairs]

    @property
    def scores(self) -> list[float]:
        value = self.file.metadata.get("tokenizer.ggml.scores")
        if value is None or len(value) != len(self.tokens):
            raise self.wrong("scores")
        return [float(score) for score in value]

    def flag(self, key: str, default: bool) -> bool:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default) is True

    def token(self, name: str) -> str | None:
        """The text of a special token, such as "eos"; None: it is not said."""
        index = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise self.wrong(f"{name}_token_id")
        return self.tokens[index]

    def of_type(self, *types: int) -> list[str]:
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def wrong(self, key: str) -> ConfigError:
        return ConfigError(
            f"{self.file.path}: tokenizer.ggml.{key} is missing or not what it should be. Download"
            " it again, or set tokenizer_path."
        )


def _byte_level(parts: _Parts) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = parts.file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind not in BPE_KINDS:
        raise ConfigError(
            f"{parts.file.path}: how words are cut (tokenizer.ggml.pre {shown(kind)}) is not known."
            f" Known: {', '.join(BPE_KINDS)}; set tokenizer_path to the folder of the model's"
            " tokenizer."
        )
    vocab = {token: i for i, token in enumerate(parts.tokens)}
    llama = kind == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocab, parts.merges, ignore_merges=llama))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in EXPRESSIONS)
    first: list[Any] = []
    if kind == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif kind in EXPRESSIONS:
        first = [pre_tokenizers.Split(Regex(EXPRESSIONS[kind]), "isolated")]
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _add_bos(tokenizer, parts, default=llama)
    return tokenizer


def _sentence_piece(parts: _Parts) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(parts.tokens)}
    unknown = next(iter(parts.of_type(UNKNOWN)), None)
    merges = _merges(parts.tokens, parts.scores, vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = parts.flag("add_space_prefix", default=True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_bos(tokenizer, parts, default=True)
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best scores first (as in transformers)."""

    def splits(token: str) -> Iterator[tuple[str, str]]:
        for i in range(1, min(len(token), MAX_PIECE)):
            if token[:i] in vocab and token[i:] in vocab:
                yield token[:i], token[i:]

    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        own = sorted(splits(token), key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(score, pair) for pair in own]
    return [pair for _, pair in sorted(ranked, key=lambda each: -each[0])]


def _add_bos(tokenizer: Any, parts: _Parts, default: bool) -> None:
    """BOS (and EOS) around every text, if the file says so."""
    from tokenizers import processors

    bos, eos = parts.token("bos"), parts.token("eos")
    before = bos if bos is not None and parts.flag("add_bos_token", default) else None
    after = eos if eos is not None and parts.flag("add_eos_token", default=False) else None
    names = [name for name in (before, after) if name is not None]
    if not names:
        return
    single = [name for name in (before, "$A", after) if name is not None]
    second = ["$B:1" if name == "$A" else f"{name}:1" for name in single]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def _add_special(tokenizer: Any, parts: _Parts) -> None:
    """Tokens that no text is cut within: control tokens, and those that the user defined."""
    from tokenizers import AddedToken

    special = parts.of_type(CONTROL)
    plain = [t for t in parts.of_type(USER_DEFINED) if t.strip()]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _config(parts: _Parts) -> dict[str, Any]:
    """The keys of tokenizer_config.json."""
    metadata = parts.file.metadata
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**12,
    }
    for name, key in names.items():
        token = parts.token(key)
        config |= {} if token is None else {f"{name}_token": token}
    template = metadata.get("tokenizer.chat_template")
    return config if not isinstance(template, str) else config | {"chat_template": template}
