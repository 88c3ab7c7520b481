"""The recipe of the bundled pair on sizes of a second: the target, its responses, its drafts."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forerun.llm.bundled import bundled  # noqa: E402
from forerun_train.drafts.blocks import can_anchor  # noqa: E402
from forerun_train.toys import recipe  # noqa: E402
from forerun_train.toys.generate import batches, causal_layers, greedy, head  # noqa: E402
from forerun_train.toys.regen import regenerate, verified_chats  # noqa: E402
from forerun_train.toys.samples import Samples, SampleStream  # noqa: E402
from forerun_train.toys.target import (  # noqa: E402
    TargetShape,
    build_target,
    label_weights,
    load_target,
    save_target,
)
from forerun_train.toys.tokenizer import load_tokenizer  # noqa: E402
from forerun_train.toys.tokens import TokenStream, prompt_text  # noqa: E402
from forerun_train.toys.word_problems import generate  # noqa: E402

SHAPE = TargetShape(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def target():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = build_target(SHAPE)
    for p in model.parameters():  # far from uniform logits, so that no argmax is a near tie
        if p.ndim >= 2:
            p.data.normal_(std=0.3)
    return model.eval()


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


def pool(first: int, size: int) -> Samples:
    """Sample i has the token `first` + i, a prompt of 2 + i % 3 and a response of 4 + i tokens."""
    number = np.arange(size)
    prompt = (2 + number % 3).astype(np.int32)
    ids = np.repeat((first + number)[:, None], 24, 1).astype(np.uint16)
    return Samples(ids, prompt, (prompt + 4 + number).astype(np.int32))


def stream(rows: slice = slice(None)) -> SampleStream:
    return SampleStream([pool(100, 7), pool(200, 5)], [3, 2], 32, 0, rows)


def test_batches_mix_the_pools_and_supervise_responses() -> None:
    seen: list[int] = []
    for batch in islice(stream(), 7):
        assert batch.input_ids.shape == (5, 32)
        first = batch.input_ids[:, 0]
        assert (first[:3] < 200).all() and (first[3:] >= 200).all()
        seen += first[:3].tolist()
        for row, token in enumerate(first.tolist()):
            prompt = 2 + token % 100 % 3
            end = prompt + 4 + token % 100
            assert batch.loss_mask[row].nonzero()[:, 0].tolist() == list(range(prompt, end))
            assert (batch.document_ids[row] == 0).sum() == end
            assert batch.position_ids[row, :end].tolist() == list(range(end))
        assert (can_anchor(batch).sum(1) == batch.loss_mask.sum(1)).all()
    assert [Counter(seen[at : at + 7]) for at in (0, 7, 14)] == 3 * [Counter(range(100, 107))]
    assert seen[:7] != seen[7:14]


def test_samples_go_on_and_are_divided_among_ranks() -> None:
    whole = [batch.input_ids for batch in islice(stream(), 6)]
    first = stream()
    list(islice(first, 2))
    again = stream()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one, two in zip(whole[2:], again, strict=False):
        assert torch.equal(one, two.input_ids)
    halves = [stream(slice(0, 2)), stream(slice(2, 5))]
    for one, *parts in zip(whole, *halves, strict=False):
        assert torch.equal(one, torch.cat([part.input_ids for part in parts]))


@pytest.mark.exhaustive
def test_the_recipe_trains_both_drafts_with_the_trainer(tmp_path: Path) -> None:
    """For the bundled target, on its own answers: files that serve, and their scores."""
    out = tmp_path / "out"
    shutil.copytree(bundled("target"), out / "target")
    tokenizer = load_tokenizer(out / "target")
    prompts = [tokenizer.encode(prompt_text(p)).ids for p in generate(3, 24)]
    model = load_target(out / "target", "cpu", torch.float32)
    found = regenerate(model, prompts, new_tokens=40, length=128, eos=[2, 0], batch=24)
    (out / "data").mkdir()
    for name in ("chat", "python"):
        found.save(out / "data" / f"{name}_samples.npz")
    flags = ["--out", str(out), "--stage", "draft,eagle3,eval", "--tiny", "--eagle-vocab", "512"]
    recipe.main([*flags, "--draft-seconds", "8", "--eagle-seconds", "8"])
    scores = json.loads((out / "scores.json").read_text())
    assert [each["eval"] for each in scores["draft"]] == ["word-problems", "python"]
    for name in ("draft", "eagle3"):
        assert scores[name][0]["accept_length"] >= 1
    config = json.loads((out / "draft" / "config.json").read_text())
    shipped = json.loads((bundled("draft") / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "block_size"):
        assert config[key] == shipped[key]
    assert config["dflash_config"].items() >= shipped["dflash_config"].items()
