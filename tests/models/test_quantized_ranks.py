"""Quantized weights divided among two ranks, which are threads here, mean what those of one do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.cpu import library
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.layers.communication import SINGLE_RANK, Communicator, UnreducedRank, WeightPlacement
from forerun.layers.sharding import Shard, even_shard
from forerun.models.base import CausalLM
from forerun.models.formats import mxfp4
from forerun.models.formats.int4 import Awq, Gptq, PackQuantized
from forerun.models.loader import load_target_at
from tests.models import test_int4_formats as int4
from tests.models import test_quantization as fp8
from tests.models.support import CPU, Loop, family, random_hf, save
from tests.thread_ranks import on_ranks

BLOCK = (24, 8)  # columns on a rank are multiples
Make = Callable[[Path], Path]


def model_of(name: str, **changes: Any) -> Any:
    """Of a family, with experts of which a half has a width that kernels take."""
    config = {**family(name).config.to_dict(), **changes}
    if config.get("moe_intermediate_size") == 24:
        config["moe_intermediate_size"] = 32
    return random_hf(type(family(name).config)(**config, experts_implementation="eager"))


def in_blocks(name: str, **changes: Any) -> Make:
    return lambda path: fp8.two_checkpoints(path, model_of(name, **changes), BLOCK)[0]


def in_rows(path: Path) -> Path:
    """One scale per row of some matrices, and per matrix of the others."""
    folder = save(family("qwen3"), path)
    weights = load_file(folder / "model.safetensors")
    for name, weight in dict(weights).items():
        if name.endswith("proj.weight"):
            size = weight.abs().amax(1, keepdim=True) if "gate" in name else weight.abs().max()
            weights[name] = (weight / (size / 448)).to(torch.float8_e4m3fn)
            weights[f"{name}_scale"] = size / 448
    save_file(weights, folder / "model.safetensors")
    int4.set_config(folder, fp8.ROW_SPECS[2])
    return folder


def in_4_bits(method: str, **config: Any) -> Make:
    return lambda path: int4.two_checkpoints(path, method, **config)[0]


def plain(name: str, **changes: Any) -> Make:
    return lambda path: save(model_of(name, **changes), path)


def needs_kernels(*case: Any) -> Any:
    missing = library.why_missing()
    return pytest.param(*case, marks=pytest.mark.skipif(missing is not None, reason=str(missing)))


def load(
    folder: Path,
    comm: Communicator,
    quantization: str | None = None,
    load_format: str = "auto",
    ep_size: int = 1,
) -> CausalLM:
    place = WeightPlacement(torch.float32, CPU, comm, quantization, ep_size, allocate=False)
    return load_target_at(place, folder, load_format)


def logits(folder: Path, comm: Communicator, *how: Any) -> Tensor:
    model = load(folder, comm, *how)
    layout, heads = model.kv_layout(torch.float32), model.config.num_heads // comm.size
    loop = Loop.over(model.forward, layout, model.layer_masks, heads, 2)
    return model.compute_logits(loop.ragged([(0, torch.arange(20))])[0])


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("make", "quantization"),
    [
        pytest.param(in_blocks("qwen3-moe"), None, id="blocks-moe"),
        pytest.param(in_blocks("deepseek-v3", v_head_dim=12), None, id="blocks-shared"),
        pytest.param(in_rows, None, id="rows"),
        pytest.param(in_4_bits("awq"), None, id="awq"),
        pytest.param(in_4_bits("gptq", desc_act=True), None, id="gptq"),
        pytest.param(in_4_bits("compressed-tensors"), None, id="compressed"),
        pytest.param(plain("qwen3-moe"), "fp8", id="to-fp8-moe"),
        pytest.param(plain("qwen3.5"), "fp8", id="to-fp8-gated"),
        needs_kernels(plain("llama-biases", head_dim=16, intermediate_size=64), "int8"),
    ],
)
def test_two_ranks_compute_as_one(make: Make, quantization: str | None, tmp_path: Path) -> None:
    """The same quantized values; only the order of sums differs."""
    folder = make(tmp_path)
    for how in ((quantization,), (quantization, "dummy_normal")):
        want = logits(folder, SINGLE_RANK, *how)
        for got in on_ranks(2, lambda comm, how=how: logits(folder, comm, *how)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-5)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("make", "quantization"),
    [
        pytest.param(in_blocks("qwen3-moe"), None, id="blocks-moe"),
        pytest.param(in_blocks("deepseek-v3", v_head_dim=12), None, id="blocks-shared"),
        pytest.param(plain("qwen3-moe"), "fp8", id="to-fp8-moe"),
        pytest.param(in_4_bits("awq", name="qwen3-moe"), None, id="awq-moe"),
    ],
)
def test_whole_experts_of_two_ranks(make: Make, quantization: str | None, tmp_path: Path) -> None:
    folder = make(tmp_path)
    want = logits(folder, SINGLE_RANK, quantization)
    for got in on_ranks(2, lambda comm: logits(folder, comm, quantization, "auto", 2)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-5)
    if quantization == "fp8":
        with pytest.raises(ConfigError, match="fp8 is not available with ep_size 2 of tp_size 4"):
            load(folder, UnreducedRank(0, 4), "fp8", ep_size=2)


@pytest.mark.parametrize("packed", [False, True])
def test_experts_in_mxfp4(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantized while they are read, and packed, as on a GPU; 128 columns and 64."""
    monkeypatch.setattr(mxfp4, "have_triton", lambda device: packed)
    fp8.mxfp4_checkpoint(tmp_path, hidden_size=64, intermediate_size=192)
    for load_format, ep_size in itertools.product(("auto", "dummy_normal"), (1, 2)):
        how = None, load_format
        want = logits(tmp_path, SINGLE_RANK, *how)
        for got in on_ranks(2, lambda comm, how=(*how, ep_size): logits(tmp_path, comm, *how)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match=r"whole experts or columns, not both; set ep_size to 1"):
        load(tmp_path, UnreducedRank(0, 4), ep_size=2)
    with pytest.raises(ConfigError, match=r"too many for .* expert width, 192: .* at most 3"):
        load(tmp_path, UnreducedRank(0, 4))


# --- what is kept packed is divided, too ----------------------------------------------------------


def test_parts_of_a_weight_in_4_bits() -> None:
    """By rows and by columns; of GPTQ's reordered columns, each has its group's scale."""
    for method, form in (
        ("awq", Awq(128)),
        ("gptq", Gptq(128)),
        ("gptq", Gptq(128, reorders=True)),
        ("compressed-tensors", PackQuantized(128)),
    ):
        order = torch.randperm(512) % 4 if form.reorders else None
        stored, meant = int4.encode(method, torch.empty(32, 512), order)
        for rank in range(2):
            for dim, size in ((0, 32), (1, 512)):
                shard = even_shard(size, UnreducedRank(rank, 2), "size", dim)
                parts = form.shards(shard)
                own = {n: parts[n].take(t) if n in parts else t for n, t in stored.items()}
                got = form.decode(own, shard)
                assert isinstance(got, Tensor) == form.reorders
                plain = got if isinstance(got, Tensor) else got.dequantize()
                assert torch.equal(plain, shard.take(meant))


def test_scales_of_rows_are_those_of_all_columns() -> None:
    weight = torch.randn(6, 40)
    whole = Fp8Weight.empty(6, 40, CPU, group=None)
    whole.quantize_(weight)

    def work(comm: Communicator) -> Tensor:
        part = Fp8Weight.empty(6, 20, CPU, group=None)
        part.quantize_(even_shard(40, comm, "columns", 1).take(weight), comm.all_reduce_max)
        return part.dequantize()

    assert torch.equal(torch.cat(on_ranks(2, work), 1), whole.dequantize())


# --- what cannot be divided -------------------------------------------------------------------


def test_ranks_that_would_divide_a_group(tmp_path: Path) -> None:
    folder = fp8.two_checkpoints(tmp_path, model_of("qwen3"), (16, 16))[0]
    message = r"within a group of 16 .*take one that does not: 1, 3\."
    with pytest.raises(ConfigError, match=message):
        on_ranks(2, lambda comm: load(folder, comm))
    shard = Shard(1, 768, (range(192, 384),))
    with pytest.raises(ConfigError, match=r"columns, 768, within a group of 128 .*: 1, 2, 3, 6"):
        Awq(128).shards(shard)
