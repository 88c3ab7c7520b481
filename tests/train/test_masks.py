"""Attention of training where it is compiled: alone, or with what calls it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from forerun_train.masks import attend


@pytest.mark.exhaustive
def test_training_on_a_cpu_does_not_import_the_compiler() -> None:
    check = (
        "import sys, forerun_train.trainer.run;"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.exhaustive
def test_attention_in_blocks_is_part_of_a_compiled_caller() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    q = torch.randn(1, 2, 128, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 128, 128, device="cpu")

    def caller(q: Tensor) -> Tensor:
        return attend(q, q, q, mask, 0.25) * 2

    got = torch.compile(caller, backend=backend, dynamic=False, fullgraph=True)(q)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.25)
    torch.testing.assert_close(got, want * 2)
    assert len(graphs) == 1
