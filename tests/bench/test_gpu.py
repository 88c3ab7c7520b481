"""On a GPU: ceilings, and a profile of the bundled pair's steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.bench.ceilings import Ceilings, product_seconds
from forerun.cli.main import run
from forerun.layers.linear import Product

pytestmark = pytest.mark.gpu


def test_products_alone_are_no_faster_than_the_ceilings() -> None:
    device = torch.device("cuda", 0)
    ceilings = Ceilings.measure(device, torch.bfloat16)
    few = [Product(8192, 8192, torch.bfloat16, 1)] * 40  # more than the caches hold
    size = sum(product.weight_bytes for product in few)
    assert product_seconds(few, device) > 0.95 * size / ceilings.read_bytes_per_second
    many = Product(8192, 8192, torch.bfloat16, 8192)
    assert product_seconds([many], device) > 0.9 * 2 * 8192**3 / ceilings.flops


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
