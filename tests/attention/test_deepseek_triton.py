"""A DeepSeek model through the kernels (interpreted): equal to the plain backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.attention.triton import TritonAttention
from forerun.kvcache.pools import ModelPools
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop, family, save


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels do not run on a CPU then")
def test_forwards_equal_the_plain_backend(tmp_path: Path) -> None:
    """A prompt (expanded), a short chunk (absorbed), a verify pass; norm and RoPE in one kernel."""
    model = load_target(save(family("deepseek-v3"), tmp_path), torch.float32, CPU)
    plain, kernels = Loop.of_model(model, requests=2), Loop.of_model(model, requests=2)
    pools = kernels.backend.pools
    need = replace(kernels.backend.need, latent_dim=24)
    kernels.backend = TritonAttention(need, ModelPools(pools.layout, pools.shape, CPU))  # type: ignore[assignment]
    ids = torch.arange(30)
    for loop in (plain, kernels):
        loop.ragged([(0, ids[:11]), (0, ids[5:14])])
    outs = [
        (
            loop.ragged([(11, ids[11:13]), (9, ids[14:15])])[0],
            loop.fixed([13, 10], torch.cat((ids[13:16], ids[15:18])))[0],
        )
        for loop in (plain, kernels)
    ]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)
