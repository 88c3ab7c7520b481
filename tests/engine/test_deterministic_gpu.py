"""`enable_deterministic_inference` on a GPU: log-probabilities, bit for bit."""

from __future__ import annotations

import pytest

from forerun import LLM, ConfigError
from forerun.doctor.determinism import Sizes
from tests.determinism import hold_bits
from tests.golden_engine import GOLDEN


@pytest.mark.gpu
def test_bits_of_the_bundled_pair() -> None:
    report = hold_bits(
        Sizes(requests=16, tokens=128),
        device="cuda",
        dtype="bfloat16",
        enable_deterministic_inference=True,
    )
    assert max(way["accept_length"] or 0 for way in report["ways"]) > 2


@pytest.mark.gpu
def test_what_has_no_such_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32 weights"):
        LLM(
            str(GOLDEN / "target"),
            skip_tokenizer_init=True,
            device="cuda",
            dtype="float32",
            enable_deterministic_inference=True,
        )
