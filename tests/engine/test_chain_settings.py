"""Settings of chain drafts: chain lengths, and errors for settings that cannot work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from forerun import LLM
from forerun.core.errors import ConfigError
from tests import chain_models as models
from tests.engine.test_algorithms import GREEDY
from tests.golden_engine import CASES, golden_llm

NAMES = ["EAGLE3", "NEXTN", "STANDALONE"]
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "drafted"),
    [
        ({"speculative_eagle_topk": 1}, None),
        ({"speculative_num_steps": 1}, 1),
        ({"speculative_num_draft_tokens": 8}, 7),
        ({"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}, 2),
    ],
)
def test_num_verify_tokens_follow_from_the_settings(
    name: str, settings: dict[str, Any], drafted: int | None, chain_llm: Callable[..., LLM]
) -> None:
    defaults = {"EAGLE3": 5, "NEXTN": 3, "STANDALONE": 4}
    with chain_llm(name, **settings) as llm:
        assert llm.engine.limits.max_verify_tokens == (drafted or defaults[name]) + 1
        if drafted == 1:
            out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=GREEDY)
            assert out.output_ids[: len(CASES[0]["output"])] == CASES[0]["output"][:24]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_num_steps": 0}, "must be >= 1, got 0"),
        ({"speculative_num_draft_tokens": 1}, "must be >= 2"),
        (
            {"speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
            "disagree: a chain of 3 drafts verifies 4 tokens",
        ),
        ({"speculative_eagle_topk": 0}, "must be (>= )?1"),
        ({"speculative_draft_window_size": 64}, "whole context; drop it"),
        ({"speculative_draft_model_path": "/no/such/folder"}, "not a folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    name: str, settings: dict[str, Any], words: str, chain_llm: Callable[..., LLM]
) -> None:
    with pytest.raises(ConfigError, match=words):
        chain_llm(name, **settings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("EAGLE3", "needs a draft model"),
        ("STANDALONE", "needs a draft model"),
        ("NEXTN", "no layer that predicts further ahead"),  # nor has the target one
        ("EAGLE", "as NEXTN does, and .* has none.*EAGLE3; EAGLE-1 and EAGLE-2 heads are not"),
    ],
)
def test_a_missing_draft_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        golden_llm(name)


def test_eagle_is_another_name_of_nextn(drafts: dict[str, Path]) -> None:
    lengths = []
    for name in ("NEXTN", "EAGLE"):
        own = {"speculative_num_steps": 2, "speculative_draft_model_path": str(drafts["NEXTN"])}
        with golden_llm(name, **own) as llm:
            out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=GREEDY)
            lengths.append(out.meta_info["spec_accept_lengths"])
    assert lengths[0] == lengths[1] and max(lengths[0]) > 1
    with golden_llm("EAGLE", **own, speculative_eagle_topk=4) as llm:
        tree = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=GREEDY)
        assert llm.engine.limits.max_verify_tokens == 9
    assert tree.output_ids == out.output_ids


MISMATCHED = [
    ("EAGLE3", {"target_hidden_size": 64}, "target hidden size is 64, the target's 160"),
    ("EAGLE3", {"vocab_size": 512}, "vocabulary is 512, the target's 320"),
    ("EAGLE3", {"eagle_config": {models.AUX: [1, 3, 6]}}, "has 6 layers"),
    ("EAGLE3", {"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 draft"),
    ("NEXTN", {"hidden_size": 128}, "hidden size is 128, the target's 160"),
    ("NEXTN", {"vocab_size": 512}, "vocabulary is 512, the target's 320"),
    ("STANDALONE", {"vocab_size": 512}, "vocabulary of 512, the target 320"),
    ("STANDALONE", {"architectures": ["GPT2LMHeadModel"]}, "not supported"),
]


@pytest.mark.parametrize(("name", "changes", "words"), MISMATCHED)
def test_a_draft_for_another_target_is_refused(
    name: str, changes: dict[str, Any], words: str, drafts: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((drafts[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=words):
        golden_llm(name, speculative_draft_model_path=str(tmp_path))


def with_tokenizer(folder: Path, source: Path, words: list[str], size: int | None = None) -> str:
    """A copy of a model with a tokenizer of these words and, given `size`, a smaller embedding."""
    shutil.copytree(source, folder)
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    if size is not None:
        weights = load_file(folder / "model.safetensors")
        table = weights["model.embed_tokens.weight"][:size].contiguous()
        models.write(folder, {**models.CONFIG, "vocab_size": size}, {**weights, EMBEDDING: table})
    return str(folder)


def test_vocabularies_are_compared(drafts: dict[str, Path], tmp_path: Path) -> None:
    """Tokenizers must assign the same ids to the same tokens; padding ids may differ."""
    words = [f"w{i}" for i in range(300)]
    target = with_tokenizer(tmp_path / "target", models.TARGET, words)
    small = drafts["STANDALONE"]
    settings = {"speculative_algorithm": "STANDALONE", "dtype": "float32"}

    def llm(draft: str, **own: Any) -> LLM:
        return LLM(target, speculative_draft_model_path=draft, **settings, **own)

    swapped = with_tokenizer(tmp_path / "a", small, [*words[:7], "w8", "w7", *words[9:]])
    with pytest.raises(ConfigError, match="300 and 300 tokens and differ at 'w7'"):
        llm(swapped)
    with pytest.raises(ConfigError, match="No tokenizer loads from"):
        llm(str(small))
    with pytest.raises(ConfigError, match="Not every token has an id in the draft"):
        llm(with_tokenizer(tmp_path / "b", small, words, size=290))
    unpadded = with_tokenizer(tmp_path / "c", small, words, size=300)
    with pytest.raises(ConfigError, match="vocabularies must have the same size"):
        llm(unpadded, skip_tokenizer_init=True)
    prompt = [*CASES[0]["prompt"], 319]  # a padding id of the target that the draft does not have
    with golden_llm() as plain:
        want = plain.generate(input_ids=prompt, sampling_params=GREEDY).output_ids
    with llm(unpadded, speculative_adaptive=False) as padded:
        out = padded.generate(input_ids=prompt, sampling_params=GREEDY)
    assert out.output_ids == want
    assert max(out.meta_info["spec_accept_lengths"]) > 1
