"""Trees of EAGLE3, NEXTN and STANDALONE drafts in the engine: output and accept lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM
from forerun.evals.prompts import held_out
from tests.engine.test_ddtree import SEEDED, hold_at_every_width, run, total
from tests.engine.test_matrix import hold

TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("name", ["EAGLE3", "NEXTN", "STANDALONE"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (16, 512), (256, 512)])
def test_output_equals_plain_decoding(
    name: str, page_size: int, chunk: int, tight: bool, overlap_depth: int, drafts: dict[str, Path]
) -> None:
    own = {**TREE, "speculative_draft_model_path": str(drafts[name])}
    hold(name, page_size, chunk, overlap_depth, tight, **own)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("name", ["EAGLE3", "NEXTN", "STANDALONE"])
def test_the_width_does_not_change_the_output(name: str, drafts: dict[str, Path]) -> None:
    hold_at_every_width(name, **TREE, speculative_draft_model_path=str(drafts[name]))


@pytest.mark.exhaustive
def test_trees_of_a_small_model_accept_more_than_its_chains(drafts: dict[str, Path]) -> None:
    lengths = []
    for topk in (1, 4):
        own = {"speculative_num_steps": 4, "speculative_eagle_topk": topk}
        own |= {"speculative_draft_model_path": str(drafts["STANDALONE"])}
        lengths.append(total(run("STANDALONE", **own)).accept_length or 0)
    assert 5 - lengths[1] < 0.95 * (5 - lengths[0])  # of 5 tokens at most


@pytest.mark.exhaustive
def test_the_bundled_eagle3_draft() -> None:
    """The output of plain decoding, and longer accept lengths than the chain of as many steps."""
    prompts = [row["prompt"] for row in held_out()[:6]]
    kinds = [{**SEEDED, "sampling_seed": i} if i % 2 else {"temperature": 0} for i in range(6)]
    ids, lengths = [], []
    for name, topk in (("NONE", 1), ("EAGLE3", 1), ("EAGLE3", 4)):
        own = {"speculative_num_steps": 5, "speculative_eagle_topk": topk}
        settings = {"dtype": "float32", "speculative_adaptive": False}
        settings |= {} if name == "NONE" else own
        with LLM(speculative_algorithm=name, **settings) as llm:
            outs = llm.generate(prompts, [{**kind, "max_new_tokens": 48} for kind in kinds])
        ids.append([out.output_ids for out in outs])
        lengths.append(total(outs).accept_length or 0)
    assert ids[1] == ids[0] and ids[2] == ids[0]
    assert lengths[2] >= 1.15 * lengths[1]
