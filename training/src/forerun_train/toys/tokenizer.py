"""A small byte-level BPE tokenizer with ChatML, for code and word problems."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE: Final = 6144
END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
MASK: Final = "<|mask|>"
SPECIALS: Final = (END_OF_TEXT, IM_START, IM_END, MASK)

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# A word includes a leading space or sign, digits are separate, newlines include blanks before.
_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that ``transformers.AutoTokenizer`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {name: i for name in SPECIALS if (i := tokenizer.token_to_id(name)) is not None}
    if missing := [name for name in SPECIALS if name not in ids]:
        raise ValueError(f"the tokenizer lacks special tokens: {missing}")
    return ids


def assistant_id(tokenizer: Tokenizer) -> int:
    """The token ``assistant``: after ``<|im_start|>`` it begins an answer."""
    token: int | None = tokenizer.token_to_id("assistant")
    if token is None:
        raise ValueError("the tokenizer has no token for the whole word 'assistant'")
    return token


def render_chat(messages: Sequence[tuple[str, str]], *, generation_prompt: bool = False) -> str:
    """``CHAT_TEMPLATE`` in Python: (role, content) pairs to text."""
    text = "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in messages)
    return text + (f"{IM_START}assistant\n" if generation_prompt else "")
