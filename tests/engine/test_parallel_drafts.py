"""P-EAGLE (EAGLE3) and PARD (STANDALONE): all drafts of a step from one pass over masks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from forerun.core.errors import ConfigError
from forerun.sampling.noise import gumbel_argmax, seed_key
from tests import chain_models as models
from tests.engine.test_algorithms import GREEDY
from tests.engine.test_chain_drafts import LONGEST, hold_any_width, plain_texts, recorded
from tests.engine.test_chain_settings import with_tokenizer
from tests.engine.test_matrix import hold
from tests.golden_engine import golden_llm
from tests.models.eagle3_oracle import Oracle

NAMES = ["EAGLE3", "STANDALONE"]
SEED = 7
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("parallel")
    return {"EAGLE3": models.peagle(root / "peagle"), "STANDALONE": models.pard(root / "pard")}


class References:
    """Logits of `count` drafts after ids [n], of which the target has run on all but the last."""

    def __init__(self, folders: Folders) -> None:
        self.target = models.hugging_face()
        self.small = models.hugging_face(folders["STANDALONE"])
        weights = load_file(folders["EAGLE3"] / "model.safetensors")
        left_out = ("architectures", "eagle_config", "draft_vocab_size", "target_hidden_size")
        own = {k: v for k, v in models.EAGLE3.items() if k not in left_out}
        own |= {"num_hidden_layers": 2, "attn_implementation": "eager"}
        self.head = Oracle(weights, LlamaConfig(**own), "midlayer.")
        self.tokens = weights["d2t"] + torch.arange(models.PRUNED)

    @torch.inference_mode()
    def logits(self, name: str, ids: Tensor, count: int) -> Tensor:
        if name == "STANDALONE":
            masked = torch.cat((ids, ids.new_full((count - 1,), models.MASK)))
            logits: Tensor = self.small(masked[None]).logits[0, -count:]
            return logits
        states = self.target(ids[None, :-1], output_hidden_states=True).hidden_states
        layers = models.EAGLE3["eagle_config"][models.AUX]
        aux = torch.cat([states[i + 1][0] for i in layers], 1)
        return self.head.parallel(ids, aux, models.MASK, count)

    def drafts(self, name: str, ids: Tensor, count: int, sampled: bool) -> list[int]:
        columns = self.tokens if name == "EAGLE3" else torch.arange(models.VOCAB)
        logits = self.logits(name, ids, count)
        if not sampled:
            return columns[logits.argmax(-1)].tolist()
        key = torch.tensor(seed_key(SEED))
        drawn = [
            gumbel_argmax(row / 0.8, key, torch.tensor(len(ids) + i), columns)
            for i, row in enumerate(logits)
        ]
        return columns[torch.stack(drawn)].tolist()


@pytest.fixture(scope="module")
def references(folders: Folders) -> References:
    return References(folders)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("sampled", "chunk"), [(False, 512), (True, 7), (False, 1)], ids=["greedy", "seeded", "single"]
)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_equal_one_pass_without_a_cache(
    name: str,
    sampled: bool,
    chunk: int,
    steps: int,
    folders: Folders,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step by step, without and with a cached prefix: nothing reads the K/V of masks again."""
    kind = {**GREEDY, "temperature": 0.8 * sampled, "sampling_seed": SEED}
    own: dict[str, Any] = {"chunked_prefill_size": chunk, "speculative_num_steps": steps}
    with golden_llm(name, speculative_draft_model_path=str(folders[name]), **own) as llm:
        seen = recorded(llm, monkeypatch)
        outs = [llm.generate(input_ids=LONGEST, sampling_params=kind) for _ in ("cold", "warm")]
    assert outs[1].meta_info["cached_tokens"] > 16 > outs[0].meta_info["cached_tokens"]
    lengths = [out.meta_info["spec_accept_lengths"] for out in outs]
    text = torch.tensor(LONGEST + outs[0].output_ids)
    assert len(seen) == 2 * len(lengths[0]) and max(lengths[0]) > 1
    for start, tokens in seen[: len(lengths[0])]:
        assert tokens == references.drafts(name, text[: start + 1], steps, sampled), start
    assert seen[len(lengths[0]) :] == seen[: len(lengths[0])]


CELLS = [(1, 4, 1, True), (16, 512, 0, True), (256, 4, 0, False), (16, 4, 1, False)]


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", NAMES)
def test_output_equals_plain_decoding(
    name: str, cell: tuple[int, int, int, bool], folders: Folders
) -> None:
    hold(name, *cell, speculative_draft_model_path=str(folders[name]))


@pytest.mark.exhaustive
@pytest.mark.covering(0)
@pytest.mark.parametrize("overlap_depth", [1, 0], ids=["overlap", "sync"])
@pytest.mark.parametrize("name", NAMES)
def test_the_width_does_not_change_drafts_or_output(
    name: str, overlap_depth: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"speculative_draft_model_path": str(folders[name]), "disable_cuda_graph": True}
    start = partial(golden_llm, name, overlap_depth=overlap_depth, **own)
    hold_any_width(start, monkeypatch, plain_texts())


@pytest.mark.parametrize("name", NAMES)
def test_there_are_eight_drafts_by_default(name: str, folders: Folders) -> None:
    with golden_llm(name, speculative_draft_model_path=str(folders[name])) as llm:
        assert llm.engine.limits.max_verify_tokens == 9


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_refused(name: str, folders: Folders) -> None:
    own = {"speculative_draft_model_path": str(folders[name]), "speculative_eagle_topk": 4}
    with pytest.raises(ConfigError, match=r"must be 1 \(a chain\), got 4: .* all tokens at once"):
        golden_llm(name, **own)


PARD = [
    ({"pard_token": models.VOCAB}, "pard_token 320 is no token of its vocabulary of 320"),
    ({"pard_token": "<mask>"}, "pard_token '<mask>' is no token"),
    ({"pard_token": 1, "ptd_token_id": 2}, "pard_token and ptd_token_id differ"),
]


@pytest.mark.parametrize(("changes", "words"), PARD)
def test_masks_that_cannot_be_are_refused(
    changes: dict[str, Any], words: str, folders: Folders, tmp_path: Path
) -> None:
    config = json.loads((folders["STANDALONE"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=words):
        golden_llm("STANDALONE", speculative_draft_model_path=str(tmp_path))


def test_a_draft_without_its_mask_state_is_refused(folders: Folders, tmp_path: Path) -> None:
    weights = load_file(folders["EAGLE3"] / "model.safetensors")
    del weights["mask_hidden"]
    config = json.loads((folders["EAGLE3"] / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"lacks 1 tensor.*mask_hidden"):
        golden_llm(
            "EAGLE3",
            speculative_draft_model_path=str(models.write(tmp_path, config, weights)),
        )


def test_the_mask_may_be_a_token_of_the_draft_alone(folders: Folders, tmp_path: Path) -> None:
    """Training adds it to the draft's tokenizer."""
    words = [f"w{i}" for i in range(models.MASK)]
    target = with_tokenizer(tmp_path / "target", models.TARGET, words)
    draft = with_tokenizer(tmp_path / "draft", folders["STANDALONE"], [*words, "<mask>"])
    other = with_tokenizer(tmp_path / "other", folders["STANDALONE"], [*words[:-1], "x", "<mask>"])
    own = {"skip_tokenizer_init": False}
    with golden_llm("STANDALONE", Path(target), speculative_draft_model_path=draft, **own) as llm:
        assert llm.generate(input_ids=LONGEST, sampling_params=GREEDY).output_ids
    with pytest.raises(ConfigError, match="differ at 'w318'"):
        golden_llm("STANDALONE", Path(target), speculative_draft_model_path=other, **own)
