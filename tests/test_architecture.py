"""The architecture rules hold everywhere, and every rule can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import architecture_rules as rules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "forerun"


@cache
def modules() -> tuple[rules.Module, ...]:
    """Every file of the package; parsed once, by whichever rule asks first."""
    return tuple(
        rules.Module(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    )


@cache
def findings() -> tuple[dict[str, list[str]], set[str]]:
    """What breaks each rule, and the host reads. Every file is parsed once."""
    broken: dict[str, list[str]] = {rule.__name__: [] for rule in rules.RULES}
    host_reads: set[str] = set()
    for module in modules():
        for rule in rules.RULES:
            broken[rule.__name__] += rule(module)
        host_reads |= {where for where, *_ in module.host_syncs}
    return broken, host_reads


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_rule(rule) -> None:
    broken = findings()[0][rule.__name__]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


# (rule, file, what breaks it there)
REFUSED = [
    ("imports_go_down", "kvcache/x.py", "from forerun.engine.engine import Engine"),
    ("imports_go_down", "kvcache/x.py", "def f():\n    import forerun.llm"),
    ("imports_go_down", "sampling/x.py", "from forerun import speculative"),
    ("imports_go_down", "models/x.py", "from ..engine import engine"),
    ("imports_go_down", "engine/x.py", "from forerun import LLM"),
    ("imports_go_down", "core/x.py", "TABLE = {'a': 'forerun.models.llama:Llama'}"),
    ("imports_go_down", "nowhere/x.py", ""),
    ("imports_go_down", "plan/x.py", "from forerun_bench.gemms import step_gemms"),
    ("imports_go_down", "evals/x.py", "def f():\n    import forerun_train"),
    ("no_torch", "scheduler/x.py", "import torch"),
    ("no_torch", "kvcache/radix_cache.py", "def f():\n    from torch import Tensor"),
    ("no_algorithm_names", "engine/x.py", "if is_dflash(): ..."),
    ("no_algorithm_names", "engine/x.py", "kind = 'EAGLE3'"),
    ("no_algorithm_names", "scheduler/x.py", "from forerun.speculative.ngram import Ngram"),
    ("no_algorithm_names", "models/x.py", "class DFlashDraft: ..."),
    ("no_algorithm_names", "config/x.py", "speculative_mtp_steps = 1"),
    ("no_algorithm_names", "speculative/ngram.py", "name = 'dflash'"),
    ("no_probing", "engine/x.py", "y = getattr(x, 'maybe', None)"),
    ("no_probing", "attention/x.py", "y = hasattr(x, 'maybe')"),
    ("no_swallowed_errors", "cli/x.py", "try: f()\nexcept: raise"),
    ("no_swallowed_errors", "cli/x.py", "try: f()\nexcept Exception: pass"),
    ("no_swallowed_errors", "cli/x.py", "with contextlib.suppress(Exception): f()"),
    ("no_host_sync", "sampling/x.py", "def draw(t): return t.argmax().item()"),
    ("no_host_sync", "speculative/x.py", "def propose(t):\n    def f(): return t.cpu()"),
    ("no_host_sync", "engine/x.py", "t.cpu()"),
    ("no_host_sync", "executor/x.py", "def launch(t): return t.to('cpu')"),
    ("no_host_sync", "executor/x.py", "class A:\n    def launch(self): self.n = n.tolist()"),
    ("no_host_sync", "executor/step/timing.py", "class StepTimer:\n    def take(t): t.tolist()"),
    ("no_host_sync", "executor/step/timing.py", "def unix(t): t.tolist()"),
    ("no_host_sync", "kernels/sampling/x.py", "def sample(t): torch.cuda.synchronize()"),
    ("no_host_sync", "kvcache/pools.py", "def commit(t): return t.nonzero()"),
    ("no_host_sync", "models/x.py", "def load(t): return t.max().item()"),
    ("no_unsafe_loading", "models/x.py", "import pickle"),
    ("no_unsafe_loading", "models/x.py", "w = torch.load(path)"),
    ("no_unsafe_loading", "llm/x.py", "f(path, trust_remote_code=True)"),
    ("no_unsafe_loading", "llm/x.py", "eval('1')"),
    ("small_functions", "llm/x.py", "def f(a, b, c, d, e, *, g, h, i): ..."),
    ("whole_sentences", "llm/x.py", '"""From ids to text."""'),
    ("whole_sentences", "llm/x.py", 'class A:\n    def f(self):\n        """Of the tensor."""'),
    ("small_functions", "llm/x.py", "class A:\n    def f(self, a, b, c, d, e, g, h, i): ..."),
    ("small_functions", "llm/x.py", "async def f():\n" + "    x = 1\n" * 60),
]

# What must pass: the rule is about the rest.
ALLOWED = [
    ("imports_go_down", "engine/x.py", "from forerun.models.llama import Llama\nimport torch"),
    ("imports_go_down", "cli/x.py", "from forerun import LLM\nfrom forerun.evals import prompts"),
    ("imports_go_down", "config/x.py", "from forerun.core.errors import ConfigError"),
    ("no_torch", "kvcache/pools.py", "import torch"),
    ("no_algorithm_names", "engine/x.py", '"""As in EAGLE."""\nempty = "promptpf"'),
    ("no_algorithm_names", "speculative/dflash.py", "class DFlash: name = 'DFLASH'"),
    ("no_algorithm_names", "speculative/registry.py", "TABLE = {'NGRAM': 1}"),
    ("no_probing", "engine/x.py", "y = getattr(x, name)"),
    ("no_swallowed_errors", "cli/x.py", "try: f()\nexcept ValueError: pass"),
    ("no_host_sync", "executor/step/timing.py", "class StepTimer:\n    def unix(t): t.tolist()"),
    ("no_host_sync", "llm/x.py", "t.cpu()"),
    ("no_host_sync", "executor/x.py", "t.to('cuda')"),
    ("no_unsafe_loading", "models/x.py", "model.eval()\nself.load(path)"),
    ("small_functions", "llm/x.py", "class A:\n    def f(self, a, b, c, d, e, g, h): ..."),
    (
        "small_functions",
        "llm/x.py",
        'def f():\n    """A.\n' + "\n" * 90 + '"""\n' + "    x = 1\n" * 59,
    ),
    (
        "small_functions",
        "kernels/x.py",
        "@jit\ndef f(a, b, c, d, e, g, h, i):\n" + "    x = 1\n" * 99,
    ),
    ("small_functions", "cli/x.py", "def f(a: Annotated[int, X], b: B, c, d, e, g, h, i): ..."),
]


@pytest.mark.parametrize(("name", "path", "source"), REFUSED)
def test_rule_refuses(name: str, path: str, source: str) -> None:
    assert list(vars(rules)[name](rules.Module(path, source)))


@pytest.mark.parametrize(("name", "path", "source"), ALLOWED)
def test_rule_allows(name: str, path: str, source: str) -> None:
    assert not list(vars(rules)[name](rules.Module(path, source)))


def test_every_rule_has_a_snippet_it_refuses() -> None:
    assert {name for name, *_ in REFUSED} == {rule.__name__ for rule in rules.RULES}


@pytest.mark.parametrize("name", rules.HOST_READS)
def test_every_host_read_that_is_allowed_exists(name: str) -> None:
    found = findings()[1]
    assert name in found


def test_no_import_cycles() -> None:
    assert list(rules.import_cycles(modules())) == []
    assert list(rules.package_circles(modules())) == []


def test_no_function_repeats_another_one() -> None:
    assert list(rules.repeated_bodies(modules())) == []


def test_repeated_bodies_are_found() -> None:
    body = "    a = x + 1\n    b = a * 2\n    return b\n"
    files = {
        "core/a.py": f"def f(x):\n{body}",
        "llm/b.py": f'class C:\n  def g(self, x):\n    """Doubles."""\n{body}',
        "llm/c.py": "def h(x):\n    a = x + 1\n    b = a * 3\n    return b\n",
    }
    found = list(rules.repeated_bodies(rules.Module(path, text) for path, text in files.items()))
    assert found == ["llm/b.py:2: g has the body of core/a.py:1"]


def test_circles_of_packages_are_found() -> None:
    files = {
        "__init__.py": "from forerun.llm.a import A",  # puts them together: no circle
        "llm/a.py": "def f(): from forerun.core.b import B",
        "core/b.py": "",
        "core/c.py": "import forerun.llm.d",
        "llm/d.py": "",
    }
    found = list(rules.package_circles(rules.Module(path, text) for path, text in files.items()))
    assert found == ["core -> llm -> core"]


# (second file, whether it closes a cycle with "core/x.py", which imports it)
CYCLES = [
    ("from forerun.core.x import X", True),
    ("def f():\n    from . import x", True),
    ("from forerun.core.z import Z", True),  # which imports x
    ("import json", False),
    (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from forerun.core.x import X",
        False,
    ),
]


@pytest.mark.parametrize(("source", "cyclic"), CYCLES)
def test_import_cycles_are_found(source: str, cyclic: bool) -> None:
    files = {
        "core/__init__.py": "",
        "core/x.py": "from forerun.core.y import Y",
        "core/y.py": source,
        "core/z.py": "import forerun.core.x",
    }
    found = list(rules.import_cycles(rules.Module(path, text) for path, text in files.items()))
    assert bool(found) == cyclic
    assert not cyclic or "forerun.core.x" in found[0]


def test_the_layers_are_those_of_the_design_document() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("\n## Layering\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    documented = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert documented == [set(packages) for packages in reversed(rules.LAYERS)]


def test_the_scheduler_side_runs_without_torch() -> None:
    """What the imports of imports bring in counts too."""
    names = [
        "forerun." + m.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for m in modules()
        if m.under(rules.NO_TORCH)
    ]
    assert "forerun.core.request" in names
    check = f"import sys, forerun, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# Put together, or this file would break its own rule.
MACHINE_PATHS = tuple("/" + folder + "/" for folder in ("work", "tmp", "root", "home"))
DATA = ("src/forerun/assets/", "src/forerun/evals/data/")  # other people's code names such paths


def machine_paths(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if any(path in line for path in MACHINE_PATHS):
            yield f"{name}:{number}: {line.strip()[:80]}"


def test_no_tracked_file_names_a_machines_paths() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    broken: list[str] = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if name.startswith(DATA) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights
            continue
        broken += machine_paths(name, text)
    assert not broken, "\n".join(broken)


def test_machine_paths_are_seen() -> None:
    assert list(machine_paths("x", f"see {MACHINE_PATHS[0]}file"))
    assert not list(machine_paths("x", "see src/forerun and https://example.org/homepage"))
