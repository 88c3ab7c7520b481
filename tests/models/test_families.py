"""Every model family compared with transformers, on small random configs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.layers import gemm, linear
from forerun.layers.gemm import LibraryGemm
from forerun.layers.residual import AuxHiddenStates
from forerun.models.base import CausalLM
from forerun.models.loader import load_target
from tests.models.support import CPU, FAMILIES, Loop, family, save

LENGTH = 30  # more than the sliding windows and several pages


@dataclass
class Pair:
    model: CausalLM
    ids: Tensor  # [LENGTH]
    logits: Tensor  # [LENGTH, V], of transformers
    hidden: tuple[Tensor, ...]  # of every layer, [LENGTH, H]


def reference(hf: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    with torch.no_grad():
        out = hf(ids[None], output_hidden_states=True)
    return out.logits[0], tuple(h[0] for h in out.hidden_states)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    hf = family(request.param)
    folder = save(hf, tmp_path_factory.mktemp(request.param))
    ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))
    logits, hidden = reference(hf, ids)
    return Pair(load_target(folder, torch.float32, CPU), ids, logits, hidden)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_prefill(pair: Pair) -> None:
    hidden, aux_hidden_states = Loop.of_model(pair.model).ragged([(0, pair.ids)])
    close(pair.model.compute_logits(hidden), pair.logits)
    close(hidden, pair.hidden[-1])
    assert aux_hidden_states is None


@pytest.mark.parametrize("chunks", [(1, 5, 2, 13, 9), (7, 23)])
def test_chunked_prefill(pair: Pair, chunks: tuple[int, ...]) -> None:
    loop, start = Loop.of_model(pair.model), 0
    for size in chunks:
        hidden, _ = loop.ragged([(start, pair.ids[start : start + size])])
        close(pair.model.compute_logits(hidden), pair.logits[start : start + size])
        start += size
    assert start == LENGTH


@pytest.mark.parametrize("width", [1, 4])
def test_decode_in_a_batch(pair: Pair, width: int) -> None:
    """Two requests of different lengths, prefilled in one forward, decode in one batch."""
    loop = Loop.of_model(pair.model, requests=2)
    starts = [5, 13]
    loop.ragged([(0, pair.ids[:s]) for s in starts])
    for _ in range(3):
        ids = torch.cat([pair.ids[s : s + width] for s in starts])
        logits = pair.model.compute_logits(loop.fixed(starts, ids)[0])
        close(logits, torch.cat([pair.logits[s : s + width] for s in starts]))
        starts = [s + width for s in starts]


def test_tokens_past_the_committed_ones_are_overwritten(pair: Pair) -> None:
    """Rejected drafts have written K/V that the next step must not read."""
    loop = Loop.of_model(pair.model)
    loop.ragged([(0, pair.ids[:8])])
    loop.fixed([8], (pair.ids[8:12] + 1) % 96, num_committed=0)
    hidden, _ = loop.fixed([8], pair.ids[8:12])
    close(pair.model.compute_logits(hidden), pair.logits[8:12])


def test_captured_layers_are_transformers_hidden_states(pair: Pair) -> None:
    _, aux_hidden_states = Loop.of_model(pair.model).ragged([(0, pair.ids)], (1, 0))
    assert aux_hidden_states is not None
    close(aux_hidden_states, torch.cat((pair.hidden[2], pair.hidden[1]), 1))


@pytest.mark.covering(0)
@pytest.mark.parametrize("selects", [True, False])
def test_final_hidden_states_of_some_tokens(
    pair: Pair, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a family's layers do not call `after_attention`, and compute all tokens."""
    if not selects:
        monkeypatch.setattr(AuxHiddenStates, "after_attention", lambda aux, layer, x, r: (x, r))
    parts = [(0, pair.ids[:11]), (0, pair.ids)]
    rows = torch.tensor([10, 40, 3])
    whole, captured = Loop.of_model(pair.model, requests=2).ragged(parts, (1,))
    some, aux = Loop.of_model(pair.model, requests=2).ragged(parts, (1,), rows)
    assert len(some) == len(rows)
    close(some, whole[rows])
    assert torch.equal(aux, captured)


def test_the_last_layer_is_captured_before_the_final_norm(pair: Pair) -> None:
    last = pair.model.config.num_layers - 1
    hidden, aux_hidden_states = Loop.of_model(pair.model).ragged([(0, pair.ids)], (last,))
    close(pair.model.model.norm.norm(aux_hidden_states), hidden)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-next"])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    hf = family(name)
    model = load_target(save(hf, tmp_path), torch.bfloat16, CPU)
    ids = torch.arange(LENGTH)
    with torch.no_grad():
        want = hf.to(torch.bfloat16)(ids[None]).logits[0].float()
        exact = hf.float()(ids[None]).logits[0]
    got = model.compute_logits(Loop.of_model(model).ragged([(0, ids)])[0])
    assert got.dtype == torch.bfloat16
    # About as close to float32 with the same weights as transformers in bfloat16.
    assert (got.float() - exact).abs().mean() < 1.5 * (want - exact).abs().mean()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "glm4", "gemma3"])
def test_gemms_add_to_the_residual_in_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of many tokens do on a GPU. What is captured stays as it was."""
    added = []
    monkeypatch.setattr(gemm, "MIN_IN_PLACE_TOKENS", 1)
    monkeypatch.setattr(linear, "gemm_for", lambda weight, bias, *_: LibraryGemm(weight, bias))
    in_place = LibraryGemm.add_

    def add(self: LibraryGemm, x: Tensor, residual: Tensor) -> None:
        added.append(residual.shape)
        in_place(self, x, residual)

    monkeypatch.setattr(LibraryGemm, "add_", add)
    hf = family(name)
    model = load_target(save(hf, tmp_path), torch.float32, CPU)
    ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))
    logits, hidden = reference(hf, ids)
    out, captured = Loop.of_model(model).ragged([(0, ids)], (0, 1))
    close(model.compute_logits(out), logits)
    close(captured, torch.cat((hidden[1], hidden[2]), 1))
    assert bool(added) == (name not in ("glm4", "gemma3"))  # which norm outputs before they add
