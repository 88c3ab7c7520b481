"""The trainer of the hybrid toy: hidden states of its target, responses, files."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forerun_train.toys import hybrid  # noqa: E402
from forerun_train.trainer.run import DRAFT  # noqa: E402


def test_the_draft_reads_what_the_layers_put_out() -> None:
    torch.manual_seed(0)
    target, outputs = hybrid.build().eval(), []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        got = hybrid.states_of(target, torch.arange(60, 90)[None])
    assert torch.equal(got.aux, torch.cat([outputs[layer] for layer in hybrid.READ], -1))


def test_files_hold_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps of training; responses are the target's own greedy tokens."""
    monkeypatch.setattr(hybrid, "PROMPT", 12)
    monkeypatch.setattr(hybrid, "RESPONSE", 12)
    target = hybrid.train_target(2, tmp_path / "log", batch=2, length=16)
    hybrid.save_target(target, tmp_path / "target")
    stored = hybrid.load_target(tmp_path / "target")
    for name, weight in target.state_dict().items():
        assert torch.equal(weight.bfloat16().float(), stored.state_dict()[name]), name
    samples = hybrid.responses(stored, 6, seed=1, batch=2)
    ids = torch.from_numpy(samples.ids.astype("int64"))
    with torch.no_grad():
        greedy = stored(ids, use_cache=False).logits.argmax(-1)
    assert samples.prompt.tolist() == [12] * 6 and samples.end.tolist() == [24] * 6
    assert torch.equal(greedy[:, 11:23], ids[:, 12:])
    options = hybrid.options_of(tmp_path, max_steps=2, batch_size=2, anchors=4)
    hybrid.train_on(stored, samples, options)
    draft = hybrid.load_draft(tmp_path / "run" / DRAFT, tmp_path / "target")
    case = hybrid.golden(stored, draft, ids[0, :12].tolist(), 4)
    assert case["output"] == ids[0, 12:16].tolist() and len(case["matches"]) == 4
