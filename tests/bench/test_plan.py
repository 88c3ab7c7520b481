"""`forerun plan`: sizes are those of real engines, steps those that were measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.layers.communication import UnreducedRank, WeightPlacement
from forerun.llm.bundled import bundled, preset
from forerun.models.registry import model_class
from forerun.plan.gpus import GPUS, find_gpu
from forerun.plan.model_shape import DraftShape, ModelShape, busiest_touched
from forerun.plan.plan import Traffic, make_rows, possible_tps, settle
from forerun.plan.step_time import REDUCE, REDUCE_READ, Deployment, Speculation
from forerun.plan.work import touched_experts
from forerun_bench.bounds import step_work
from tests.cli.conftest import forerun
from tests.cli.support import Result

__all__ = ["forerun"]
CONTEXT = 1088  # one-batch: 1,024 + 128 tokens, halfway
# Milliseconds on one H200 at batch 1, 8, 32 (docs/performance.md, lab notes).
PLAIN = {
    ("qwen3-8b", None): (3.86, 4.21, 5.20),
    ("qwen3-8b", "fp8"): (2.62, 3.07, 4.30),
    ("qwen3-30b-a3b", None): (2.11, 6.73, 13.25),
    ("deepseek-v2-lite", None): (1.72, 4.74, 7.82),
}
WITHIN, WITHIN_DRAFTS, WITHIN_PREFILL = 0.05, 0.08, 0.06


def shape(name: str, quantization: str | None = None) -> ModelShape:
    return ModelShape.of(preset(name)[0], quantization)


@pytest.mark.parametrize("name, quantization", PLAIN, ids=str)
def test_steps_are_those_measured(name: str, quantization: str | None) -> None:
    deployment = Deployment(shape(name, quantization), GPUS["h200"])
    for batch, want in zip((1, 8, 32), PLAIN[name, quantization], strict=True):
        got = 1e3 * deployment.step_seconds(batch, CONTEXT)
        assert got == pytest.approx(want, rel=WITHIN), (batch, got)


def test_experts_in_fp8_are_those_measured() -> None:
    """No constant was fitted to these. (Of batch 1 a fifth is missing: docs/performance.md.)"""
    deployment = Deployment(shape("qwen3-30b-a3b", "fp8"), GPUS["h200"])
    for batch, want in ((8, 4.69), (32, 9.15)):
        got = 1e3 * deployment.step_seconds(batch, CONTEXT)
        assert got == pytest.approx(want, rel=WITHIN), (batch, got)
    assert deployment.model.weight_bytes == pytest.approx(31.43e9, rel=0.01)


def test_steps_on_two_gpus_are_those_measured(tmp_path: Path) -> None:
    """Qwen3-32B's shapes, batch 1, about 230 tokens of context; weights per rank as allocated."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelShape.of(tmp_path)
    for tp, want in ((1, 15.9), (2, 8.78)):
        got = 1e3 * Deployment(model, GPUS["h200"], tp).step_seconds(1, 234)
        assert got == pytest.approx(want, rel=WITHIN), (tp, got)
    assert model.weight_bytes == pytest.approx(65.63e9, rel=0.01)
    assert model.weight_bytes / 2 == pytest.approx(32.83e9, rel=0.01)


def test_steps_with_drafts_are_those_measured() -> None:
    folder, draft = preset("qwen3-8b")
    assert draft is not None
    speculation = Speculation(6.5, 16, DraftShape.of(draft, passes=1))
    deployment = Deployment(ModelShape.of(folder), GPUS["h200"], speculation=speculation)
    for batch, want in ((1, 5.11), (8, 6.23), (32, 15.24)):
        got = 1e3 * deployment.step_seconds(batch, CONTEXT)
        assert got == pytest.approx(want, rel=WITHIN_DRAFTS), (batch, got)


def test_drafts_are_whole_on_every_gpu() -> None:
    draft = DraftShape(10 << 30, num_layers=1, hidden_size=4096, ranks=1)
    made = rows("qwen3-8b", 8, speculation=Speculation(3.0, 4, draft))
    for plain, drafts in zip(made[::2], made[1::2], strict=True):
        assert drafts.weight_bytes - plain.weight_bytes == 10 << 30
        extra = drafts.step_seconds[1] - plain.step_seconds[1]
        assert extra > 0.9 * (10 << 30) / GPUS["h200"].read_bytes_per_second


def test_a_divided_draft_is_read_once_and_adds_its_reductions() -> None:
    whole = DraftShape(10 << 30, num_layers=4, hidden_size=4096, passes=3, ranks=1)
    model, gpu = shape("qwen3-8b"), GPUS["h200"]

    def seconds(draft: DraftShape) -> float:
        return Deployment(model, gpu, 2, Speculation(3.0, 4, draft)).step_seconds(1, CONTEXT)

    half = replace(whole, weight_bytes=5 << 30)  # on every GPU
    link = gpu.link_bytes_per_second * REDUCE_READ
    one = REDUCE + 2 * 4 * 4096 * 2 * (2 - 1) / 2 / link
    divided = seconds(replace(whole, ranks=2))
    assert divided == pytest.approx(seconds(half) + 3 * 2 * 4 * one)
    assert divided < seconds(whole)
    assert seconds(replace(whole, ranks=None)) == divided  # as an engine does
    small = replace(whole, hidden_size=1024)
    assert seconds(replace(small, ranks=None)) == seconds(small)
    made = make_rows(
        Deployment(model, gpu, speculation=Speculation(3.0, 4, replace(whole, ranks=2))),
        *(2, Traffic(5.0, 1024, 256), EngineConfig(max_running_requests=64), [2]),
    )
    assert made[1].weight_bytes - made[0].weight_bytes == 5 << 30


def test_prefills_are_those_measured() -> None:
    dense = Deployment(shape("qwen3-8b"), GPUS["h200"])
    experts = Deployment(shape("qwen3-30b-a3b"), GPUS["h200"])
    for deployment, tokens, count, want in (
        (dense, 1024, 1, 0.0234),
        (dense, 1024, 32, 0.738),
        (dense, 32768, 1, 1.204),
        (experts, 1024, 32, 0.89),
    ):
        got = count * deployment.prefill_seconds(tokens)
        assert got == pytest.approx(want, rel=WITHIN_PREFILL), (tokens, got)


def test_bytes_are_those_of_an_engine() -> None:
    """The floor's code counts them while a step runs."""
    folder = bundled("target")
    with LLM(folder, dtype="bfloat16", device="cpu", skip_tokenizer_init=True) as llm:
        want = step_work(llm.engine, batch_size=3, context=100)
        explain = llm.explain()
    got = ModelShape.of(folder)
    work = got.work(3, 100)
    assert work.flops == want.flops
    assert work.kv_bytes == want.kv_bytes
    assert work.weight_bytes == want.weight_bytes * got.matrices[0].dtype.itemsize // 2
    assert got.layout.token_bytes == explain["kv_bytes_per_token"]


def test_drafts_have_the_size_of_their_files(tmp_path: Path) -> None:
    """Without its norms and the projection of hidden states, the config alone gives the same."""
    folder = bundled("draft")
    sizes = {
        name: 2 * tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert DraftShape.of(folder, 1).weight_bytes == sum(sizes.values())
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    in_layers = sum(
        size for name, size in sizes.items() if name.startswith("layers.") and "norm" not in name
    )
    assert DraftShape.of(tmp_path, 1).weight_bytes == in_layers


def test_a_model_is_divided() -> None:
    one = Deployment(shape("qwen3-8b"), GPUS["h200"])
    for tp in (2, 4, 8):
        divided = Deployment(one.model, one.gpu, tp)
        assert one.step_seconds(8, 1024) / tp < divided.step_seconds(8, 1024)
        assert divided.step_seconds(8, 1024) < one.step_seconds(8, 1024)
    assert [tp for tp in range(1, 40) if one.model.divides(tp)] == [1, 2, 4, 8, 16, 32]
    assert one.model.kv_shards(16) == 8
    assert shape("deepseek-v2-lite").kv_shards(4) == 1  # every rank keeps the latents


@pytest.mark.covering(0)
@pytest.mark.parametrize("tokens, groups", [(1, 2), (1, 8), (8, 8), (32, 2), (32, 8)])
def test_the_busiest_group_is_that_of_random_choices(tokens: int, groups: int) -> None:
    """8 of 128 experts, as qwen3-30b-a3b."""
    rng, trials, total = random.Random(0), 2000, 0
    for _ in range(trials):
        touched = {e for _ in range(tokens) for e in rng.sample(range(128), 8)}
        counts = [sum(e * groups // 128 == group for e in touched) for group in range(groups)]
        total += max(counts)
    got = busiest_touched(tokens, 8, 128, groups)
    assert got == pytest.approx(total / trials, rel=0.05)
    assert got > touched_experts(tokens, 8, 128) / groups


def test_experts_are_divided_whole() -> None:
    """A rank has as many bytes as with columns of every expert; its steps wait for the busiest."""
    folder, model = preset("qwen3-30b-a3b")[0], shape("qwen3-30b-a3b")
    config, sizes = load_model_config(folder), []
    for ep in (1, 2, 4):
        place = WeightPlacement(torch.bfloat16, torch.device("meta"), UnreducedRank(3, 4), None, ep)
        weights = model_class(config)(config, place, 1).weights().values()
        sizes.append(sum(weight.nbytes for weight in weights))
    assert sizes[0] == sizes[1] == sizes[2] == pytest.approx(model.weight_bytes / 4, rel=0.01)

    def seconds(ep: int, batch_size: int) -> float:
        return Deployment(model, GPUS["h200"], 4, ep=ep).step_seconds(batch_size, CONTEXT)

    assert seconds(1, 1) < seconds(2, 1) < seconds(4, 1)
    assert seconds(4, 4096) == pytest.approx(seconds(1, 4096))  # all experts are read


def rows(name: str, count: int, gpu: str = "h200", rate: float = 5.0, **more: Any) -> list[Any]:
    deployment = Deployment(shape(name), GPUS[gpu], **more)
    traffic = Traffic(rate, 1024, 256)
    tps = possible_tps(deployment, count, None)
    return make_rows(deployment, count, traffic, EngineConfig(max_running_requests=64), tps)


def test_rows() -> None:
    made = rows("qwen3-8b", 8, speculation=Speculation(3.0, 4))
    assert [(r.tp, r.replicas, r.speculative) for r in made] == [
        (tp, 8 // tp, spec) for tp in (1, 2, 4, 8) for spec in (False, True)
    ]
    for row in made:
        gpu = GPUS["h200"].memory_bytes
        assert row.weight_bytes + row.kv_bytes < 0.85 * gpu + 1
        assert row.kv_tokens >= row.requests * 1280
        assert row.load is not None
        assert row.dollars_per_hour == pytest.approx(28)
        assert row.dollars_per_million == pytest.approx(1e6 * 28 / 3600 / (5 * 256))
    small = rows("qwen3-30b-a3b", 2, "l40s")
    assert [(row.tp, row.replicas) for row in small] == [(2, 1)]  # one is too small
    with pytest.raises(ConfigError, match="57 GiB leave no memory for a request of 1280"):
        rows("qwen3-30b-a3b", 1, "l40s")


def test_a_rate_that_is_too_high_is_not_held() -> None:
    (low,), (high,) = rows("qwen3-8b", 1, rate=5.0), rows("qwen3-8b", 1, rate=1000.0)
    assert low.load is not None and high.load is None
    assert high.max_rate == low.max_rate < 1000
    (almost,) = rows("qwen3-8b", 1, rate=0.999 * low.max_rate)
    assert almost.load is not None and almost.load.batch_size == 64
    assert almost.load.ttft_seconds > low.load.ttft_seconds
    assert almost.load.tpot_seconds > low.load.tpot_seconds


def test_the_batch_serves_the_rate_and_no_smaller_one_does() -> None:
    way, traffic = Deployment(shape("qwen3-8b"), GPUS["h200"]), Traffic(8.0, 1024, 256)
    load = settle(way, traffic, 8.0, 256)
    assert load is not None

    def used(batch: int) -> float:
        decode = 256 * way.step_seconds(batch, traffic.context) / batch
        return 8.0 * (way.prefill_seconds(1024) + decode)

    assert used(load.batch_size) <= 1 < used(load.batch_size - 1)


def test_the_command(forerun: Callable[..., Result], tmp_path: Path) -> None:
    base = ("plan", "--preset", "qwen3-8b", "--count", "8", "--rate", "20")
    shown = forerun(*base, "--accept-length", "4").out
    assert "Memory and steps" in shown and "20 requests/s of 1024 + 256 tokens" in shown
    assert shown.startswith("qwen3-8b on h200 (measured)") and "tp > 1: 6.5 us" in shown
    assert "left over" not in shown
    assert "3 GPUs: those left over" in forerun("plan", "--preset", "qwen3-8b", "--count", "3").out
    made = json.loads(forerun(*base, "--tp-size", "2", "--price", "2", "--json").out)
    (row,) = made["rows"]
    assert (row["tp"], row["replicas"], row["dollars_per_hour"], row["held"]) == (2, 4, 16, True)
    experts = ("plan", "--preset", "qwen3-30b-a3b", "--count", "8", "--ep-size", "2")
    assert "ep 2: no step was measured" in forerun(*experts).out
    fp8 = json.loads(forerun(*experts, "--quantization", "fp8", "--json").out)["rows"]
    assert [(row["tp"], row["ep"]) for row in fp8] == [(2, 2)]  # an engine refuses the others
    drafts = (*base, "--accept-length", "4", "--speculative-draft-tp-size", "2", "--json")
    assert {row["tp"] for row in json.loads(forerun(*drafts).out)["rows"]} == {2}
    other = forerun(*base, "--read-bandwidth", "8").out
    assert "(not measured): read 8 TB/s" in other
    local = forerun("plan", "--model", str(bundled("target"))).out
    assert "Memory and steps" in local


def test_bad_input(forerun: Callable[..., Result]) -> None:
    qwen = ("plan", "--preset", "qwen3-8b")
    drafts = ("--accept-length", "4", "--speculative-draft-tp-size")
    for flags, match in (
        (("plan",), "Give --model or --preset"),
        ((*qwen, "--model", "x"), "Give --model or --preset"),
        ((*qwen, "--count", "0"), "count must be >= 1"),
        ((*qwen, "--rate", "-1"), "rate must be > 0"),
        ((*qwen, "--price", "0"), "price must be > 0"),
        ((*qwen, "--accept-length", "17"), "accept_length must be in [1, draft_tokens = 16]"),
        ((*qwen, "--tp-size", "2"), "tp_size 2 is more than the 1 GPUs"),
        ((*qwen, "--count", "3", "--tp-size", "3"), "does not divide 32 heads"),
        ((*qwen, "--tp-size", "0"), "tp_size must be >= 1, got 0"),
        ((*qwen, "--speculative-draft-tp-size", "2"), "is set without accept_length"),
        ((*qwen, "--draft-model", "x"), "draft_model is set without accept_length"),
        ((*qwen, *drafts, "0"), "speculative_draft_tp_size must be 1 or tp_size, 1, got 0"),
        ((*qwen, *drafts, "2", "--tp-size", "4"), "must be 1 or tp_size, 4, got 2"),
        ((*qwen, *drafts, "2"), "tp_size 2 is more than the 1 GPUs"),
        ((*qwen, *drafts, "3", "--count", "3"), "does not divide the model's attention heads, 32"),
        (("plan", "--model", str(bundled("target")), *drafts, "2"), "divides a draft model, and"),
        ((*qwen, "--ep-size", "0"), "ep_size must be >= 1"),
        ((*qwen, "--ep-size", "2"), "ep_size 2 is more than the 1 GPUs"),
        ((*qwen, "--count", "3", "--ep-size", "3"), "K/V heads; take another ep_size"),
        ((*qwen, "--count", "4", "--tp-size", "2", "--ep-size", "4"), "ep_size 4 does not divide"),
        ((*qwen, "--count", "2", "--ep-size", "2"), "Qwen3ForCausalLM has none; drop it"),
        ((*qwen, "--input-len", "40960"), "over the model's context length 40960"),
        ((*qwen, "--gpu", "h20"), "Did you mean 'h200'"),
        ((*qwen, "--quantization", "fp9"), "quantization"),
    ):
        assert match in forerun(*flags).error, flags
    with pytest.raises(ConfigError, match="Known: h200"):
        find_gpu("x")
