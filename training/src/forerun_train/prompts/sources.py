"""Functions and paragraphs of the standard library and of installed packages.

Which modules are held out is decided by their names, so no function or text of a held-out module
is in the training split.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from forerun_train.toys.corpus import HELD_OUT_MODULES, HELD_OUT_PACKAGES, PACKAGES

SKIPPED = frozenset((
    "test", "tests", "testing", "_vendor", "vendored", "externals", "lib2to3", "idlelib",
    "turtledemo", "site-packages", "ensurepip", "locale", "encodings", "__pycache__", "_generated",
))  # fmt: skip
HELD_OUT_SHARE = 8  # one in so many modules
CODE_SIZE = (80, 1800)  # characters of a function
PARAGRAPH_SIZE = (240, 2400)  # characters of a text
FILE_SIZE = 400_000
AT_FIRST = 100  # functions that are read before one is chosen


@dataclass(frozen=True)
class Function:
    """A function or method with a docstring."""

    module: str
    name: str
    signature: str  # its first lines, up to the colon
    source: str  # dedented, with the docstring
    bare: str  # without the docstring
    purpose: str  # the docstring's first paragraph


@dataclass(frozen=True)
class Paragraphs:
    """A text from documentation."""

    module: str
    text: str


@dataclass
class Sources:
    """Reads modules of a split in a random order, as many as are needed."""

    held_out: bool
    seed: int
    functions: list[Function] = field(default_factory=list)
    texts: list[Paragraphs] = field(default_factory=list)
    _files: Iterator[tuple[str, Path]] | None = None

    def function(self, rng: random.Random) -> Function:
        """A function of the split."""
        self._read_for(rng)
        return rng.choice(self.functions)

    def text(self, rng: random.Random) -> Paragraphs:
        """A text of the split."""
        self._read_for(rng)
        return rng.choice(self.texts)

    def _read_for(self, rng: random.Random) -> None:
        """Reads another module now and then, until all are read; the first ones at once."""
        while not self.functions or not self.texts or len(self.functions) < AT_FIRST:
            if not self._read():
                return
        if rng.random() < 0.2:
            self._read()

    def _read(self) -> bool:
        """Reads a module; False: none is left."""
        if self._files is None:
            files = [each for each in module_files() if is_held_out(each[0]) == self.held_out]
            random.Random(f"modules {self.seed}").shuffle(files)
            self._files = iter(files)
        found = next(self._files, None)
        if found is None:
            return False
        module, path = found
        tree_and_text = parsed(path)
        if tree_and_text is not None:
            self.functions += functions_of(module, *tree_and_text)
            self.texts += texts_of(module, tree_and_text[0])
        if module == "pydoc_data.topics":
            from pydoc_data.topics import topics

            self.texts += [
                Paragraphs(module, part) for text in topics.values() for part in parts(text)
            ]
        return True


def module_files() -> list[tuple[str, Path]]:
    """Modules and their files: of the standard library, and of the packages in `PACKAGES` that
    are installed.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    folders = [(stdlib, "")]
    for package in PACKAGES:
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            folders.append((Path(place), package))
    found = []
    for folder, package in folders:
        for path in sorted(folder.rglob("*.py")):
            names = path.relative_to(folder).with_suffix("").parts
            if SKIPPED.isdisjoint(names) and not names[-1].startswith("test_"):
                kept = [name for name in (package, *names) if name and name != "__init__"]
                found.append((".".join(kept), path))
    return found


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the held-out split."""
    top = module.partition(".")[0]
    if top in HELD_OUT_PACKAGES or top in HELD_OUT_MODULES:
        return True
    digest = hashlib.blake2b(module.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def parsed(path: Path) -> tuple[ast.Module, str] | None:
    """A file's syntax tree and text; None: it is not plain Python, or very long."""
    try:
        text = path.read_text(encoding="utf-8")
        return (ast.parse(text), text) if len(text) <= FILE_SIZE else None
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def functions_of(module: str, tree: ast.Module, text: str) -> Iterator[Function]:
    """The functions and methods of a file that have docstrings and are neither short nor long."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        doc = ast.get_docstring(node)
        if not doc or len(node.body) < 2 or node.end_lineno is None or node.name[:2] == "__":
            continue
        source = _dedented(lines[node.lineno - 1 : node.end_lineno])
        if not CODE_SIZE[0] <= len(source) <= CODE_SIZE[1]:
            continue
        first, second = node.body[0], node.body[1]
        head = lines[node.lineno - 1 : first.lineno - 1]
        rest = lines[second.lineno - 1 : node.end_lineno]
        if not head or second.lineno <= (first.end_lineno or 0):
            continue
        purpose = " ".join(doc.split("\n\n")[0].split())
        yield Function(
            module, node.name, _dedented(head), source, _dedented([*head, *rest]), purpose
        )


def texts_of(module: str, tree: ast.Module) -> Iterator[Paragraphs]:
    """The docstrings of a file that are long enough, without examples."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            for part in parts(ast.get_docstring(node) or ""):
                yield Paragraphs(module, part)


def parts(text: str) -> Iterator[str]:
    """Runs of whole paragraphs of prose, of the size that prompts may have."""
    least, most = PARAGRAPH_SIZE
    run = ""
    for paragraph in [*re.split(r"\n\s*\n", inspect.cleandoc(text)), ""]:
        good = paragraph and _is_prose(paragraph)
        if good and len(run) + len(paragraph) <= most:
            run = f"{run}\n\n{paragraph}" if run else paragraph
            continue
        if least <= len(run):
            yield run
        run = paragraph if good and len(paragraph) <= most else ""


def _is_prose(paragraph: str) -> bool:
    letters = sum(each.isalpha() or each == " " for each in paragraph) / len(paragraph)
    listed = re.search(r"^\s|^[-*:\w`.]+ ?[:(=]|:$|>>>", paragraph, re.MULTILINE)
    return letters > 0.85 and listed is None and paragraph.count(" ") >= 5


def _dedented(lines: Sequence[str]) -> str:
    return inspect.cleandoc("\n" + "\n".join(lines)).strip()
