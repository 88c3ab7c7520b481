"""On a CPU with our kernels, a token has the same bits in any batch, chunk and verify pass.

Every kind of family, in bfloat16 and float32, by the checker of `forerun doctor --determinism`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.doctor.determinism import Sizes
from forerun.kernels.cpu import library
from tests.determinism import hold_bits
from tests.engine.test_family_targets import KINDS
from tests.engine.test_moe_target import SIZES
from tests.models.support import FAMILIES, random_hf, save

pytestmark = [
    pytest.mark.skipif(
        library.compiled().library is None, reason="kernels in plain PyTorch round by shape"
    ),
    pytest.mark.usefixtures("with_cpu_kernels"),
]

KIND_OF = {**KINDS, "deepseek-v3": {}, "qwen3.5-moe": {}, "qwen3-next": {}, "qwen3-moe": {}}
CELLS = [(name, dtype) for name in KIND_OF for dtype in ("bfloat16", "float32") if name in FAMILIES]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_bits(name: str, dtype: str, tmp_path: Path) -> None:
    of, changes = FAMILIES[name]
    changes = {k: v for k, v in changes.items() if k != "tie_word_embeddings"}
    torch.manual_seed(0)
    settings: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, **changes, **KIND_OF[name]}
    if "layer_types" in KIND_OF[name]:
        settings["num_hidden_layers"] = len(KIND_OF[name]["layer_types"])
    folder = save(random_hf(of(**settings)), tmp_path)
    engine = {"dtype": dtype, "device": "cpu", "context_length": 64}
    hold_bits(Sizes(requests=2, tokens=32), model_path=str(folder), **engine)
