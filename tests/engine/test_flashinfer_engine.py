"""Engines on FlashInfer's backends, over a stand-in of its calls: the text of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.models import registry
from tests.attention import stand_in_flashinfer as stand_in
from tests.engine.test_matrix import hold
from tests.engine.test_toy_models import prompts
from tests.golden_engine import CASES, golden_llm
from tests.toy_algorithms import register_toys
from tests.toy_models import ToyLatentForCausalLM, save_toy, toy_model

EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_toys()
    with stand_in.registered():
        yield


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "algorithm", "page", "chunk", "tight"),
    [
        ("flashinfer", "DFLASH", 16, 4, True),
        pytest.param("trtllm_mha", "DFLASH", 16, 512, True, marks=EXHAUSTIVE),
        ("trtllm_mha", "TOY-TREES", 16, 4, False),
        pytest.param("flashinfer", "TOY-TREES", 1, 512, False, marks=EXHAUSTIVE),
        pytest.param("flashinfer", "NGRAM", 1, 4, True, marks=EXHAUSTIVE),
        pytest.param("flashinfer", None, 16, 512, False, marks=EXHAUSTIVE),
        pytest.param("trtllm_mha", "NGRAM", 16, 4, True, marks=EXHAUSTIVE),
        pytest.param("trtllm_mha", None, 16, 512, False, marks=EXHAUSTIVE),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    name: str, algorithm: str | None, page: int, chunk: int, tight: bool
) -> None:
    hold(algorithm, page, chunk, 1, tight, attention_backend=name)
    assert stand_in.calls


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ["trtllm_mha", "flashinfer"])
@pytest.mark.usefixtures("without_cpu_kernels")
def test_draft_extend(chain_llm: Callable[..., LLM], name: str) -> None:
    """Verify and draft extend run on the decode kernel with W tokens per request."""
    ask = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    asked = [case["prompt"][:20] for case in CASES[:2]]
    with golden_llm(page_size=16) as llm:
        want = [out.output_ids for out in llm.generate(input_ids=asked, sampling_params=ask)]
    settings = {"attention_backend": name, "speculative_num_draft_tokens": 4, "page_size": 16}
    with chain_llm("EAGLE3", **settings) as llm:
        got = [out.output_ids for out in llm.generate(input_ids=asked, sampling_params=ask)]
        chosen = llm.explain()["draft_attention"]
    assert got == want
    assert chosen["draft extend"] == f"{name}: chosen"
    if name == "trtllm_mha":
        assert chosen["prefill"].startswith("torch_native: chosen")
        assert {"xqa 4", "xqa 1"} <= set(stand_in.calls)


def test_mla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One latent pool through prefill, decode and verification; a draft tree is refused."""
    kind = ToyLatentForCausalLM
    monkeypatch.setitem(registry.ARCHITECTURES, kind.__name__, kind)
    folder, ask = save_toy(kind, tmp_path / "toy"), {"temperature": 0.0, "max_new_tokens": 12}
    model = toy_model(kind, folder)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "page_size": 16}
    settings |= {"attention_backend": "flashinfer_mla", "speculative_adaptive": False}
    for algorithm in (None, "TOY-LEARNER"):
        with LLM(folder, speculative_algorithm=algorithm, **settings) as llm:
            assert llm.explain()["overlap_depth"] == 0
            for prompt in prompts():
                out = llm.generate(input_ids=prompt, sampling_params={**ask, "ignore_eos": True})
                assert out.output_ids == model.oracle(prompt, 12)
    assert set(stand_in.calls) == {"mla fa2 True"}
    with pytest.raises(ConfigError, match="verify of the target: it has no custom mask"):
        LLM(folder, speculative_algorithm="TOY-TREES", **settings)
