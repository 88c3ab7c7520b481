"""The rules of the house, each a function from a parsed file to what breaks it.

They are run over the whole package by `test_architecture.py`, which also feeds each of them a
snippet that it must refuse.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

# An import only goes down. Packages on one line share a floor and may import each other.
HOUSE = (
    ("core", "config", "platform", "assets"),
    ("kernels",),
    ("kvcache",),
    ("attention",),
    ("layers",),
    ("models",),
    ("sampling",),
    ("speculative",),
    ("scheduler",),
    ("executor",),
    ("engine",),
    ("llm",),
    ("cli", "server", "bench", "evals"),
)
FLOORS = {package: floor for floor, packages in enumerate(HOUSE) for package in packages}
FRONT = len(HOUSE) - 1  # `forerun/__init__.py` is a front door too

NO_TORCH = (
    "core/", "config/", "scheduler/", "engine/", "kvcache/pages.py", "kvcache/prefix_cache.py",
    "kvcache/radix_cache.py",
)  # fmt: skip
# May name algorithms: the table, an algorithm's own files (by their stem), and front doors,
# where naming one is the user's choice.
NAMES = re.compile(
    r"dflash|ddtree|eagle|n_?gram|medusa|next_?n|dspark|(?<![a-z])mtp(?![a-z])", re.IGNORECASE
)
NAMES_ALLOWED = ("speculative/registry.py",)
OWN_FILES = ("speculative/", "models/", "kernels/")
BUILT_ON = {"ddtree": "dflash"}  # an algorithm made from another names it
NAMES_FRONT = ("cli/", "bench/", "evals/")

NO_PROBING = (
    "engine/", "executor/", "scheduler/", "speculative/", "sampling/", "attention/", "kvcache/",
    "layers/",
    "models/", "llm/",
)  # fmt: skip
STEP_CODE = ("attention/", "layers/", "models/", "sampling/", "speculative/")
STEP_EXEMPT = ("models/loader.py", "speculative/registry.py")
STARTUP = re.compile(r"resolve|load|_?load_\w+|_?check\w*|__init__|why_not|from_\w+")
HOST_SYNCS = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select")
UNSAFE_MODULES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


@dataclass(frozen=True)
class Module:
    """One file; `path` is relative to the package's folder, with forward slashes."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def package(self) -> str:
        """The first folder; "" for the package's own `__init__.py`."""
        return self.path.partition("/")[0] if "/" in self.path else ""

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    def under(self, prefixes: tuple[str, ...]) -> bool:
        return self.path.startswith(prefixes)

    @cached_property
    def docstrings(self) -> set[int]:
        """ids of the constant nodes that are documentation: any string that stands alone."""
        return {
            id(node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything imported, in functions and by string as well."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            elif isinstance(node, ast.Constant) and id(node) not in self.docstrings:
                match = re.fullmatch(r"(forerun\.(\w+)[\w.]*)(:\w+)?", str(node.value))
                if match and match[2] in FLOORS:
                    yield node.lineno, match[1]

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = ["forerun", *PurePosixPath(self.path).parts[:-1]]
        kept = parts[: len(parts) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])


Rule = Callable[[Module], Iterator[str]]


def imports_go_down(module: Module) -> Iterator[str]:
    """DESIGN: cli … llm, engine, scheduler, speculative, sampling, models, …, core."""
    if module.package and module.package not in FLOORS:
        yield f"{module.path}: package {module.package!r} has no floor; add it to HOUSE"
        return
    floor = FLOORS[module.package] if module.package else FRONT
    for line, name in module.imports():
        root, _, rest = name.partition(".")
        if root != "forerun":
            continue
        target = rest.partition(".")[0]
        if target not in FLOORS:  # `from forerun import LLM`: the front
            if target != "__version__" and floor < FRONT:
                yield f"{module.path}:{line}: imports the package's front ({name})"
        elif FLOORS[target] > floor or (
            FLOORS[target] == floor and target != module.package and floor not in (0, FRONT)
        ):
            yield f"{module.path}:{line}: {module.package} may not import {target}"


def no_torch(module: Module) -> Iterator[str]:
    """The scheduler's side of the house decides with integers."""
    if module.under(NO_TORCH):
        for line, name in module.imports():
            if name.partition(".")[0] in ("torch", "triton"):
                yield f"{module.path}:{line}: imports {name}"


def no_algorithm_names(module: Module) -> Iterator[str]:
    """No algorithm's name outside its own files and the registry's table."""
    if module.path in NAMES_ALLOWED or module.under(NAMES_FRONT):
        return
    own = module.stem.lower() if module.under(OWN_FILES) else ""
    own += BUILT_ON.get(own, "")
    for line, word in _words(module):
        for match in NAMES.finditer(word):
            if match[0].lower().replace("_", "") not in own.replace("_", ""):
                yield f"{module.path}:{line}: {match[0]!r} in {word!r}"


def _words(module: Module) -> Iterator[tuple[int, str]]:
    """Identifiers and string literals, documentation excepted."""
    for node in ast.walk(module.tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in module.docstrings:
                yield line, node.value
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield line, node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.alias):
            yield line, f"{node.name} {node.asname or ''}"
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""


def no_probing(module: Module) -> Iterator[str]:
    """`getattr(x, "maybe", None)` and `hasattr`: what our objects have is known."""
    if not module.under(NO_PROBING):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "hasattr":
                yield f"{module.path}:{node.lineno}: hasattr"
            if node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2:
                yield f"{module.path}:{node.lineno}: getattr with a default"


def no_swallowed_errors(module: Module) -> Iterator[str]:
    """No bare except, and none of everything that then does nothing."""
    broad = {"Exception", "BaseException"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{module.path}:{node.lineno}: bare except"
            elif broad & _names_in(node.type) and all(map(_does_nothing, node.body)):
                yield f"{module.path}:{node.lineno}: every error swallowed"
        elif _called(node) == "suppress" and broad & _names_in(node):
            yield f"{module.path}:{node.lineno}: every error suppressed"


def _does_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass | ast.Continue) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def no_host_sync(module: Module) -> Iterator[str]:
    """Nothing in a step reads from the device; what runs once at start may."""
    if module.under(STEP_CODE) and module.path not in STEP_EXEMPT:
        yield from _syncs(module, module.tree)


def _syncs(module: Module, node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and STARTUP.fullmatch(child.name):
            continue
        if _called(child) in HOST_SYNCS:
            yield f"{module.path}:{child.lineno}: .{_called(child)}()"
        yield from _syncs(module, child)


def no_unsafe_loading(module: Module) -> Iterator[str]:
    """Weights are safetensors, configs are JSON: nothing that is loaded can run code."""
    for line, name in module.imports():
        if name.partition(".")[0] in UNSAFE_MODULES or name == "torch.load":
            yield f"{module.path}:{line}: imports {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and _names_in(node) == {"torch"}:
            yield f"{module.path}:{node.lineno}: torch.load"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield f"{module.path}:{node.value.lineno}: trust_remote_code"
        if isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            yield f"{module.path}:{node.lineno}: {node.id}"


def _names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _called(node: ast.AST) -> str:
    """The last name of what is called: "f" for `a.b.f(...)`; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


RULES: tuple[Rule, ...] = (
    imports_go_down,
    no_torch,
    no_algorithm_names,
    no_probing,
    no_swallowed_errors,
    no_host_sync,
    no_unsafe_loading,
)
