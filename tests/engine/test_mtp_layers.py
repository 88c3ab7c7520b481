"""Several MTP layers, one per draft: drafts of every step, and the text of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from forerun import LLM
from forerun.sampling.noise import gumbel_argmax, seed_key
from forerun.speculative.base import Draft, ProposeInput
from tests import chain_models as models
from tests.engine.test_algorithms import GREEDY
from tests.engine.test_chain_drafts import LONGEST, OF_JOINED, hold_any_width, plain_texts, recorded
from tests.engine.test_matrix import hold
from tests.golden_engine import CASES, golden_llm
from tests.models.nextn_oracle import Oracle, chain

LAYERS, SEED = 3, 7
Sample = Callable[[Tensor, int], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.nextn(tmp_path_factory.mktemp("mtp") / "draft", LAYERS)


class Reference:
    """Drafts after ids [n], recomputed from nothing."""

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        config = LlamaConfig(**models.CONFIG, attn_implementation="eager")
        self.layers = [Oracle(weights, config, i) for i in range(LAYERS)]
        self.target = models.hugging_face()

    @torch.inference_mode()
    def chain(self, ids: Tensor, count: int, sample: Sample) -> list[int]:
        hidden = self.target(ids[None, :-1], output_hidden_states=True).hidden_states[-1][0]
        return chain(self.layers, ids, hidden, sample, count)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def draw(sampled: bool) -> Sample:
    key = torch.tensor(seed_key(SEED))

    def sample(logits: Tensor, position: int) -> Tensor:
        if not sampled:
            return logits.argmax()
        return gumbel_argmax(logits / 0.8, key, torch.tensor(position))

    return sample


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("steps", [2, 3, 5])  # fewer than layers, as many, more
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("sampled", "chunk"), [(False, 512), (True, 7), (False, 1)], ids=["greedy", "seeded", "single"]
)
def test_drafts_equal_layers_without_a_cache(
    sampled: bool,
    chunk: int,
    page_size: int,
    steps: int,
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step by step, without and with a cached prefix."""
    kind = {**GREEDY, "temperature": 0.8 * sampled, "sampling_seed": SEED}
    own = {"chunked_prefill_size": chunk, "page_size": page_size, "speculative_num_steps": steps}
    with golden_llm("NEXTN", speculative_draft_model_path=str(folder), **own) as llm:
        seen = recorded(llm, monkeypatch)
        outs = [llm.generate(input_ids=LONGEST, sampling_params=kind) for _ in ("cold", "warm")]
    # Rows of layer i depend on i + 1 tokens after them.
    cached = (len(LONGEST) - LAYERS) // page_size * page_size
    assert [out.meta_info["cached_tokens"] for out in outs] == [0, cached]
    lengths = [out.meta_info["spec_accept_lengths"] for out in outs]
    text = torch.tensor(LONGEST + outs[0].output_ids)
    assert len(seen) == 2 * len(lengths[0]) and max(lengths[0]) > 2
    for start, tokens in seen[: len(lengths[0])]:
        assert tokens == reference.chain(text[: start + 1], steps, draw(sampled)), start
    assert seen[len(lengths[0]) :] == seen[: len(lengths[0])]


@pytest.mark.covering(0)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_layers_look(
    length: int, sampled: bool, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"speculative_draft_model_path": str(folder), "speculative_num_steps": LAYERS + 2}
    with golden_llm("NEXTN", **own) as llm:
        seen = recorded(llm, monkeypatch)
        kind = {**GREEDY, "temperature": 0.8 * sampled, "sampling_seed": SEED}
        out = llm.generate(input_ids=LONGEST[:length], sampling_params=kind)
    text = torch.tensor(LONGEST[:length] + out.output_ids)
    assert seen[0][0] == length
    for start, tokens in seen:
        assert tokens == reference.chain(text[: start + 1], LAYERS + 2, draw(sampled)), start


Tokens = tuple[int, ...]


def beam_search(score: Callable[[Tokens], Tensor], steps: int, topk: int) -> dict[Tokens, float]:
    """All nodes and their log-probabilities; `score`: those of the token after a path."""
    nodes: dict[Tokens, float] = {}
    beams: list[Tokens] = [()]
    for _ in range(steps):
        level: dict[Tokens, float] = {}
        for path in beams:
            logprobs, tokens = score(path).topk(topk)
            for logprob, token in zip(logprobs.tolist(), tokens.tolist(), strict=True):
                level[*path, token] = nodes.get(path, 0.0) + logprob
        nodes |= level
        beams = sorted(level, key=lambda path: -level[path])[:topk]
    return nodes


@pytest.mark.covering(0)
@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("steps", [2, 3, 5])  # fewer than layers, as many, more
def test_trees_equal_layers_without_a_cache(
    steps: int, length: int, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node of every tree is one of the best by the reference's log-probabilities."""
    own = {"speculative_num_steps": steps, "speculative_eagle_topk": 3, "disable_cuda_graph": True}
    with golden_llm("NEXTN", speculative_draft_model_path=str(folder), **own) as llm:
        seen = recorded_trees(llm, monkeypatch)
        kind = {**GREEDY, "max_new_tokens": 12}
        out = llm.generate(input_ids=LONGEST[:length], sampling_params=kind)
    text = torch.tensor(LONGEST[:length] + out.output_ids)
    assert seen[0][0] == length and len(seen) == len(out.meta_info["spec_accept_lengths"])
    for start, paths in seen:

        def score(path: Tokens, known: Tensor = text[: start + 1]) -> Tensor:
            forced, last = iter(path), torch.empty(0)

            def sample(logits: Tensor, _: int) -> int:
                nonlocal last
                last = logits.log_softmax(0)
                return next(forced, 0)

            reference.chain(known, len(path) + 1, sample)
            return last

        nodes = beam_search(score, steps, topk=3)
        assert len(set(paths)) == len(paths) == 3 * steps
        least = sorted(nodes.values(), reverse=True)[len(paths) - 1]
        assert all(nodes[path] >= least - 1e-4 for path in paths), start


def recorded_trees(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Tokens]]]:
    """Position of the last token and the paths of all nodes, for every step with one request."""
    algorithm, seen = llm.engine.executor.step.algorithm.algorithm, []
    propose = algorithm.propose

    def recording(step: ProposeInput) -> Draft:
        draft, paths = propose(step), [()]
        assert draft.parents is not None
        for token, parent in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True):
            paths.append((*paths[parent], token))
        seen.append((int(step.start[0]), paths[1:]))
        return draft

    monkeypatch.setattr(algorithm, "propose", recording)
    return seen


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("cell", [(1, 4, 1, True), (16, 512, 0, True), (256, 4, 0, False)])
def test_output_with_trees(cell: tuple[int, int, int, bool], folder: Path) -> None:
    own = {"speculative_num_steps": 4, "speculative_eagle_topk": 3}
    hold("NEXTN", *cell, speculative_draft_model_path=str(folder), **own)


CELLS = [  # (page size, chunk, overlap depth, tight)
    (1, 4, 1, True),
    (16, 512, 0, True),
    (256, 4, 0, False),
    (16, 4, 1, False),
]


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("cell", CELLS)
def test_output_equals_plain_decoding(cell: tuple[int, int, int, bool], folder: Path) -> None:
    hold("NEXTN", *cell, speculative_draft_model_path=str(folder))


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("cell", CELLS)
def test_output_with_suffix_drafts(cell: tuple[int, int, int, bool], folder: Path) -> None:
    hold("NEXTN,SUFFIX", *cell, speculative_draft_model_path=str(folder), **OF_JOINED)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("overlap_depth", [1, 0], ids=["overlap", "sync"])
def test_the_width_does_not_change_drafts_or_output(
    overlap_depth: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred plain steps are observed with the positions before them."""
    own = {"speculative_draft_model_path": str(folder), "disable_cuda_graph": True}
    start = partial(golden_llm, "NEXTN", overlap_depth=overlap_depth, **own)
    hold_any_width(start, monkeypatch, plain_texts())


def test_there_are_as_many_drafts_as_layers_by_default(tmp_path: Path) -> None:
    deep = models.nextn(tmp_path / "deep", 4)
    with golden_llm("NEXTN", speculative_draft_model_path=str(deep)) as llm:
        assert llm.engine.limits.max_verify_tokens == 5
        out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=GREEDY)
        assert out.output_ids[: len(CASES[0]["output"])] == CASES[0]["output"][:24]
