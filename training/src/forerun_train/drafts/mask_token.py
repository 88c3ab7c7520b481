"""Which token stands for the unknown ones of a block."""

from __future__ import annotations

from typing import Any

from forerun.core.errors import ConfigError


def choose_mask_token(tokenizer: Any, vocab_size: int, given: int | None) -> int:
    """A token that texts do not have: its embedding means "unknown" to the draft alone.

    That is the one given; the tokenizer's own mask; the first row of the embedding behind its
    tokens (so Qwen3's is 151669, as in z-lab's drafts); or its last special token that is neither
    an end nor padding nor in the chat template.

    Raises:
        ConfigError: the one given is no token.
    """
    if given is not None:
        if given >= vocab_size:
            raise ConfigError(
                f"mask_token_id {given} is not of the target's vocabulary, which ends at"
                f" {vocab_size - 1}."
            )
        return given
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    special = set(tokenizer.all_special_ids) | {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in template
    }
    free = [
        number
        for number in sorted(special - used)
        if tokenizer.convert_ids_to_tokens(number) not in template
    ]
    return free[-1] if free else int(tokenizer.pad_token_id or 0)
