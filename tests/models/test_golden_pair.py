"""The golden pair in a greedy loop of models and masks, without the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionContext
from forerun.kvcache.layouts import ModelLayout
from forerun.models.dflash import load_dflash
from forerun.models.loader import load_target
from tests.models.support import CPU, CPU_F32, PAGE, PAGES_PER_REQUEST, Loop

FOLDER = Path(__file__).parents[1] / "golden" / "zlab-llama-b10"
CASES = json.loads((FOLDER / "cases.json").read_text())
SHORT = [
    i
    for i, c in enumerate(CASES)
    if len(c["prompt"]) + c["max_new_tokens"] + 10 < PAGE * PAGES_PER_REQUEST
]


class Pair:
    """One request, positions 0 … 127; `start` is the position of the last token."""

    def __init__(self) -> None:
        self.target = load_target(FOLDER / "target", torch.float32, CPU)
        self.draft = load_dflash(FOLDER / "draft", CPU_F32, 256, self.target)
        config = self.draft.config
        layout = ModelLayout.dense(
            config.num_layers, config.num_kv_heads, config.head_dim, torch.float32
        )
        self.loop = Loop.of_model(self.target)
        self.blocks = Loop.over(
            self.draft.forward, layout, self.draft.layer_masks, config.num_heads, requests=1
        )

    def verify(self, start: int, ids: Tensor) -> Tensor:
        """Greedy token after each of `ids`; their aux hidden states become draft context."""
        layers = self.draft.config.target_layer_ids
        hidden, aux = self.loop.ragged([(start, ids)], layers)
        span = AttentionBatch(
            page_table=self.blocks.table,
            start=torch.tensor([start], dtype=torch.int32),
            kv_len_ub=start + len(ids),
            ragged=((start, len(ids)),),
        )
        plan = self.blocks.backend.plan(span)
        positions = torch.arange(start, start + len(ids))
        context = AttentionContext(self.blocks.backend, plan, span)
        self.draft.write_context_kv(aux, positions, context, None)
        return self.target.compute_logits(hidden).argmax(-1)

    def propose(self, start: int, last_token: Tensor) -> Tensor:
        config = self.draft.config
        assert config.mask_token_id is not None
        block = torch.full((config.block_size,), config.mask_token_id)
        block[0] = last_token
        hidden = self.blocks.fixed([start], self.target.embed(block))
        return self.target.compute_logits(hidden[1:]).argmax(-1)

    @torch.inference_mode()
    def generate(self, case: dict[str, Any]) -> tuple[list[int], list[int]]:
        """(new tokens, accept length of each step), run to the end of a block."""
        prompt, limit = case["prompt"], case["max_new_tokens"]
        ids = [*prompt, int(self.verify(0, torch.tensor(prompt))[-1])]
        accept: list[int] = []
        stops = set(case["stop_token_ids"])
        while len(ids) - 1 < len(prompt) + limit and not stops & set(ids[len(prompt) :]):
            start = len(ids) - 1
            drafts = self.propose(start, torch.tensor(ids[-1]))
            sampled = self.verify(start, torch.cat((torch.tensor(ids[-1:]), drafts)))
            accepted = int((drafts == sampled[:-1]).long().cumprod(0).sum())
            ids += sampled[: accepted + 1].tolist()
            accept.append(accepted + 1)
        return ids[len(prompt) :], accept


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def trim(tokens: list[int], case: dict[str, Any]) -> list[int]:
    tokens = tokens[: case["max_new_tokens"]]
    ends = [i for i, token in enumerate(tokens) if token in case["stop_token_ids"]]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("index", SHORT[:8])
def test_output_and_every_accept_length(pair: Pair, index: int) -> None:
    case = CASES[index]
    tokens, accept = pair.generate(case)
    assert trim(tokens, case) == case["output"]
    assert accept == case["accept"]
