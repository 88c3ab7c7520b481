"""Architecture rules, each a function from a parsed file to what breaks it.

`test_architecture.py` runs them over the whole package, and feeds each of them a snippet that it
must refuse.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

# An import only goes down. Packages of the first layer may import each other, not in a circle.
LAYERS = (
    ("core", "config", "platform", "assets"),
    ("kernels",),
    ("kvcache",),
    ("attention",),
    ("layers",),
    ("models",),
    ("sampling", "grammar"),
    ("speculative",),
    ("scheduler",),
    ("executor",),
    ("engine",),
    ("llm",),
    ("server", "evals"),
    ("cli", "ray"),
    ("doctor", "plan"),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
TOP = len(LAYERS) - 1  # files beside the packages put them together

NO_TORCH = (
    "core/", "config/", "scheduler/", "engine/", "kvcache/pages.py", "kvcache/prefix_cache.py",
    "kvcache/radix_cache.py",
)  # fmt: skip
# May name algorithms: the table, an algorithm's own files (by their stem), and entry points,
# where naming one is the user's choice.
NAMES = re.compile(
    r"dflash|ddtree|eagle|n_?gram|medusa|next_?n|dspark|(?<![a-z])mtp(?![a-z])", re.IGNORECASE
)
# These, the registry apart, have names of tensors and config keys.
NAMES_ALLOWED = (
    "speculative/registry.py", "models/further_layers.py", "models/heads/",
    "models/dflash_keys.py", "config/schema.py",
)  # fmt: skip
OWN_FILES = ("speculative/", "models/", "kernels/")
# An algorithm made from another names it.
BUILT_ON = {"beam_tree": "eagle", "ddtree": "dflash", "eagle": "nextn"}
NAMES_ENTRY = ("cli/", "doctor/", "evals/", "plan/")

NO_PROBING = (
    "engine/", "executor/", "scheduler/", "speculative/", "sampling/", "attention/", "kvcache/",
    "layers/",
    "models/", "llm/", "server/",
)  # fmt: skip
STEP_CODE = (
    "attention/", "engine/", "executor/", "kernels/", "kvcache/", "layers/", "models/",
    "sampling/", "speculative/",
)  # fmt: skip
HOST_SYNCS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive", "equal", "allclose", "synchronize",
)  # fmt: skip
# Functions of step code that wait for the device or read from it, and why they may.
HOST_READS = {
    "executor/device_executor.py:PendingDeviceStep._read": "fetches a step's tokens, a step later",
    "executor/step/clock.py:StepClock.wait": "called by `result`",
    "executor/step/logprob_results.py:read_logprobs": "called by `result`; its copies have arrived",
    "executor/step/pooling.py:PoolCopy.of_prefill": "called by `result`; its copy has arrived",
    "executor/step/reliability.py:confidence_counts": "called by `result`; its copy has arrived",
    "executor/layout_check.py:warning": "called by `result`; its copy has arrived",
    "executor/step/timing.py:StepTimer.unix": "called by `result`; its copy has arrived",
    "executor/step/costs.py:_wait": "measures step costs at start",
    "executor/agreement.py:Agreement._largest": "ranks agree at start",
    "executor/profiling/recorder.py:StepRecorder._wait_for_device": "a profile begins or ends",
    "layers/torch_communicator.py:TorchCommunicator._exchange_buffers": "at start",
    "executor/memory.py:_reserved": "measures memory at start",
    "executor/step/grammar_masks.py:DraftCopy.wait": "grammars need the drafts; during the forward",
    "executor/graphs/piecewise.py:_is_host_bound.seconds": "measures prefills at start",
    "kernels/cpu/gemm.py:smallest_format": "looks at weights when they are packed",
    "kernels/gemm/int4.py:Int4Weight.grouped": "looks at weights when they are packed",
    "kernels/speculation/prompt_lookup.py:longest_matches_ref": "on CPUs without kernels, whose"
    " steps are not recorded",
}
MAX_LINES, MAX_PARAMETERS = 60, 7  # of a function; its docstring does not count
MIN_REPEATED = 3  # statements of a body that may stand in one function only
# First words of what goes on from a name: "Of the tensor of which a part has this shape."
NO_BEGINNINGS = (
    "about", "after", "among", "and", "as", "at", "before", "between", "but", "by", "during", "for",
    "from", "if", "in", "into", "like", "of", "on", "onto", "or", "over", "per", "since", "than",
    "through", "to", "toward", "under", "until", "via", "when", "while", "with", "within",
    "without",
)  # fmt: skip
UNSAFE_MODULES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


@dataclass(frozen=True)
class Module:
    """One file; `path` is relative to the package's folder, with forward slashes."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def host_syncs(self) -> list[tuple[str, int, str]]:
        """(path:qualified name of the function, line, call) of every host sync."""
        called = any(f".{name}(" in self.source for name in (*HOST_SYNCS, "to"))
        return list(_syncs(self.tree, f"{self.path}:")) if called else []

    @property
    def name(self) -> str:
        """As it is imported."""
        parts = ["forerun", *PurePosixPath(self.path).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

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
            for node in self.nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }

    @cached_property
    def type_checking(self) -> set[int]:
        """ids of the nodes under `if TYPE_CHECKING:`."""
        blocks = (
            statement
            for node in self.nodes
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
        )
        return {id(node) for block in blocks for node in ast.walk(block)}

    def imports(self, type_checking: bool = True) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything imported, in functions and by string as well."""
        for node, name in self._imports:
            if type_checking or id(node) not in self.type_checking:
                yield node.lineno, name

    @cached_property
    def _imports(self) -> list[tuple[ast.expr | ast.stmt, str]]:
        found: list[tuple[ast.expr | ast.stmt, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [(node, f"{base}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Constant) and id(node) not in self.docstrings:
                match = re.fullmatch(r"(forerun\.(\w+)[\w.]*)(:\w+)?", str(node.value))
                if match and match[2] in LAYER_OF:
                    found.append((node, match[1]))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = ["forerun", *PurePosixPath(self.path).parts[:-1]]
        kept = parts[: len(parts) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])


Rule = Callable[[Module], Iterator[str]]


def imports_go_down(module: Module) -> Iterator[str]:
    """DESIGN: cli … llm, engine, scheduler, speculative, sampling, models, …, core."""
    if module.package and module.package not in LAYER_OF:
        yield f"{module.path}: package {module.package!r} has no layer; add it to LAYERS"
        return
    layer = LAYER_OF[module.package] if module.package else TOP
    for line, name in module.imports():
        root, _, rest = name.partition(".")
        if root.startswith("forerun_"):
            yield f"{module.path}:{line}: imports a distribution built on the wheel ({name})"
        if root != "forerun":
            continue
        target = rest.partition(".")[0]
        if target not in LAYER_OF:  # `from forerun import LLM`
            if target != "__version__" and layer <= LAYER_OF["llm"]:
                yield f"{module.path}:{line}: imports an entry point ({name})"
        elif LAYER_OF[target] > layer or (
            LAYER_OF[target] == layer and module.package not in ("", target) and layer > 0
        ):
            yield f"{module.path}:{line}: {module.package} may not import {target}"


def no_torch(module: Module) -> Iterator[str]:
    """Host-side decisions are made with integers."""
    if module.under(NO_TORCH):
        for line, name in module.imports():
            if name.partition(".")[0] in ("torch", "triton"):
                yield f"{module.path}:{line}: imports {name}"


def no_algorithm_names(module: Module) -> Iterator[str]:
    """No algorithm's name outside its own files and the registry's table."""
    if module.under((*NAMES_ALLOWED, *NAMES_ENTRY)):
        return
    own = module.stem.lower() if module.under(OWN_FILES) else ""
    own += BUILT_ON.get(own, "")
    for line, word in _words(module):
        for match in NAMES.finditer(word):
            if match[0].lower().replace("_", "") not in own.replace("_", ""):
                yield f"{module.path}:{line}: {match[0]!r} in {word!r}"


def _words(module: Module) -> Iterator[tuple[int, str]]:
    """Identifiers and string literals, documentation excepted."""
    for node in module.nodes:
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
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "hasattr":
                yield f"{module.path}:{node.lineno}: hasattr"
            if node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2:
                yield f"{module.path}:{node.lineno}: getattr with a default"


def no_swallowed_errors(module: Module) -> Iterator[str]:
    """No bare except, and none of everything that then does nothing."""
    broad = {"Exception", "BaseException"}
    for node in module.nodes:
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
    """Step code neither waits for the device nor reads from it, except in `HOST_READS`."""
    if module.under(STEP_CODE):
        for name, line, call in module.host_syncs:
            if name not in HOST_READS:
                yield f"{module.path}:{line}: {call} in {name}"


def _syncs(node: ast.AST, scope: str) -> Iterator[tuple[str, int, str]]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}{'' if scope.endswith(':') else '.'}{child.name}"
        if isinstance(child, ast.Call) and (_called(child) in HOST_SYNCS or _moves_to_cpu(child)):
            yield scope, child.lineno, f".{_called(child)}()"
        yield from _syncs(child, inner)


def _moves_to_cpu(call: ast.Call) -> bool:
    """`.to("cpu")`, by position or by keyword."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return _called(call) == "to" and any(
        isinstance(value, ast.Constant) and value.value == "cpu" for value in given
    )


def small_functions(module: Module) -> Iterator[str]:
    """A function fits a screen and takes few values; more of them are a dataclass.

    Triton kernels are exempt, and so are the parameters of commands.
    """
    for node in module.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_kernel(node):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        if lines > MAX_LINES:
            yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines"
        count = len(_parameters(node))
        if count > MAX_PARAMETERS:
            yield f"{module.path}:{node.lineno}: {node.name} has {count} parameters"


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated with `jit` or `jit_no_specialize(...)` of `kernels/runtime/jit.py`."""
    return any(
        _names_in(decorator) & {"jit", "jit_no_specialize"} for decorator in node.decorator_list
    )


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Without `self` and `cls`. Those of a command are options of the command line: none."""
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if any("Annotated" in _names_in(arg.annotation) for arg in args if arg.annotation):
        return []
    names = [arg.arg for arg in args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def import_cycles(modules: Iterable[Module]) -> Iterator[str]:
    """Cycles among modules, imports in functions included and those for type checking not."""
    by_name = {module.name: module for module in modules}
    graph = {name: _imported(module, by_name) for name, module in by_name.items()}
    yield from _circles(graph)


def package_circles(modules: Iterable[Module]) -> Iterator[str]:
    """Circles among packages; files beside them, which put them together, do not count."""
    graph: dict[str, set[str]] = {}
    for module in modules:
        targets = graph.setdefault(module.package, set())
        for _, name in module.imports(type_checking=False):
            root, _, rest = name.partition(".")
            targets |= {rest.partition(".")[0]} if root == "forerun" else set()
    del graph[""]
    graph = {name: (targets & graph.keys()) - {name} for name, targets in graph.items()}
    yield from _circles(graph)


def repeated_bodies(modules: Iterable[Module]) -> Iterator[str]:
    """Functions whose statements, three or more, stand elsewhere as well: share them."""
    first: dict[str, str] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                where = f"{module.path}:{node.lineno}"
                other = where
                if len(body) >= MIN_REPEATED:
                    other = first.setdefault(ast.dump(ast.Module(body, [])), where)
                if other != where:
                    yield f"{where}: {node.name} has the body of {other}"


def _circles(graph: dict[str, set[str]]) -> Iterator[str]:
    while graph:  # what imports nothing else, again and again
        leaves = {name for name, targets in graph.items() if not targets}
        if not leaves:
            yield " -> ".join(_cycle(graph))
            return
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}


def _imported(module: Module, known: Iterable[str]) -> set[str]:
    """Modules that `module` imports; of a package, its `__init__`."""
    found = set()
    for _, name in module.imports(type_checking=False):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name and name != module.name:
            found.add(name)
    return found


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a graph in which every module imports another one."""
    path = [min(graph)]
    while (target := min(graph[path[-1]])) not in path:
        path.append(target)
    return [*path[path.index(target) :], target]


def no_unsafe_loading(module: Module) -> Iterator[str]:
    """Weights are safetensors, configs are JSON: nothing that is loaded can run code."""
    for line, name in module.imports():
        if name.partition(".")[0] in UNSAFE_MODULES or name == "torch.load":
            yield f"{module.path}:{line}: imports {name}"
    for node in module.nodes:
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


def whole_sentences(module: Module) -> Iterator[str]:
    """A docstring says what a thing does or returns; it does not go on from its name."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in module.nodes:
        if isinstance(node, kinds):
            first = re.match(r"\w+", ast.get_docstring(node) or "")
            if first and first[0].lower() in NO_BEGINNINGS:
                name = "module" if isinstance(node, ast.Module) else node.name
                yield f"{module.path}: the docstring of {name} begins with {first[0]!r}"


RULES: tuple[Rule, ...] = (
    imports_go_down,
    no_torch,
    no_algorithm_names,
    no_probing,
    no_swallowed_errors,
    no_host_sync,
    no_unsafe_loading,
    small_functions,
    whole_sentences,
)
