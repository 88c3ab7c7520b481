"""What a model folder says of its embeddings, and checkpoints without an LM head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from forerun import LLM
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError, RequestError
from forerun.models.embedding_layout import EmbeddingLayout, embedding_layout
from forerun.models.registry import model_class
from tests.embedding_models import embedding_folder, embeddings, write_modules
from tests.golden_engine import GOLDEN


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert embedding_layout(tmp_path, tmp_path) == EmbeddingLayout("last", True, False)


@pytest.mark.parametrize(
    ("pooling", "kind"), [("lasttoken", "last"), ("mean", "mean"), ("cls", "cls")]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_files_of_sentence_transformers(
    tmp_path: Path, pooling: str, kind: Any, normalize: bool
) -> None:
    write_modules(tmp_path, pooling, normalize)
    assert embedding_layout(tmp_path, tmp_path) == EmbeddingLayout(kind, normalize, True)
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    assert embedding_layout(tmp_path, tmp_path).adds_eos
    # Without the list of modules, and with the name of newer versions.
    (tmp_path / "modules.json").unlink()
    name = {"lasttoken": "lasttoken", "mean": "mean", "cls": "cls"}[pooling]
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": name}))
    assert embedding_layout(tmp_path, tmp_path) == EmbeddingLayout(kind, True, True, True)


def test_what_cannot_be_made_is_a_problem_until_the_user_chooses(tmp_path: Path) -> None:
    write_modules(tmp_path, "max")
    assert "pooling by max" in str(embedding_layout(tmp_path, tmp_path).problem)
    write_modules(tmp_path, "mean", True, "Dense")
    layout = embedding_layout(tmp_path, tmp_path)
    assert "a module 'Dense'" in str(layout.problem)
    assert layout.with_pooling("mean") == EmbeddingLayout("mean", True, True)
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    write_modules(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(both))
    assert "by mean and cls" in str(embedding_layout(tmp_path, tmp_path).problem)
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    assert "by nothing" in str(embedding_layout(tmp_path, tmp_path).problem)


def test_a_reranker_of_sentence_transformers_is_no_embedding_model(tmp_path: Path) -> None:
    kinds = ("Transformer", "LogitScore")
    modules = [{"type": f"sentence_transformers.cross_encoder.modules.{each}"} for each in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    layout = embedding_layout(tmp_path, tmp_path)
    assert not layout.is_embedding and "a module 'LogitScore'" in str(layout.problem)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"path": "x"}]', '[{"type": 1}]'])
def test_broken_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules.json is not readable"):
        embedding_layout(tmp_path, tmp_path)


def test_a_path_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_modules(folder, "mean")
    shutil.move(folder / "1_Pooling", tmp_path / "1_Pooling")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "../1_Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert embedding_layout(folder, folder).pooling == "last"


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_without_model_and_head(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = embedding_folder(tmp_path / "model", tied=tied)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    with LLM(folder, dtype="float32", device="cpu") as llm:
        out = llm.embed("Hello world")
        (want,) = embeddings(folder, ["Hello world"])
        assert out.embedding == pytest.approx(list(want), abs=1e-5)
        assert llm.engine.info.has_lm_head is tied
        if tied:
            assert llm.generate("Hello", {"max_new_tokens": 2}).output_ids
            return
        for ask in (llm.generate, llm.chat):
            prompt: Any = "x" if ask == llm.generate else [{"role": "user", "content": "x"}]
            with pytest.raises(RequestError, match="no LM head: it makes embeddings"):
                ask(prompt)


def test_a_head_that_is_lost_is_still_missed(tmp_path: Path) -> None:
    """Tensors with `model.` are those of a causal LM."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"lacks 1 tensor: lm_head\.weight"):
        LLM(folder, skip_tokenizer_init=True, device="cpu")
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    bare.pop("norm.weight")
    save_file(bare, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 tensor: model\.norm\.weight"):
        LLM(folder, skip_tokenizer_init=True, device="cpu")


def test_attention_to_both_sides_is_refused(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(ConfigError, match="is_causal false is not supported"):
        model_class(load_model_config(tmp_path))
