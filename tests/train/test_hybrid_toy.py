"""The trainer of the hybrid toy: hidden states of its target, responses, files."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forerun_train.toys import hybrid  # noqa: E402
from forerun_train.toys.anchors import target_aux_hidden_states  # noqa: E402
from forerun_train.toys.draft_model import Draft, load_draft, save_draft  # noqa: E402


def test_the_draft_reads_what_the_layers_put_out() -> None:
    torch.manual_seed(0)
    target, outputs = hybrid.build().eval(), []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        got = target_aux_hidden_states(target, torch.arange(60, 90)[None], (0, 2))
    assert torch.equal(got, torch.cat((outputs[0], outputs[2]), -1))
    with pytest.raises(IndexError):  # normalized in transformers
        target_aux_hidden_states(target, torch.arange(60, 90)[None], (3,))


def test_files_hold_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps of training; responses are the target's own greedy tokens."""
    monkeypatch.setattr(hybrid, "PROMPT", 12)
    monkeypatch.setattr(hybrid, "RESPONSE", 4)
    target = hybrid.train_target(2, tmp_path / "log", batch=2, length=16)
    draft = Draft(hybrid.SHAPE)
    hybrid.save_target(target, tmp_path / "target")
    save_draft(draft, tmp_path / "draft")
    stored = hybrid.load_target(tmp_path / "target")
    further = load_draft(tmp_path / "draft").eval()
    for ours, theirs in ((target, stored), (draft, further)):
        for name, weight in ours.state_dict().items():
            assert torch.equal(weight.bfloat16().float(), theirs.state_dict()[name]), name
    samples = hybrid.responses(stored, 2, seed=1, batch=2)
    ids = torch.from_numpy(samples.ids.astype("int64"))
    with torch.no_grad():
        greedy = stored(ids, use_cache=False).logits.argmax(-1)
    assert samples.prompt.tolist() == [12, 12] and samples.end.tolist() == [16, 16]
    assert torch.equal(greedy[:, 11:15], ids[:, 12:])
    case = hybrid.golden(stored, further, ids[0, :12].tolist(), 4)
    assert case["output"] == ids[0, 12:].tolist() and len(case["matches"]) == 4
