"""Heads over a DFlash body: the drafts of every step, against the modules they were trained with.

A wrong head still gives the right text, so the drafts themselves are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.kernels.speculation.best_first import NO_TOKEN
from forerun.models.dflash import DFlashDraft
from forerun.models.dflash_config import load_dflash_config
from forerun.models.heads.base import Block, DraftHead, DraftVocabulary, Draw, Proposal
from forerun.models.heads.gru import DominoHead
from forerun.models.heads.markov import DSparkHead
from forerun.models.heads.plain import PlainHead
from forerun.models.heads.selector import SelectorHead
from forerun.scheduler.adaptive_width import WidthChoice
from forerun.speculative import beam_tree
from forerun.speculative.base import Draft, ProposeInput
from forerun.speculative.beam_tree import propose_tree
from forerun.speculative.ddtree import DDTree, _tree
from forerun.speculative.dflash import DFlash
from tests.golden_engine import golden_llm, without_layout_check

HEADS = Path(__file__).resolve().parent.parent / "golden" / "heads"
NAMES = sorted(folder.name for folder in HEADS.iterdir() if (folder / "cases.json").exists())
QUICK = ("dspark-specforge-rnn-b5", "dflash2-zlab-b8", "domino-zlab-shift-b7")
PAIRS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in NAMES
]

Known = tuple[int, ...]  # tokens up to the anchor


def cases(name: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = json.loads((HEADS / name / "cases.json").read_text())
    return out


def params(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "max_new_tokens": case["max_new_tokens"],
        "stop_token_ids": case["stop_token_ids"],
        "ignore_eos": True,
    }


def pair(folder: Path, **settings: Any) -> LLM:
    settings = {"speculative_draft_model_path": str(folder), **settings}
    return without_layout_check(golden_llm("DFLASH", HEADS / "target", **settings))


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Proposal]]:
    """(anchors, what is proposed) of every step."""
    seen: list[tuple[list[int], Proposal]] = []
    for head in (DSparkHead, SelectorHead, DominoHead, PlainHead):
        _watch(monkeypatch, head, seen)
    return seen


def _watch(
    monkeypatch: pytest.MonkeyPatch,
    head: type[DraftHead],
    seen: list[tuple[list[int], Proposal]],
) -> None:
    propose = head.propose

    def watched(self: DraftHead, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        proposal = propose(self, block, vocabulary, draw)
        seen.append((block.anchor.tolist(), proposal))
        return proposal

    monkeypatch.setattr(head, "propose", watched)


def hold(
    llm: LLM, name: str, proposals: list[tuple[list[int], Proposal]], count: int | None = None
) -> None:
    """One request at a time: every step's drafts and confidences, accept lengths and outputs."""
    for case in cases(name)[:count]:
        proposals.clear()
        out = llm.generate(input_ids=case["prompt"], sampling_params=params(case))
        assert out.output_ids == case["output"]
        ours = out.meta_info["spec_accept_lengths"]  # the last one may be cut short
        assert ours[:-1] == case["accept"][: max(len(ours) - 1, 0)]
        assert len(proposals) == len(ours)
        for (_, proposal), step in zip(proposals, case["steps"], strict=False):
            drafts = proposal.tokens[0].tolist()
            assert drafts == step["draft"][: len(drafts)]
            if "confidence" in step:
                assert proposal.confidence is not None
                wanted = torch.tensor(step["confidence"])[: len(drafts)]
                torch.testing.assert_close(proposal.confidence[0], wanted, atol=1e-4, rtol=0)


def accept_length(llm: LLM, name: str) -> float:
    """Tokens per step over all cases, whose texts must be right."""
    outs = llm.generate(
        input_ids=[case["prompt"] for case in cases(name)],
        sampling_params=[params(case) for case in cases(name)],
    )
    assert [out.output_ids for out in outs] == [case["output"] for case in cases(name)]
    lengths = [length for out in outs for length in out.meta_info["spec_accept_lengths"]]
    return sum(lengths) / len(lengths)


def accepted(name: str) -> float:
    """The same of the reference."""
    lengths = [length for case in cases(name) for length in case["accept"]]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("name", PAIRS)
def test_drafts_are_those_of_the_reference(
    name: str, proposals: list[tuple[list[int], Proposal]]
) -> None:
    with pair(HEADS / name) as llm:
        hold(llm, name, proposals, None if name not in QUICK else 8)
        llm.engine.check()


@pytest.mark.covering(0)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", ["causal-zlab-full-b8", "causal-zlab-mixed-w20-b8"])
def test_a_causal_block_is_cut_to_the_width(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft runs on no more rows than are verified, and they draft as in a whole block."""
    rows: set[int] = set()
    drafts: dict[int, list[int]] = {}
    propose, embed = DFlash.propose, DFlashDraft.embed_block

    def watched_propose(self: DFlash, step: ProposeInput) -> Draft:
        draft = propose(self, step)
        drafts[int(step.start[0])] = draft.tokens[0].tolist()
        return draft

    def watched_embed(self: DFlashDraft, ids: torch.Tensor) -> torch.Tensor:
        rows.add(ids.shape[1])
        return embed(self, ids)

    with pair(HEADS / name, disable_cuda_graph=True) as llm:
        monkeypatch.setattr(llm.engine.scheduler.widths, "choose", lambda _: WidthChoice(width))
        monkeypatch.setattr(DFlash, "propose", watched_propose)
        monkeypatch.setattr(DFlashDraft, "embed_block", watched_embed)
        compared = 0
        for case in cases(name):
            drafts.clear()
            out = llm.generate(input_ids=case["prompt"], sampling_params=params(case))
            assert out.output_ids == case["output"]
            for step in case["steps"]:
                if step["start"] in drafts:
                    assert drafts[step["start"]] == step["draft"][: width - 1]
                    compared += 1
        llm.engine.check()
    assert rows == {width} and compared > 50


TRIED = ("dspark-speculators-b5", "dspark-speculators-fillin-pruned-b6")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TRIED else pytest.mark.exhaustive)
        for name in NAMES
        if name.startswith(("dspark", "domino"))  # the others accept little in either layout
    ],
)
def test_the_other_layout_fails(name: str) -> None:
    """Rows that are read one off predict next to nothing; the text stays."""
    stated = load_dflash_config(HEADS / name).sample_from_anchor
    layout = "fill-in" if stated else "anchor-first"
    with pair(HEADS / name, speculative_draft_layout=layout) as llm:
        assert accept_length(llm, name) < 0.8 * accepted(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("dspark")])
def test_trees_hold_the_drafts_of_chains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every node of a chain's path the first child is the chain's next token."""
    trees: dict[int, tuple[list[int], list[int]]] = {}
    propose = DDTree.propose

    def watched(self: DDTree, step: ProposeInput) -> Draft:
        draft = propose(self, step)
        assert draft.parents is not None
        trees[int(step.start[0])] = draft.tokens[0].tolist(), draft.parents[0].tolist()
        return draft

    monkeypatch.setattr(DDTree, "propose", watched)
    compared, lengths = 0, []
    with tree_of(name) as llm:
        for case in cases(name):
            trees.clear()
            out = llm.generate(input_ids=case["prompt"], sampling_params=params(case))
            assert out.output_ids == case["output"]
            lengths += out.meta_info["spec_accept_lengths"]
            for step in case["steps"]:
                tokens, parents = trees.get(step["start"], ([], []))
                node = 0
                for token in step["draft"]:
                    if node not in parents:
                        break
                    node = parents.index(node) + 1  # the first child: the best one
                    assert tokens[node - 1] == token
                    compared += 1
        llm.engine.check()
    assert compared > 100 and sum(lengths) / len(lengths) > 1.05 * accepted(name)


def test_a_tree_of_a_few_logits(tmp_path: Path) -> None:
    """Tokens that the head does not correct are in no tree."""
    source = HEADS / "dspark-speculators-b5"
    config = json.loads((source / "config.json").read_text()) | {"dspark_draft_topk": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    branched: Counter[int] = Counter()
    best = beam_tree._Nodes.best

    def counted(self: beam_tree._Nodes, count: int) -> Draft:
        for scores, parents in zip(self.scores, self.parents, strict=True):
            branched.update(parents[scores > -torch.inf].tolist())
            assert max(branched.values()) <= 2
            branched.clear()
        return best(self, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_tree._Nodes, "best", counted)
        with tree_of("dspark-speculators-b5", tmp_path, max_running_requests=1) as llm:
            assert accept_length(llm, "dspark-speculators-b5") > 1.5


@pytest.mark.parametrize(
    ("name", "block", "budget"),
    [("dspark-speculators-fillin-pruned-b6", 2, 32), ("dspark-speculators-b5", 2, 255)],
)
def test_short_blocks_give_trees_of_many_nodes(name: str, block: int, budget: int) -> None:
    """More than eight beams give: as many as are verified."""
    sizes = {"speculative_dflash_block_size": block, "speculative_ddtree_budget": budget}
    own: dict[str, Any] = dict(sizes)
    with tree_of(name, **own) as llm:
        assert accept_length(llm, name) > 1.3
        llm.engine.check()


@pytest.mark.parametrize("vocab_size", [2, 8, 300])
@pytest.mark.parametrize("nodes", [1, 9, 255])
def test_a_vocabulary_may_be_smaller_than_a_tree(nodes: int, vocab_size: int) -> None:
    """Nodes that no token is left for have none."""
    logits = torch.randn(3, vocab_size)
    step: Any = SimpleNamespace(num_verify_tokens=nodes + 1)
    tree = _tree(1, nodes, vocab_size)
    draft = propose_tree(step, tree, logits, (lambda beams: logits, lambda x: x))
    given = min(nodes, vocab_size)
    assert draft.tokens[:, :given].equal(logits.topk(given)[1])
    assert draft.parents is not None and not draft.parents.any()
    assert (draft.tokens[:, given:] == NO_TOKEN).all()
    assert draft.tokens.shape == (3, nodes)


def tree_of(name: str, folder: Path | None = None, **settings: Any) -> LLM:
    own: dict[str, Any] = {"speculative_draft_model_path": str(folder or HEADS / name)}
    own |= {"speculative_ddtree_budget": 24, **settings}
    return without_layout_check(golden_llm("DDTREE", HEADS / "target", **own))


def test_a_block_of_one_row() -> None:
    """It drafts one token anchor-first and none as fill-in, so no other layout is checked."""
    name = "dspark-speculators-b5"
    own = {"speculative_num_draft_tokens": 2, "speculative_draft_model_path": str(HEADS / name)}
    with golden_llm("DFLASH", HEADS / "target", **own) as llm:
        outs = llm.generate(
            input_ids=[case["prompt"] for case in cases(name)],
            sampling_params=[params(case) for case in cases(name)],
        )
    assert [out.output_ids for out in outs] == [case["output"] for case in cases(name)]
    assert {n for out in outs for n in out.meta_info["spec_accept_lengths"]} == {1, 2}


def test_joined_drafts_keep_their_confidences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second algorithm that has none: each draft comes with one."""
    monkeypatch.setattr("forerun.executor.device_executor.CONFIDENCE_STEPS", 1)
    name = "dspark-speculators-b5"
    own = {"speculative_draft_model_path": str(HEADS / name), "max_running_requests": 1}
    with golden_llm("DSPARK,NGRAM", HEADS / "target", **own) as llm:
        accept_length(llm, name)
        llm.engine.drain()
        counts = llm.engine.metrics().confidences
    assert counts is not None
    drafts = sum(n for n, *_ in counts.greedy)
    right = sum(n for _, n, _ in counts.greedy)
    assert drafts > 50
    assert abs(right - sum(total for *_, total in counts.greedy)) < 0.15 * drafts


def test_reliability_counts_the_drafts_that_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference's confidences and accept lengths, in bins of a tenth."""
    monkeypatch.setattr("forerun.executor.device_executor.CONFIDENCE_STEPS", 1)
    name = "dspark-speculators-b5"
    with pair(HEADS / name, overlap_depth=0, max_running_requests=1) as llm:
        bins = [[0, 0, 0.0] for _ in range(10)]
        for case in cases(name):
            out = llm.generate(input_ids=case["prompt"], sampling_params=params(case))
            lengths = out.meta_info["spec_accept_lengths"]
            for length, step in zip(case["accept"][: len(lengths)], case["steps"], strict=False):
                for i, confidence in enumerate(step["confidence"][:length]):
                    row = bins[min(int(confidence * 10), 9)]
                    row[0] += 1
                    row[1] += i < length - 1
                    row[2] += confidence
        llm.engine.drain()
        counts = llm.engine.metrics().confidences
        stats = llm.engine.stats()["confidence"]
    assert counts is not None and not any(n for n, *_ in counts.sampled)
    assert sum(n for n, *_ in counts.greedy) > 100
    for ours, (drafts, accepted_drafts, total) in zip(counts.greedy, bins, strict=True):
        assert ours[:2] == [drafts, accepted_drafts]
        assert abs(ours[2] - total) < 1e-4 * (drafts + 1)
    assert stats["greedy"]["drafts"] == sum(n for n, *_ in counts.greedy)


# --- other writers' layouts of the same weights -------------------------------------------------

Files = tuple[dict[str, Any], dict[str, torch.Tensor]]
FLAT = {  # ModelOpt's names
    "markov_head.markov_w1.": "markov_w1.",
    "markov_head.markov_w2.": "markov_w2.",
    "confidence_head.proj.": "confidence_proj.",
}


def decoder(config: dict[str, Any]) -> dict[str, Any]:
    return {**config["transformer_layer_config"], "num_target_layers": 4}


def deepspec(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Files:
    """Flat, no flag of the layout, the target's embedding and LM head in the file."""
    target = load_file(HEADS / "target" / "model.safetensors")
    keys = {
        **decoder(config),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
        **{key: config[key] for key in ("markov_rank", "markov_head_type")},
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 64,
    }
    embedding = target["model.embed_tokens.weight"]
    own = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": target.get("lm_head.weight", embedding),
    }
    return keys, tensors | {name: tensor.clone() for name, tensor in own.items()}


def modelopt(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Files:
    """Keys in dflash_config, heads without a folder of their own."""
    keys = {
        **decoder(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config["block_size"],
        "dflash_config": {
            "projector_type": "dspark",
            "shift_label": True,
            "use_confidence_head": True,
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
            **{key: config[key] for key in ("markov_rank", "markov_head_type")},
        },
    }
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((each for each in FLAT if name.startswith(each)), "")
        renamed[FLAT.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return keys, renamed


def specforge(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Files:
    """As early files: the heads' tensors under `logit_head.`."""
    keys, renamed = modelopt(config, tensors)
    inner = keys["dflash_config"]
    del inner["shift_label"], inner["use_confidence_head"]
    inner |= {"confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
    heads = tuple(FLAT.values())
    prefixed = {
        ("logit_head." if name.startswith(heads) else "") + name: t for name, t in renamed.items()
    }
    return {**keys, "architectures": ["DSparkDraftModel"]}, prefixed


@pytest.fixture(params=[deepspec, modelopt, specforge])
def other_layout(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    source = HEADS / "dspark-speculators-b5"
    config, tensors = request.param(
        json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    yield tmp_path


def test_layouts_of_other_writers(
    other_layout: Path, proposals: list[tuple[list[int], Proposal]]
) -> None:
    with pair(other_layout) as llm:
        hold(llm, "dspark-speculators-b5", proposals, 4)


# --- equality -----------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "sampling_seed": 5},
    {"temperature": 0.7, "sampling_seed": 6, "top_p": 0.8},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
SETTINGS: list[dict[str, Any]] = [
    {"page_size": 1, "chunked_prefill_size": 4, "overlap_depth": 1},
    {"page_size": 16, "max_total_tokens": 160, "overlap_depth": 0},
    {"speculative_dflash_block_size": 4, "overlap_depth": 1},
    {"speculative_num_draft_tokens": 3, "overlap_depth": 1},
]


def texts(llm: LLM) -> list[list[int]]:
    """Some prompts of every kind, twice: the second time they are in the prefix cache."""
    asked = [case["prompt"] for case in cases(NAMES[0])[: 2 * len(KINDS)]]
    kinds = [{**kind, "max_new_tokens": 20, "ignore_eos": True} for kind in KINDS * 2]
    first = llm.generate(input_ids=asked, sampling_params=kinds)
    again = llm.generate(input_ids=asked, sampling_params=kinds)
    assert [out.output_ids for out in first] == [out.output_ids for out in again]
    return [out.output_ids for out in first]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with golden_llm(None, HEADS / "target") as llm:
        return texts(llm)


@pytest.mark.covering(0)
@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("name", NAMES)
def test_output_equals_plain_decoding(
    name: str, settings: dict[str, Any], plain: list[list[int]]
) -> None:
    with pair(HEADS / name, **settings) as llm:
        assert texts(llm) == plain
        llm.engine.check()


@pytest.mark.covering(0)
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=range(2))
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("dspark")])
def test_trees_give_the_output_of_plain_decoding(
    name: str, settings: dict[str, Any], plain: list[list[int]]
) -> None:
    with tree_of(name, **settings) as llm:
        assert texts(llm) == plain
        llm.engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("dspark")])
def test_trees_on_a_gpu(name: str, graph: bool) -> None:
    """Texts in float32, and more accepted than of the reference's chains."""
    settings: dict[str, Any] = {"device": "cuda", "disable_cuda_graph": not graph}
    settings["max_running_requests"] = 8
    with tree_of(name, **settings) as llm:
        assert accept_length(llm, name) > 1.05 * accepted(name)
        llm.engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, graph: bool) -> None:
    """In float32: the texts, and the acceptance of the reference, with one request and with all."""
    settings: dict[str, Any] = {"device": "cuda", "disable_cuda_graph": not graph}
    settings["max_running_requests"] = 8
    known = cases(name)
    with pair(HEADS / name, **settings) as llm:
        outs = llm.generate(
            input_ids=[case["prompt"] for case in known],
            sampling_params=[params(case) for case in known],
        )
        assert [out.output_ids for out in outs] == [case["output"] for case in known]
        ours = [out.meta_info["spec_accept_lengths"][:-1] for out in outs]  # the last is cut short
        same = [own == case["accept"][: len(own)] for own, case in zip(ours, known, strict=True)]
        assert sum(same) >= 0.9 * len(same)  # a draft may be nearly tied with another
        llm.engine.check()


# --- bad input ----------------------------------------------------------------------------------


def test_refusals() -> None:
    for name, settings, words in (
        ("dspark-speculators-b5", {"speculative_dflash_block_size": 6}, "was trained at 5"),
        ("dspark-speculators-b5", {"speculative_draft_layout": "shifted"}, "fill-in or anchor"),
        ("dflash2-zlab-b8", {"speculative_draft_layout": "anchor-first"}, "fill-in layout only"),
        ("domino-zlab-shift-b7", {"speculative_domino_candidate_pool_size": -1}, "0 \\(all"),
    ):
        with pytest.raises(ConfigError, match=words), pair(HEADS / name, **settings):
            pass
    with pytest.raises(ConfigError, match="Domino head gives one token"):
        tree_of("domino-zlab-shift-b7")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("dspark-speculators-b5", "markov_head.markov_w2.weight"),
        ("dflash2-zlab-b8", "candidate_selector.successor_codebook"),
        ("domino-zlab-shift-b7", "embed_proj.2.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    tensors = load_file(HEADS / name / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((HEADS / name / "config.json").read_text())
    with pytest.raises(ConfigError, match=tensor), pair(tmp_path):
        pass


def test_domino_with_a_pool_proposes_from_it() -> None:
    """Text as before; of 512 tokens the likeliest 96 of a block are nearly always enough."""
    name = "domino-zlab-shift-b7"
    with pair(HEADS / name, speculative_domino_candidate_pool_size=96) as llm:
        assert accept_length(llm, name) > 0.85 * accepted(name)
