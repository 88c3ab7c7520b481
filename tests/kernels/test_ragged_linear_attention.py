"""Linear attention in ragged passes: each request as in a pass in which all have as many tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.linear_attention.causal_conv import causal_conv_update
from forerun.kernels.linear_attention.gated_delta import gated_delta_update
from forerun.kernels.speculation.ragged import RaggedRows
from tests.kernels.attention_support import ragged_rows
from tests.kernels.test_linear_attention import (
    REAL,
    SMALL,
    Heads,
    conv_state,
    copied,
    gates,
    normal,
    random_trees,
    state,
)

WIDTHS, MOST, SLOTS = (1, 5, 3), 5, [2, 0, 3]
F32 = torch.float32


def rows_of(device: torch.device) -> RaggedRows:
    return ragged_rows(WIDTHS, MOST, device)


def parents_of(tree: bool, device: torch.device) -> Tensor | None:
    return random_trees(len(WIDTHS), MOST, device) if tree else None


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_convolution(dtype: torch.dtype, tree: bool, device: torch.device) -> None:
    rows, parents = rows_of(device), parents_of(tree, device)
    ragged, uniform = (conv_state(4, 130, SLOTS, device, dtype) for _ in range(2))
    before = ragged.inputs.clone()
    weight = normal(130, 4, seed=3, device=device, dtype=dtype)
    x = normal(rows.count, 134, seed=4, device=device, dtype=dtype)[:, 4:]
    got = causal_conv_update(x, weight, ragged, parents, rows)
    want = causal_conv_update(rows.unpack(x), weight, uniform, parents)
    torch.testing.assert_close(got, rows.pack(want))
    assert torch.equal(ragged.state, uniform.state)
    for slot, width in zip(SLOTS, WIDTHS, strict=True):
        assert torch.equal(ragged.inputs[slot, :width], uniform.inputs[slot, :width])
        untouched = ragged.inputs[slot, width:], before[slot, width:]
        torch.testing.assert_close(*untouched, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_gated_delta_rule(tree: bool, device: torch.device) -> None:
    check_delta(SMALL, F32, tree, device)


def test_gated_delta_rule_in_a_fixed_order(device: torch.device) -> None:
    check_delta(SMALL, F32, False, device, fixed_order=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gated_delta_rule_real(dtype: torch.dtype, tree: bool, device: torch.device) -> None:
    check_delta(REAL, dtype, tree, device)
    if not tree:
        check_delta(REAL, dtype, tree, device, fixed_order=True)


def check_delta(
    heads: Heads, dtype: torch.dtype, tree: bool, device: torch.device, fixed_order: bool = False
) -> None:
    """In a fixed order, and in the interpreter, bit for bit."""
    exact = fixed_order or device.type == "cpu"
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    rows, parents = rows_of(device), parents_of(tree, device)
    ragged = state(heads, device, SLOTS, [0, 3, 5])
    uniform, before = copied(ragged), copied(ragged)
    qkv = normal(rows.count, heads.conv, seed=8, device=device, dtype=dtype)
    of = gates(rows.count, heads, device, dtype)
    got = gated_delta_update(qkv, of, ragged, parents, fixed_order, rows)
    padded = replace(of, a=rows.unpack(of.a), b=rows.unpack(of.b))
    want = gated_delta_update(rows.unpack(qkv), padded, uniform, parents, fixed_order)
    torch.testing.assert_close(got, rows.pack(want), **tolerance)
    torch.testing.assert_close(ragged.state, uniform.state, **tolerance)
    for slot, width in zip(SLOTS, WIDTHS, strict=True):
        turn = 1 - int(ragged.num_passes[slot]) % 2
        for name, at in (("delta", ()), ("k", (turn,)), ("g", (turn,))):
            mine, theirs = (
                getattr(each, name)[(slot, slice(width), *at)] for each in (ragged, uniform)
            )
            torch.testing.assert_close(mine, theirs, msg=name, **tolerance)
            mine, theirs = (getattr(each, name)[slot, width:] for each in (ragged, before))
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
