"""The example packages on a GPU: captured with the step, or run without a graph."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM
from forerun.evals.word_problems import problems
from forerun.speculative.registry import algorithm_names, register_algorithm
from tests.examples.environment import EXAMPLES

pytestmark = pytest.mark.gpu
CHATS = [[{"role": "user", "content": p.question}] for p in problems(6)]
OWN: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_running_requests": 4}


@pytest.fixture(scope="module", autouse=True)
def examples() -> None:
    patch = pytest.MonkeyPatch()
    for package in ("forerun-lookback", "forerun-twohead"):
        patch.syspath_prepend(str(EXAMPLES / package / "src"))
    from forerun_lookback import Lookback
    from forerun_twohead import TwoHead

    for name, cls in (("LOOKBACK", Lookback), ("TWOHEAD", TwoHead)):
        if name not in algorithm_names():
            register_algorithm(name, cls)


def texts(algorithm: str | None, **settings: Any) -> list[list[list[int]]]:
    greedy = [{"temperature": 0.0, "max_new_tokens": 48}] * len(CHATS)
    seeded = [
        {"temperature": 0.8, "top_p": 0.95, "sampling_seed": i, "max_new_tokens": 48}
        for i in range(len(CHATS))
    ]
    with LLM(speculative_algorithm=algorithm, **OWN, **settings) as llm:
        out = [[o.output_ids for o in llm.chat(CHATS, kind)] for kind in (greedy, seeded)]
        llm.engine.check()
    return out


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    return texts(None)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["full", "adaptive"])
@pytest.mark.parametrize("name", ["LOOKBACK", "TWOHEAD"])
def test_output_equals_plain_decoding(
    name: str, adaptive: bool, overlap_depth: int, graph: bool, plain: list[list[list[int]]]
) -> None:
    own = {"speculative_adaptive": adaptive, "disable_cuda_graph": not graph}
    assert texts(name, overlap_depth=overlap_depth, **own) == plain
