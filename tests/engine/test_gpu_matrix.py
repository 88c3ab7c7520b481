"""The equality matrix on a GPU, with and without CUDA graphs."""

from __future__ import annotations

import pytest

from forerun.core.errors import ConfigError
from tests.engine.test_matrix import WIDTHS, hold
from tests.golden_engine import golden_llm
from tests.toy_algorithms import register_toys

pytestmark = pytest.mark.gpu
register_toys()
ALGORITHMS = [
    *(None, "DFLASH", "NGRAM", "SUFFIX", "DFLASH,SUFFIX"),
    *("TOY-TREES", "TOY-LEARNER", "TOY-EAGER", "TOY-EAGER-TREES"),
]


@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_output_equals_plain_decoding(
    algorithm: str | None, page_size: int, chunk: int, overlap_depth: int, tight: bool, graph: bool
) -> None:
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    own |= WIDTHS.get(algorithm, {})
    hold(algorithm, page_size, chunk, overlap_depth, tight, **own)


@pytest.mark.parametrize("algorithm", ["TOY-FAULTY", "TOY-FAULTY-OBSERVER"])
def test_algorithms_that_cannot_be_captured_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="disable_cuda_graph"):
        golden_llm(algorithm, device="cuda", max_running_requests=2)
