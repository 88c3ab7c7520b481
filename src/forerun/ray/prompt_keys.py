"""What a request is routed by: keys of the blocks of its prompt's text, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from forerun.server.engines.routing import block_keys

BLOCK_CHARACTERS = 128
BLOCK_TOKENS = 32  # that they are taken for
MAX_CHARACTERS = 1 << 17  # of a prompt, that are looked at
# Of the bodies of all endpoints; the first that is there.
PROMPTS = ("messages", "prompt", "input_ids", "text", "input")


def prompt_keys(body: bytes) -> list[int]:
    """Returns keys of the blocks of a prompt; none where the body has no prompt."""
    try:
        value = json.loads(body) if body else None
    except ValueError:  # the replica says what is wrong
        return []
    if not isinstance(value, Mapping):
        return []
    prompt = next((value[name] for name in PROMPTS if value.get(name)), None)
    if prompt is None:
        return []
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return block_keys(text[:MAX_CHARACTERS], BLOCK_CHARACTERS)
