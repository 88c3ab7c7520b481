"""The EAGLE-3 draft compared with a reference implementation, in both checkpoint formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.models.eagle3 import Eagle3Draft, load_eagle3
from forerun.models.eagle3_config import (
    default_target_layers,
    load_eagle3_config,
    parse_eagle3_config,
)
from tests.models.eagle3_oracle import Oracle
from tests.models.support import ABSENT, CPU_F32, Loop, vocab_of

HIDDEN, TARGET_HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, PRUNED = 32, 24, 4, 2, 16, 48, 96, 31
STEPS, AUX = 5, 3

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
SPECFORGE: dict[str, Any] = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": PRUNED,
    "target_hidden_size": TARGET_HIDDEN,
    "tie_word_embeddings": False,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": PRUNED,
    "target_hidden_size": TARGET_HIDDEN,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x/y"}},
}
NEW = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
QWEN_LAYER = {**LAYER, "model_type": "qwen3"}
QWEN = {**SPECULATORS, "transformer_layer_config": QWEN_LAYER}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

# name -> (config, the layer's prefix)
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "specforge": (SPECFORGE, "midlayer."),
    "specforge-3.1": ({**SPECFORGE, "fc_norm": True, "norm_output": True}, "midlayer."),
    "specforge-rope": ({**SPECFORGE, "rope_scaling": LINEAR_ROPE}, "midlayer."),
    "specforge-bias": ({**SPECFORGE, "attention_bias": True}, "midlayer."),
    "speculators": (SPECULATORS, "layers.0."),
    "speculators-normed": ({**SPECULATORS, **NEW}, "layers.0."),
    "speculators-qwen3": ({**QWEN, "norm_before_residual": True}, "layers.0."),
    "three-layers": ({**SPECFORGE, "num_hidden_layers": 3}, "midlayer."),
    "rope-of-each-type": (
        {
            **SPECFORGE,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 64,  # longer than the texts
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "midlayer.",
    ),
    "qwen3-two-layers": (
        {**QWEN, "transformer_layer_config": {**QWEN_LAYER, "num_hidden_layers": 2}},
        "layers.0.",
    ),
}


def random_weights(config: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    q, kv, wide = HEADS * DIM, KV_HEADS * DIM, AUX * TARGET_HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, wide),
        "norm.weight": (HIDDEN,),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (PRUNED, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, q),
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
    for name, size in {"q": q, "k": kv, "v": kv}.items():
        shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, 2 * HIDDEN)
        if config.get("attention_bias"):
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
    if config.get("attention_bias"):
        shapes[f"{prefix}self_attn.o_proj.bias"] = (HIDDEN,)
    if config.get("transformer_layer_config", {}).get("model_type") == "qwen3":
        shapes |= {f"{prefix}self_attn.{n}_norm.weight": (DIM,) for n in "qk"}
    for i in range(1, config.get("transformer_layer_config", config)["num_hidden_layers"]):
        parts = {n: s for n, s in shapes.items() if n.startswith(prefix) and "hidden_norm" not in n}
        for name, shape in parts.items():
            double = any(f".{n}_proj.weight" in name for n in "qkv")
            shapes[f"layers.{i}.{name.removeprefix(prefix)}"] = (
                (shape[0], HIDDEN) if double else shape
            )
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (wide,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (TARGET_HIDDEN,) for i in range(AUX)}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }
    ids = torch.arange(0, VOCAB, 3)[:PRUNED]
    return weights | {
        "d2t": ids - torch.arange(PRUNED),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(folder: Path, **kwargs: Any) -> Eagle3Draft:
    return load_eagle3(folder, CPU_F32, 128, ABSENT, **kwargs)


def expected(config: dict[str, Any], prefix: str, weights: dict[str, Tensor]) -> Oracle:
    layer = dict(config.get("transformer_layer_config", config))
    shape = {k: layer[k] for k in LAYER if k not in ("model_type", "rope_theta")}
    shape["attn_implementation"] = "eager"
    rope = layer.get("rope_scaling") or {"rope_type": "default", "rope_theta": layer["rope_theta"]}
    thetas = [layer["rope_parameters"][kind]["rope_theta"] for kind in layer.get("layer_types", ())]
    return Oracle(
        weights,
        LlamaConfig(**shape, rope_parameters=rope),
        prefix,
        bool(config.get("norm_before_residual")),
        bool(config.get("norm_output")),
        thetas=tuple(thetas),
    )


@dataclass
class Case:
    draft: Eagle3Draft
    oracle: Oracle
    loop: Loop

    @classmethod
    def of(cls, folder: Path, name: str, requests: int = 2) -> Case:
        config, prefix = FORMS[name]
        weights = random_weights(config, prefix)
        draft = load(write(folder, config, weights))
        layout = draft.config.kv_layout(torch.float32)

        def forward(ids: Tensor, positions: Tensor, ctx: AttentionContext, h: Tensor) -> Any:
            return draft.forward(ids, h, positions, ctx)

        loop = Loop.over(forward, layout, draft.layer_masks, HEADS, requests)
        return cls(draft, expected(config, prefix, weights), loop)

    def extend(self, starts: list[int], ids: list[Tensor], aux_states: list[Tensor]) -> list[Any]:
        """Runs the draft on committed tokens from `starts` on, ragged; outputs by request."""
        h = self.draft.combine_hidden_states(torch.cat(aux_states))
        results = self.loop.ragged(list(zip(starts, ids, strict=True)), h)
        sizes = [len(x) for x in ids]
        return list(zip(*(r.split(sizes) for r in results), strict=True))

    def chain(self, starts: list[int], normed: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """`STEPS` drafts from the last outputs [B, H] of every request; next positions `starts`.

        Returns:
            (target's ids [STEPS, B], logits [STEPS, B, V_d]).
        """
        drafts, logits = [], []
        for step in range(STEPS):
            logits.append(self.draft.compute_logits(normed))
            drafts.append(self.draft.target_token_ids[logits[-1].argmax(-1)])
            normed, h = self.loop.fixed([s + step for s in starts], drafts[-1], h)
        return torch.stack(drafts), torch.stack(logits)


def text(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids [length], and aux hidden states of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    return ids, torch.randn(length - 1, AUX * TARGET_HIDDEN, generator=generator)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("name", FORMS)
def test_chains_of_two_requests(tmp_path: Path, name: str) -> None:
    """A prompt in two chunks, a chain, the verified tokens in place of the chain, another chain."""
    case = Case.of(tmp_path, name)
    texts = [text(24, seed=1), text(17, seed=2)]
    known = [14, 9]  # ids before the first chain; the target has run on all but the last
    first = [5, 3]
    case.extend([0, 0], [t[1 : n + 1] for (t, _), n in zip(texts, first, strict=True)],
                [f[:n] for (_, f), n in zip(texts, first, strict=True)])  # fmt: skip
    for ends in (known, [24, 17]):
        outputs = case.extend(
            first,
            [t[s + 1 : e] for (t, _), s, e in zip(texts, first, ends, strict=True)],
            [f[s : e - 1] for (_, f), s, e in zip(texts, first, ends, strict=True)],
        )
        normed, h = (torch.stack([out[i][-1] for out in outputs]) for i in (0, 1))
        drafts, logits = case.chain([e - 1 for e in ends], normed, h)
        for i, ((ids, aux_states), end) in enumerate(zip(texts, ends, strict=True)):
            want, want_logits = case.oracle.chain(ids[:end], aux_states[: end - 1], STEPS)
            close(logits[:, i], want_logits)
            assert torch.equal(drafts[:, i], want)
        first = [e - 1 for e in ends]


def test_a_fixed_q_len_equals_ragged_tokens(tmp_path: Path) -> None:
    """Verified tokens may have a fixed q_len, with arbitrary values after the accepted ones."""
    case, (ids, aux_states) = Case.of(tmp_path, "specforge", requests=1), text(20, seed=3)
    want, _ = case.oracle.forward(ids[1:], case.oracle.fuse(aux_states))
    case.extend([0], [ids[1:13]], [aux_states[:12]])
    junk = torch.randn(4, AUX * TARGET_HIDDEN)
    h = case.draft.combine_hidden_states(torch.cat((aux_states[12:15], junk)))
    got, _ = case.loop.fixed([12], torch.cat((ids[13:16], ids[:4])), h)
    close(got[:3], want[12:15])
    got, _ = case.loop.fixed([15], ids[16:20], case.draft.combine_hidden_states(aux_states[15:19]))
    close(got, want[15:19])


def test_combine_hidden_states(tmp_path: Path) -> None:
    for name in FORMS:
        case = Case.of(tmp_path / name, name)
        aux_states = torch.randn(6, AUX * TARGET_HIDDEN)
        close(case.draft.combine_hidden_states(aux_states), case.oracle.fuse(aux_states))


def test_both_formats_give_the_same_config() -> None:
    aux = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    one = parse_eagle3_config({**SPECFORGE, "eagle_config": aux})
    two = parse_eagle3_config(SPECULATORS)
    for config in (one, two):
        assert config.target_layers(12) == (1, 5, 8)
        assert config.aux_hidden_size == AUX * TARGET_HIDDEN
        assert (config.draft_vocab_size, config.vocab_size) == (PRUNED, VOCAB)
        assert config.kv_layout(torch.bfloat16) == ModelLayout.dense(
            1, KV_HEADS, DIM, torch.bfloat16
        )
        assert config.layer_masks == (LayerMask(Mask.CAUSAL),)
        flags = (config.norm_before_residual, config.norm_before_fc, config.fc_norm)
        assert not any((*flags, config.norm_output, config.qk_norm))


def test_variants_of_the_config() -> None:
    assert parse_eagle3_config(SPECFORGE).target_layers(36) == (1, 17, 32)
    assert default_target_layers(12) == (1, 5, 8)
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}
    assert parse_eagle3_config({**SPECFORGE, "eagle_config": inner}).target_layers(12) == (1, 5, 8)
    whole = parse_eagle3_config({**SPECFORGE, "draft_vocab_size": None, "target_hidden_size": None})
    assert (whole.draft_vocab_size, whole.target_hidden_size) == (VOCAB, HIDDEN)
    sliding = {**LAYER, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    config = parse_eagle3_config({**SPECULATORS, "transformer_layer_config": sliding})
    assert config.layer_masks == (LayerMask(Mask.CAUSAL, 7),)
    with pytest.raises(ConfigError, match=r"layers \(1, 5, 8\), but the target has 8 layers"):
        parse_eagle3_config(SPECULATORS).target_layers(8)
    with pytest.raises(ConfigError, match="but the target has 3 layers"):
        parse_eagle3_config(SPECFORGE).target_layers(3)


FILES = {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight"}


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], [], None, ["Eagle3DraftModel"]])
def test_a_draft_is_known_by_its_tensors(names: list[str] | None) -> None:
    raw = bad(SPECFORGE, architectures=names)
    assert parse_eagle3_config(raw, stored=FILES) == parse_eagle3_config(SPECFORGE)
    normed = parse_eagle3_config(raw, stored=FILES | {"midlayer.self_attn.q_norm.weight"})
    assert normed.qk_norm and normed.layer_prefix == "midlayer."
    speculators = {name.replace("midlayer", "layers.0") for name in FILES}
    assert parse_eagle3_config(raw, stored=speculators).layer_prefix == "layers.0."
    with pytest.raises(ConfigError, match="not an EAGLE-3 draft"):  # EAGLE-1's
        parse_eagle3_config(raw, stored={"fc.weight", "layers.0.mlp.up_proj.weight"})


def test_a_draft_with_a_common_name_loads(tmp_path: Path) -> None:
    named = Case.of(tmp_path / "named", "specforge").draft
    folder = tmp_path / "common"
    shutil.copytree(tmp_path / "named", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(bad(config, architectures=["LlamaForCausalLM"])))
    weights = load_file(folder / "model.safetensors")
    save_file({f"model.{k}": v for k, v in weights.items()}, folder / "model.safetensors")
    other = load_eagle3(folder, CPU_F32, 64, ABSENT).weights()
    assert all(torch.equal(view, other[name]) for name, view in named.weights().items())


def test_pruned_vocabulary(tmp_path: Path) -> None:
    config, prefix = FORMS["specforge"]
    draft = load(write(tmp_path, config, random_weights(config, prefix)))
    assert torch.equal(draft.target_token_ids, torch.arange(PRUNED) * 3)


def test_the_targets_embedding_and_lm_head_are_used(tmp_path: Path) -> None:
    config = {**SPECFORGE, "draft_vocab_size": None, "target_hidden_size": HIDDEN}
    weights = random_weights(config, "midlayer.")
    for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
        del weights[name]
    weights["fc.weight"] = torch.zeros(HIDDEN, AUX * HIDDEN)
    table = torch.randn(VOCAB, HIDDEN)
    draft = load_eagle3(write(tmp_path, config, weights), CPU_F32, 64, vocab_of(table))
    ids = torch.tensor([3, 5])
    assert torch.equal(draft.embed(ids), table[ids])
    assert torch.equal(draft.compute_logits(table[ids]), table[ids] @ table.T)
    assert torch.equal(draft.target_token_ids, torch.arange(VOCAB))


def test_dummy_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE))
    draft = load(tmp_path, load_format="dummy")
    assert draft.compute_logits(torch.randn(2, HIDDEN)).shape == (2, PRUNED)
    assert torch.equal(draft.target_token_ids, torch.arange(PRUNED))


def bad(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


PARALLEL: dict[str, dict[str, Any]] = {
    "speculators": bad(SPECULATORS, speculators_model_type="peagle", mask_token_id=5),
    "flag": bad(SPECFORGE, parallel_drafting=True, pard_token=5),
    "other name": bad(SPECFORGE, parallel_drafting=True, ptd_token_id=5, mask_token_id=5),
    "architecture": bad(
        SPECFORGE, architectures=["PEagleDraftModel"], parallel_drafting=True, pard_token=5
    ),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_a_parallel_draft_is_known_by_its_config(name: str) -> None:
    assert parse_eagle3_config(PARALLEL[name]).mask_token_id == 5
    chain = {k: v for k, v in PARALLEL[name].items() if k != "parallel_drafting"}
    if name != "speculators":  # a mask token alone says nothing
        assert parse_eagle3_config(chain).mask_token_id is None
        assert parse_eagle3_config(chain, stored=["mask_hidden"]).mask_token_id == 5


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a target": (bad(SPECFORGE, architectures=["LlamaForCausalLM"]), "is not an EAGLE-3 draft"),
    "other speculator": (bad(SPECULATORS, speculators_model_type="dflash"), "'dflash' model"),
    "last layer only": (
        bad(SPECFORGE, eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is false",
    ),
    "a bias of fc": (bad(SPECFORGE, bias=True), "bias True is not supported"),
    "pairs of dims": (bad(SPECFORGE, is_neox_style=False), "is_neox_style False is not supported"),
    "norms": (bad(SPECFORGE, use_gemma_norm=True), "use_gemma_norm True is not supported"),
    "part of a head": (
        bad(SPECFORGE, rope_scaling={"rope_type": "default", "rope_dim": 4}),
        "partial_rotary_factor 0.*must be 1 .and rope_dim",
    ),
    "no mask": (bad(SPECFORGE, parallel_drafting=True), "mask token; mask_token_id, pard_token"),
    "two masks": (
        bad(SPECULATORS, speculators_model_type="peagle", mask_token_id=1, pard_token=2),
        "mask tokens differ: mask_token_id 1, pard_token 2",
    ),
    "mask": (
        bad(SPECFORGE, parallel_drafting=True, ptd_token_id=VOCAB),
        "mask token 96 is outside the vocabulary of 96",
    ),
    "below 0": (
        bad(SPECULATORS, eagle_aux_hidden_state_layer_ids=[0, 2, 4]),
        r"ids \(-1, 1, 3\) start below 0",
    ),
    "vocabulary": (bad(SPECFORGE, draft_vocab_size=VOCAB + 1), "over the target's 96"),
    "family": (
        bad(SPECULATORS, transformer_layer_config={**LAYER, "model_type": "gpt_oss"}),
        "family 'gpt_oss' is not supported; known: llama, qwen3",
    ),
    "no size": (
        {k: v for k, v in SPECFORGE.items() if k != "hidden_size"},
        "lacks 'hidden_size'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config(tmp_path: Path, name: str) -> None:
    config, message = BAD[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        load_eagle3_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_draft_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder; give the path of the draft"):
        load_eagle3_config(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), r"lacks 1 tensor: fc\.weight"),
        (lambda w: w.update({"fc.weight": torch.zeros(HIDDEN, 9)}), r"expected \[32, 72\]"),
        (lambda w: w.pop("d2t"), r"needs lm_head\.weight and d2t"),
        (lambda w: w.pop("embed_tokens.weight"), "hidden size 32 is not the target's 24"),
        (lambda w: w.update(d2t=w["d2t"] + VOCAB), "d2t leads outside the vocabulary of 96"),
        (lambda w: w.update(extra=torch.zeros(1)), "holds 1 tensor: extra"),
    ],
)
def test_bad_weights(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = write(tmp_path, SPECFORGE, random_weights(SPECFORGE, "midlayer."))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(folder)
