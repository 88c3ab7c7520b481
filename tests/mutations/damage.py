"""Random damage to a copy of the bundled pair, drawn from a number."""

from __future__ import annotations

import json
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from forerun.models.safetensors_files import INDEX, SINGLE

PAIR = ("target", "draft")
TEMPLATE = "chat_template.jinja"
SNIPPETS = (
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}", "{{ 1 / 0 }}", "{{ 1 % 0 }}",
    "{{ messages[99].content }}", "{{ ''.__class__.__mro__ }}", "{% if %}", "{{ undefined.a.b }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 10**10**10 }}",
    "{{ range(10**12)|list }}", "{% include 'x' %}", "{{ raise_exception('no') }}",
    "{# ", "{{ messages|tojson }}", "\x00",
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """What was done to one file of the pair in a folder."""

    folder: Path
    part: str  # of the pair
    file: str
    what: str

    @property
    def folders(self) -> tuple[Path, Path]:
        """Of the target and the draft."""
        return self.folder / PAIR[0], self.folder / PAIR[1]


def damaged(pair: Path, folder: Path, seed: int) -> Damage:
    """Copies the pair into an empty folder and damages one file of it."""
    rng = random.Random(seed)
    for part in PAIR:
        shutil.copytree(pair / part, folder / part, ignore=shutil.ignore_patterns("*.safetensors"))
        os.symlink(pair / part / SINGLE, folder / part / SINGLE)
    part = rng.choices(PAIR, (3, 1))[0]
    own = folder / part
    json_files = sorted(file.name for file in own.glob("*.json"))
    file = rng.choice([*json_files, "config.json", SINGLE, SINGLE, INDEX, TEMPLATE])
    if file == TEMPLATE and part == "draft":
        file = "config.json"
    if file == INDEX:
        _shard(own)
    elif file == SINGLE:
        shutil.copyfile((own / SINGLE).resolve(), own / "copy")
        os.replace(own / "copy", own / SINGLE)
    return Damage(folder, part, file, _damage(rng, own / file))


def _shard(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _damage(rng: random.Random, file: Path) -> str:
    if rng.random() < 0.1:
        how = rng.choice(FILES)
        how(file)
        return how.__name__.strip("_")
    if file.name == SINGLE:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, what = _text(rng, data[8 : 8 + length], in_json=True)
        size = (
            len(header) if rng.random() < 0.9 else rng.choice((0, 1, length + 1, 2**40, 2**64 - 1))
        )
        file.write_bytes(size.to_bytes(8, "little") + header + data[8 + length :])
        return what if size == len(header) else f"{what}, length {size}"
    changed, what = _text(rng, file.read_bytes(), in_json=file.suffix == ".json")
    file.write_bytes(changed)
    return what


def _text(rng: random.Random, data: bytes, in_json: bool) -> tuple[bytes, str]:
    """Values of JSON, or what anybody's editor or network may do to bytes."""
    if in_json and rng.random() < 0.75:
        value, what = _json(rng, json.loads(data))
        return json.dumps(value).encode(), what
    at = rng.randrange(len(data))
    if not in_json and rng.random() < 0.6:
        snippet = rng.choice(SNIPPETS)
        return data[:at] + snippet.encode() + data[at:], f"{snippet!r} at {at}"
    junk = bytes(rng.randrange(256) for _ in range(rng.choice((1, 1, 4, 50))))
    deep = rng.choice((b"[", b'{"a":')) * 10**5
    changes: dict[str, Callable[[], bytes]] = {
        "cut": lambda: data[:at],
        "overwritten": lambda: data[:at] + junk + data[at + len(junk) :],
        "inserted": lambda: data[:at] + junk + data[at:],
        "removed": lambda: data[:at] + data[at + rng.choice((1, 10, 1000)) :],
        "repeated": lambda: data + data,
        "byte order mark": lambda: b"\xef\xbb\xbf" + data,
        "UTF-16": lambda: data.decode(errors="replace").encode("utf-16"),
        "nested": lambda: data[:at] + deep + data[at:],
        "digits": lambda: data[:at] + b"9" * 5000 + data[at:],
    }
    name = rng.choice(sorted(changes))
    return changes[name](), f"{name} at {at}"


def _json(rng: random.Random, value: Any) -> tuple[Any, str]:
    """One value within another is replaced, removed, renamed or moved."""
    places = list(_places(value))
    if not places:
        return _junk(rng, value), "all"
    # One of all keys, however many values of one kind there are.
    within, key = places[rng.randrange(len(places))]
    if isinstance(value, dict) and rng.random() < 0.6:
        within, key = value, rng.choice(list(value))
    old, what = (
        within[key],
        rng.choice(("value", "value", "value", "value", "gone", "renamed", "swapped")),
    )
    if what == "value":
        within[key] = _junk(rng, old)
        return value, f"{key!r} is {str(within[key])[:60]!r}"
    if what == "gone":
        del within[key]
    elif what == "renamed" and isinstance(within, dict):
        within["".join(rng.choices(string.ascii_letters, k=5))] = within.pop(key)
    else:
        other, at = places[rng.randrange(len(places))]
        within[key], other[at] = other[at], old
        if _is_cyclic(value):
            within[key] = None
    return value, f"{key!r} {what}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything within."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items) if isinstance(value, dict | list) else ():
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def _is_cyclic(value: Any) -> bool:
    try:
        json.dumps(value)
    except (ValueError, RecursionError):
        return True
    return False


def _junk(rng: random.Random, old: Any) -> Any:
    near: list[Any] = []
    if isinstance(old, int | float) and not isinstance(old, bool):
        near = [old + 1, old - 1, -old, old * 2, old * 10**9, old / 2, str(old), [old], float(old)]
    elif isinstance(old, str):
        near = [
            old + "x",
            old[1:],
            [old],
            {old: old},
            old * 1000,
            "../" + old,
            "/" + old,
            old.upper(),
        ]
    elif isinstance(old, list):
        near = [
            old[1:],
            old + old,
            dict(enumerate(old)),
            [old],
            old[:1] * 10**4,
            list(map(str, old)),
        ]
    elif isinstance(old, dict):
        near = [list(old), [old], {**old, "x": old}, dict(list(old.items())[1:])]
    far = [
        None, True, False, 0, 1, -1, 10**9, 10**12, 10**30, 2**63, 0.5, 1e308, float("nan"),
        float("inf"), "", "x", "\x00", "é" * 300, [], {}, [None], ["x"], {"a": 1}, [[[]]], [1, 2],
    ]  # fmt: skip
    return rng.choice(near or far) if rng.random() < 0.4 else rng.choice(far)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _missing(file: Path) -> None:
    file.unlink()


def _a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _a_loop_of_links(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _zeros(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _nul_bytes(file: Path) -> None:
    file.write_bytes(bytes(10**6))


FILES = (_empty, _missing, _a_folder, _a_pipe, _a_loop_of_links, _zeros, _nul_bytes)
