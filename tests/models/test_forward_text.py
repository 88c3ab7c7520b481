"""The forward of a model calls its own submodules, and nothing inside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun.models

FOLDER = Path(forerun.models.__path__[0])
FILES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek", "dflash", "eagle3", "nextn")
FORWARDS = ("__call__", "forward", "embed", "combine_hidden_states", "write_context_kv")


def reaches_inside(source: str) -> Iterator[str]:
    """Accesses in `forward` to attributes of a submodule's submodules, or of a layer in a loop."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name not in FORWARDS:
            continue
        loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
        items = {loop.target.id for loop in loops if isinstance(loop.target, ast.Name)}
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            names = ast.unparse(node).split(".")
            if names[0] in items or (names[0] == "self" and len(names) > 3):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", FILES)
def test_a_forward_uses_its_own_submodules_only(name: str) -> None:
    assert not list(reaches_inside((FOLDER / f"{name}.py").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "line",
    ["x = self.mlp.gate_up_proj.gemm(x)", "for layer in self.layers: x = layer.self_attn(x)"],
)
def test_nested_accesses_are_found(line: str) -> None:
    assert list(reaches_inside(f"def forward(self, x):\n    {line}"))
    assert not list(reaches_inside(f"def prepare(self, x):\n    {line}"))
