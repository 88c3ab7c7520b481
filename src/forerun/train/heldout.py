"""Picking the held-out Python prompts that ship with the package: code the target never saw."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

_OPENS = re.compile(r"^(?:async def|def|class|@)[^\n]*", re.MULTILINE)


def write_heldout(
    documents: Path, tokenizer: Tokenizer, out: Path, count: int = 60, seed: int = 0
) -> int:
    """Prompts of 64 to 200 tokens from file and function beginnings, cut after a whole line."""
    rng = random.Random(seed)
    files = json.loads(documents.read_text())
    rng.shuffle(files)
    files.sort(key=lambda d: d["source"] != "cpython")  # half of them from the standard library
    library = [d for d in files if d["source"] == "cpython"]
    packages = [d for d in files if d["source"] != "cpython"]
    rows: list[dict[str, object]] = []
    for group, share in ((library, count // 2), (packages, count - count // 2)):
        found: list[dict[str, object]] = []
        while len(found) < share:
            document = rng.choice(group)
            for prompt in _prompts(document["text"], tokenizer, rng):
                row = {
                    "source": document["source"],
                    "path": document["path"],
                    "licence": document["licence"],
                    "prompt": prompt,
                }
                if row not in found:
                    found.append(row)
                break
        rows += found
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def _prompts(text: str, tokenizer: Tokenizer, rng: random.Random) -> Iterator[str]:
    starts = [0, *[m.start() for m in _OPENS.finditer(text)]]
    begin = 0 if rng.random() < 0.25 else rng.choice(starts)
    lines = text[begin:].splitlines(keepends=True)
    wanted, prompt = rng.randint(64, 190), ""
    for line in lines:
        size = len(tokenizer.encode(prompt + line, add_special_tokens=False).ids)
        if size > 200:
            return
        prompt += line
        if size >= wanted:
            yield prompt
            return
