"""Resolution of device, dtype and memory, on simulated machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.core.errors import ConfigError
from forerun.platform import device as machine

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """A function that simulates this many GPUs of a compute capability."""

    def make(count: int, capability: tuple[int, int] = (9, 0), hip: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)

    return make


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function that simulates a CPU with these flags."""

    def make(text: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        monkeypatch.setattr(machine, "_CPUINFO", path)

    return make


def test_auto_prefers_a_gpu(gpus) -> None:
    gpus(0)
    assert machine.resolve_device("auto") == CPU
    gpus(2)
    assert machine.resolve_device("auto") == GPU
    assert machine.resolve_device("cpu") == CPU


def test_a_gpu_by_index(gpus) -> None:
    gpus(2)
    assert machine.resolve_device("cuda") == GPU
    assert machine.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"shows 2 GPUs, cuda:0 to cuda:1"):
        machine.resolve_device("cuda:2")


def test_a_missing_gpu_is_refused_with_the_fix(gpus, monkeypatch) -> None:
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"CPU build.*--device cpu"):
        machine.resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"driver and CUDA_VISIBLE_DEVICES"):
        machine.resolve_device("cuda:0")


@pytest.mark.parametrize("name", ["", "gpu", "mps", "cuda:", "cuda:x", "cpu:0", "CUDA"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="Known: auto, cpu, cuda, cuda:N"):
        machine.resolve_device(name)


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("model name : A\nflags\t\t: fpu avx2 avx512f\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags : nobf16 avx512_bf16x\n", False),  # whole words only
        ("", False),
    ],
)
def test_fast_bf16_on_a_cpu(cpu, text: str, fast: bool) -> None:
    cpu(text)
    assert machine.fast_bf16(CPU) is fast


def test_fast_bf16_on_a_gpu(gpus) -> None:
    gpus(1, capability=(7, 5))
    assert not machine.fast_bf16(GPU)
    gpus(1, capability=(8, 0))
    assert machine.fast_bf16(GPU)
    gpus(1, capability=(7, 5), hip="7.0")
    assert machine.fast_bf16(GPU)
    assert machine.is_rocm()


@pytest.mark.parametrize(
    ("name", "checkpoint", "fast", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.bfloat16),
        ("auto", "float16", False, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),  # asked for: slow, but never changed
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_dtype(monkeypatch, name, checkpoint, fast, expected) -> None:
    monkeypatch.setattr(machine, "fast_bf16", lambda device: fast)
    assert machine.resolve_dtype(name, checkpoint, CPU) is expected


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float8_e4m3fn.*Known: bfloat16, float16, float32"):
        machine.resolve_dtype("auto", "float8_e4m3fn", CPU)
    with pytest.raises(ConfigError, match="must be one of auto, bfloat16, float32"):
        machine.resolve_dtype("float16", "float16", CPU)


def test_memory_of_a_container(monkeypatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory(CPU) == (800 * 1024, 1000 * 1024)
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    used.write_text(f"{100 * 1024}\n")
    limit.write_text("max\n")  # no limit
    assert machine.memory(CPU) == (800 * 1024, 1000 * 1024)
    limit.write_text(f"{500 * 1024}\n")
    assert machine.memory(CPU) == (400 * 1024, 500 * 1024)
    limit.write_text(f"{5000 * 1024}\n")  # more than there is
    assert machine.memory(CPU) == (800 * 1024, 1000 * 1024)


def test_memory_and_name_of_this_machine() -> None:
    free, total = machine.memory(CPU)
    assert 0 < free <= total
    assert machine.device_name(CPU)


def test_versions_name_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(machine, "_PACKAGES", ("torch", "no-such-package"))
    found = machine.versions()
    assert found["torch"] == torch.__version__
    assert found["no-such-package"] is None


def test_dtype_of_stored_kv() -> None:
    assert machine.resolve_kv_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert machine.resolve_kv_dtype("float32", torch.bfloat16) == torch.float32
    assert machine.resolve_kv_dtype("fp8_e4m3", torch.bfloat16) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="auto, bfloat16, float32, fp8_e4m3, got 'int8'"):
        machine.resolve_kv_dtype("int8", torch.bfloat16)
