"""The trainer of the DeepSeek-shaped toy: heads are widened, stored and read without a change."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forerun.models.loader import load_target  # noqa: E402
from forerun.models.nextn import load_nextn, load_nextn_config  # noqa: E402
from forerun_train.toys import mtp  # noqa: E402
from tests.models.support import CPU, CPU_F32, Loop  # noqa: E402

IDS = torch.arange(60, 90)


def unrounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-size // mtp.BLOCK) for size in weight.shape)
    return weight, torch.ones(rows, columns)


def test_wide_heads_compute_what_small_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two steps of training; compared before the rounding to FP8."""
    target, layer = mtp.train(2)
    monkeypatch.setattr(mtp, "quantize", unrounded)
    monkeypatch.setattr(mtp, "PLAIN", torch.float32)
    mtp.save(target, layer, tmp_path)
    wide, further = mtp.stored(tmp_path)
    with torch.no_grad():
        small, large = (m.model(IDS[None]).last_hidden_state for m in (target, wide))
        torch.testing.assert_close(large, small, rtol=1e-3, atol=1e-4)
        rope = [m.model.rotary_emb(small, torch.arange(len(IDS))[None]) for m in (target, wide)]
        mask = torch.full((len(IDS),) * 2, float("-inf")).triu(1)[None, None]
        outs = [layer(small, small, rope[0]), further(small, small, rope[1], mask)]
        torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-4)


def test_the_checkpoint_loads(tmp_path: Path) -> None:
    """Target and MTP layer are those of transformers with the dequantized weights."""
    mtp.save(*mtp.build(), tmp_path)
    wide, further = mtp.stored(tmp_path)
    model = load_target(tmp_path, torch.float32, CPU)
    hidden, _ = Loop.of_model(model).ragged([(0, IDS)])
    with torch.no_grad():
        want = wide.model(IDS[None]).last_hidden_state
    torch.testing.assert_close(hidden, want[0], rtol=1e-4, atol=1e-4)
    draft = load_nextn(tmp_path, load_nextn_config(tmp_path), CPU_F32, 128)
    assert torch.equal(draft.ends[0].norm.norm.weight, further.norm.weight)
