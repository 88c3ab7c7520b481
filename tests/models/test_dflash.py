"""The DFlash draft compared with a plain reference implementation, in both checkpoint formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionContext, LayerMask, Mask
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.models.dflash import DFlashDraft, load_dflash
from forerun.models.dflash_config import (
    default_target_layers,
    load_dflash_config,
    parse_dflash_config,
)
from forerun.models.loader import load_target
from tests.models.dflash_oracle import Oracle
from tests.models.support import ABSENT, CPU, CPU_F32, Loop, family, save, vocab_of

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, BLOCK = 3, 32, 4, 2, 16, 48, 96, 5
TARGET_LAYERS = (1, 4)
SLIDING = ("sliding_attention", "full_attention", "sliding_attention")
WINDOW = 7

DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
ZLAB: dict[str, Any] = {
    **DECODER,
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 8,
    "dflash_config": {
        "block_size": BLOCK,
        "mask_token_id": 95,
        "target_layer_ids": list(TARGET_LAYERS),
    },
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": {"model_type": "qwen3", **DECODER},
    "draft_vocab_size": VOCAB,
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": [i + 1 for i in TARGET_LAYERS],
    "mask_token_id": 95,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "x/y"}},
}


def random_weights(bias: bool = False) -> dict[str, Tensor]:
    q, kv = HEADS * DIM, KV_HEADS * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TARGET_LAYERS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        p = f"layers.{i}."
        for name, size in {"q": q, "k": kv, "v": kv}.items():
            shapes[f"{p}self_attn.{name}_proj.weight"] = (size, HIDDEN)
            if bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{p}self_attn.o_proj.weight"] = (HIDDEN, q)
        if bias:
            shapes[f"{p}self_attn.o_proj.bias"] = (HIDDEN,)
        shapes |= {f"{p}self_attn.{n}_norm.weight": (DIM,) for n in "qk"}
        shapes |= {f"{p}mlp.{n}_proj.weight": (INNER, HIDDEN) for n in ("gate", "up")}
        shapes[f"{p}mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{p}{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@dataclass
class Case:
    draft: DFlashDraft
    oracle: Oracle
    loop: Loop

    @classmethod
    def of(cls, folder: Path, oracle: Oracle, requests: int = 1, window: int | None = None) -> Case:
        draft = load_dflash(folder, CPU_F32, 128, ABSENT, window)
        layout = ModelLayout.dense(LAYERS, KV_HEADS, DIM, torch.float32)
        loop = Loop.over(draft.forward, layout, draft.layer_masks, HEADS, requests)
        return cls(draft, oracle, loop)

    def observe(self, aux_states: list[Tensor], first: int = 0) -> None:
        """Writes context K/V of every request's aux hidden states, from position `first` on."""
        spans = tuple((first, len(f)) for f in aux_states)
        batch = AttentionBatch(
            page_table=self.loop.table[: len(aux_states)],
            start=torch.full((len(aux_states),), first, dtype=torch.int32),
            kv_len_ub=first + max(map(len, aux_states)),
            ragged=spans,
        )
        plan = self.loop.backend.plan(batch)
        positions = torch.cat([torch.arange(s, s + n) for s, n in spans])
        with torch.inference_mode():
            context = AttentionContext(self.loop.backend, plan, batch)
            self.draft.write_context_kv(torch.cat(aux_states), positions, context, None)


def oracle(weights: dict[str, Tensor], **changes: Any) -> Oracle:
    values: dict[str, Any] = {"windows": (None,) * LAYERS, **changes}
    return Oracle(weights, LAYERS, HEADS, KV_HEADS, DIM, 10000.0, 1e-6, **values)


def aux_states(length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, len(TARGET_LAYERS) * HIDDEN, generator=generator)


def embeddings(seed: int = 2, count: int = BLOCK) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


SLIDING_ZLAB = {**ZLAB, "layer_types": list(SLIDING), "sliding_window": WINDOW}
SLIDING_SPECULATORS = {
    **SPECULATORS,
    "transformer_layer_config": {
        **DECODER,
        "layer_types": list(SLIDING),
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
}
WINDOWS = (WINDOW, None, WINDOW)
# name -> (config, oracle's changes, with biases)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "z-lab": (ZLAB, {}, False),
    "z-lab-bias": ({**ZLAB, "attention_bias": True}, {}, True),
    "z-lab-sliding": (SLIDING_ZLAB, {"windows": WINDOWS}, False),
    "speculators": (SPECULATORS, {}, False),
    "speculators-sliding": (SLIDING_SPECULATORS, {"windows": WINDOWS}, False),
    "speculators-sliding-non-causal": (
        {**SLIDING_SPECULATORS, "sliding_window_non_causal": True},
        {"windows": WINDOWS, "sliding_block": True},
        False,
    ),
}


def test_a_block_has_gemma4s_embeddings_and_capped_logits(tmp_path: Path) -> None:
    """They are the target's: times sqrt(H), and c · tanh(logit / c)."""
    target = load_target(save(family("gemma4"), tmp_path / "target"), torch.float32, CPU)
    folder = write(tmp_path / "draft", ZLAB, random_weights())
    draft = load_dflash(folder, CPU_F32, 128, target)
    weight = load_file(tmp_path / "target" / "model.safetensors")["model.embed_tokens.weight"]
    ids, hidden = torch.tensor([3, 95, 95]), 3 * torch.randn(5, HIDDEN)
    close(draft.embed(ids), weight[ids] * HIDDEN**0.5)
    logits = hidden @ weight.T
    assert logits.abs().max() > 3.0
    close(draft.compute_logits(hidden), 3.0 * torch.tanh(logits / 3.0))
    assert torch.equal(draft.compute_argmax(hidden), logits.argmax(1))


@pytest.fixture(params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    config, changes, bias = FORMS[request.param]
    weights = random_weights(bias)
    return Case.of(write(tmp_path, config, weights), oracle(weights, **changes), requests=2)


def test_context_kv(case: Case) -> None:
    f = aux_states(9)
    close(case.draft.combine_hidden_states(f), case.oracle.context(f))
    case.observe([f])
    pool, at = case.loop.backend.pools, torch.arange(9)
    kv_slots = (
        case.loop.table[0, at // pool.page_size].long() * pool.page_size + at % pool.page_size
    )
    for layer in range(LAYERS):
        want_k, want_v = case.oracle.context_kv(f, layer)
        close(pool.k(layer).flatten(0, 1)[kv_slots], want_k.transpose(0, 1))
        close(pool.v(layer).flatten(0, 1)[kv_slots], want_v.transpose(0, 1))


def test_blocks_of_two_requests(case: Case) -> None:
    """Context arrives in pieces; each block overwrites the scratch K/V of the one before."""
    lengths = [20, 11]
    given = [aux_states(30, seed=i) for i in range(2)]
    case.observe([f[:8] for f in given])
    case.loop.fixed([8, 8], torch.cat([embeddings(7), embeddings(8)]))  # scratch at 8 … 12
    case.observe([f[8:n] for f, n in zip(given, lengths, strict=True)], first=8)
    x = [embeddings(3), embeddings(4)]
    got = case.loop.fixed(lengths, torch.cat(x))
    for i, n in enumerate(lengths):
        close(got[i * BLOCK : (i + 1) * BLOCK], case.oracle.block(x[i], given[i][:n]))


def test_no_context_and_a_shorter_block(case: Case) -> None:
    close(
        case.loop.fixed([0], embeddings(count=3)),
        case.oracle.block(embeddings(count=3), aux_states(0)),
    )


def test_draft_window(tmp_path: Path) -> None:
    """`--speculative-draft-window-size`: full layers use that much context and the whole block."""
    weights = random_weights()
    expected = oracle(weights, windows=(6,) * LAYERS, sliding_block=True)
    case = Case.of(write(tmp_path, ZLAB, weights), expected, window=6)
    case.observe([aux_states(20)])
    got = case.loop.fixed([20], embeddings())
    close(got, expected.block(embeddings(), aux_states(20)))
    assert not torch.allclose(got, oracle(weights).block(embeddings(), aux_states(20)), atol=1e-3)


def test_layer_masks() -> None:
    block, causal = Mask.BLOCK, Mask.CAUSAL
    full = parse_dflash_config(ZLAB)
    assert full.layer_masks() == (LayerMask(block),) * LAYERS
    assert full.layer_masks(9) == (LayerMask(block, 9),) * LAYERS
    sliding = parse_dflash_config(SLIDING_ZLAB)
    own = LayerMask(causal, WINDOW)
    assert sliding.layer_masks() == (own, LayerMask(block), own)
    assert sliding.layer_masks(9) == (own, LayerMask(block, 9), own)
    assert sliding.layer_masks(6)[0] == LayerMask(causal, 6)
    free = parse_dflash_config({**SLIDING_SPECULATORS, "sliding_window_non_causal": True})
    near = LayerMask(block, WINDOW)
    assert free.layer_masks() == (near, LayerMask(block), near)


def test_both_formats_give_the_same_config() -> None:
    one, two = parse_dflash_config(ZLAB), parse_dflash_config(SPECULATORS)
    for config in (one, two):
        assert config.target_layer_ids == TARGET_LAYERS
        assert (config.block_size, config.num_drafts) == (BLOCK, BLOCK - 1)
        assert (config.mask_token_id, config.mask_token) == (95, None)
        assert config.aux_hidden_size == len(TARGET_LAYERS) * HIDDEN
        assert (config.draft_vocab_size, config.vocab_size) == (VOCAB, VOCAB)
        assert not config.sample_from_anchor
    assert (one.num_target_layers, two.num_target_layers) == (8, None)


def test_variants_of_the_config() -> None:
    anchored = parse_dflash_config({**SPECULATORS, "sample_from_anchor": True})
    assert anchored.sample_from_anchor and anchored.num_drafts == BLOCK
    older = {**ZLAB, "block_size": 8, "dflash_config": {"mask_token": "<|mask|>"}}
    config = parse_dflash_config(older)
    assert (config.block_size, config.mask_token_id, config.mask_token) == (8, None, "<|mask|>")
    assert config.target_layer_ids == default_target_layers(8, LAYERS) == (1, 3, 5)
    assert default_target_layers(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-8B
    assert default_target_layers(36, 1) == (18,)


def pruned(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A draft with every third token of the target's vocabulary and its own LM head."""
    ids = torch.arange(0, VOCAB, 3)
    weights = random_weights() | {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "lm_head.weight": torch.randn(len(ids), HIDDEN),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
        "verifier_norm.weight": torch.ones(HIDDEN),
    }
    return write(folder, {**SPECULATORS, "draft_vocab_size": len(ids)}, weights), weights


def test_pruned_vocabulary(tmp_path: Path) -> None:
    folder, weights = pruned(tmp_path)
    draft = load_dflash(folder, CPU_F32, 64, ABSENT)
    ids = torch.tensor([3, 95])
    assert torch.equal(draft.embed(ids), weights["embed_tokens.weight"][ids])
    hidden = torch.randn(4, HIDDEN)
    logits = hidden @ weights["lm_head.weight"].T
    close(draft.compute_logits(hidden), logits)
    best = logits.argmax(-1)
    assert torch.equal(draft.compute_argmax(hidden), best)
    assert torch.equal(draft.to_target_ids(best), best * 3)


def test_without_its_own_vocabulary(tmp_path: Path) -> None:
    table = torch.randn(VOCAB, HIDDEN)
    folder = write(tmp_path, ZLAB, random_weights())
    draft = load_dflash(folder, CPU_F32, 64, vocab_of(table))
    ids = torch.tensor([3, 5])
    assert torch.equal(draft.embed(ids), table[ids])
    logits = table[ids] @ table.T
    assert torch.equal(draft.compute_logits(table[ids]), logits)
    assert torch.equal(draft.compute_argmax(table[ids]), logits.argmax(-1))
    assert torch.equal(draft.to_target_ids(ids), ids)


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**ZLAB, **changes}.items() if k not in keys}


INNER_ZLAB = ZLAB["dflash_config"]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a target": ({**DECODER, "architectures": ["Qwen3ForCausalLM"]}, "is not a DFlash draft"),
    "no block": (without(dflash_config={**INNER_ZLAB, "block_size": None}), "block_size must be"),
    "block of 1": (without(dflash_config={**INNER_ZLAB, "block_size": 1}), "at least 2, got 1"),
    "no mask": (without(dflash_config={**INNER_ZLAB, "mask_token_id": None}), "no mask token"),
    "no layers": (
        without("num_target_layers", dflash_config={"block_size": 4, "mask_token_id": 1}),
        "lacks target_layer_ids and num_target_layers",
    ),
    "empty layers": (
        without(dflash_config={**INNER_ZLAB, "target_layer_ids": []}),
        "target_layer_ids is empty",
    ),
    "no window": (without(layer_types=list(SLIDING)), "but no sliding_window"),
    "negative layer": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 3]},
        r"target layer ids \(-1, 2\) start below 0",
    ),
    "no aux layers": ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "aux_hidden_state"),
    "other speculator": ({**SPECULATORS, "speculators_model_type": "eagle3"}, "'eagle3' model"),
    "other projector": ({**SPECULATORS, "projector_type": "domino"}, "projector 'domino'"),
    "shifted": ({**SPECULATORS, "shift_label": True}, "shift_label is not supported"),
    "vocabulary": ({**SPECULATORS, "draft_vocab_size": VOCAB + 1}, "over the target's"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config(tmp_path: Path, name: str) -> None:
    config, message = BAD[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        load_dflash_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_draft_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder; give the path of the draft"):
        load_dflash_config(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), r"lacks 1 tensor: fc\.weight"),
        (lambda w: w.update({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}), r"expected \[32, 64\]"),
        (lambda w: w.pop("d2t"), r"needs lm_head\.weight and d2t"),
        (lambda w: w.update(d2t=w["d2t"] + VOCAB), "d2t leads outside the vocabulary of 96"),
        (lambda w: w.update(d2t=w["d2t"].float()), "d2t is F32, expected integers"),
    ],
)
def test_bad_weights(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder, _ = pruned(tmp_path)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_dflash(folder, CPU_F32, 64, ABSENT)
