"""The GEMMs of a step are those that its models say, whichever way they are computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from forerun import LLM
from forerun.executor.device_executor import device_step
from forerun.kernels.cpu import library
from forerun.kernels.gemm import gemm as own
from forerun.kernels.gemm import head_gemm
from forerun.llm.bundled import PAIR
from forerun.plan.work import Gemm, touched_experts
from forerun_bench.bounds import step_work
from forerun_bench.ceilings import gemm_seconds
from forerun_bench.gemms import recording, step_gemms
from tests.golden_engine import golden_llm

INT8_BITS = 8 + 16 / 32  # with a scale per group
Shapes = list[tuple[int, int, int]]  # n, k, tokens


def by_shape(gemms: Sequence[Gemm]) -> Shapes:
    return sorted((gemm.n, gemm.k, gemm.tokens) for gemm in gemms)


def decoder(
    layers: int, hidden: int, heads: int, kv_heads: int, dim: int, inner: int, tokens: int
) -> Shapes:
    """qkv, o, gate_up and down of every layer."""
    return [
        ((heads + 2 * kv_heads) * dim, hidden, tokens),
        (hidden, heads * dim, tokens),
        (2 * inner, hidden, tokens),
        (hidden, inner, tokens),
    ] * layers


@pytest.mark.parametrize("batch", [1, 3])
def test_llama_with_a_block_draft(batch: int) -> None:
    """The golden pair: blocks of 10, two aux hidden states, 320 tokens in the vocabulary."""
    with golden_llm("DFLASH") as llm:
        tokens = 10 * batch
        expected = [
            *decoder(6, 160, 5, 1, 32, 400, tokens),
            (320, 160, tokens),
            *decoder(2, 160, 5, 1, 32, 448, tokens),
            (320, 160, 9 * batch),  # K = 9 predicted tokens of the block
            (160, 2 * 160, tokens),  # fc
            (2 * 2 * 32, 160, tokens),  # k and v of both layers, from the context
        ]
        found = step_gemms(llm.engine, batch)
        assert by_shape(found) == sorted(expected)
        assert {gemm.dtype for gemm in found} == {torch.float32}


bundled = pytest.mark.skipif(
    not (PAIR / "target" / "model.safetensors").exists(), reason="the bundled pair is not there"
)


@pytest.mark.covering(0)
@bundled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE3", "NGRAM"])
def test_the_bundled_target(algorithm: str | None, dtype: str) -> None:
    settings = {"speculative_algorithm": algorithm, "speculative_adaptive": False}
    with LLM(device="cpu", dtype=dtype, max_running_requests=2, **settings) as llm:
        width = device_step(llm.engine.executor).caps.num_verify_tokens
        tokens = 2 * width
        c = device_step(llm.engine.executor).model.config
        target = [
            *decoder(
                *(c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim),
                *(c.intermediate_size, tokens),
            ),
            (c.vocab_size, c.hidden_size, tokens),
        ]
        found = step_gemms(llm.engine, 2)
        rest = by_shape(found)
        for shape in target:
            rest.remove(shape)
        counts = sorted(count for *_, count in rest)
        assert (
            counts
            == {
                None: [],
                "NGRAM": [],
                # 2 layers, fc, k and v; the head.
                "DFLASH": sorted([tokens] * 10 + [2 * (width - 1)]),
                # observe: layer and fc; a chain of W - 1 drafts: heads, and layers between them.
                "EAGLE3": sorted([tokens] * 5 + [2] * (width - 1) + [2] * 4 * (width - 2)),
            }[algorithm]
        )
        work = step_work(llm.engine, 2, 100)
        assert work.gemms == found
        packed = library.library() is not None
        # The target in bfloat16, as the checkpoint is, and drafts in 8 bits with scales where
        # float32 is not asked for; a DFLASH draft has the target's head.
        head = c.vocab_size * c.hidden_size if algorithm == "DFLASH" else 0
        plain = sum(n * k for n, k, _ in target) + head
        drafts = sum(n * k for n, k, _ in rest) - head
        kept = 2 * plain + drafts * (2 if dtype == "float32" else INT8_BITS / 8)
        size = getattr(torch, dtype).itemsize
        assert work.weight_bytes == (kept if packed else size * (plain + drafts))


def test_experts_that_are_read(tmp_path: Path) -> None:
    """Of a mixture: the router, and the experts that so many tokens are expected to touch."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "mlp_only_layers": [0],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, load_format="dummy", dtype="float32", skip_tokenizer_init=True) as llm:
        found = step_gemms(llm.engine, 3)
    attention = [(64, 32, 3), (32, 32, 3)]
    dense = [*attention, (96, 32, 3), (32, 48, 3)]
    sparse = [*attention, (8, 32, 3), (32, 32, 6), (32, 16, 6)]
    assert by_shape(found) == sorted([*dense, *sparse, (64, 32, 3)])
    touched = 8 * (1 - 0.75**3)
    assert [g.matrices for g in found if g.tokens == 6] == [touched] * 2
    experts = [g for g in found if g.tokens == 6]
    assert sum(g.weight_bytes for g in experts) == round(touched * 3 * 32 * 16 * 4)
    assert experts[0].flops == 2 * 32 * 32 * 6
    assert experts[0].per_matrix() == [Gemm(32, 32, torch.float32, 2)] * 5
    assert gemm_seconds(found, torch.device("cpu")) > 0


def test_shared_experts_are_always_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, load_format="dummy", dtype="float32", skip_tokenizer_init=True) as llm:
        found = [g for g in step_gemms(llm.engine, 3) if g.tokens == 3 * (2 + 2)]
    assert by_shape(found) == [(32, 16, 12), (32, 32, 12)]
    assert [g.matrices for g in found] == [8 * (1 - 0.75**3) + 2] * 2


@pytest.mark.parametrize(("tokens", "touched"), [(1, 8), (2, 15.5), (8, 51.6), (10_000, 128)])
def test_expected_number_of_touched_experts(tokens: int, touched: float) -> None:
    assert touched_experts(tokens, 8, 128) == pytest.approx(touched, abs=0.1)


def test_operators() -> None:
    """However a plugin writes it; what has no weight in it does not count."""
    x, cube = torch.randn(3, 8), torch.randn(2, 3, 8)
    w, b, stack = torch.randn(5, 8), torch.randn(5), torch.randn(2, 5, 8)

    def step() -> None:
        h, hidden = x.clone(), cube.clone()
        F.linear(h, w, b)
        F.linear(hidden, w)
        torch.addmm(b, h, w.t())
        h @ w.T
        w @ h.T
        torch.einsum("th,nh->tn", h, w)
        torch.baddbmm(hidden @ stack.mT, hidden, stack.mT)
        scores = hidden @ hidden.mT
        torch.bmm(scores, hidden)
        F.scaled_dot_product_attention(hidden, hidden, hidden)
        torch.ops.mkldnn._linear_pointwise(h, packed, None, "none", [], "")

    packed = torch.ops.mkldnn._reorder_linear_weight(w, 32)
    one, folded, two = [(5, 8, 3)], [(5, 8, 6)], [(5, 8, 3)] * 2
    expected = one + folded + one * 4 + two * 2 + one
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), recording() as gemms:
            step()
        assert [(g.n, g.k, g.tokens) for g in gemms] == expected
    step()
    assert len(gemms) == len(expected)  # nothing is seen afterwards


def test_gemms_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_gemm, "_launch", lambda x, weight, out: None)
    with recording() as gemms:
        head_gemm._launch(torch.empty(3, 2, 8), torch.empty(2, 8, 5), torch.empty(3, 2, 5))
    assert by_shape(gemms) == [(5, 8, 3)] * 2


def test_recording_ends_with_an_error() -> None:
    launch = own._launch
    with pytest.raises(ZeroDivisionError), recording():
        assert own._launch is not launch
        1 / 0  # noqa: B018
    assert own._launch is launch
