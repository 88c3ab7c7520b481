"""Stop ids are the union of generation_config.json, config.json and the tokenizer's EOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.models import stop_ids as module
from forerun.models.stop_ids import stop_ids, union
from tests.models.test_tokenizer import save

EOS = "<|im_end|>"  # id 2


def folder(path: Path, config: Any = None, generation: Any = None, **settings: object) -> Path:
    raw = {"architectures": ["LlamaForCausalLM"]}
    if config is not None:
        raw["eos_token_id"] = config
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    save(path, **settings)
    return path


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, (2,)),
        (0, None, (0, 2)),  # the base model's EOS stayed in config.json
        (0, [1, 0], (1, 0, 2)),
        ([2], 2, (2,)),
        (-1, 10**9, (2,)),  # ids that no token has
    ],
)
def test_all_files_count(config: Any, generation: Any, expected: tuple[int], tmp_path) -> None:
    found = stop_ids(folder(tmp_path, config, generation), tmp_path, 300)
    assert union(found) == expected and found["tokenizer"] == (2,)
    own = stop_ids(tmp_path, None, 300)
    assert own == {**found, "tokenizer": ()}


def test_an_id_outside_the_vocabulary_is_said_once_in_our_words(
    tmp_path: Path, caplog, capfd
) -> None:
    made = folder(tmp_path, [0, 400], 2, vocab_size=300)
    assert stop_ids(made, made, 300)["config.json"] == (0,)
    module.load_tokenizer(made)
    (said,) = caplog.messages
    assert said.startswith("config.json of") and "eos_token_id 400 is outside" in said
    assert "eos_token_id" not in "".join(capfd.readouterr())


def test_a_text_model_within_another_one(tmp_path: Path) -> None:
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "text_config": {}}))
    assert union(stop_ids(tmp_path, None, 300)) == (1, 106)


@pytest.mark.parametrize(
    ("given", "expected", "loads"),
    [
        (EOS, 2, False),
        ({"__type": "AddedToken", "content": EOS, "special": True}, 2, False),
        (None, None, True),
        ("h", None, True),  # no added token: transformers knows its id, or adds one
    ],
)
def test_the_tokenizer_s_eos_is_the_one_of_transformers(
    given: Any, expected: int | None, loads: bool, tmp_path: Path, monkeypatch
) -> None:
    asked = []
    original = module.load_tokenizer
    monkeypatch.setattr(module, "load_tokenizer", lambda f: asked.append(f) or original(f))
    folder(tmp_path, eos_token=given, tokenizer_class="PreTrainedTokenizerFast")
    (found, *_) = (*stop_ids(tmp_path, tmp_path, 300)["tokenizer"], None)
    assert bool(asked) is loads
    assert found == original(tmp_path).eos_token_id
    assert given == "h" or found == expected


def test_the_special_tokens_map_is_asked_too(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (found,) = stop_ids(tmp_path, tmp_path, 300)["tokenizer"]
    assert found == module.load_tokenizer(tmp_path).eos_token_id


@pytest.mark.parametrize("bad", ["2", [0, "2"], 2.0, True, {"id": 2}])
def test_bad_ids_are_refused(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id must be a token id or"):
        stop_ids(folder(tmp_path, bad), tmp_path, 300)


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target whose config has an EOS that it does not write."""
    import shutil

    from forerun.llm.bundled import bundled

    made = tmp_path_factory.mktemp("finetuned") / "model"
    shutil.copytree(bundled("target"), made)
    (made / "generation_config.json").unlink()
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    return made


def test_generation_and_grammars_stop_at_the_tokenizer_s_eos(finetuned: Path) -> None:
    ask = [{"role": "user", "content": "Say yes."}]
    settings = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 2}
    with LLM(finetuned, **settings) as llm:
        assert llm.explain()["stop_token_ids"] == {
            "generation_config.json": [],
            "config.json": [3],
            "tokenizer": [2],
        }
        one = llm.chat(ask, {"temperature": 0, "max_new_tokens": 256})
        assert one.finish_reason == {"type": "stop", "matched": 2}
        two = llm.chat(ask, {"temperature": 0, "max_new_tokens": 256, "regex": "yes|no"})
        assert two.text in ("yes", "no") and two.finish_reason == {"type": "stop", "matched": 2}
