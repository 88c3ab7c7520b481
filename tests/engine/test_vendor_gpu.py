"""Engines on the attention libraries that are installed, in bfloat16, on a GPU.

Rounding decides between tokens that are almost equally likely. So a token is right if, after the
tokens before it, a float32 model gives it nearly the highest logit. Wrong attention is far off.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from forerun.attention.base import AttentionNeed, LayerMask
from forerun.attention.capabilities import Phase
from forerun.attention.select import BACKENDS
from forerun.platform.device import gpu_arch
from tests.engine.test_matrix import NEW, prompts
from tests.golden_engine import GOLDEN, golden_llm
from tests.support_cells import passed

pytestmark = pytest.mark.gpu

CLOSE = 0.25  # logits; bfloat16 moves them by less than 0.1 in this model
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}


# (setting, backend); flashmla and flashinfer_mla have targets of their own.
CHOICES = [
    ("attention_backend", "triton"),
    ("attention_backend", "fa3"),
    ("prefill_attention_backend", "fa4"),
    ("decode_attention_backend", "trtllm_mha"),
    ("attention_backend", "flashinfer"),
]


def skip_unless(flag: str, backend: str, page_size: int) -> None:
    """Skips where the backend cannot serve the golden target."""
    need = AttentionNeed(
        "cuda",
        torch.bfloat16,
        head_dim=32,
        num_heads=5,
        num_kv_heads=1,
        masks=frozenset({LayerMask()}),
        phase=Phase.PREFILL if flag.startswith("prefill") else Phase.DECODE,
        arch=gpu_arch(torch.device("cuda")),
        page_sizes=frozenset({page_size}),
    )
    if reasons := BACKENDS[backend]().why_not(need):
        pytest.skip("; ".join(reasons))


@cache
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "target", dtype=torch.float32
    ).eval()


@torch.inference_mode()
def behind(prompt: list[int], output: list[int]) -> float:
    """How far a generated token's logit is below the highest, at most."""
    logits = reference()(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return float((logits.amax(1) - chosen).max())


def test_the_measure_can_fail() -> None:
    prompt = prompts(16, False)[0]
    assert behind(prompt, [prompt[5]] * 4) > 4 * CLOSE


@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (16, 4), (64, 512), (128, 16)])
@pytest.mark.parametrize("algorithm", [None, "NGRAM", "DFLASH"])
@pytest.mark.parametrize(("flag", "backend"), CHOICES, ids=[name for _, name in CHOICES])
def test_every_token_is_nearly_the_most_likely(
    flag: str,
    backend: str,
    algorithm: str | None,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    graph: bool,
) -> None:
    skip_unless(flag, backend, page_size)
    asked = prompts(page_size, False)
    with golden_llm(
        algorithm,
        device="cuda",
        dtype="bfloat16",
        page_size=page_size,
        chunked_prefill_size=chunk,
        overlap_depth=overlap_depth,
        disable_cuda_graph=not graph,
        max_running_requests=6,
        **{flag: backend},
    ) as llm:
        for _ in range(2):  # then with cached prefixes
            outputs = llm.generate(input_ids=asked, sampling_params=GREEDY)
            for prompt, output in zip(asked, outputs, strict=True):
                assert len(output.output_ids) == NEW
                assert behind(prompt, output.output_ids) < CLOSE
        llm.engine.check()
        passed(llm, __file__)
