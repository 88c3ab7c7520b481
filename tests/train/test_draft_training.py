"""Drafts in training compared with the drafts that serve, and the parts of a step with oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from forerun.attention.base import AttentionBatch, AttentionContext, LayerMask, Mask
from forerun.core.errors import ConfigError
from forerun.models.dflash import DFlashDraft, load_dflash
from forerun.models.eagle3 import load_eagle3
from forerun.models.heads.base import Block
from forerun.models.nextn import load_nextn, load_nextn_config
from forerun_train import masks
from forerun_train.batch import HiddenStates
from forerun_train.drafts import draft as draft_module
from forerun_train.drafts.blocks import blocks_at, can_anchor, sample_anchors
from forerun_train.drafts.build import BuiltDraft, build_draft, initial_vocabulary
from forerun_train.drafts.draft import Draft
from forerun_train.drafts.heads import LMHead, MarkovHead
from forerun_train.drafts.speculators import (
    check_kind,
    speculators_config,
    speculators_tensors,
)
from forerun_train.files import export_draft
from forerun_train.hidden_states import FrozenTarget, load_frozen_target
from forerun_train.masks import (
    BlockPlaces,
    MaskShape,
    attend,
    block_mask,
    blocks_after_context,
    make_mask,
)
from forerun_train.objectives import PositionWeights
from forerun_train.trainer.distributed import whole_parameters
from forerun_train.trainer.flops import flops_per_step
from forerun_train.trainer.memory import estimate, shape_of
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.validation import walk
from tests.models.support import CPU, CPU_F32, Loop, family, save
from tests.train.packed import packed

VOCAB, BLOCK = 96, 5
DOCUMENTS = [[30, 18], [11, 37]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = save(family("llama"), tmp_path_factory.mktemp("target"))
    return load_frozen_target(str(folder), torch.float32, CPU, 64)


def options_of(kind: str, **given: Any) -> TrainOptions:
    given = {"num_layers": 2, "block_size": BLOCK, "seq_len": 48, "batch_size": 2, **given}
    return TrainOptions.of(
        None, {"kind": kind, "target": "-", "data": "-", "output": "-", "anchors": 6, **given}
    )


def built(target: FrozenTarget, kind: str, **given: Any) -> BuiltDraft:
    """A draft with weights far from their first ones, so that every part matters."""
    ids = given.pop("ids", None)
    draft = build_draft(options_of(kind, **given), target, VOCAB - 1, ids)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.15
    return draft


class Step:
    """A batch with blocks on it, and what the target says of it."""

    def __init__(self, target: FrozenTarget, draft: Draft, anchors: int = 6) -> None:
        self.batch = packed(DOCUMENTS, VOCAB)
        self.states = target.hidden_states(self.batch, draft.target_layer_ids)
        noise = torch.rand(self.batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
        self.anchors, self.chosen = sample_anchors(self.batch, noise, anchors)
        self.blocks = blocks_at(self.batch, self.anchors, self.chosen, draft.num_drafts)


def test_hidden_states_are_those_of_each_document_alone(tmp_path: Path) -> None:
    model = family("llama")
    folder = save(model, tmp_path)
    target = load_frozen_target(str(folder), torch.float32, CPU, 64)
    batch = packed(DOCUMENTS, VOCAB)
    states = target.hidden_states(batch, (0, 1))
    for row, lengths in enumerate(DOCUMENTS):
        first = 0
        for length in lengths:
            places = slice(first, first + length)
            first += length
            with torch.no_grad():
                alone = model(batch.input_ids[row : row + 1, places], output_hidden_states=True)
            aux = torch.cat(alone.hidden_states[1:3], -1)[0]
            torch.testing.assert_close(states.aux[row, places], aux, rtol=1e-4, atol=1e-5)
            logits = target.logits(states.final[row, places])
            torch.testing.assert_close(logits, alone.logits[0], rtol=1e-4, atol=1e-5)


KINDS = [LayerMask(mask, window) for mask in (Mask.BLOCK, Mask.CAUSAL) for window in (None, 7)]
KINDS += [LayerMask(Mask.SLIDING_BLOCK, window) for window in (3, 20)]


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_flex_attention_sees_what_the_dense_mask_shows(kind: LayerMask) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, 127, (2, 16), generator=generator).sort(1).values
    first = (anchors - torch.randint(0, 40, (2, 16), generator=generator)).clamp(min=0)
    seen = blocks_after_context(BlockPlaces(first, anchors, 8, 128), kind)
    q = torch.randn(2, 4, 128, 16, generator=generator)
    k, v = (torch.randn(2, 2, 256, 16, generator=generator) for _ in range(2))
    dense = attend(q, k, v, make_mask(seen, MaskShape(2, 128, 256, CPU)), 0.25)
    blocks = block_mask(seen, MaskShape(2, 128, 256, CPU))
    flex = flex_attention(q, k, v, block_mask=blocks, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", [1, 3 * 2 * 128 * 128, 1 << 26], ids=["row", "some", "all"])
@pytest.mark.parametrize("kind", [LayerMask(Mask.BLOCK), LayerMask(Mask.CAUSAL, 150)], ids=str)
def test_blocks_of_a_mask_are_those_of_pytorch(
    kind: LayerMask, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are looked at at once; whole blocks, and lengths that end within one."""
    monkeypatch.setattr(masks, "PART", part)
    anchors = torch.arange(7, 391, 12).repeat(2, 1)
    first = (anchors - torch.tensor([[300], [20]])).clamp(min=0)
    seen = blocks_after_context(BlockPlaces(first, anchors, 16, 395), kind)
    got = block_mask(seen, MaskShape(2, 512, 907, CPU))
    want = create_block_mask(seen, 2, None, 512, 907, device="cpu")
    assert got.seq_lengths == want.seq_lengths
    assert got.mask_mod is seen
    for mine, theirs in zip(got.as_tuple()[1:], want.as_tuple()[1:], strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine, theirs)
    assert got.full_kv_num_blocks is not None
    assert got.full_kv_num_blocks.any() == (kind.window is None)


@pytest.mark.parametrize("window", [3, 20])
def test_a_sliding_block_sees_what_is_near(window: int) -> None:
    places = BlockPlaces(torch.zeros(1, 1).long(), torch.full((1, 1), 25), 5, 32)
    seen = blocks_after_context(places, LayerMask(Mask.SLIDING_BLOCK, window))
    mask = make_mask(seen, MaskShape(1, 5, 37, CPU))
    assert isinstance(mask, Tensor)
    near = (torch.arange(25, 30)[:, None] - torch.arange(30)).abs() < window
    assert torch.equal(torch.cat((mask[0, 0, :, :25], mask[0, 0, :, 32:]), 1), near)
    assert not mask[0, 0, :, 25:32].any()


def test_anchors_and_labels() -> None:
    batch = packed([[9, 12]], VOCAB)  # supervised: 3 to 8, and 9 + 4 to 20
    assert can_anchor(batch)[0].nonzero().flatten().tolist() == [*range(2, 8), *range(12, 20)]
    noise = torch.rand((1, 21), generator=torch.Generator().manual_seed(0))
    anchors, chosen = sample_anchors(batch, noise, 16)
    assert anchors[chosen].tolist() == [*range(2, 8), *range(12, 20)]
    blocks = blocks_at(batch, torch.tensor([[2, 6, 18]]), torch.tensor([[True, True, False]]), 4)
    assert blocks.valid[0].tolist() == [[True] * 4, [True, True, False, False], [False] * 4]
    assert blocks.tokens[0, 1, :3].tolist() == batch.input_ids[0, 6:9].tolist()
    assert blocks.positions.tolist() == [[2, 6, 9]]


def served(draft: BuiltDraft, target: FrozenTarget, folder: Path) -> DFlashDraft:
    return load_dflash(exported(draft, folder), CPU_F32, 64, target.model)


def exported(draft: BuiltDraft, folder: Path) -> Path:
    export_draft(folder, draft.raw, draft.stored(whole_parameters(draft.model)), torch.float32)
    return folder


class Forced:
    """Draws the tokens of the text, and keeps the scores that it is given."""

    def __init__(self, tokens: Tensor) -> None:
        """`tokens` [D + 1]: the anchor, then what is drawn."""
        self.tokens, self._drawn = tokens, []  # type: ignore[var-annotated]

    def __call__(self, scores: Tensor, first: int, columns: Tensor | None = None) -> Tensor:
        self._drawn.append((scores[0], None if columns is None else columns[0]))
        return self.tokens[None, 1 + first : 1 + first + scores.shape[1]]

    def each(self) -> list[tuple[Tensor, Tensor | None]]:
        """Scores and columns of every draft."""
        return [
            (scores[i], None if columns is None else columns[i])
            for scores, columns in self._drawn
            for i in range(len(scores))
        ]


def serve_block(draft: DFlashDraft, step: Step, place: tuple[int, int]) -> Tensor:
    """Hidden states [R, H] of one block, through paged K/V: its document's context, then it."""
    row = place[0]
    anchor, position = step.anchors[place].item(), step.blocks.positions[place].item()
    config = draft.config
    layout = config.kv_layout(torch.float32)
    loop = Loop.over(draft.forward, layout, draft.layer_masks, config.num_heads, 1)
    if position:
        span = AttentionBatch(
            loop.table[:1], torch.zeros(1, dtype=torch.int32), position, ragged=((0, position),)
        )
        context = AttentionContext(loop.backend, loop.backend.plan(span), span)
        aux = step.states.aux[row, anchor - position : anchor]
        with torch.inference_mode():
            draft.write_context_kv(aux, torch.arange(position), context, None)
    assert config.mask_token_id is not None
    ids = torch.full((1, config.block_size), config.mask_token_id)
    ids[0, 0] = step.batch.input_ids[row, anchor]
    out: Tensor = loop.fixed([position], draft.embed_block(ids))
    return out


HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"head_rank": 12},
    "dspark-gated": {"head_rank": 12, "markov_head_type": "gated"},
    "dspark-rnn": {"head_rank": 12, "markov_head_type": "rnn"},
    "dflash2": {"head_rank": 12, "selector_top_k": 6},
    "domino": {"head_rank": 12},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_block_is_that_of_the_served_draft(
    name: str, target: FrozenTarget, tmp_path: Path
) -> None:
    """Hidden states of the body, and scores of the head after the tokens of the text."""
    made = built(target, name.partition("-")[0], **HEADS[name])
    draft, engine = made.model, served(made, target, tmp_path / "draft")
    step, depth, confidence = Step(target, draft), draft.num_drafts, None
    with torch.no_grad():
        hidden = draft.hidden(step.batch, step.states, step.blocks)
        chunk = draft.chunk(step.states, step.blocks, torch.zeros(()))
        rows = draft.rows(hidden.flatten(0, 1), chunk)
        scores = draft.head.scores(rows)
        if isinstance(draft.head, MarkovHead):
            confidence = draft.head.confidence(rows).sigmoid()
    places = step.chosen.nonzero().tolist()
    assert len(places) >= 8
    for row, block in places:
        of_engine = serve_block(engine, step, (row, block))
        torch.testing.assert_close(hidden[row, block], of_engine, rtol=1e-4, atol=1e-4)
        index, forced = row * step.anchors.shape[1] + block, Forced(step.blocks.tokens[row, block])
        anchor = forced.tokens[:1]
        seen = Block(of_engine[None], draft.first_row, depth, anchor, None, False, None)
        with torch.inference_mode():
            proposal = engine.head.propose(seen, engine, forced)
        drawn = forced.each()
        assert len(drawn) == depth
        for k, (wanted, columns) in enumerate(drawn):
            own = scores[index, k] if columns is None else scores[index, k, columns]
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
        if confidence is not None:
            assert proposal.confidence is not None
            torch.testing.assert_close(confidence[index], proposal.confidence[0])


def test_a_chunked_loss_has_the_gradients_of_the_whole(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of all rows in one piece, plain autograd, against chunks of three blocks."""
    mix, weights = {"ce_weight": 0.3, "kl_weight": 0.5, "l1_weight": 0.7}, PositionWeights(3.0, 0.4)
    draft = built(target, "dflash", dpace=0.4, decay=3.0, **mix).model
    step, zero = Step(target, draft), torch.zeros(())
    monkeypatch.setitem(draft_module.CHUNK_LOGITS, "cpu", 3 * VOCAB * draft.num_drafts)
    found = draft(step.batch, step.states, step.blocks, zero)
    found.total.backward()
    chunked = {name: p.grad for name, p in draft.named_parameters()}
    draft.zero_grad()
    hidden = draft.hidden(step.batch, step.states, step.blocks)
    logits = target.logits(hidden[:, :, 1:]).flatten(0, 1)
    places = (step.anchors.unsqueeze(2) + torch.arange(4)).clamp(max=47)
    of_target = target.logits(step.states.final[torch.arange(2).view(2, 1, 1), places])
    of_target = of_target.flatten(0, 1)
    labels, valid = step.blocks.tokens[:, :, 1:].flatten(0, 1), step.blocks.valid.flatten(0, 1)
    p, q = logits.softmax(-1), of_target.softmax(-1)
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    kl = (q * (q.log() - p.log())).sum(-1)
    losses = 0.3 * ce + 0.5 * kl + 0.7 * (p - q).abs().sum(-1)
    total = (losses * weights.of(ce, valid)).sum()
    torch.testing.assert_close(found.total, total)
    total.backward()
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(chunked[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def serve_chain(forward: Callable[..., Any], loop: Loop, step: Step, place: Any) -> list[Tensor]:
    """Hidden states [H] of every step of a chain, one row at a time after its context.

    `forward`: (loop, first position, ids, hidden states or None for the target's) -> for the LM
    head, and for the next step.
    """
    row, block = place
    anchor, position = int(step.anchors[row, block]), int(step.blocks.positions[row, block])
    tokens, context = step.blocks.tokens[row, block], slice(anchor - position, anchor)
    following = step.batch.input_ids[row, context.start + 1 : anchor + 1]
    states = HiddenStates(step.states.aux[row, context], step.states.final[row, context])
    normed, hidden = forward(loop, 0, following, states, None)
    out = [normed[-1]]
    for k in range(1, len(tokens) - 1):
        normed, hidden = forward(loop, position - 1 + k, tokens[k : k + 1], None, hidden[-1:])
        out.append(normed[-1])
    return out


def check_chains(
    draft: Draft, target: FrozenTarget, new_loop: Callable[[], Loop], forward: Callable[..., Any]
) -> None:
    step = Step(target, draft)
    with torch.no_grad():
        hidden = draft.hidden(step.batch, step.states, step.blocks)
    places = step.chosen.nonzero().tolist()
    assert len(places) >= 8
    for place in places:
        of_engine = serve_chain(forward, new_loop(), step, place)
        torch.testing.assert_close(
            hidden[tuple(place)], torch.stack(of_engine), rtol=1e-4, atol=1e-4
        )


def test_a_chain_is_that_of_the_served_eagle3_draft(target: FrozenTarget, tmp_path: Path) -> None:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:60].sort().values
    draft = built(target, "eagle3", target_layer_ids=(0, 1, 2), ids=ids)
    engine = load_eagle3(exported(draft, tmp_path / "d"), CPU_F32, 64, target.model)
    assert engine.target_token_ids.tolist() == ids.tolist()

    def forward(loop: Loop, start: int, ids: Tensor, states: Any, hidden: Any) -> Any:
        hidden = hidden if states is None else engine.combine_hidden_states(states.aux)
        return loop.ragged([(start, ids)], hidden)

    def new_loop() -> Loop:
        def run(ids: Tensor, positions: Tensor, ctx: AttentionContext, hidden: Tensor) -> Any:
            return engine.forward(ids, hidden, positions, ctx)

        layout = engine.config.kv_layout(torch.float32)
        return Loop.over(run, layout, engine.layer_masks, engine.config.num_heads, 1)

    check_chains(draft.model, target, new_loop, forward)
    assert isinstance(draft.model.head, LMHead)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(draft.model.head.lm_head(hidden), engine.compute_logits(hidden))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_chain_is_that_of_the_served_mtp_layer(name: str, tmp_path: Path) -> None:
    folder = save(family(name), tmp_path / "target")
    target = load_frozen_target(str(folder), torch.float32, CPU, 64)
    draft = built(target, "mtp")
    config = load_nextn_config(exported(draft, tmp_path / "d"))
    engine = load_nextn(tmp_path / "d", config, CPU_F32, 64)

    def forward(loop: Loop, start: int, ids: Tensor, states: Any, hidden: Any) -> Any:
        hidden = hidden if states is None else states.final
        out = loop.ragged([(start, target.model.embed(ids))], hidden)
        return out, out

    def new_loop() -> Loop:
        def run(x: Tensor, positions: Tensor, ctx: AttentionContext, hidden: Tensor) -> Any:
            return engine.forward(x, hidden, positions, ctx)

        layout = engine.kv_layout(config, torch.float32)
        return Loop.over(run, layout, (config.mask,), config.model.num_heads, 1)

    check_chains(draft.model, target, new_loop, forward)


def test_parts_are_even_where_they_can_be() -> None:
    for count in range(1, 300):
        for most in (1, 7, 64, 1000):
            size = draft_module.even_part(count, most)
            assert 1 <= size <= most and -(-count // size) < 2 * -(-count // most)
    assert [draft_module.even_part(8192, 780), draft_module.even_part(127, 60)] == [512, 43]


def test_a_walk_is_that_of_serving() -> None:
    """Ten tokens are labels, the first comes with the prompt, and steps accept 2, 0, 9 drafts."""
    able = np.zeros((1, 14), dtype=bool)
    able[0, 2:12] = True
    right = np.zeros((1, 14), dtype=np.int64)
    right[0, [2, 3, 4, 6, 7]] = 5, 2, 7, 0, 9
    tokens, steps, *reached = walk(right, able, 10)
    assert (tokens, steps) == (3 + 1 + 5, 3)  # nine after the first; the last step is cut short
    assert reached == [2, 2, 1, 1, 0, 0, 0, 0, 0, 0]


def test_training_goes_on_from_an_exported_draft(target: FrozenTarget, tmp_path: Path) -> None:
    for kind in ("dflash", "dspark", "dflash2", "domino", "eagle3", "mtp"):
        given = {"head_rank": 12, "selector_top_k": 6, "target_layer_ids": (0, 1, 2)}
        first = built(target, kind, **given)
        folder = exported(first, tmp_path / kind)
        options = options_of(kind, **given, initial_draft=str(folder), seed=9)
        second = build_draft(options, target, VOCAB - 1)
        kept = dict(second.model.named_parameters())
        for name, value in first.model.named_parameters():
            assert torch.equal(kept[name], value), name
    expected = "initial_draft has block_size 5, this run 7"
    with pytest.raises(ConfigError, match=expected):
        build_draft(
            options_of("dflash", block_size=7, initial_draft=str(tmp_path / "dflash")), target, 0
        )
    with pytest.raises(ConfigError, match="initial_draft has kind 'dspark', this run 'dflash'"):
        build_draft(options_of("dflash", initial_draft=str(tmp_path / "dspark")), target, 0)
    with pytest.raises(ConfigError, match=r"initial_draft .* has no config.json"):
        build_draft(options_of("dflash", initial_draft=str(tmp_path)), target, 0)


def test_weights_are_counted_whatever_form_they_are_kept_in(target: FrozenTarget) -> None:
    """Linears of a CPU are packed when they are prepared, and the model keeps none as they were."""
    stored = load_file(target.folder / "model.safetensors")
    count = sum(weight.numel() for weight in stored.values())
    assert sum(weight.numel() for weight in target.weights.values()) == count
    options = options_of("dflash")
    draft = build_draft(options, target, 0).model
    assert estimate(shape_of(options, target, draft, 1), target, draft, 1).target > 4 * count
    layers = sum(weight.numel() for name, weight in stored.items() if ".layers." in name)
    assert flops_per_step(options, target, draft) > 2 * layers * 2 * 48


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_draft_to_begin_with_keeps_its_vocabulary_and_layers(
    kind: str, target: FrozenTarget, tmp_path: Path
) -> None:
    """Columns of an LM head are those of its tokens, whatever tokens the new data has."""
    ids = torch.arange(10, 70)
    first = built(target, kind, ids=ids, target_layer_ids=(0, 1, 2))
    folder = exported(first, tmp_path / "z")
    kept = initial_vocabulary(folder)
    assert kept is not None and kept.tolist() == ids.tolist()
    options = options_of(kind, initial_draft=str(folder), target_layer_ids=None)
    again = build_draft(options, target, 0, kept)
    assert again.model.target_layer_ids == first.model.target_layer_ids
    assert again.stored(whole_parameters(again.model))["d2t"].tolist() == [10] * 60
    other = options_of(kind, initial_draft=str(folder), draft_vocab_size=50)
    with pytest.raises(ConfigError, match="initial_draft has draft_vocab_size 60, this run 50"):
        build_draft(other, target, 0, kept)
    config = speculators_config(kind, first.raw, target.config, "org/target")
    export_draft(tmp_path / "s", config, {"d2t": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ConfigError, match=r"has the layout of speculators; give .* z-lab"):
        initial_vocabulary(tmp_path / "s")


def test_drafts_of_other_targets_and_damaged_ones_are_refused(
    target: FrozenTarget, tmp_path: Path
) -> None:
    folder = exported(built(target, "dflash", ids=torch.arange(10, 70)), tmp_path / "z")
    options = options_of("dflash", initial_draft=str(folder))
    expected = f"tokens up to {VOCAB}, and the target's vocabulary ends at {VOCAB - 1}"
    with pytest.raises(ConfigError, match=expected):
        build_draft(options, target, 0, torch.tensor([1, VOCAB]))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ConfigError, match=f"{file} cannot be read: .* Download it again"):
        initial_vocabulary(folder)


CANNOT = {
    "gpt-oss": "its attention has sinks or caps its scores",
    "qwen3-next": "it has recurrent layers",
    "deepseek-v2-lite": "not all of its layers keep K and V per head",
}


@pytest.mark.parametrize("name", CANNOT)
def test_targets_whose_states_cannot_be_captured(name: str, tmp_path: Path) -> None:
    folder = save(family(name), tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be captured for training: {CANNOT[name]}. Take"):
        load_frozen_target(str(folder), torch.float32, CPU, 64)


@pytest.mark.parametrize(
    "preset, given, message",
    [
        (None, {"kind": "medusa"}, "kind 'medusa' is not known; one of: dflash, dspark"),
        ("tiny", {}, "preset 'tiny' is not known; one of: smoke, small, base"),
        ("smoke", {"block_size": 300}, "block_size 300 is larger than seq_len 256: no block fits"),
        ("smoke", {"seq_len": 0}, "seq_len must be at least 16, got 0"),
        ("smoke", {"validation_share": 1.0}, "validation_share must lie between 0 and 1, got 1"),
        ("smoke", {"logs": ("paper",)}, "logs 'paper' is not known; one of: jsonl, tensorboard"),
        ("smoke", {"seed": -1}, "seed must be at least 0, at most 4294967295, got -1"),
        ("smoke", {"dpace": 2.0}, "dpace must be at least 0, at most 1, got 2"),
        ("smoke", {"warmup": -1.0}, "warmup must be at least 0, at most 1, got -1"),
        ("smoke", {"final_learning_rate": 3.0}, "final_learning_rate must be .* at most 1, got 3"),
        ("smoke", {"learning_rate": math.nan}, "learning_rate must be at least 0, got nan"),
        ("smoke", {"max_minutes": math.inf}, "max_minutes must be at least 0.01, got inf"),
        ("smoke", {"validate_every": 0}, "validate_every must be at least 1, got 0"),
        ("smoke", {"stored_batches": 3}, "stored_batches needs hidden_states"),
        ("smoke", {"ce_weight": 0.0}, "ce_weight, kl_weight and l1_weight are all 0"),
    ],
)
def test_options_that_are_refused(preset: str | None, given: dict[str, Any], message: str) -> None:
    whole = {"kind": "dflash", "target": "t", "data": "d", "output": "o"}
    with pytest.raises(ConfigError, match=message):
        TrainOptions.of(preset, whole | given)


def test_options_that_are_missing() -> None:
    with pytest.raises(ConfigError, match="target, data must be given"):
        TrainOptions.of("smoke", {"kind": "dflash", "output": "o"})


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", [name for name in HEADS if name != "domino"])
@pytest.mark.parametrize("pruned", [False, True])
def test_both_layouts_are_read_alike(
    name: str, pruned: bool, target: FrozenTarget, tmp_path: Path
) -> None:
    if pruned and name == "dflash2":
        pytest.skip("its head has no pruned vocabulary")
    kind, ids = name.partition("-")[0], torch.arange(10, 70) if pruned else None
    draft = built(target, kind, ids=ids, **HEADS[name])
    export_draft(
        tmp_path / "s",
        speculators_config(kind, draft.raw, target.config, "org/target"),
        speculators_tensors(draft.stored(whole_parameters(draft.model))),
        torch.float32,
    )
    ours = served(draft, target, tmp_path / "z")
    other = load_dflash(tmp_path / "s", CPU_F32, 64, target.model)
    assert replace(other.config, model=ours.config.model, num_target_layers=3) == ours.config
    weights, others = ours.weights(), other.weights()
    assert weights.keys() == others.keys()
    assert all(torch.equal(others[each], weights[each]) for each in weights)


def test_eagle3_in_both_layouts(target: FrozenTarget, tmp_path: Path) -> None:
    draft = built(target, "eagle3", target_layer_ids=(0, 1, 2), ids=torch.arange(10, 70))
    config = speculators_config("eagle3", draft.raw, target.config, "org/target")
    tensors = speculators_tensors(draft.stored(whole_parameters(draft.model)))
    export_draft(tmp_path / "s", config, tensors, torch.float32)
    ours = load_eagle3(exported(draft, tmp_path / "z"), CPU_F32, 64, target.model)
    other = load_eagle3(tmp_path / "s", CPU_F32, 64, target.model)
    assert other.config.aux_layer_ids == ours.config.aux_layer_ids
    assert other.target_token_ids.tolist() == ours.target_token_ids.tolist()
    for one, two in zip(ours.weights().values(), other.weights().values(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ConfigError, match="layout speculators has no domino drafts; known"):
        check_kind("domino")


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_recomputed_activations_give_the_same_gradients(kind: str, target: FrozenTarget) -> None:
    gradients = []
    for recompute in (False, True):
        given = {"target_layer_ids": (0, 1, 2), "activation_checkpointing": recompute}
        draft = built(target, kind, **given).model.train()
        step = Step(target, draft)
        draft(step.batch, step.states, step.blocks, torch.zeros(())).total.backward()
        gradients.append({name: p.grad for name, p in draft.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0, msg=name)
