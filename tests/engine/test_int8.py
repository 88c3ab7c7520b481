"""`quantization int8`: speculation does not change the text, and the error is that of rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.kernels.cpu import library
from forerun.llm.bundled import bundled
from forerun.models.loader import load_target
from tests.models.support import Loop

pytestmark = pytest.mark.usefixtures("with_cpu_kernels")
needs_kernels = pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler")

PROMPTS = ["A box holds 6 pens. Tom has 3 boxes.", "def add(a, b):", "for i in range("]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "sampling_seed": 5}


@pytest.mark.covering(0, 2)
@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_does_not_depend_on_the_draft(dtype: str) -> None:
    got = []
    for settings in ({}, {"speculative_algorithm": "DFLASH", "chunked_prefill_size": 4}):
        with LLM(dtype=dtype, quantization="int8", **settings) as llm:
            outs = llm.generate(PROMPTS, [GREEDY, SEEDED, GREEDY])
            got.append([out.output_ids for out in outs])
    assert got[0] == got[1]


@needs_kernels
def test_logits_of_the_bundled_target() -> None:
    """As far from float32's as rounding puts them; nearly all argmax are the same."""
    ids, logits = torch.arange(5, 69), []
    for quantization in (None, "int8"):
        model = load_target(
            bundled("target"), torch.float32, torch.device("cpu"), quantization=quantization
        )
        hidden, _ = Loop.of_model(model, 1).ragged([(0, ids)])
        logits.append(model.compute_logits(hidden))
    plain, int8 = logits
    assert (int8 - plain).norm() < 0.03 * plain.norm()
    assert (int8.argmax(-1) == plain.argmax(-1)).float().mean() > 0.9


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = library.Loaded(None, "no C++ compiler was found (c++); install g++ or set CXX")
    monkeypatch.setattr(library, "_load", lambda: reason)
    with pytest.raises(ConfigError, match=r"needs the kernels in C\+\+.*no C\+\+ compiler"):
        LLM(device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match="model_impl transformers"):
        LLM(device="cpu", quantization="int8", model_impl="transformers")
