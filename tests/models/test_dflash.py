"""The DFlash draft compared with a plain reference implementation, in both checkpoint formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionContext, LayerMask, Mask
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.rope import rotary_dims
from forerun.models.dflash import DFlashDraft, DFlashServing, check_dflash_files, load_dflash
from forerun.models.dflash_config import load_dflash_config, parse_dflash_config
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
        draft = load_dflash(folder, CPU_F32, 128, ABSENT, DFlashServing(window=window))
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


def zlab(base: dict[str, Any] = ZLAB, **inner: Any) -> dict[str, Any]:
    return {**base, "dflash_config": {**base["dflash_config"], **inner}}


# name -> (config, oracle's changes, with biases)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "z-lab": (ZLAB, {}, False),
    "z-lab-bias": ({**ZLAB, "attention_bias": True}, {}, True),
    "z-lab-sliding": (SLIDING_ZLAB, {"windows": WINDOWS}, False),
    "z-lab-causal": (
        {**SLIDING_ZLAB, "is_causal": True},
        {"windows": WINDOWS, "causal": True},
        False,
    ),
    "z-lab-not-causal": (
        zlab(SLIDING_ZLAB, causal=False),
        {"windows": WINDOWS, "sliding": "row"},
        False,
    ),
    "z-lab-window-within-the-block": (
        {**SLIDING_ZLAB, "sliding_window": 3, "is_causal": False},
        {"windows": (3, None, 3), "sliding": "row"},
        False,
    ),
    "z-lab-use-swa": (
        zlab(use_swa=True, swa_window_size=WINDOW),
        {"windows": (WINDOW,) * LAYERS},
        False,
    ),
    "z-lab-scaled-values-and-sinks": (
        {
            **zlab(SLIDING_ZLAB, attention_value_scale=0.7, attention_sink_bias=True),
            "attention_bias": True,
        },
        {"windows": WINDOWS, "value_scale": 0.7},
        True,
    ),
    "z-lab-norms-of-gemma": (zlab(use_gemma_norm=True), {"norm_offset": 1.0}, False),
    "z-lab-rope-of-each-type": (
        {
            **SLIDING_ZLAB,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
            },
        },
        {"windows": WINDOWS, "thetas": (100.0, 100000.0, 100.0)},
        False,
    ),
    "z-lab-layer-without-rope": (
        {**ZLAB, "no_rope_layers": [1, 0, 1]},
        {"thetas": (10000.0, None, 10000.0)},
        False,
    ),
    "speculators": (SPECULATORS, {}, False),
    "speculators-sliding": (SLIDING_SPECULATORS, {"windows": WINDOWS}, False),
    "speculators-sliding-non-causal": (
        {**SLIDING_SPECULATORS, "sliding_window_non_causal": True},
        {"windows": WINDOWS, "sliding": "block"},
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
    if any(parse_dflash_config(config).sinks):
        weights |= {
            f"layers.{i}.self_attn.attention_sink_bias": torch.linspace(-1, 2, HEADS) * (i + 1)
            for i in range(LAYERS)
        }
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


ROTARY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"partial_rotary_factor": 0.5}, {"rotated": 8}),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_dim": 6}}, {"rotated": 6}),
    ({"rope_scaling": {"rope_type": "default", "rope_dim": 16}}, {}),
    ({"is_neox_style": False}, {"interleaved": True}),
    (
        {"rope_is_neox_style": False, "partial_rotary_factor": 0.25},
        {"interleaved": True, "rotated": 4},
    ),
    ({"is_neox_style": True}, {}),
]


@pytest.mark.parametrize(("keys", "changes"), ROTARY)
def test_which_dims_are_rotated(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any]
) -> None:
    weights = random_weights(bias=True)
    folder = write(tmp_path, {**ZLAB, "attention_bias": True, **keys}, weights)
    case = Case.of(folder, oracle(weights, **changes))
    case.observe([aux_states(20)])
    got = case.loop.fixed([20], embeddings())
    close(got, case.oracle.block(embeddings(), aux_states(20)))


@pytest.mark.parametrize(("dims", "head_dim"), [(30, 44), (62, 78), (96, 128), (128, 128)])
def test_rope_dim_is_exact(dims: int, head_dim: int) -> None:
    """30 / 44 · 44 is less than 30 in floating point."""
    raw = {**ZLAB, "head_dim": head_dim, "rope_scaling": {"rope_dim": dims}}
    assert rotary_dims(parse_dflash_config(raw).model.rope, head_dim) == dims


def test_no_context_and_a_shorter_block(case: Case) -> None:
    close(
        case.loop.fixed([0], embeddings(count=3)),
        case.oracle.block(embeddings(count=3), aux_states(0)),
    )


def test_draft_window(tmp_path: Path) -> None:
    """`--speculative-draft-window-size`: full layers use that much context and the whole block."""
    weights = random_weights()
    expected = oracle(weights, windows=(6,) * LAYERS, sliding="block")
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
    before = LayerMask(block, WINDOW)
    assert free.layer_masks() == (before, LayerMask(block), before)
    free = parse_dflash_config({**SLIDING_ZLAB, "is_causal": False})
    around, shorter = (LayerMask(Mask.SLIDING_BLOCK, window) for window in (WINDOW, 6))
    assert free.layer_masks() == (around, LayerMask(block), around)
    assert free.layer_masks(6) == (shorter, LayerMask(block, 6), shorter)


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
    inner = {"mask_token": "<|mask|>", "target_layer_ids": [1, 4]}
    config = parse_dflash_config({**ZLAB, "block_size": 8, "dflash_config": inner})
    assert (config.block_size, config.mask_token_id, config.mask_token) == (8, None, "<|mask|>")


ALL, NONE = (True,) * LAYERS, (False,) * LAYERS
DSPARK_BODY = {  # DeepSpec's own DFlash drafts
    **DECODER,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 95,
    "target_layer_ids": [1, 4],
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
}
SLIDING_CAUSAL = (True, False, True)  # unless something says otherwise
# config -> fields of what is read
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SLIDING_ZLAB, {"causal": SLIDING_CAUSAL, "windows": WINDOWS}),
    ({**SLIDING_ZLAB, "is_causal": True}, {"causal": ALL}),
    ({**SLIDING_ZLAB, "causal": True}, {"causal": ALL}),
    ({**SLIDING_ZLAB, "is_causal": False}, {"causal": NONE}),
    (zlab(SLIDING_ZLAB, causal=True), {"causal": ALL}),
    ({**zlab(SLIDING_ZLAB, causal=True), "is_causal": False}, {"causal": NONE}),
    ({**SLIDING_SPECULATORS, "sliding_window_non_causal": False}, {"causal": SLIDING_CAUSAL}),
    (zlab(use_swa=True, swa_window_size=5), {"windows": (5,) * LAYERS, "causal": ALL}),
    ({**zlab(use_swa=True), "sliding_window": 6}, {"windows": (6,) * LAYERS}),
    (zlab(SLIDING_ZLAB, use_swa=True, swa_window_size=5), {"windows": (5, None, 5)}),
    (zlab(use_swa=False, swa_window_size=5), {"windows": (None,) * LAYERS}),
    (zlab(attention_sink_bias=True), {"sinks": ALL, "value_scale": 1.0}),
    ({**SLIDING_ZLAB, "add_swa_attention_sink_bias": True}, {"sinks": (True, False, True)}),
    ({**ZLAB, "attention_value_scale": 0.5}, {"value_scale": 0.5}),
    (ZLAB, {"sample_from_anchor": False, "num_drafts": BLOCK - 1}),
    (zlab(sample_from_anchor=True), {"sample_from_anchor": True, "num_drafts": BLOCK}),
    (zlab(query_zero_predicts_next=True), {"sample_from_anchor": True}),
    ({**SPECULATORS, "query_zero_predicts_next": True}, {"sample_from_anchor": True}),
    (DSPARK_BODY, {"sample_from_anchor": True, "num_drafts": 7, "target_layer_ids": (1, 4)}),
    ({**DSPARK_BODY, "sample_from_anchor": False}, {"sample_from_anchor": False}),
    (zlab(eagle_aux_hidden_state_layer_ids=[2, 5]), {"target_layer_ids": (1, 4)}),
    (zlab(projector_type="dflash", shift_label=False, conv_kernel_size=None), {"causal": NONE}),
    (zlab(attention_mode="mha", has_embed_tokens=True, has_lm_head=False), {"causal": NONE}),
    # DFlash2's layers see all of their block, whoever wrote the file.
    (zlab(SLIDING_ZLAB, conv_kernel_size=2, conv_group_size=8), {"causal": NONE}),
    (zlab(SLIDING_ZLAB, selector_rank=16, selector_top_k=8), {"causal": NONE}),
    (
        zlab(SLIDING_ZLAB, selector_rank=16, selector_top_k=8, sliding_window_non_causal=False),
        {"causal": SLIDING_CAUSAL},
    ),
    ({**SLIDING_SPECULATORS, "speculators_model_type": "dflash2"}, {"causal": NONE}),
]


@pytest.mark.parametrize(("config", "fields"), READ)
def test_what_keys_mean_at_either_level(config: dict[str, Any], fields: dict[str, Any]) -> None:
    read = parse_dflash_config(config)
    assert {name: getattr(read, name) for name in fields} == fields
    if "dflash_config" in config:
        at_top = {**config, **config["dflash_config"], "dflash_config": None}
        assert parse_dflash_config(at_top) == replace(read, model=parse_dflash_config(at_top).model)


MARKOV = {"markov_rank": 24, "markov_head_type": "gated"}
SELECTOR = {"selector_rank": 16, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8}
GRU = {"projector_type": "domino", "gru_hidden_dim": 32, "emb_dim": 24}
LATTICE = {
    "lilicorr_candidate_topk": 4,
    "lilicorr_hidden_size": 0,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 4,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 10.0,
}
SPECFORGE_DOMINO = {**ZLAB, "architectures": ["DominoDraftModel"]}
SPECULATORS_2 = {**SPECULATORS, "speculators_model_type": "dflash2"}
XPRESS = {**SPECULATORS, "speculators_model_type": "xpress"}
CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 8}
CONFIDENT = {"markov_rank": 8, "enable_confidence_head": True}
# config -> how the head is described, and the row layout
WITH_HEADS: list[tuple[dict[str, Any], str, str]] = [
    ({**DSPARK_BODY, "markov_rank": 256}, r"vanilla Markov, rank 256\)", "anchor-first"),
    ({**DSPARK_BODY, **CONFIDENT}, "rank 8, confidence head", "anchor-first"),
    (zlab(projector_type="dspark", **MARKOV), r"gated Markov, rank 24\)", "anchor-first"),
    (zlab(projector_type="dspark", shift_label=True, **MARKOV), "gated", "anchor-first"),
    (zlab(sample_from_anchor=False, **MARKOV, num_anchors=512), "gated", "fill-in"),
    ({**ZLAB, "dspark_config": MARKOV}, "gated", "anchor-first"),
    (
        {**SPECULATORS, "speculators_model_type": "dspark"},
        "vanilla Markov, rank 256, confidence head",
        "anchor-first",
    ),
    ({**ZLAB, "architectures": ["DFlash2DraftModel"], **SELECTOR}, "best 8, rank 16", "fill-in"),
    ({**ZLAB, "architectures": ["MiniMaxDFlash2DraftModel"], **SELECTOR}, "convol", "fill-in"),
    (SPECULATORS_2, "best 16, rank 256.*convolutions", "fill-in"),
    (zlab(**CONVOLUTIONS), "^no head.*convolutions", "fill-in"),
    (zlab(**GRU, shift_label=True), "GRU of 32, first 1", "anchor-first"),
    (zlab(**GRU, pure_draft_prefix_len=2), "GRU of 32, first 2", "fill-in"),
    (zlab(SPECFORGE_DOMINO, **GRU), "GRU of 32, first 0", "fill-in"),
    ({**ZLAB, "architectures": ["LiLiCorrDraftModel"], **LATTICE}, "LiLiCorr head", "fill-in"),
    (zlab(**LATTICE, **CONVOLUTIONS), "LiLiCorr.*convolutions", "fill-in"),
    (XPRESS, "rank 256, 6 Jacobi passes", "fill-in"),
]


@pytest.mark.parametrize(("config", "head", "layout"), WITH_HEADS)
def test_heads_and_layouts(config: dict[str, Any], head: str, layout: str) -> None:
    described = parse_dflash_config(config).describe()
    assert re.search(head, described)
    assert f"{layout} blocks" in described


# config -> what is wrong with it
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**ZLAB, "architectures": ["DSparkDraftModel"]}, "lacks markov_head_type"),
    (zlab(projector_type="dspark", markov_head_type="rnn"), "lacks markov_rank"),
    (zlab(markov_rank=24, markov_head_type="lstm"), "markov_head_type"),
    ({**ZLAB, "dspark_block_size": 5}, "in the target's own checkpoint"),
    (zlab(**MARKOV, **SELECTOR), "signs of several heads: DSpark .* and DFlash2"),
    ({**ZLAB, "architectures": ["DFlash2DraftModel"]}, "both selector_rank and selector_top_k"),
    (zlab(selector_rank=16, selector_top_k=8, sample_from_anchor=True), "fill-in layout only"),
    (
        zlab(**SELECTOR, sample_from_anchor=True),
        "^config: sample_from_anchor is true, but a DFlash2 draft .*fill-in.* Set it to false",
    ),
    (zlab(**SELECTOR, shift_label=True), "^config: shift_label is true"),
    (
        zlab(**{**SELECTOR, "selector_top_k": VOCAB + 1}),
        "config: selector_top_k 97 is over .* of 96",
    ),
    (
        {**DSPARK_BODY, **CONFIDENT, "dspark_draft_topk": 97},
        "dspark_draft_topk 97 is over .* of 96",
    ),
    (
        {**DSPARK_BODY, **CONFIDENT, "dspark_draft_topk": 33, "draft_vocab_size": 32},
        "dspark_draft_topk 33 is over the draft's vocabulary of 32",
    ),
    (zlab(**{**LATTICE, "lilicorr_num_heads": 3}), "^config: lilicorr_hidden_size 32 is not a mul"),
    (zlab(**LATTICE, draft_vocab_size=32), "^config: a LiLiCorr head has no pruned vocabulary"),
    (zlab(**SELECTOR, draft_vocab_size=32), "^config: a DFlash2 head has no pruned vocabulary"),
    (zlab(**SELECTOR, transformer_layer_config=1), "dflash_config has the unknown 'transformer_la"),
    (zlab(**MARKOV, num_anchors=0), "num_anchors is 0, expected int >= 1"),
    (zlab(**MARKOV, markov_gate_bias=True), "dflash_config has the unknown 'markov_gate_bias'"),
    (zlab(**LATTICE, lilicorr_foo=1), "dflash_config has the unknown 'lilicorr_foo'"),
    ({**DSPARK_BODY, **CONFIDENT, "markov_foo": 0}, "^config: it has the unknown 'markov_foo'"),
    (
        {**zlab(**MARKOV), "markov_rank": 8},
        "markov_rank is 8 at the top and 24 in dflash_config",
    ),
    ({**zlab(**MARKOV), "markov_head_type": "rnn"}, "markov_head_type is 'rnn' at the top and"),
    (
        {**zlab(**MARKOV), "rope_parameters": {"rope_theta": 1e5}, "rope_theta": 5.0},
        "rope_theta is 100000.0 in rope_parameters and 5.0 beside it",
    ),
    (
        {**zlab(), "rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear"}},
        "rope_type is 'default' in rope_parameters and 'linear' beside it",
    ),
    ({**zlab(**SELECTOR), "selector_top_k": 9}, "selector_top_k is 9 at the top and 8 in"),
    (
        {**XPRESS, "num_jacobi_passes": 4, "xpress_num_passes": 5},
        "num_jacobi_passes 4 and xpress_num_passes 5 say the same and disagree",
    ),
    (
        zlab(**MARKOV, enable_confidence_head=True, use_confidence_head=False),
        "enable_confidence_head True and use_confidence_head False say the same",
    ),
    ({**zlab(**GRU), "architectures": None}, "lacks pure_draft_prefix_len, whose default differs"),
    (
        {**DSPARK_BODY, **CONFIDENT, "architectures": ["Gemma4DSparkModel"]},
        r"the Gemma 4 body of DSpark \(Gemma4DSparkModel\) is not supported",
    ),
    (
        {
            **DSPARK_BODY,
            "architectures": ["Gemma4DSparkModel"],
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "the Gemma 4 body of DSpark",
    ),
    (zlab(conv_kernel_size=2), "both conv_kernel_size and conv_group_size"),
    (zlab(conv_kernel_size=2, conv_group_size=7), "does not divide the hidden size"),
    (zlab(projector_type="domino", shift_label=True), "lacks gru_hidden_dim, emb_dim"),
    ({**ZLAB, "emb_dim": 24}, "lacks gru_hidden_dim"),
    (zlab(lilicorr_num_layers=2), "lacks lilicorr_candidate_topk"),
    (zlab(projector_type="lattice"), "projector_type 'lattice' is not known"),
    (zlab(output_multiplier=2.0), "output_multiplier 2.0 is not supported"),
    ({**XPRESS, "xpress_selector": True}, "xpress_selector is not supported"),
    ({**SPECULATORS, "speculators_model_type": "peagle"}, "P-EAGLE draft .*EAGLE3, which serves"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_incomplete_heads_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_dflash_config(config)


TENSORS = {
    "markov_head.markov_w1.weight": "DSpark",
    "markov_w1.weight": "DSpark",
    "gate_proj.weight": "DSpark",
    "logit_head.joint_proj.bias": "DSpark",
    "confidence_head.proj.weight": "DSpark",
    "layers.0.mlp_conv.base_kernel": r"layers\.0\.mlp_conv\.base_kernel",
    "candidate_selector.successor_codebook": "DFlash2",
    "prefix_gru.weight_ih_l0": "Domino",
    "logit_head.embed_proj.0.weight": "Domino",
    "lilicorr.slot_embedding": "LiLiCorr",
    "refiner_head.mix_l": "XPress",
    "mix.L": "XPress",
    "mask_hidden": "P-EAGLE",
    "layers.0.self_attn.g_proj.weight": r"layers\.0\.self_attn\.g_proj\.weight",
}


@pytest.mark.parametrize("name", TENSORS)
def test_no_tensor_is_left_out(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, ZLAB, random_weights() | {name: torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match=TENSORS[name]):
        load_dflash(folder, CPU_F32, 64, ABSENT)


def test_other_names_of_the_bodys_tensors(tmp_path: Path) -> None:
    weights, config = random_weights(), {**ZLAB, "num_hidden_layers": 1}
    weights = {k: v for k, v in weights.items() if not k.startswith(("layers.1.", "layers.2."))}
    plain = load_dflash(write(tmp_path / "plain", config, weights), CPU_F32, 64, ABSENT)
    names = {
        "layers.0.": "midlayer.",
        "fc.": "encoder.fc.",
        "hidden_norm.": "encoder.output_norm_enc.",
    }
    renamed = {}
    for name, weight in weights.items():
        old = next((prefix for prefix in names if name.startswith(prefix)), "")
        renamed[f"model.{names.get(old, '')}{name.removeprefix(old)}"] = weight
    other = load_dflash(write(tmp_path / "other", config, renamed), CPU_F32, 64, ABSENT)
    for name, view in plain.weights().items():
        assert torch.equal(view, other.weights()[name])


def dspark(folder: Path, names: str, inputs: int = HIDDEN, **keys: Any) -> Path:
    """A draft with a Markov head of rank 4 and a confidence head, which a writer calls `names`."""
    config = zlab(markov_rank=4, markov_head_type="vanilla", **keys)
    shapes = {"markov_w1.weight": (VOCAB, 4), "markov_w2.weight": (VOCAB, 4)}
    head = {name: torch.zeros(shape) for name, shape in shapes.items()}
    proj = {"weight": torch.zeros(1, inputs), "bias": torch.zeros(1)}
    head |= {f"{names}.{name}": tensor for name, tensor in proj.items()}
    return write(folder, config, random_weights() | head)


@pytest.mark.parametrize("names", ["confidence_head.proj", "logit_head.confidence_proj"])
def test_a_confidence_head_that_only_the_tensors_show(tmp_path: Path, names: str) -> None:
    """As in SGLang; where the config says that there is none, its tensors are too many."""
    folder = dspark(tmp_path / "on", names)
    assert "confidence head" in load_dflash_config(folder).describe()
    assert "confidence_head.proj.bias" in load_dflash(folder, CPU_F32, 64, ABSENT).weights()
    folder = dspark(tmp_path / "with the token before", names, HIDDEN + 4)
    load_dflash(folder, CPU_F32, 64, ABSENT)
    folder = dspark(tmp_path / "stated", names, HIDDEN + 4, confidence_head_with_markov=False)
    with pytest.raises(ConfigError, match=r"has shape \[1, 36\], expected \[1, 32\]"):
        load_dflash(folder, CPU_F32, 64, ABSENT)
    folder = dspark(tmp_path / "off", names, enable_confidence_head=False)
    assert "confidence head" not in load_dflash_config(folder).describe()
    with pytest.raises(ConfigError, match=r"holds 2 tensors: confidence_head\.proj"):
        load_dflash(folder, CPU_F32, 64, ABSENT)


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN)])
def test_an_embedding_of_the_masks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    own = torch.arange(HIDDEN, dtype=torch.float32)
    weights = random_weights() | {"mask_embedding": own.view(shape)}
    table = torch.randn(VOCAB, HIDDEN)
    draft = load_dflash(write(tmp_path, ZLAB, weights), CPU_F32, 64, vocab_of(table))
    block = draft.embed_block(torch.tensor([[3, 95, 95], [5, 95, 95]]))
    assert torch.equal(block, torch.stack([table[3], own, own, table[5], own, own]))


def test_a_pickled_embedding_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    folder = write(tmp_path, ZLAB, random_weights())
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors .* as mask_embedding, and"):
        load_dflash(folder, CPU_F32, 64, ABSENT)


def test_codebooks_named_as_weights(tmp_path: Path) -> None:
    """DFlash2's, as z-lab's own class calls them."""
    books = ("predecessor_codebook", "successor_codebook")
    head = {f"candidate_selector.{name}.weight": torch.randn(VOCAB, 4) for name in books}
    head["candidate_selector.hidden_projection.weight"] = torch.randn(4, HIDDEN)
    config = zlab(selector_rank=4, selector_top_k=8)
    draft = load_dflash(write(tmp_path, config, random_weights() | head), CPU_F32, 64, ABSENT)
    for name in books:
        read = draft.weights()[f"candidate_selector.{name}"]
        assert torch.equal(read, head[f"candidate_selector.{name}.weight"])


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


def test_pruned_vocabulary_of_the_targets_rows(tmp_path: Path) -> None:
    """Without an LM head the file's offsets say which rows of the target's serve."""
    folder, weights = pruned(tmp_path)
    del weights["lm_head.weight"], weights["embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors")
    table = torch.randn(VOCAB, HIDDEN)
    draft = load_dflash(folder, CPU_F32, 64, vocab_of(table))
    hidden = torch.randn(4, HIDDEN)
    logits = hidden @ table[::3].T
    close(draft.compute_logits(hidden), logits)
    assert torch.equal(draft.compute_argmax(hidden), logits.argmax(-1))
    assert torch.equal(draft.embed(torch.tensor([3, 5])), table[[3, 5]])
    check_dflash_files(folder)


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
    "no block": (zlab(block_size=None), "lacks block_size"),
    "block of 1": (zlab(block_size=1), "block_size is 1, expected int >= 2"),
    "block of text": (zlab(block_size="5"), "block_size is '5', expected int"),
    "two blocks": ({**ZLAB, "block_size": 8}, "block_size is 8 at the top and 5 in dflash_config"),
    "two layouts": (
        zlab(sample_from_anchor=True, query_zero_predicts_next=False),
        "sample_from_anchor True and query_zero_predicts_next False",
    ),
    "two sets of layers": (
        zlab(eagle_aux_hidden_state_layer_ids=[1, 4]),
        r"\[1, 4\] and aux_hidden_state_layer_ids \(less 1\) \[0, 3\] disagree",
    ),
    "unknown key": (zlab(hyper_gate=True), "dflash_config has the unknown 'hyper_gate'"),
    "unknown class": ({**ZLAB, "architectures": ["JetDraftModel"]}, "'JetDraftModel' is not known"),
    "two rope styles": (
        zlab({**ZLAB, "is_neox_style": False}, rope_is_neox_style=True),
        "is_neox_style False and rope_is_neox_style True",
    ),
    "odd rope": ({**ZLAB, "rope_scaling": {"rope_dim": 5}}, "rotates 5 dims"),
    "wide rope": ({**ZLAB, "rope_scaling": {"rope_dim": 32}}, "rope_dim 32 does not fit head_dim"),
    "two ropes": (
        {**ZLAB, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_dim": 4}},
        "rope_dim 4 does not fit head_dim 16 and partial_rotary_factor 0.5",
    ),
    "norms": (zlab(use_gemma_norm="yes"), "use_gemma_norm is 'yes'"),
    "value scale": (zlab(attention_value_scale="half"), "attention_value_scale is 'half'"),
    "swa": (zlab(use_swa=True), r"no sliding_window \(swa_window_size\)"),
    "inner": ({**ZLAB, "dflash_config": [1]}, "dflash_config is"),
    "activation": ({**ZLAB, "hidden_act": "gelu"}, "config.json: hidden_act 'gelu' is not supp"),
    "no mask": (without(dflash_config={**INNER_ZLAB, "mask_token_id": None}), "no mask token"),
    "no layers": (
        without(dflash_config={"block_size": 4, "mask_token_id": 1}),
        r"lacks dflash_config\.target_layer_ids",
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
    "other projector": ({**SPECULATORS, "projector_type": "mlp"}, "projector_type 'mlp'"),
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
        (lambda w: w.pop("d2t"), "needs d2t; the checkpoint is incomplete"),
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
