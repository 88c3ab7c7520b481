"""The Python training corpus: the standard library and permissively licensed packages.

One story: wheels and the running interpreter in, two compressed document files out (training, held
out), with a table of sources and licences. Documents are whole source files, joined by NUL.
"""

from __future__ import annotations

import json
import lzma
import random
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGES: dict[str, str] = {
    "accelerate": "Apache-2.0",
    "aiohttp": "Apache-2.0 AND MIT",
    "altair": "BSD-3-Clause",
    "anyio": "MIT",
    "apscheduler": "MIT",
    "astropy": "BSD-3-Clause",
    "attrs": "MIT",
    "babel": "BSD-3-Clause",
    "black": "MIT",
    "bokeh": "BSD-3-Clause",
    "boto3": "Apache-2.0",
    "botocore": "Apache-2.0",
    "bottle": "MIT",
    "celery": "BSD-3-Clause",
    "click": "BSD-3-Clause",
    "dask": "BSD-3-Clause",
    "datasets": "Apache-2.0",
    "diffusers": "Apache-2.0",
    "django": "BSD-3-Clause",
    "fastapi": "MIT",
    "flask": "BSD-3-Clause",
    "httpx": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0",
    "ipython": "BSD-3-Clause",
    "jedi": "MIT",
    "jinja2": "BSD-3-Clause",
    "marshmallow": "MIT",
    "matplotlib": "PSF-based",
    "mypy": "MIT",
    "networkx": "BSD-3-Clause",
    "nltk": "Apache-2.0",
    "numpy": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "pip": "MIT",
    "poetry_core": "MIT",
    "prompt_toolkit": "BSD-3-Clause",
    "pydantic": "MIT",
    "pygments": "BSD-2-Clause",
    "pytest": "MIT",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "sanic": "MIT",
    "scikit_learn": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "scrapy": "BSD-3-Clause",
    "setuptools": "MIT",
    "sphinx": "BSD-2-Clause",
    "sqlalchemy": "MIT",
    "sqlglot": "MIT",
    "starlette": "BSD-3-Clause",
    "statsmodels": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "tornado": "Apache-2.0",
    "traitlets": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "trio": "MIT OR Apache-2.0",
    "twisted": "MIT",
    "urllib3": "MIT",
    "websockets": "BSD-3-Clause",
    "werkzeug": "BSD-3-Clause",
    "xarray": "Apache-2.0",
}
"""Wheel name to licence. Only these packages are read."""

PACKAGE_LIMIT = 7_000_000  # characters of one package
HELD_OUT_PACKAGES = ("click", "marshmallow", "traitlets")
HELD_OUT_MODULES = [
    "argparse",
    "calendar",
    "configparser",
    "csv",
    "difflib",
    "fractions",
    "graphlib",
    "heapq",
    "queue",
    "sched",
    "shelve",
    "statistics",
    "string",
    "textwrap",
    "wave",
    "zipapp",
]
"""Held out: the test set of Python completion."""

_SKIP_PARTS = {
    "test",
    "tests",
    "testing",
    "_vendor",
    "vendored",
    "externals",
    "lib2to3",
    "idlelib",
    "turtledemo",
}
_SKIP_PARTS |= {
    "site-packages",
    "ensurepip",
    "pydoc_data",
    "locale",
    "encodings",
    "__pycache__",
    "_generated",
}


@dataclass(frozen=True)
class Document:
    source: str
    path: str
    licence: str
    text: str


def build_corpus(wheels: Path, out: Path) -> dict[str, object]:
    """Write ``python_train.xz``, ``python_heldout.xz`` and ``sources.json`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    train: list[Document] = []
    held: list[Document] = []
    for document in _stdlib():
        module = document.path.split("/")[0].removesuffix(".py")
        (held if module in HELD_OUT_MODULES else train).append(document)
    for name in sorted(PACKAGES):
        files = list(_wheel(name, wheels))
        rng.shuffle(files)
        if name in HELD_OUT_PACKAGES:
            held += files
            continue
        size = 0
        for document in files:
            size += len(document.text)
            if size > PACKAGE_LIMIT:
                break
            train.append(document)
    train = _without_copies(train, held)
    rng.shuffle(train)
    write_documents(out / "python_train.xz", [d.text for d in train])
    (out / "python_heldout.json").write_text(json.dumps([asdict(d) for d in held]))
    sources: dict[str, list[int]] = {}
    for d in train:
        entry = sources.setdefault(f"{d.source} ({d.licence})", [0, 0])
        entry[0] += 1
        entry[1] += len(d.text)
    summary: dict[str, object] = {
        "sources": {k: {"files": v[0], "characters": v[1]} for k, v in sorted(sources.items())},
        "held_out_packages": list(HELD_OUT_PACKAGES),
        "held_out_modules": list(HELD_OUT_MODULES),
        "characters": sum(len(d.text) for d in train),
    }
    (out / "sources.json").write_text(json.dumps(summary, indent=1))
    return summary


def write_documents(path: Path, texts: list[str]) -> None:
    path.write_bytes(lzma.compress("\0".join(texts).encode(), preset=4))


def read_documents(path: Path) -> list[str]:
    return lzma.decompress(path.read_bytes()).decode().split("\0")


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if _wanted(relative):
            text = path.read_text(encoding="utf-8", errors="replace")
            if _clean(text):
                yield Document("cpython", relative, "PSF-2.0", text)


def _wheel(name: str, wheels: Path) -> Iterator[Document]:
    found = sorted(wheels.glob(f"{name}-*.whl"))
    if not found:
        raise FileNotFoundError(
            f"no wheel of {name} in {wheels}; "
            f"get it with: pip download --no-deps -d {wheels} {name}"
        )
    with zipfile.ZipFile(found[-1]) as archive:
        for path in sorted(archive.namelist()):
            if path.endswith(".py") and _wanted(path):
                text = archive.read(path).decode("utf-8", errors="replace")
                if _clean(text):
                    yield Document(
                        found[-1].name.split("-cp")[0].split("-py")[0], path, PACKAGES[name], text
                    )


def _wanted(path: str) -> bool:
    parts = path.split("/")
    return (
        not (_SKIP_PARTS & set(parts))
        and not parts[-1].startswith("test_")
        and not parts[-1].endswith("_test.py")
    )


def _clean(text: str) -> bool:
    """Whether a file is code: not empty, not a data table, no invalid bytes."""
    if not 200 <= len(text) <= 400_000 or "\0" in text or "\ufffd" in text:
        return False
    lines = text.splitlines()
    digits = sum(c.isdigit() for c in text) / len(text)
    return (
        max(map(len, lines)) < 500
        and digits < 0.12
        and sum(map(ord, text[:20000:10])) < 200 * len(text[:20000:10])
    )


def _without_copies(train: list[Document], held: list[Document]) -> list[Document]:
    """Deduplicated training files with (almost) no line in common with the held-out ones."""
    marks = {hash(line) for d in held for line in d.text.splitlines() if len(line.strip()) >= 40}
    seen: set[int] = set()
    kept = []
    for d in train:
        if hash(d.text) in seen:
            continue
        seen.add(hash(d.text))
        shared = {
            line for line in d.text.splitlines() if len(line.strip()) >= 40 and hash(line) in marks
        }
        if len(shared) < 8:
            kept.append(d)
    return kept
