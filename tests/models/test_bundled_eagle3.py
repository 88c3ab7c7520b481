"""The bundled target and EAGLE-3 draft in a greedy loop of models and pages, without an engine."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.models.eagle3 import load_eagle3
from forerun.models.loader import load_target
from tests.models.support import CPU, CPU_F32, PAGE, PAGES_PER_REQUEST, Loop

PAIR = Path(str(files("forerun"))) / "assets" / "pair"
DRAFTS, NEW = 7, 48
QUESTION = (  # from the test set
    "<|im_start|>user\nDiana is 11 years older than Kenji. Felix is twice as old as Diana. If Kenji"
    " is 8 years old, how old are the three of them together?<|im_end|>\n<|im_start|>assistant\n"
)
CODE = "def read_lines(path):\n    with open(path) as f:\n"


class Pair:
    """One request; `at` is the position of the last token, on which no model has run yet."""

    def __init__(self) -> None:
        self.target = load_target(PAIR / "target", torch.float32, CPU)
        self.draft = load_eagle3(PAIR / "eagle3", CPU_F32, 256, self.target)
        self.layers = self.draft.config.target_layers(self.target.config.num_layers)
        self.loop = Loop.of_model(self.target)
        layout, heads = self.draft.config.kv_layout(torch.float32), self.draft.config.num_heads

        def forward(ids: Tensor, positions: Tensor, ctx: AttentionContext, h: Tensor) -> Any:
            return self.draft.forward(ids, h, positions, ctx)

        self.chain = Loop.over(forward, layout, self.draft.layer_masks, heads, requests=1)

    def verify(self, start: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the target: (greedy token after each, aux hidden states)."""
        hidden, aux = self.loop.ragged([(start, ids)], self.layers)
        return self.target.compute_logits(hidden).argmax(-1), aux

    def extend(self, start: int, ids: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the draft on tokens from `start` on; returns the outputs for the last one."""
        normed, h = self.chain.ragged([(start, ids)], self.draft.combine_hidden_states(aux))
        return normed[-1:], h[-1:]

    def propose(self, at: int, normed: Tensor, h: Tensor) -> Tensor:
        """A chain after the draft's outputs at position `at` - 1."""
        drafts = []
        for step in range(DRAFTS):
            column = self.draft.compute_logits(normed).argmax(-1)
            drafts.append(self.draft.target_token_ids[column])
            if step + 1 < DRAFTS:
                normed, h = self.chain.fixed([at + step], drafts[-1], h)
        return torch.cat(drafts)

    @torch.inference_mode()
    def generate(self, prompt: Tensor, drafting: bool) -> tuple[list[int], int]:
        """(NEW tokens, verify steps)."""
        after, aux = self.verify(0, prompt)
        ids, new, steps = prompt, after[-1:], 0
        at = 0  # the draft has run on the tokens before it
        while len(ids) - len(prompt) < NEW:
            ids = torch.cat((ids, new))
            last = self.extend(at, ids[at + 1 :], aux[: len(ids) - at - 1])
            at = len(ids) - 1
            block = self.propose(at, *last) if drafting else new[:0]
            after, aux = self.verify(at, torch.cat((ids[-1:], block)))
            held = int((block == after[:-1]).long().cumprod(0).sum())
            new, steps = after[: held + 1], steps + 1
        return ids[len(prompt) :][:NEW].tolist(), steps


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.mark.exhaustive
@pytest.mark.covering(0)
@pytest.mark.parametrize(("text", "min_accept"), [(QUESTION, 5.5), (CODE, 1.8)])
def test_same_output_in_fewer_steps(pair: Pair, text: str, min_accept: float) -> None:
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    prompt = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(prompt) + NEW + DRAFTS < PAGE * PAGES_PER_REQUEST
    plain, tokens = pair.generate(prompt, drafting=False)
    drafted, steps = pair.generate(prompt, drafting=True)
    assert drafted == plain
    assert tokens / steps >= min_accept


def test_the_head_is_small() -> None:
    assert (PAIR / "eagle3" / "model.safetensors").stat().st_size <= 4_000_000
