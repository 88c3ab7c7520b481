"""TWOHEAD in the engine: the text of plain decoding, in fewer steps, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.evals.word_problems import problems
from forerun.speculative.base import ObserveInput, Phase, ProposeInput
from forerun.speculative.registry import get_algorithm
from forerun_twohead import TwoHead
from forerun_twohead.heads import SHIPPED, Heads, Shape, read_shape

PROBLEMS = [[{"role": "user", "content": p.question}] for p in problems(6)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 48}
SEEDED = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": 48}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 2048,
    "max_running_requests": 4,
}


def rules(sampled: bool) -> list[dict[str, Any]]:
    return [{**SEEDED, "sampling_seed": i} if sampled else GREEDY for i in range(len(PROBLEMS))]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    with LLM(**SMALL) as llm:
        return [
            [out.output_ids for out in llm.chat(PROBLEMS, rules(sampled))]
            for sampled in (False, True)
        ]


@pytest.fixture(scope="module", params=[0, 1], ids=["sync", "overlap"])
def twohead(request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {"chunked_prefill_size": 32, "speculative_adaptive": False}
    with LLM(
        speculative_algorithm="TWOHEAD", overlap_depth=request.param, **SMALL, **settings
    ) as llm:
        yield llm
        llm.close()
        llm.engine.check()


def test_it_comes_through_its_entry_point() -> None:
    (point,) = entry_points(group="forerun.algorithms", name="TWOHEAD")
    assert point.dist is not None and point.dist.name == "forerun-twohead"
    assert get_algorithm("twohead") is TwoHead


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_output_equals_plain_decoding_in_fewer_steps(
    sampled: bool, twohead: LLM, plain: list[list[list[int]]]
) -> None:
    for _ in ("cold", "warm"):
        outs = twohead.chat(PROBLEMS, rules(sampled))
        assert [out.output_ids for out in outs] == plain[sampled]
    tokens = sum(out.meta_info["completion_tokens"] for out in outs)
    steps = sum(out.meta_info["spec_verify_ct"] for out in outs)
    assert tokens / steps > 1.3


def test_widths_that_adapt(plain: list[list[list[int]]]) -> None:
    """At W = 1 nothing is proposed, and the hidden state is kept up to date all the same."""
    with LLM(speculative_algorithm="TWOHEAD", **SMALL) as llm:
        widths = llm.engine.scheduler.widths
        turns = iter(range(10**6))
        widths._choose = lambda requests, most: widths.widths[next(turns) % (most + 1)]
        assert [out.output_ids for out in llm.chat(PROBLEMS, rules(False))] == plain[0]
        assert set(widths.chosen) == {1, 2, 3}


class NoHostReads(TorchDispatchMode):
    """Refuses the operations through which the host learns what a tensor holds."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        assert name not in self.READS, f"{name} reads a tensor on the host"
        return function(*args, **(kwargs or {}))


def test_a_step_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step must not; the engine's own part of it is not checked here.

    Without graphs, so that every step calls the algorithm.
    """
    calls: list[Phase | None] = []
    propose, observe = TwoHead.propose, TwoHead.observe

    def checked_propose(self: TwoHead, step: ProposeInput) -> Any:
        calls.append(None)
        with NoHostReads():
            return propose(self, step)

    def checked_observe(self: TwoHead, step: ObserveInput) -> None:
        calls.append(step.phase)
        with NoHostReads():
            observe(self, step)

    monkeypatch.setattr(TwoHead, "propose", checked_propose)
    monkeypatch.setattr(TwoHead, "observe", checked_observe)
    with LLM(speculative_algorithm="TWOHEAD", disable_cuda_graph=True, **SMALL) as llm:
        out = llm.chat(PROBLEMS[0], {**GREEDY, "max_new_tokens": 8})
    assert out.finish_reason["type"] == "length"
    assert set(calls) == {None, Phase.PREFILL, Phase.VERIFY}


def test_the_heads_are_what_their_formula_says() -> None:
    heads = Heads.load(SHIPPED, torch.device("cpu"), torch.float32)
    hidden = torch.randn(5, read_shape(SHIPPED).hidden_size)
    out = heads(hidden, 2)
    for i in range(2):
        inner = torch.nn.functional.silu(hidden @ heads.down[i].T)
        torch.testing.assert_close(out[:, i], hidden + inner @ heads.up[i].T)
    torch.testing.assert_close(heads(hidden, 1), out[:, :1])


def test_the_weights_that_ship_are_small() -> None:
    assert SHIPPED.stat().st_size <= 2**20


def test_weights_that_cannot_work(tmp_path: Path) -> None:
    def refuse(says: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=says):
            LLM(speculative_algorithm="TWOHEAD", **SMALL, **settings)

    def written(name: str, weights: dict[str, torch.Tensor]) -> str:
        save_file(weights, tmp_path / name)
        return str(tmp_path / name)

    refuse("is not a safetensors file", speculative_draft_model_path=str(tmp_path / "none"))
    refuse("not the heads' down and up", speculative_draft_model_path=written("a", {}))
    small = Heads(Shape(2, 4, 64)).state_dict()
    refuse("hidden states of 64, the target's have 256",
           speculative_draft_model_path=written("b", small))  # fmt: skip
    small["up"] = torch.zeros(1, 1, 1)
    refuse("expected .2, 64, 4.", speculative_draft_model_path=written("c", small))
    refuse("must be 2 to 3", speculative_num_draft_tokens=4)
    refuse("must be 2 to 3", speculative_num_draft_tokens=1)
    from forerun.llm.bundled import bundled

    refuse("belong to the bundled target", model_path=str(bundled("target")))


def test_the_command_line(plain: list[list[list[int]]]) -> None:
    line = [
        *("generate", PROBLEMS[0][0]["content"], "--chat", "--json", "--device", "cpu"),
        *("--speculative-algorithm", "TWOHEAD", "--dtype", "float32", "--temperature", "0"),
        *("--max-total-tokens", "2048", "--max-new-tokens", "48"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "forerun", *line], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout)["output_ids"] == plain[0][0]
