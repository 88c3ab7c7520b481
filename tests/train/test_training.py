"""The training package on sizes of a second: masks, labels, generation, accept length, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forerun_train.toys.accept import matches, walk  # noqa: E402
from forerun_train.toys.anchors import block_labels, sample_anchors, target_aux_hidden_states  # noqa: E402
from forerun_train.toys.draft import (  # noqa: E402
    DraftRun,
    block_guesses,
    block_inputs,
    draft_logits,
    position_weights,
    train_draft,
)
from forerun_train.toys.draft_model import Draft, DraftShape, block_mask, load_draft, save_draft  # noqa: E402
from forerun_train.toys.generate import batches, causal_layers, greedy, head  # noqa: E402
from forerun_train.toys.regen import Samples, verified_chats  # noqa: E402
from forerun_train.toys.target import (  # noqa: E402
    TargetShape,
    build_target,
    label_weights,
    load_target,
    save_target,
)
from forerun_train.toys.tokens import TokenStream  # noqa: E402

SHAPE = TargetShape(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip
DRAFT = DraftShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, vocab_size=64, num_target_layers=3, block_size=4,
    mask_token_id=3, target_layer_ids=(0, 1),
)  # fmt: skip


@pytest.fixture(scope="module")
def target():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = build_target(SHAPE)
    for p in model.parameters():  # far from uniform logits, so that no argmax is a near tie
        if p.ndim >= 2:
            p.data.normal_(std=0.3)
    return model.eval()


def test_block_mask_sees_strictly_before_the_anchor_and_its_own_block() -> None:
    anchors, length, block = torch.tensor([[2, 5]]), 7, 3
    mask = block_mask(anchors, length, block)
    assert mask.shape == (1, 1, 6, 13)
    for row in range(6):
        owner = row // block
        for column in range(13):
            if column < length:
                expected = column < int(anchors[0, owner])
            else:
                expected = (column - length) // block == owner
            assert bool(mask[0, 0, row, column]) == expected


def test_blocks_begin_with_the_anchor_and_labels_end_with_the_response() -> None:
    ids = torch.arange(10, 22)[None]
    anchors, end = torch.tensor([[4, 9]]), torch.tensor([12])
    assert block_inputs(ids, anchors, 4, 3).tolist() == [[14, 3, 3, 3, 19, 3, 3, 3]]
    labels, inside = block_labels(ids, anchors, end, 4)
    assert labels[0, 0].tolist() == [15, 16, 17]
    assert inside.tolist() == [[[True, True, True], [True, True, False]]]


def test_anchors_stay_where_a_next_token_is_known() -> None:
    prompt, end = torch.tensor([5, 30]), torch.tensor([20, 39])
    for seed in range(20):
        anchors = sample_anchors(prompt, end, 7, torch.Generator().manual_seed(seed))
        assert bool((anchors >= prompt[:, None]).all())
        assert bool((anchors < end[:, None] - 1).all())


def test_a_draft_block_cannot_see_its_own_answer(target) -> None:  # type: ignore[no-untyped-def]
    """New text after an anchor changes nothing in that anchor's predictions."""
    torch.manual_seed(1)
    draft = Draft(DRAFT).eval()
    ids = torch.randint(4, 64, (1, 12))
    other = ids.clone()
    other[0, 7:] = torch.randint(4, 64, (5,))
    anchors = torch.tensor([[6]])
    with torch.no_grad():
        a, b = (
            draft_logits(draft, target, x, target_aux_hidden_states(target, x, (0, 1)), anchors)
            for x in (ids, other)
        )
    torch.testing.assert_close(a, b)


def test_position_weights() -> None:
    losses, inside = torch.tensor([[[0.0, 50.0, 0.0]]]), torch.ones(1, 1, 3, dtype=torch.bool)
    plain = position_weights(losses, inside, DraftRun(gamma=7.0))
    torch.testing.assert_close(plain[0, 0], torch.exp(-torch.arange(3) / 7.0))
    paced = position_weights(losses, inside, DraftRun(dpace=0.5))
    torch.testing.assert_close(paced[0, 0], torch.tensor([2.0, 1.0, 0.5]))


def test_what_the_user_says_weighs_little() -> None:
    start, role = 1, 9
    rows = torch.tensor([[1, 5, 30, 31, 2, 1, 9, 40, 41, 2, 50]])
    weights = label_weights(rows, start, role)[0]
    assert (weights == 1.0).tolist() == [
        False,
        False,
        False,
        False,
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert bool((label_weights(torch.full((1, 5), 30), start, role) == 1).all())


def test_layers_agree_with_transformers(target) -> None:  # type: ignore[no-untyped-def]
    ids = torch.randint(4, 64, (2, 9))
    with torch.no_grad():
        *_, x = causal_layers(target, ids)
        torch.testing.assert_close(
            head(target, x), target(input_ids=ids).logits, atol=1e-4, rtol=1e-4
        )


def test_greedy_batches_agree_with_one_at_a_time(target) -> None:  # type: ignore[no-untyped-def]
    prompts = [torch.randint(4, 64, (n,)).tolist() for n in (5, 9, 3, 9)]
    for members, ids, lengths in batches(prompts, 4):
        out, ends = greedy(target, ids, lengths, 8, eos=[2, 0])
        for row, i in enumerate(members):
            alone, end = greedy(
                target, torch.tensor([prompts[i]]), torch.tensor([len(prompts[i])]), 8, eos=[2, 0]
            )
            assert out[row, : ends[row]].tolist() == alone[0, : end[0]].tolist()


def test_verified_answers_are_greedy_answers(target) -> None:  # type: ignore[no-untyped-def]
    """Text not the target's own is cut at the first difference, closed by the target's token."""
    rng = np.random.default_rng(0)
    row = np.concatenate(
        [[1, 20], rng.integers(10, 60, 4), [2, 1, 9, 10], rng.integers(10, 60, 30), [2]]
    )
    tokens = np.tile(row, 4).astype(np.uint16)
    stream = TokenStream(tokens, np.arange(3, dtype=np.int64) * len(row))
    found = verified_chats(target, stream, 3, 44, im_end=2, answer_opens=9, batch=2, keep=1)
    assert len(found) == 3
    for ids, prompt, end in zip(found.ids.astype(np.int64), found.prompt, found.end, strict=True):
        assert prompt == 10
        out, ends = greedy(
            target, torch.from_numpy(ids[None, :prompt]), torch.tensor([int(prompt)]), 34, eos=[2]
        )
        assert end <= ends[0]
        assert out[0, :end].tolist() == ids[:end].tolist()


def test_walk_is_the_step_loop(target) -> None:  # type: ignore[no-untyped-def]
    """Accept length read off one pass equals the one of a propose, verify, commit loop."""
    torch.manual_seed(3)
    draft = Draft(DRAFT).eval()
    ids = torch.randint(4, 64, (1, 6))
    out, ends = greedy(target, ids, torch.tensor([6]), 24, eos=[2])
    end = int(ends[0])
    text = out[0, :end]
    steps, at = 0, 6
    with torch.no_grad():
        while at < end - 1:
            context = text[None, : at + 1]
            aux_hidden_states = target_aux_hidden_states(target, context, DRAFT.target_layer_ids)
            guess = draft_logits(draft, target, context, aux_hidden_states, torch.tensor([[at]]))[
                0, 0
            ].argmax(-1)
            *_, x = causal_layers(target, torch.cat([context, guess[None]], dim=1))
            truth = head(target, x)[0, at:].argmax(-1)
            took = int((guess == truth[:-1]).long().cumprod(0).sum())
            at, steps = at + took + 1, steps + 1
    assert walk(matches(block_guesses(draft, target), text, 6, end, chunk=5), 3)[0] == steps


def test_walk_counts() -> None:
    assert walk([2, 0, 0, 1, 0, 0], 3) == (2, [2, 1, 0])
    assert walk([0], 3) == (0, [0, 0, 0])


@pytest.mark.exhaustive
def test_draft_learns(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(4)
    ids = np.tile(np.arange(4, 44, dtype=np.uint16), (16, 1))
    samples = Samples(ids, np.full(16, 6, np.int32), np.full(16, 40, np.int32))
    saved: list[int] = []
    run = DraftRun(
        batch=(8,), anchors=4, max_steps=200, seconds=60, lr=1e-2, compile=False, save_every=100
    )
    draft = Draft(DRAFT)
    train_draft(draft, target, [samples], run, tmp_path / "log.jsonl", save=lambda: saved.append(1))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 20
    assert len(saved) == 2
    text = torch.arange(4, 44)
    assert sum(matches(block_guesses(draft.eval(), target), text, 6, 40)) > 34


def test_files_round_trip(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save_target(target, SHAPE, tmp_path / "target", eos=[2, 0], pad=0)
    again = load_target(tmp_path / "target", "cpu", torch.float32)
    rounded = {k: v.bfloat16().float() for k, v in target.state_dict().items()}
    assert all(torch.equal(v, rounded[k]) for k, v in again.state_dict().items())
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    ids = torch.randint(4, 64, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, again(input_ids=ids).logits)

    draft = Draft(DRAFT)
    save_draft(draft, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 1]}
    assert config["block_size"] == 4
    back = load_draft(tmp_path / "draft")
    assert back.shape == DRAFT
    assert all(
        torch.equal(v.bfloat16().float(), back.state_dict()[k])
        for k, v in draft.state_dict().items()
    )
