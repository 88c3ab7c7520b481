"""Weights of GGUF files that are kept as they are stored: the bits of the dequantized ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.kernels.cpu import library
from forerun.kernels.cpu.gemm import Format
from forerun.layers.communication import SINGLE_RANK
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.gemm import CpuGemm
from forerun.layers.gemm_grouped import GroupedMethod
from forerun.layers.linear import LinearBase
from forerun.models.base import CausalLM
from forerun.models.checkpoint import Checkpoint
from forerun.models.formats.gguf import describe_gguf
from forerun.models.gguf.config import config_of
from forerun.models.gguf.reader import read_gguf
from forerun.models.loader import load_target
from tests.models.gguf_files import write_gguf
from tests.models.support import CPU, Loop
from tests.models.test_gguf import small, with_tokenizer
from tests.models.test_quantized_ranks import logits as rank_logits
from tests.thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler")

MIXED = {
    "v_proj": "Q8_0",
    "k_proj": "Q5_1",
    "down": "Q5_0",
    "up": "Q8_0",
    "embed": "Q8_0",
    "": "Q4_0",
}


def folder_of(path: Path, name: str, kind: str | Mapping[str, str]) -> Path:
    """A model folder of a small random model."""
    path.mkdir()
    write_gguf(path / "model.gguf", small(name), kind)
    (path / "config.json").write_text(json.dumps(config_of(read_gguf(path / "model.gguf"))))
    return path


def dequantized(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupedMethod, "empty_linear", lambda *_: None)
        return load_target(folder, dtype, CPU)


def logits(model: CausalLM, tokens: int = 40) -> torch.Tensor:
    ids = torch.randint(0, 96, (tokens,), generator=torch.Generator().manual_seed(3))
    hidden, _ = Loop.of_model(model).ragged([(0, ids)])
    return model.compute_logits(hidden)


@pytest.mark.parametrize("name", ["llama", "llama-tied-mqa", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "mixed"])
def test_logits_have_the_bits_of_dequantized_weights(name: str, kind: str, tmp_path: Path) -> None:
    """Rows of q and k of llama are reordered; parts of one matrix have several kinds."""
    folder = folder_of(tmp_path / "m", name, MIXED if kind == "mixed" else kind)
    kept, plain = load_target(folder, torch.float32, CPU), dequantized(folder)
    gemms = [linear.gemm for linear in kept.modules(LinearBase)]
    assert all(isinstance(g, CpuGemm) and g.weight.format is Format.GROUPED for g in gemms)
    assert not any(
        isinstance(linear.gemm, CpuGemm) and linear.gemm.weight.format is Format.GROUPED
        for linear in plain.modules(LinearBase)
    )
    assert torch.equal(logits(kept), logits(plain))


def test_a_tied_head_and_the_embedding_are_one(tmp_path: Path) -> None:
    model = load_target(folder_of(tmp_path / "m", "llama-tied-mqa", "Q8_0"), torch.float32, CPU)
    (head,), (embedding,) = model.modules(LMHead), model.modules(VocabEmbedding)
    assert isinstance(head.gemm, CpuGemm) and head.gemm.weight is embedding.packed
    assert head.weight.numel() == embedding.weight.numel() == 0


def test_bfloat16_tokens(tmp_path: Path) -> None:
    """Products of the exact weights, rounded once; dequantized to bfloat16 they are others."""
    folder = folder_of(tmp_path / "m", "qwen3", "Q4_1")
    exact = logits(load_target(folder, torch.float32, CPU))
    kept = logits(load_target(folder, torch.bfloat16, CPU)).float()
    rounded = logits(dequantized(folder, torch.bfloat16)).float()
    assert (kept - exact).norm() < (rounded - exact).norm()


def test_ranks_read_parts_dequantized(tmp_path: Path) -> None:
    """Divided matrices are plain, whole ones are kept; only the order of sums differs."""
    folder = folder_of(tmp_path / "m", "llama", MIXED)
    want = rank_logits(folder, SINGLE_RANK)
    for got in on_ranks(2, lambda comm: rank_logits(folder, comm)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q4_1"), ("llama-tied-mqa", "Q8_0")])
def test_int8_keeps_the_weights_and_rounds_tokens(name: str, kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", name, kind)
    plain, rounding = (
        load_target(folder, torch.float32, CPU, quantization=each) for each in (None, "int8")
    )
    for linear, other in zip(plain.modules(LinearBase), rounding.modules(LinearBase), strict=True):
        assert linear.gemm.weight.format is Format.GROUPED
        assert other.gemm.weight.format is Format.GROUPED_INT8
        assert torch.equal(linear.gemm.weight.data, other.gemm.weight.data)
        assert "8-bit tokens" in (other.quantized_gemm or "")
        x = torch.randn(5, linear.gemm.weight.k, generator=torch.Generator().manual_seed(1))
        want, got = linear.gemm(x), other.gemm(x)
        assert 0 < (got - want).norm() / want.norm() < 0.02
    (embedding,), (head,) = rounding.modules(VocabEmbedding), rounding.modules(LMHead)
    if name == "llama-tied-mqa":
        assert head.gemm.weight.data is embedding.packed.data


def test_shapes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "llama", "Q4_1")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ConfigError, match=r"has shape \[96, 64\], expected \[128, 64\]"):
        load_target(folder, torch.float32, CPU)
    assert Checkpoint(folder).read("model.embed_tokens.weight").dtype == torch.float32


def test_the_engine_says_how_weights_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is float32: the values of codes are not those of bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with_tokenizer(tmp_path / "m.gguf")
    prompt, params = "def add(a, b):\n", {"temperature": 0, "max_new_tokens": 8}
    with LLM(str(tmp_path / "m.gguf"), device="cpu") as llm:
        explained, text = llm.explain(), llm.generate(prompt, params).output_ids
    assert explained["dtype"] == "float32"
    (said,) = explained["quantized_weights"]
    assert said == "8-bit codes in groups of 32: float32 in C++"
    monkeypatch.setattr(GroupedMethod, "empty_linear", lambda *_: None)
    with LLM(str(tmp_path / "m.gguf"), device="cpu", dtype="float32") as llm:
        assert llm.generate(prompt, params).output_ids == text
        assert not llm.explain()["quantized_weights"]


def test_doctor_says_what_becomes_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "m", "llama", {"down": "F16", "": "Q4_1"})
    assert (
        describe_gguf(folder, CPU) == "20 Q4_1, 3 F16; what is quantized is kept as stored (on cpu)"
    )
    monkeypatch.setenv(library.VARIABLE, "0")
    assert "is dequantized when loaded" in describe_gguf(folder, CPU)
