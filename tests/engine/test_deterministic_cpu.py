"""`enable_deterministic_inference` on a CPU: what our kernels do anyway, or a reason why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun import ConfigError
from forerun.config.engine_config import EngineConfig
from forerun.executor.fixed_order import cpu_has_fixed_order
from forerun.kernels.cpu import library
from forerun.models.llama import LlamaForCausalLM
from tests.golden_engine import golden_llm

needs_kernels = pytest.mark.skipif(
    library.compiled().library is None, reason="kernels in plain PyTorch round by shape"
)


def explained(**settings: Any) -> tuple[bool, str]:
    """What `explain` says: whether bits are equal, and what holds."""
    with golden_llm(device="cpu", **settings) as llm:
        said = llm.explain()
    assert isinstance(said["deterministic_inference"], bool)
    return said["deterministic_inference"], said["same_text"]


def says(**settings: Any) -> bool:
    """Whether bits are equal."""
    return explained(**settings)[0]


@needs_kernels
def test_it_is_so_with_our_kernels(with_cpu_kernels: None) -> None:
    assert all(says(enable_deterministic_inference=asked) for asked in (None, True, False))
    assert not says(attention_backend="torch_native")


@needs_kernels
def test_a_backend_that_rounds_by_shape_is_refused(with_cpu_kernels: None) -> None:
    settings = {"attention_backend": "torch_native", "enable_deterministic_inference": True}
    with pytest.raises(ConfigError, match="its sums depend on the batch"):
        says(**settings)
    with pytest.raises(ConfigError, match="cannot be had on a CPU: model_impl transformers: no"):
        says(model_impl="transformers", enable_deterministic_inference=True)


@needs_kernels
def test_what_holds_is_said(with_cpu_kernels: None) -> None:
    assert explained()[1].startswith("every bit is equal: ")
    off = "texts part at near ties, {}; enable_deterministic_inference {}"
    depends = "cannot be had: the attention backend's sums depend on the batch"
    for dtype, ties in (("float32", "rare in float32"), ("bfloat16", "common in bfloat16")):
        said = explained(attention_backend="torch_native", dtype=dtype)[1]
        assert said.endswith(off.format(ties, depends))


def test_not_without_kernels(without_cpu_kernels: None) -> None:
    assert not says()
    with pytest.raises(ConfigError, match="CPU: there are no kernels in C"):
        says(enable_deterministic_inference=True)


@needs_kernels
def test_ranks_add_up_in_their_order_where_they_are_asked_to(with_cpu_kernels: None) -> None:
    attention: Any = SimpleNamespace(choices={})
    for ranks, asked, said in ((1, None, True), (2, None, False), (2, True, True)):
        config = EngineConfig("x", tp_size=ranks, enable_deterministic_inference=asked)
        assert cpu_has_fixed_order(config, LlamaForCausalLM, attention) is said
