"""`forerun doctor` tells what is there, and why not more."""

from __future__ import annotations

import json

import pytest
import torch

from forerun.attention.select import BACKENDS
from forerun.platform import device as machine
from forerun.speculative.registry import algorithm_names


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
    assert [] in report["devices"][0]["attention"]["target"].values()


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


def test_a_missing_pair_is_said(forerun, monkeypatch, tmp_path) -> None:
    from forerun.cli import doctor

    monkeypatch.setattr(doctor, "PAIR", tmp_path)
    assert json.loads(forerun("doctor", "--json").out)["bundled"]["present"] is False
    assert "not in this installation" in forerun("doctor").out
