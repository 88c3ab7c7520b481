"""`forerun doctor`: what is available, and reasons for what is not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from forerun.attention.select import BACKENDS
from forerun.doctor.command import TOKENS, _show_gemms, gemm_choices, model_shapes
from forerun.kernels.gemm.dispatch import TUNED, choose_fp8_gemm, choose_gemm
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.llm.bundled import preset
from forerun.platform import device as machine
from forerun.speculative.registry import algorithm_names

HEADS = Path(__file__).resolve().parent.parent / "golden" / "heads"


def test_json(forerun) -> None:
    result = forerun("doctor", "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["algorithms"] == algorithm_names()
    assert report["devices"][0]["device"] == "cpu"
    assert (
        0 < report["devices"][0]["memory_free_bytes"] <= report["devices"][0]["memory_total_bytes"]
    )
    for device in report["devices"]:
        for verdicts in device["attention"].values():
            assert list(verdicts) == list(BACKENDS)
    # Something can always run the target on a CPU.
    assert [] in report["devices"][0]["attention"]["decode"].values()


def test_reasons_are_listed(forerun, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # one line a reason
    report = json.loads(forerun("doctor", "--json").out)
    shown = forerun("doctor").out
    for verdicts in report["devices"][0]["attention"].values():
        for name, reasons in verdicts.items():
            assert name in shown
            for reason in reasons:
                assert reason in " ".join(shown.split())


@pytest.mark.parametrize("fast", [True, False])
def test_dtypes(forerun, monkeypatch, fast: bool) -> None:
    monkeypatch.setattr(machine, "fast_bf16", lambda device: fast)
    device = json.loads(forerun("doctor", "--json").out)["devices"][0]
    assert device["dtypes"]["bfloat16"] == ("fast" if fast else "slow")
    assert device["auto_dtype"] == ("bfloat16" if fast else "float32")


def test_a_missing_pair_is_reported(forerun, monkeypatch, tmp_path) -> None:
    from forerun.doctor import command as doctor

    monkeypatch.setattr(doctor, "PAIR", tmp_path)
    assert json.loads(forerun("doctor", "--json").out)["bundled"]["present"] is False
    assert "not in this installation" in forerun("doctor").out


QWEN3_8B = {(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)}


def test_matrices_of_a_model_come_from_its_config() -> None:
    assert set(model_shapes(preset("qwen3-8b")[0])) == QWEN3_8B


@pytest.mark.parametrize(
    "gpu",
    [
        GpuInfo(132, amd=False),
        GpuInfo(108, amd=False, capability=80),
        GpuInfo(304, amd=True, warp_size=64),
    ],
    ids=["sm_90", "sm_80", "gfx942"],
)
def test_choices_are_those_of_the_table(gpu: GpuInfo) -> None:
    found = gemm_choices(gpu, [(1000, 512), *QWEN3_8B])
    shapes = {(m["n"], m["k"]): m for m in found["matrices"]}
    tuned = TUNED.get(0 if gpu.amd else gpu.capability, {})
    assert set(shapes) == {(1000, 512), *QWEN3_8B, *tuned}
    for (n, k), entry in shapes.items():
        assert entry["tuned"] == ((n, k) in tuned)
        for tokens in TOKENS:
            mine = choose_gemm(n, k, tokens, gpu) is not None
            assert (entry["choices"][str(tokens)] is not None) == mine
            fp8 = choose_fp8_gemm(n, k, tokens, gpu) is not None
            assert (entry["fp8_choices"][str(tokens)] is not None) == fp8 == (tokens <= 128)
    screen = Console(file=io.StringIO(), width=100)
    _show_gemms({"library": "cuBLAS", "programmatic_launch": True, **found}, screen)
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "programmatic dependent launch: on" in shown
    hopper = gpu.capability == 90 and not gpu.amd and found["cuda"]
    language = "C++" if hopper else "Triton"
    assert f"bfloat16 {language}, fp8 {language}, mxfp4 {language}" in shown
    rows = {line.split("  ")[1]: line.split()[3:] for line in shown.splitlines() if " x " in line}
    for (n, k), entry in shapes.items():
        said = rows[f"{n} x {k}"]
        expected = ["library" if c is None else "own" for c in entry["choices"].values()]
        assert [word.replace("default", "own").removesuffix("+C++") for word in said] == expected


def test_one_model_at_a_time(forerun) -> None:
    result = forerun("doctor", "--preset", "qwen3-8b", "--model-path", "x")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "give one of them" in result.err
    assert "Unknown preset" in forerun("doctor", "--preset", "qwen").err
    assert forerun("doctor", "--preset", "qwen3-8b").code == 0
