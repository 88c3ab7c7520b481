"""`quantization fp8`: text does not depend on the draft; logits of the bundled target."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.llm.bundled import bundled
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop

PROMPTS = ["A box holds 6 pens. Tom has 3 boxes.", "def add(a, b):", "for i in range("]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "sampling_seed": 5}


@pytest.mark.exhaustive
def test_text_does_not_depend_on_the_draft() -> None:
    got = []
    for settings in ({}, {"speculative_algorithm": "DFLASH", "chunked_prefill_size": 4}):
        with LLM(device="cpu", dtype="float32", quantization="fp8", **settings) as llm:
            assert llm.explain()["quantized_weights"] == {"dequantized when loaded": 48}
            outs = llm.generate(PROMPTS, [GREEDY, SEEDED, GREEDY])
            got.append([out.output_ids for out in outs])
    assert got[0] == got[1]


def test_logits_of_the_bundled_target() -> None:
    """As far from float32's as rounding to three bits of mantissa puts them; nearly all argmax are
    the same.
    """
    ids, logits = torch.arange(5, 69), []
    for quantization in (None, "fp8"):
        model = load_target(bundled("target"), torch.float32, CPU, quantization=quantization)
        hidden, _ = Loop.of_model(model, 1).ragged([(0, ids)])
        logits.append(model.compute_logits(hidden))
    plain, fp8 = logits
    assert 0 < (fp8 - plain).norm() < 0.1 * plain.norm()
    assert (fp8.argmax(-1) == plain.argmax(-1)).float().mean() > 0.8
