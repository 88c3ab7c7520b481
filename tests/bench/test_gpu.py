"""On a GPU: ceilings, and a profile of the bundled pair's steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun import LLM
from forerun.main import run
from forerun.plan.work import Gemm
from forerun_bench.ceilings import Ceilings, gemm_seconds
from forerun_bench.gemms import step_gemms

pytestmark = pytest.mark.gpu


def test_gemms_alone_are_no_faster_than_the_ceilings() -> None:
    device = torch.device("cuda", 0)
    ceilings = Ceilings.measure(device, torch.bfloat16)
    few = [Gemm(8192, 8192, torch.bfloat16, 1)] * 40  # more than the caches hold
    size = sum(gemm.weight_bytes for gemm in few)
    assert gemm_seconds(few, device) > 0.95 * size / ceilings.read_bytes_per_second
    many = Gemm(8192, 8192, torch.bfloat16, 8192)
    assert gemm_seconds([many], device) > 0.9 * 2 * 8192**3 / ceilings.flops


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE3"])
def test_gemms_are_those_of_a_cpu(algorithm: str | None) -> None:
    """Whether our kernels or the library compute them."""
    found = []
    for device in ("cuda", "cpu"):
        settings = {"speculative_algorithm": algorithm, "max_running_requests": 2}
        with LLM(device=device, dtype="bfloat16", **settings) as llm:
            found.append(sorted((g.n, g.k, g.tokens) for g in step_gemms(llm.engine, 2)))
    assert found[0] == found[1]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_profile(graphs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch-size", "2", "--input-len", "32", "--output-len", "200")
    how = () if graphs else ("--disable-cuda-graph",)
    args = (*shape, *how, "--repetitions", "1", "--profile", str(tmp_path), "--json")
    assert run(("bench", "one-batch", *args)) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    for half in (result["plain"], result["spec"]):
        assert 0 < half["host_gap"] < 1
        assert half["step_seconds_median"] > half["floor_seconds"] > 0
    names = {path.name for path in tmp_path.iterdir()}
    kinds = ("trace.json.gz", "svg", "kernels.md")
    assert names == {f"{way}-2x32.{kind}" for way in ("plain", "spec") for kind in kinds}
    table = (tmp_path / "spec-2x32.kernels.md").read_text(encoding="utf-8")
    launches = float(table.splitlines()[-1].split("|")[2])
    assert launches > 2 * 8  # layers of the target, of at least so many kernels
