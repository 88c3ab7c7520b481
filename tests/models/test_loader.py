"""Checkpoint folders that load, and the errors for broken ones."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.models.checkpoint import Checkpoint
from forerun.models.formats.plain import Plain
from forerun.models.loader import load_target
from forerun.models.registry import ARCHITECTURES
from forerun.models.safetensors_files import INDEX, SINGLE
from forerun.platform import progress
from tests.models.support import CPU, Loop, family, save

IDS = torch.arange(12)


def logits(folder: Path, load_format: str = "auto", dtype: torch.dtype = torch.float32) -> Tensor:
    model = load_target(folder, dtype, CPU, load_format)
    return model.compute_logits(Loop.of_model(model).ragged([(0, IDS)])[0])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(family("qwen3"), tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that tests may modify."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def shard(folder: Path) -> list[Path]:
    """Splits the single file into two with an index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("model-*"))


def test_shards_load_as_one_file(original: Path, folder: Path) -> None:
    shard(folder)
    assert torch.equal(logits(folder), logits(original))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_floats_are_converted(folder: Path, dtype: torch.dtype) -> None:
    """A half-precision checkpoint equals a float32 one with rounded weights."""

    def to(kind: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
        return lambda tensors: tensors.update({n: t.to(kind) for n, t in tensors.items()})

    edit_tensors(folder, to(dtype))
    got = logits(folder)
    edit_tensors(folder, to(torch.float32))
    assert torch.equal(got, logits(folder))


def test_harmless_extras(original: Path, folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.ones(8)}))
    assert torch.equal(logits(folder), logits(original))


def test_a_tied_model_may_store_its_head(tmp_path: Path) -> None:
    folder = save(family("llama-tied-mqa"), tmp_path)
    want = logits(folder)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)}))
    assert torch.equal(logits(folder), want)


def test_configs_of_transformers_4(tmp_path: Path) -> None:
    """`rope_theta`, `torch_dtype` and `max_window_layers` at the top, no `layer_types`."""
    folder = save(family("qwen2-sliding-tied"), tmp_path)
    want, config = logits(folder), json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    assert config.pop("layer_types") == ["full_attention"] + ["sliding_attention"] * 2
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_config(folder).windows == (None, 6, 6)
    assert torch.equal(logits(folder), want)


def test_dummy_weights_need_a_config_only(original: Path, folder: Path) -> None:
    (folder / SINGLE).unlink()
    first = logits(folder, "dummy_normal")
    assert torch.equal(first, logits(folder, "dummy_normal"))  # the same seed
    uniform = logits(folder, "dummy")
    assert uniform.abs().sum() > 0
    assert uniform.abs().max() < first.abs().max() / 100  # norms are small too
    assert torch.isfinite(first).all() and 0.01 < first.std() < 10
    assert not torch.allclose(first, logits(original))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_a_long_load(
    terminal: bool,
    original: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    want = logits(original)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich: treat it as one
    capsys.readouterr()
    assert torch.equal(logits(original), want)
    assert capsys.readouterr().err == ""  # loaded quickly
    monkeypatch.setattr(progress, "BAR_AFTER", 0.01)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.01)
    load = Plain.load

    def slow_load(*args: Any) -> None:
        time.sleep(0.02)
        load(*args)

    monkeypatch.setattr(Plain, "load", slow_load)
    assert torch.equal(logits(original), want)
    shown = capsys.readouterr()
    assert shown.out == ""  # standard output is for the user's text
    assert "loading weights: 0.0 of 0.0 GB" in " ".join(shown.err.split())
    assert ("forerun: loading" in shown.err) != terminal


PEAK_OF_A_LOAD = """
import sys
import time
from pathlib import Path
import torch
from forerun.models.checkpoint import Checkpoint

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) << 10

checkpoint = Checkpoint(Path(sys.argv[1]))
slots = {name: torch.ones(checkpoint.shape(name)) for name in checkpoint.headers}
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
checkpoint.read_into(slots)
print(status("VmHWM") - before, all((slot == 2).all() for slot in slots.values()))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "stored", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)]
)
def test_a_load_holds_one_shard_at_a_time(stored: torch.dtype, tmp_path: Path) -> None:
    """The peak includes mapped pages: four shards at once, or a copy of one, would exceed it."""
    shards, each, rows = 4, 4, 2048  # float32: 4 tensors of 8 MiB a shard
    weight_map = {}
    for i in range(shards):
        tensors = {f"{i}.{j}": torch.full((rows, 1024), 2.0, dtype=stored) for j in range(each)}
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, "-c", PEAK_OF_A_LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    grown, right = done.stdout.split()
    tensor = rows * 1024 * stored.itemsize
    assert right == "True"
    assert int(grown) < (each + 1) * tensor + (6 << 20)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def put(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def only_pickles(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def truncate(size: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(data[:size])

    return cut


def garble(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:8] + b"\xff" * 50 + data[58:])


def lose_shard(folder: Path) -> None:
    shard(folder)[1].unlink()


def swap_shards(folder: Path) -> None:
    one, two = shard(folder)
    one.write_bytes(two.read_bytes())


def move_shards(to: str) -> Callable[[Path], None]:
    """The index names the files so."""

    def move(folder: Path) -> None:
        shard(folder)
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        moved = {name: to.format(folder=folder, file=file) for name, file in weight_map.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": moved}))

    return move


def pipe(name: str) -> Callable[[Path], None]:
    """A file that never ends."""

    def put(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return put


def empty_index(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text("{}")


def both(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [damage(folder) for damage in damages]


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 16]}
NORM, QKV = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json does not exist"),
    "config cut": (lambda f: (f / "config.json").write_text("{"), r"not readable JSON.*Download"),
    "no weights": (lambda f: (f / SINGLE).unlink(), r"no \*\.safetensors.*load_format dummy"),
    "pickles": (only_pickles, r"pickled.*never unpickles.*convert"),
    "shard absent": (lose_shard, r"1 shard: model-00002-of-00002.*Download the missing"),
    "shard without": (swap_shards, r"model-00001-of-00002.*lacks lm_head.weight, which the index"),
    "index empty": (empty_index, "no weight_map"),
    "index of another folder": (
        move_shards("../{folder.name}/{file}"),
        "names '../.*in the folder",
    ),
    "index of everywhere": (move_shards("{folder}/{file}"), "names '/.*in the folder"),
    "index of other files": (move_shards("config.json"), "names 'config.json', expected a safe"),
    "index of no text": (
        both(shard, lambda f: (f / INDEX).write_text('{"weight_map": {"a": 5}}')),
        r"weight_map\[...\] is .*expected str",
    ),
    "index twice": (
        both(shard, lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}')),
        "'a' is there twice",
    ),
    "weights are a pipe": (pipe(SINGLE), "not a regular file"),
    "config is a pipe": (pipe("config.json"), "not a regular file"),
    "config nested": (
        lambda f: (f / "config.json").write_text("[" * 10**5 + "]" * 10**5),
        "nested too deeply",
    ),
    "number too long": (
        lambda f: (f / "config.json").write_text('{"a": ' + "9" * 5000 + "}"),
        "not readable JSON",
    ),
    "cut in data": (truncate(-1000), r"cannot be read: .*Download it again"),
    "cut in header": (truncate(100), r"cannot be read: .*header.*Download it again"),
    "file empty": (truncate(0), r"cannot be read: .*header too small"),
    "garbled": (garble, r"cannot be read.*Download it again"),
    "tensor missing": (drop(NORM), rf"lacks 1 tensor: {NORM}.*config\.json"),
    "head missing": (drop("lm_head.weight"), r"lacks 1 tensor: lm_head\.weight"),
    "layers missing": (
        config(num_hidden_layers=4, layer_types=None),
        r"lacks 11 tensors: .*and 8 more",
    ),
    "layers too many": (
        config(num_hidden_layers=2, layer_types=None),
        r"holds 11 tensors: model\.layers\.2.*8 more",
    ),
    "wrong shape": (
        put(QKV, torch.zeros(32, 16)),
        rf"{QKV} has shape \[32, 16\], expected \[32, 32\]",
    ),
    "quantized tensor": (
        put(QKV, torch.zeros(32, 32, dtype=torch.int8)),
        rf"{QKV} is I8, expected BF16.*Quantized",
    ),
    "quantized": (
        config(quantization_config={"quant_method": "bitsandbytes"}),
        r"quantized \(bitsandbytes\).*one in FP8",
    ),
    "other fp8": (
        config(quantization_config={**FP8, "fmt": "e5m2"}),
        r"quantized \(fp8, fmt e5m2\)",
    ),
    "fp8 blocks of nothing": (
        config(quantization_config={**FP8, "weight_block_size": [128]}),
        r"weight_block_size \[128\] is not two positive integers",
    ),
    "fp8 undeclared": (
        put(QKV, torch.zeros(32, 32, dtype=torch.float8_e4m3fn)),
        rf"{QKV} is F8_E4M3, expected BF16.*Quantized",
    ),
    "fp8 without scales": (
        both(
            config(quantization_config=FP8),
            put(QKV, torch.zeros(32, 32, dtype=torch.float8_e4m3fn)),
        ),
        rf"lacks 1 tensor: {QKV}_scale_inv",
    ),
    "fp8 scales of another size": (
        both(
            config(quantization_config=FP8),
            put(QKV, torch.zeros(32, 32, dtype=torch.float8_e4m3fn)),
            put(f"{QKV}_scale_inv", torch.zeros(1, 1)),
        ),
        rf"{QKV}_scale_inv has shape \[1, 1\], expected \[2, 2\]",
    ),
    "scales of a plain tensor": (
        both(config(quantization_config=FP8), put(f"{QKV}_scale_inv", torch.zeros(2, 2))),
        rf"holds 1 tensor: {QKV}_scale_inv",
    ),
    "architecture": (config(architectures=["GemmaForCausalLM"]), "Gemma.*not supported"),
    "activation": (config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "rope": (
        config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
        "rope scaling 'dynamic' is not supported",
    ),
    "partial rope": (
        config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5",
    ),
    "layer types": (config(num_hidden_layers=4), "3 layer_types for 4 layers"),
    "unknown layers": (config(layer_types=["mamba"] * 3), "layers of type 'mamba' are not"),
    "vocabulary of another size": (
        config(vocab_size=2**24),
        r"embed_tokens.weight has shape \[96, 32\], expected \[16777216, 32\]",
    ),
    "odd head": (config(head_dim=15), "head_dim 15 is odd"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_are_one_line(folder: Path, name: str) -> None:
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(folder, torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder; give the path"):
        load_target(tmp_path / "nothing", torch.float32, CPU)


def test_every_supported_architecture_is_listed(folder: Path) -> None:
    edit_config(folder, architectures=["Qwen3forCausalLM"])
    with pytest.raises(ConfigError, match=r"Did you mean 'Qwen3ForCausalLM'\?") as caught:
        load_target(folder, torch.float32, CPU)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_configs_are_checked_before_weights_are_read(folder: Path) -> None:
    drop(NORM)(folder)
    slot = torch.full((32, 32), 7.0)
    with pytest.raises(ConfigError):
        Checkpoint(folder).read_into({QKV: slot, NORM: torch.empty(32)})
    assert (slot == 7).all()


def test_the_index_decides_which_file_a_tensor_is_taken_from(
    original: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of two files is read last."""
    want = logits(original)
    files = shard(folder)
    tensors = [load_file(file) for file in files]
    for own, other in ((0, 1), (1, 0)):
        stale = {name: torch.randn_like(t) for name, t in tensors[other].items()}
        save_file({**stale, **tensors[own], "unknown.weight": torch.ones(3)}, files[own])
    with caplog.at_level(logging.WARNING, "forerun"):
        assert torch.equal(logits(folder), want)
    assert len(caplog.records) == 1
    assert "37 tensors" in caplog.messages[0] and "are ignored" in caplog.messages[0]


def test_files_may_be_links_as_in_the_cache_of_the_hub(original: Path, folder: Path) -> None:
    shard(folder)
    blobs = folder / "blobs"
    blobs.mkdir()
    for i, file in enumerate([*folder.glob("*.safetensors"), folder / INDEX]):
        file.rename(blobs / str(i))
        file.symlink_to(Path("blobs") / str(i))
    assert torch.equal(logits(folder), logits(original))


def test_what_does_not_fit_is_refused_before_there_is_memory(folder: Path) -> None:
    """Such an embedding would have a petabyte."""
    edit_config(folder, vocab_size=2**24, hidden_size=2**24, intermediate_size=2**24)
    with pytest.raises(ConfigError, match="has shape"):
        load_target(folder, torch.float32, CPU)
