"""Chain drafts in the engine propose what a chain without a K/V cache proposes, and the output is
that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from forerun import LLM
from forerun.executor.step.device_step import DeviceStep
from forerun.sampling.noise import gumbel_argmax, seed_key
from forerun.speculative.base import Draft, ProposeInput
from tests import chain_models as models
from tests.covering import some_of
from tests.engine.test_algorithms import GREEDY, PROMPTS, rules
from tests.engine.test_matrix import hold
from tests.golden_engine import CASES, GOLDEN, golden_llm, poison_on_release
from tests.models.eagle3_oracle import Oracle as Eagle3Oracle
from tests.models.nextn_oracle import Oracle as NextNOracle
from tests.ragged import SETTINGS, divide_at_random

TARGET = GOLDEN / "target"
NAMES = ["EAGLE3", "NEXTN", "STANDALONE"]
JOINED = [f"{name},SUFFIX" for name in NAMES]
# As in test_matrix.py: with few drafts, what is known already still takes steps.
OF_JOINED = {"speculative_num_draft_tokens": 5, "speculative_num_steps": 3}
LONGEST = max(CASES, key=lambda case: len(case["prompt"]))["prompt"]
SEED = 7


@cache
def plain_texts() -> list[list[list[int]]]:
    """Plain decoding of the prompts, greedy and sampled."""
    with golden_llm() as llm:
        runs = [llm.generate(input_ids=PROMPTS, sampling_params=rules(s)) for s in (False, True)]
    return [[out.output_ids for out in run] for run in runs]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    return plain_texts()


# --- proposals ------------------------------------------------------------------------------

Sample = Callable[[Tensor, int], Any]  # (logits, position to sample for) -> index into them
Chain = Callable[[Tensor, int, Sample], list[int]]  # (ids, number of drafts, sample) -> tokens


class Oracles:
    """The drafts after ids [n], where the target has run on all but the last id."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.target = models.hugging_face()
        self.small = models.hugging_face(folders["STANDALONE"])
        nextn = load_file(folders["NEXTN"] / "model.safetensors")
        config = LlamaConfig(**models.CONFIG, attn_implementation="eager")
        self.layer = NextNOracle(nextn, config)
        weights = load_file(folders["EAGLE3"] / "model.safetensors")
        table = self.target.get_input_embeddings().weight
        own = {k: v for k, v in models.EAGLE3.items() if k not in ("architectures", "eagle_config")}
        self.head = Eagle3Oracle(
            {**weights, "embed_tokens.weight": table}, LlamaConfig(**own), "midlayer."
        )
        self.tokens = weights["d2t"] + torch.arange(models.PRUNED)

    def hidden(self, ids: Tensor) -> tuple[Tensor, ...]:
        states = self.target(ids[None, :-1], output_hidden_states=True).hidden_states
        return tuple(state[0] for state in states)

    def eagle3(self, ids: Tensor, count: int, sample: Sample) -> list[int]:
        states = self.hidden(ids)
        layers = models.EAGLE3["eagle_config"][models.AUX]
        h = self.head.fuse(torch.cat([states[i + 1] for i in layers], 1))
        tokens, drafts = ids[1:], []
        for i in range(count):
            normed, further = self.head.forward(tokens, h)
            column = sample(normed[-1] @ self.head.weights["lm_head.weight"].T, len(ids) + i)
            drafts.append(int(self.tokens[column]))
            tokens = torch.cat((tokens, tokens.new_tensor(drafts[-1:])))
            h = torch.cat((h, further[-1:]))
        return drafts

    def nextn(self, ids: Tensor, count: int, sample: Sample) -> list[int]:
        return self.layer.chain(ids, self.hidden(ids)[-1], sample, count)

    def standalone(self, ids: Tensor, count: int, sample: Sample) -> list[int]:
        tokens = ids
        for _ in range(count):
            token = sample(self.small(tokens[None]).logits[0, -1], len(tokens))
            tokens = torch.cat((tokens, token.view(1)))
        return [int(token) for token in tokens[len(ids) :]]


@pytest.fixture(scope="module")
def oracles(drafts: dict[str, Path]) -> Oracles:
    return Oracles(drafts)


EAGER: dict[str, Any] = {"disable_cuda_graph": True}  # `propose` runs in every step


def recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Position of the last token and the proposed drafts, for every step with one request."""
    return recorded_drafts(llm.engine.executor.step, monkeypatch)


def recorded_drafts(
    step: DeviceStep, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, list[int]]]:
    """The same of one executor."""
    algorithm, seen = step.algorithm.algorithm, []
    propose = algorithm.propose

    def recording(step: ProposeInput) -> Draft:
        draft = propose(step)
        seen.append((int(step.start[0]), draft.tokens[0].tolist()))
        return draft

    monkeypatch.setattr(algorithm, "propose", recording)
    return seen


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(("sampled", "chunk"), [(False, 512), (True, 7)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_drafts_equal_a_chain_without_a_cache(
    name: str,
    sampled: bool,
    chunk: int,
    chain_llm: Callable[..., LLM],
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step by step, without and with a cached prefix, with the noise of the sampled positions."""
    columns = oracles.tokens if name == "EAGLE3" else None
    key = torch.tensor(seed_key(SEED))

    def sample(logits: Tensor, position: int) -> Tensor:
        if not sampled:
            return logits.argmax()
        return gumbel_argmax(logits / 0.8, key, torch.tensor(position), columns)

    chain: Chain = vars(Oracles)[name.lower()].__get__(oracles)
    kind = {**GREEDY, "temperature": 0.8 * sampled, "sampling_seed": SEED}
    with chain_llm(name, chunked_prefill_size=chunk, speculative_num_steps=3) as llm:
        seen = recorded(llm, monkeypatch)
        outs = [llm.generate(input_ids=LONGEST, sampling_params=kind) for _ in ("cold", "warm")]
    assert outs[1].meta_info["cached_tokens"] > 16 > outs[0].meta_info["cached_tokens"]
    lengths = [out.meta_info["spec_accept_lengths"] for out in outs]
    assert lengths[0] == lengths[1]
    assert len(seen) == 2 * len(lengths[0]) and max(lengths[0]) > 1
    text = torch.tensor(LONGEST + outs[0].output_ids)
    for start, tokens in seen[: len(lengths[0])]:
        assert tokens == chain(text[: start + 1], 3, sample), start
    assert seen[len(lengths[0]) :] == seen[: len(lengths[0])]


def test_the_target_as_its_own_draft_is_always_right(plain: list[list[list[int]]]) -> None:
    """With the same noise a draft that samples is no worse than a greedy one."""
    own = {"speculative_draft_model_path": str(TARGET), "speculative_num_steps": 6}
    with golden_llm("STANDALONE", **own) as llm:
        for sampled in (False, True):
            for _ in ("cold", "warm"):
                outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
                assert [o.output_ids for o in outs] == plain[sampled]
                for out in outs:
                    assert set(out.meta_info["spec_accept_lengths"][:-1]) == {7}
        llm.engine.check()


# --- output ---------------------------------------------------------------------------------

CELLS = [  # (page size, chunk, overlap depth, tight): every pair of values occurs
    (1, 4, 1, True),
    (16, 512, 1, False),
    (256, 512, 0, True),
    (1, 512, 0, False),
    (16, 4, 0, True),
    (256, 4, 1, False),
]


def cells(every: bool) -> list[tuple[str, tuple[int, int, int, bool]]]:
    """By default a third for each name, and one of those with SUFFIX; with `every` the others."""
    own = {"EAGLE3": CELLS[:2], "NEXTN": CELLS[2:4], "STANDALONE": CELLS[4:]}
    own |= {name: [cell] for name, cell in zip(JOINED, CELLS[3:], strict=True)}
    return [(name, cell) for name in own for cell in CELLS if (cell in own[name]) != every]


def hold_draft(
    name: str, cell: tuple[int, int, int, bool], drafts: dict[str, Path], **settings: Any
) -> None:
    folder = drafts[name.removesuffix(",SUFFIX")]
    own = OF_JOINED if name in JOINED else {}
    hold(name, *cell, speculative_draft_model_path=str(folder), **own, **settings)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *cells(every=False),
        *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in cells(every=True)),
    ],
)
def test_output_equals_plain_decoding(
    name: str, cell: tuple[int, int, int, bool], drafts: dict[str, Path]
) -> None:
    hold_draft(name, cell, drafts)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "cell"), some_of([*zip((*NAMES, *JOINED), CELLS, strict=True)], 3)
)
def test_output_of_ragged_passes(
    name: str,
    cell: tuple[int, int, int, bool],
    drafts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    division = divide_at_random(monkeypatch)
    hold_draft(name, cell, drafts, **SETTINGS)
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", NAMES)
def test_with_suffix_drafts_a_known_text_takes_fewer_steps(
    name: str, chain_llm: Callable[..., LLM], drafts: dict[str, Path]
) -> None:
    kind = {**GREEDY, "max_new_tokens": 60, "ignore_eos": True}
    with chain_llm(name) as llm:
        alone = llm.generate(input_ids=LONGEST, sampling_params=kind)
    folder = str(drafts[name])
    with golden_llm(f"{name},SUFFIX", speculative_draft_model_path=folder) as llm:
        first, again = (llm.generate(input_ids=LONGEST, sampling_params=kind) for _ in range(2))
        llm.engine.check()
    assert alone.output_ids == first.output_ids == again.output_ids
    assert again.meta_info["spec_verify_ct"] < alone.meta_info["spec_verify_ct"] / 2


WIDTHS = (1, 2, 4, 6)  # adaptive widths for 5 drafts


def alternate_widths(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles through all widths, step by step."""
    widths, steps = llm.engine.scheduler.widths, iter(range(10**6))
    assert widths.widths == WIDTHS
    monkeypatch.setattr(
        widths, "_choose", lambda _, max_index: WIDTHS[next(steps) % (max_index + 1)]
    )


def hold_any_width(
    start: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    plain: list[list[list[int]]] | None = None,
) -> None:
    """Holds the drafts of 5 steps equal at every width; with `plain`, also the texts to it."""
    drafts: list[dict[int, list[int]]] = []
    for adaptive in (False, True):
        with start(speculative_num_steps=5, speculative_adaptive=adaptive) as llm:
            if adaptive:
                alternate_widths(llm, monkeypatch)
            seen = recorded(llm, monkeypatch)
            llm.generate(input_ids=LONGEST, sampling_params={**GREEDY, "max_new_tokens": 64})
            drafts.append(dict(seen))
            for sampled in (False, True) if plain is not None else ():
                outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
                assert [o.output_ids for o in outs] == plain[sampled]
            llm.close()  # a step may still be in flight
            llm.engine.check()
    full, some = drafts
    common = full.keys() & some.keys()
    assert len(common) > 3 and {len(some[at]) for at in common} == {1, 3, 5}
    assert all(some[at] == full[at][: len(some[at])] for at in common)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("name", NAMES)
def test_the_width_does_not_change_the_drafts(
    name: str, chain_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's K/V is complete after plain steps in between."""
    hold_any_width(partial(chain_llm, name, **EAGER), monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", NAMES)
def test_the_width_does_not_change_the_output(
    name: str,
    overlap_depth: int,
    plain: list[list[list[int]]],
    chain_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"speculative_num_steps": 5, "speculative_adaptive": True}
    with chain_llm(name, overlap_depth=overlap_depth, **own) as llm:
        alternate_widths(llm, monkeypatch)
        for sampled in (False, True):
            for _ in ("cold", "warm"):
                outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
                assert [o.output_ids for o in outs] == plain[sampled]
        assert set(llm.engine.scheduler.widths.chosen) == set(WIDTHS)
        llm.close()  # a step may still be in flight
        llm.engine.check()


def test_the_targets_own_checkpoint_provides_the_nextn_layer(
    drafts: dict[str, Path], plain: list[list[list[int]]]
) -> None:
    settings: dict[str, Any] = {
        "speculative_algorithm": "NEXTN",
        "speculative_adaptive": False,
        "dtype": "float32",
        "skip_tokenizer_init": True,
    }
    lengths = []
    for own in ({}, {"speculative_draft_model_path": str(drafts["NEXTN"])}):
        with LLM(drafts["NEXTN"], **settings, **own) as llm:
            poison_on_release(llm)
            outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(False))
            assert [o.output_ids for o in outs] == plain[0]
            lengths.append([o.meta_info["spec_accept_lengths"] for o in outs])
            assert llm.explain()["num_verify_tokens"] == 4
            llm.engine.check()
    assert lengths[0] == lengths[1] and max(map(max, lengths[0])) == 4


def test_the_bundled_head() -> None:
    """Its acceptance is high enough to show mistakes in its inputs."""
    question = (
        "Diana is 11 years older than Kenji. Felix is twice as old as Diana. If Kenji is 8 years"
        " old, how old are the three of them together?"
    )
    chat = [{"role": "user", "content": question}]
    texts = []
    for name in (None, "EAGLE3"):
        with LLM(speculative_algorithm=name, dtype="float32", speculative_adaptive=False) as llm:
            outs = [
                llm.chat(chat, {"temperature": t, "max_new_tokens": 64, "sampling_seed": 1})
                for t in (0.0, 0.8)
            ]
            texts.append([out.output_ids for out in outs])
            if name is not None:
                assert all(out.meta_info["spec_accept_length"] > 5.5 for out in outs)
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_a_draft_with_the_full_vocabulary(tmp_path: Path, plain: list[list[list[int]]]) -> None:
    """speculators' format, which gives the number of drafts; LM head of the target."""
    folder = models.eagle3(tmp_path / "draft", whole=True)
    with golden_llm("EAGLE3", speculative_draft_model_path=str(folder)) as llm:
        assert llm.engine.limits.max_verify_tokens == 3
        for sampled in (False, True):
            outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
            assert [o.output_ids for o in outs] == plain[sampled]
            assert max(max(o.meta_info["spec_accept_lengths"]) for o in outs) > 1


# --- on a GPU -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", [*NAMES, *JOINED])
def test_text_on_a_gpu(
    name: str, cell: tuple[int, int, int, bool], graph: bool, drafts: dict[str, Path]
) -> None:
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    hold_draft(name, cell, drafts, **own)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_launching_a_step_does_not_synchronize(name: str, chain_llm: Callable[..., LLM]) -> None:
    """With and without graphs, and with requests without drafts in the batch."""
    kinds = [{**kind, "speculative": i % 2 == 0} for i, kind in enumerate(rules(True))]
    for graph in (True, False):
        with chain_llm(
            name, device="cuda", max_running_requests=4, disable_cuda_graph=not graph
        ) as llm:
            llm.generate(input_ids=PROMPTS[:2], sampling_params=kinds[:2])  # kernels compiled
            launch = llm.engine.executor.launch

            def strict(plan: Any, launch: Callable[[Any], Any] = launch) -> Any:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return launch(plan)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            llm.engine.executor.launch = strict  # type: ignore[method-assign]
            llm.generate(input_ids=PROMPTS, sampling_params=kinds)
