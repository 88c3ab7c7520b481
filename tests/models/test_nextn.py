"""The MTP layer compared with transformers' decoder layers, and checkpoints that contain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.core.errors import ConfigError
from forerun.models.further_layers import COUNT
from forerun.models.loader import load_target
from forerun.models.nextn import NextNDraft, load_nextn, load_nextn_config
from tests.models.nextn_oracle import HYBRIDS, Oracle
from tests.models.support import CPU, CPU_F32, Loop, family, save

NAMES = [
    "llama",
    "llama-3.1",
    "llama-biases",
    "qwen3",
    "qwen3-bias-sliding",
    "deepseek-v2-groups",
    "deepseek-v3",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "glm4-moe",
]
MTP_NAMES = {  # of hybrids, in this order
    "eh_proj.": "mtp.fc.",
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "shared_head.norm.": "mtp.norm.",
    "": "mtp.layers.0.",
}
LENGTH = 23


def checkpoint(folder: Path, name: str) -> tuple[Path, Any, dict[str, Tensor]]:
    """A random target with an MTP layer: (folder, transformers' model, all tensors)."""
    model = family(name)
    save(model, folder)
    weights = load_file(folder / "model.safetensors")
    layers, size = model.config.num_hidden_layers, model.config.hidden_size
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2 + mean

    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    copies = {new + n.removeprefix(last): w for n, w in weights.items() if n.startswith(last)}
    weights |= {n: random(*w.shape, mean=float("norm" in n)) for n, w in copies.items()}
    weights[f"{new}eh_proj.weight"] = random(size, 2 * size)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{new}{norm}.weight"] = random(size, mean=1.0)
    if model.config.model_type in HYBRIDS:
        save_file({mtp_name(n, new): w for n, w in weights.items()}, folder / "model.safetensors")
        edit(folder, mtp_num_hidden_layers=1)
        return folder, model, weights
    weights[f"{new}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    edit(folder, **{COUNT: 1})
    return folder, model, weights


def mtp_name(name: str, new: str) -> str:
    """As a hybrid's checkpoint has it; `new`: prefix of the MTP layer."""
    if not name.startswith(new):
        return name
    rest = name.removeprefix(new)
    old = next(prefix for prefix in MTP_NAMES if rest.startswith(prefix))
    return MTP_NAMES[old] + rest.removeprefix(old)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path) -> NextNDraft:
    return load_nextn(folder, load_nextn_config(folder), CPU_F32, 128)


def loop(draft: NextNDraft, table: Tensor, index: int = 0) -> Loop:
    """A loop over token ids with hidden states `h` as further argument."""

    def forward(ids: Tensor, positions: Tensor, ctx: AttentionContext, h: Tensor) -> Tensor:
        return draft.forward(table[ids], h, positions, ctx, index)

    config = draft.config.model
    layout = NextNDraft.kv_layout(draft.config, torch.float32)
    masks = (draft.config.mask,) * draft.config.count
    return Loop.over(forward, layout, masks, config.num_heads, requests=2)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_transformers(name: str, tmp_path: Path) -> None:
    folder, model, weights = checkpoint(tmp_path / "m", name)
    draft = load(folder)
    model.config._attn_implementation = "eager"
    oracle = Oracle(weights, model.config)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 96, (LENGTH,), generator=generator)
    h = torch.randn(LENGTH, 32, generator=generator)
    window = draft.config.mask.window  # the reference has none: compare as many tokens as it covers
    assert (window is not None) == ("sliding" in name)
    seen = LENGTH if window is None else window
    want = oracle.forward(ids[:seen], h[:seen])
    run = loop(draft, weights["model.embed_tokens.weight"])
    first = run.ragged([(0, ids[:2])], h[:2])
    chunks = [run.fixed([at], ids[at : at + 1], h[at : at + 1]) for at in range(2, seen - 2)]
    last = run.fixed([seen - 2], ids[seen - 2 : seen], h[seen - 2 : seen])
    torch.testing.assert_close(torch.cat((first, *chunks, last)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "qwen3.5"])
def test_a_second_layer_has_weights_of_its_own(name: str, tmp_path: Path) -> None:
    """In hybrids, of the decoder layer alone: the rest is the first one's."""
    folder, model, weights = checkpoint(tmp_path / "m", name)
    layers, hybrid = model.config.num_hidden_layers, model.config.model_type in HYBRIDS
    first, second = f"model.layers.{layers}.", f"model.layers.{layers + 1}."
    generator = torch.Generator().manual_seed(3)
    for key in [key for key in weights if key.startswith(first)]:
        ends = not mtp_name(key, first).startswith("mtp.layers.")
        noise = 0.0 if hybrid and ends else 0.2
        drawn = torch.randn(weights[key].shape, generator=generator)
        weights[key.replace(first, second)] = weights[key] + noise * drawn
    stored = weights
    if hybrid:
        of_first = {mtp_name(n, first): w for n, w in weights.items() if not n.startswith(second)}
        own = {mtp_name(n, second): w for n, w in weights.items() if n.startswith(second)}
        own = {n.replace("mtp.layers.0.", "mtp.layers.1."): w for n, w in own.items()}
        stored = of_first | {n: w for n, w in own.items() if n.startswith("mtp.layers.")}
    save_file(stored, folder / "model.safetensors")
    edit(folder, **{"mtp_num_hidden_layers" if hybrid else COUNT: 2})
    draft = load(folder)
    assert draft.config.count == 2
    model.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 96, (LENGTH,), generator=generator)
    h = torch.randn(LENGTH, 32, generator=generator)
    outs = []
    for index in (0, 1):
        want = Oracle(weights, model.config, index).forward(ids, h)
        run = loop(draft, weights["model.embed_tokens.weight"], index)
        outs.append(run.ragged([(0, ids)], h))
        torch.testing.assert_close(outs[-1], want, rtol=1e-4, atol=1e-5)
    assert (outs[0] - outs[1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_hybrid_targets_are_unchanged(name: str, tmp_path: Path) -> None:
    folder, model, _ = checkpoint(tmp_path / "with", name)
    plain = save(model, tmp_path / "without")
    runs = [
        Loop.of_model(load_target(path, torch.float32, CPU)).ragged([(0, torch.arange(LENGTH))])[0]
        for path in (folder, plain)
    ]
    assert torch.equal(*runs)


def test_the_target_is_unchanged(tmp_path: Path) -> None:
    """The target's hidden states are the same with and without the MTP layer."""
    folder, model, _ = checkpoint(tmp_path / "with", "qwen3")
    plain = save(model, tmp_path / "without")
    ids = torch.arange(LENGTH)
    runs = [
        Loop.of_model(load_target(path, torch.float32, CPU)).ragged([(0, ids)])[0]
        for path in (folder, plain)
    ]
    assert torch.equal(*runs)
    edit(folder, **{COUNT: 0})  # unexpected tensors without the setting
    with pytest.raises(ConfigError, match=r"model\.layers\.3\..*does not have"):
        load_target(folder, torch.float32, CPU)


def test_missing_or_unsupported_layers_are_refused(tmp_path: Path) -> None:
    folder, _, weights = checkpoint(tmp_path / "m", "llama")
    name = "model.layers.3.eh_proj.weight"
    for tensor, words in ((None, "lacks 1 tensor"), (torch.ones(32, 32), "has shape")):
        changed = {n: w for n, w in weights.items() if n != name}
        changed |= {} if tensor is None else {name: tensor}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=words):
            load(folder)
    save_file({**weights, "model.layers.3.e_score": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="e_score"):
        load(folder)
    save_file(weights, folder / "model.safetensors")
    edit(folder, **{COUNT: 2})
    with pytest.raises(ConfigError, match=r"lacks.*layers\.4\..*promises 2 more than"):
        load(folder)
    for changes, words in (
        ({COUNT: 0}, "no layer that predicts further ahead"),
        ({COUNT: 1, "architectures": ["GemmaForCausalLM"]}, "not supported"),
    ):
        edit(folder, **changes)
        with pytest.raises(ConfigError, match=words):
            load_nextn_config(folder)
    with pytest.raises(ConfigError, match="not a folder"):
        load_nextn_config(tmp_path / "nowhere")


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    folder, _, _ = checkpoint(tmp_path / "m", "qwen3")
    (folder / "model.safetensors").unlink()
    config = load_nextn_config(folder)
    drafts = [load_nextn(folder, config, CPU_F32, 128, "dummy") for _ in range(2)]
    table = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(8)
    outs = [loop(draft, table).ragged([(0, ids)], table[ids]) for draft in drafts]
    assert torch.equal(*outs) and bool(outs[0].isfinite().all())
