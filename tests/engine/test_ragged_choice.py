"""Whether steps are ragged where nothing is set, and what is said about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from forerun.attention.capabilities import Mask
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor import ragged
from forerun.executor.ragged import choose_ragged
from forerun.kvcache.layouts import DenseKV, ModelLayout, RecurrentState
from forerun.layers.module import Module
from forerun.scheduler.adaptive_width import AdaptiveWidth
from forerun.scheduler.ragged_width import RaggedWidth
from forerun.speculative.base import SpecCaps
from tests.golden_engine import golden_llm

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CHAINS = SpecCaps(num_drafts=7, observes_packed=True)


class Target(Module):
    """As far as the choice looks at it."""

    def __init__(self, *recurrent: bool) -> None:
        """`recurrent`: whether each recurrent layer serves ragged passes."""
        states = (RecurrentState({}, {}, Mock(), ragged=each) for each in recurrent)
        self._layout = ModelLayout((DenseKV(1, 8, torch.float32), *states))
        self.config = SimpleNamespace(architecture="Hybrid")

    def kv_layout(self, kv_dtype: torch.dtype) -> ModelLayout:
        return self._layout


DENSE: Any = Target()


def config(**values: Any) -> EngineConfig:
    return EngineConfig.of({"model_path": "m", "speculative_algorithm": "DFLASH", **values}, {})


@pytest.mark.parametrize("default", [False, True])
def test_one_table_decides(default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ragged.DEFAULTS, "cpu", (default, "so it was measured"))
    with golden_llm("DFLASH", speculative_adaptive=True) as llm:
        assert llm.explain()["ragged_verify"] == f"{'on' if default else 'off'}: so it was measured"
        assert llm.engine.limits.ragged is default
        policy = RaggedWidth if default else AdaptiveWidth
        assert type(llm.engine.scheduler.widths) is policy


def test_what_is_set_is_followed() -> None:
    for wanted in (True, False):
        got = choose_ragged(config(speculative_ragged_verify=wanted), CHAINS, CPU, DENSE)
        assert got.ragged is wanted and "is set" in str(got)


@pytest.mark.parametrize(
    ("values", "caps", "why"),
    [
        ({}, SpecCaps(num_drafts=0), "needs drafts"),
        ({"speculative_adaptive": False}, CHAINS, "needs speculative_adaptive"),
        ({}, SpecCaps(num_drafts=7, verify_mask=Mask.CUSTOM), "trees evenly"),
        ({"attention_backend": "fa3"}, CHAINS, "fa3 was named"),
        ({"decode_attention_backend": "flashinfer"}, CHAINS, "flashinfer was named"),
        ({"speculative_draft_attention_backend": "fa3"}, CHAINS, "fa3 was named"),
    ],
)
def test_where_it_cannot_be_it_is_off(
    values: dict[str, Any], caps: SpecCaps, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ragged.DEFAULTS, "cpu", (True, "it is fast"))
    got = choose_ragged(config(**values), caps, CPU, DENSE)
    assert not got.ragged and why in got.reason
    others = SpecCaps(num_drafts=7)  # its draft sees W tokens of every request
    drafted = {"speculative_draft_attention_backend": "fa3"}
    assert choose_ragged(config(**drafted), others, CPU, DENSE).ragged


def test_on_a_gpu_it_is_on_where_it_was_measured() -> None:
    hybrid: Any = Target(True)
    for target in (DENSE, hybrid):
        for ranks in (1, 2):
            assert choose_ragged(config(tp_size=ranks), CHAINS, GPU, target).ragged
    for name in ("disable_cuda_graph", "enable_deterministic_inference"):
        off = choose_ragged(config(**{name: True}), CHAINS, GPU, DENSE)
        assert str(off) == f"off: it has not been measured with {name}"
        asked = config(**{name: True}, speculative_ragged_verify=True)
        assert choose_ragged(asked, CHAINS, GPU, DENSE).ragged


def test_recurrent_layers_that_follow_one_width() -> None:
    target: Any = Target(True, False)
    off = choose_ragged(config(), CHAINS, GPU, target)
    assert str(off) == "off: it needs recurrent layers that serve it, which those of Hybrid do not"
    with pytest.raises(ConfigError, match="needs recurrent layers that serve it"):
        choose_ragged(config(speculative_ragged_verify=True), CHAINS, GPU, target)


def test_what_forbids_it_is_named() -> None:
    asked = config(speculative_ragged_verify=True, speculative_adaptive=False)
    with pytest.raises(ConfigError, match="speculative_ragged_verify needs speculative_adaptive"):
        choose_ragged(asked, CHAINS, CPU, DENSE)
