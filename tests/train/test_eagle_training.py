"""EAGLE-3's trainer on sizes of a second: chains, vocabulary, accept length, files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forerun.attention.base import AttentionContext  # noqa: E402
from forerun.models.eagle3 import load_eagle3  # noqa: E402
from forerun.models.eagle3_config import load_eagle3_config  # noqa: E402
from forerun_train.toys.accept import matches, walk  # noqa: E402
from forerun_train.toys.anchors import target_aux_hidden_states  # noqa: E402
from forerun_train.toys.eagle import (  # noqa: E402
    EagleRun,
    chain_guesses,
    frequent_tokens,
    known_run,
    start_from_target,
    train_eagle,
)
from forerun_train.toys.eagle_model import Eagle, EagleShape, load_eagle, save_eagle  # noqa: E402
from forerun_train.toys.generate import causal_layers, greedy, head  # noqa: E402
from forerun_train.toys.regen import Samples  # noqa: E402
from forerun_train.toys.target import TargetShape, build_target  # noqa: E402
from tests.models.support import CPU_F32, Loop  # noqa: E402

SHAPE = TargetShape(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip
EAGLE = EagleShape(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=64, draft_vocab_size=40, target_layer_ids=(0, 1, 2),
)  # fmt: skip
IDS = torch.arange(4, 44)


@pytest.fixture(scope="module")
def target():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = build_target(SHAPE)
    for p in model.parameters():  # far from uniform logits, so that no argmax is a near tie
        if p.ndim >= 2:
            p.data.normal_(std=0.3)
    return model.eval().requires_grad_(False)


@pytest.fixture
def draft(target):  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    model = Eagle(EAGLE, IDS)
    start_from_target(model, target)
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.1
    return model.eval()


@torch.no_grad()
def test_chains_are_those_of_the_served_model(target, draft, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Every chain of the trainer equals the paged model's, run row by row after its prefix."""
    save_eagle(draft, tmp_path, steps=5)
    draft = load_eagle(tmp_path).eval()  # the weights as rounded on disk
    embed, steps = target.model.embed_tokens, 4
    served = load_eagle3(
        tmp_path, CPU_F32, 64, SimpleNamespace(embed=embed, compute_logits=target.lm_head)
    )
    assert served.config.target_layers(3) == EAGLE.target_layer_ids
    ids = torch.randint(4, 64, (1, 15))
    aux_hidden_states = target_aux_hidden_states(target, ids, EAGLE.target_layer_ids)
    anchors = torch.tensor([[3, 7, 9]])
    chain = draft(embed(ids), aux_hidden_states, anchors, steps)
    for i, anchor in enumerate(anchors[0].tolist()):
        layout = served.config.kv_layout(torch.float32)

        def forward(ids, positions, ctx: AttentionContext, h):  # type: ignore[no-untyped-def]
            return served.forward(ids, h, positions, ctx)

        loop = Loop.over(forward, layout, served.layer_masks, EAGLE.num_attention_heads, 1)
        h = served.combine_hidden_states(aux_hidden_states[0, :anchor])
        normed, h = loop.ragged([(0, ids[0, 1 : anchor + 1])], h)
        for j in range(steps):
            torch.testing.assert_close(normed[-1], chain[j][0, i], rtol=1e-4, atol=1e-4)
            logits = served.compute_logits(normed[-1:])
            torch.testing.assert_close(logits, draft.lm_head(chain[j][0, i])[None])
            row = ids[0, anchor + 1 + j : anchor + 2 + j]
            normed, h = loop.ragged([(anchor + j, row)], h[-1:])


def test_a_chain_sees_only_what_its_step_may(target, draft) -> None:  # type: ignore[no-untyped-def]
    """Step j of the chain after an anchor reads the tokens up to anchor + j and no others."""
    ids = torch.randint(4, 64, (1, 14))
    anchors, steps = torch.tensor([[4, 6]]), 4
    with torch.no_grad():
        aux_hidden_states = target_aux_hidden_states(target, ids, EAGLE.target_layer_ids)
        before = draft(target.model.embed_tokens(ids), aux_hidden_states, anchors, steps)
        for changed in (6, 8):
            other = ids.clone()
            other[0, changed:] = (ids[0, changed:] - 3) % 60 + 4
            aux_hidden_states = target_aux_hidden_states(target, other, EAGLE.target_layer_ids)
            after = draft(target.model.embed_tokens(other), aux_hidden_states, anchors, steps)
            for j in range(steps):
                same = (before[j] - after[j]).abs().amax(-1)[0] < 1e-5
                assert same.tolist() == [a + j < changed for a in (4, 6)]


def test_walk_is_the_step_loop(target, draft) -> None:  # type: ignore[no-untyped-def]
    """Accept length read off one pass equals that of a loop that feeds the draft its own tokens."""
    steps = 3
    draft.lm_head.weight.data = target.lm_head.weight[draft.ids]
    guess = chain_guesses(draft, target, steps)
    torch.manual_seed(5)
    out, ends = greedy(target, torch.randint(4, 64, (1, 6)), torch.tensor([6]), 40, eos=[2])
    end = int(ends[0])
    text, taken, at = out[0, :end], 0, 6
    with torch.no_grad():
        while at < end - 1:
            context = text[: at + 1]
            for _ in range(steps):  # the last token of each pass is a draft of the one before
                said = guess(context[None], torch.tensor([[at]]))[0]
                context = torch.cat([context, said[len(context) - at - 1][None]])
            *_, x = causal_layers(target, context[None])
            truth = head(target, x)[0, at:].argmax(-1)
            held = int((context[at + 1 :] == truth[:-1]).long().cumprod(0).sum())
            at, taken = at + held + 1, taken + 1
    assert walk(matches(guess, text, 6, end, chunk=5), steps)[0] == taken


def test_known_run_ends_at_the_first_foreign_label() -> None:
    known = torch.ones(10, dtype=torch.bool)
    known[7] = False
    labels = torch.tensor([[[1, 7, 2, 3], [1, 2, 3, 4]]])
    inside = torch.tensor([[[True] * 4, [True, True, True, False]]])
    expected = [[[True, False, False, False], [True, True, True, False]]]
    assert known_run(labels, inside, known).tolist() == expected


def test_frequent_tokens_weigh_every_pool_the_same() -> None:
    """Prompts do not count; a pool ten times as large has no more to say."""
    small = Samples(np.array([[9, 5, 5, 6]], np.uint16), np.array([1]), np.array([4]))
    large = Samples(
        np.array([[9, 7, 7, 8]] * 10, np.uint16), np.array([1] * 10), np.array([4] * 10)
    )
    assert frequent_tokens([small, large], 12, 2).tolist() == [5, 7]
    assert frequent_tokens([small, large], 12, 4).tolist() == [5, 6, 7, 8]


@pytest.mark.exhaustive
def test_draft_learns(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """One text of the target's own, learnt by heart: chains hold to their end."""
    prompt = torch.randint(4, 64, (1, 6), generator=torch.Generator().manual_seed(4))
    out, ends = greedy(target, prompt, torch.tensor([6]), 34, eos=[2])
    text, end = out[0], int(ends[0])
    rows = np.tile(text.numpy().astype(np.uint16), (16, 1))
    samples = Samples(rows, np.full(16, 6, np.int32), np.full(16, end, np.int32))
    ids = frequent_tokens([samples], SHAPE.vocab_size, EAGLE.draft_vocab_size)
    draft, saved = Eagle(EAGLE, ids), []
    start_from_target(draft, target)
    run = EagleRun(
        batch=(4,), anchors=8, steps=4, max_steps=250, lr=1e-2, compile=False, save_every=100
    )
    before = walk(matches(chain_guesses(draft, target, 4), text, 6, end), 4)[0]
    facts = train_eagle(
        draft, target, [samples], run, tmp_path / "log.jsonl", save=lambda: saved.append(1)
    )
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 250]
    assert (len(saved), facts["chains"]) == (2, 250 * 4 * 8)
    after = walk(matches(chain_guesses(draft.eval(), target, 4), text, 6, end), 4)[0]
    assert after <= 10 and before > 2 * after  # 33 tokens take 7 steps at best


def test_files(draft, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save_eagle(draft, tmp_path, steps=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert load_eagle3_config(tmp_path).aux_layer_ids == EAGLE.target_layer_ids
    back = load_eagle(tmp_path)
    assert back.shape == EAGLE and torch.equal(back.ids, IDS)
    for name, x in draft.state_dict().items():
        kept = x.bfloat16().float() if x.is_floating_point() else x
        assert torch.equal(kept, back.state_dict()[name])
    with pytest.raises(ValueError, match="3 tokens for a vocabulary of 40"):
        Eagle(EAGLE, torch.arange(3))
