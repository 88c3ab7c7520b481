"""Every family with every algorithm on every backend: small random models, equal texts.

Backends over packages run over stand-ins of their calls. What passes is a cell of docs/support.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.executor import resolve
from forerun.speculative.registry import BUILT_IN
from tests.attention import stand_in_flashinfer, stand_ins
from tests.golden_engine import poison_on_release
from tests.support_cells import passed
from tests.support_table import MODELS, Config, folders_of

# Cells name `torch_native` where no other backend serves; that is so on CPUs without a compiler.
pytestmark = pytest.mark.usefixtures("without_cpu_kernels")

LATENT = [label for label, config in MODELS.items() if "kv_lora_rank" in config]
DENSE = [label for label in MODELS if label not in LATENT]
PACKAGES = stand_ins.stand_ins()
NEW = 10
REFUSALS = (
    "cannot serve",
    "has no layer that predicts further ahead",
    "drafts with a multi-token prediction layer, as NEXTN does",
    "drafts for Gemma 4, and the target is",
)
SMALL: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
ALSO: Config = {  # where a config has them
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "sliding_window": 20,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
}


def small(label: str) -> Config:
    config = MODELS[label] | SMALL
    config |= {key: value for key, value in ALSO.items() if key in config}
    if "kv_lora_rank" in config:
        del config["head_dim"]
        config["num_key_value_heads"] = config["num_attention_heads"]
    config.pop("layer_types", None)
    if "linear_num_key_heads" in config:
        config["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    return config


@contextmanager
def named(backend: str, arch: str) -> Iterator[str]:
    """The name to ask for; if it has a package, with its stand-in for this GPU."""
    package = {"fa3": "fa3-vllm", "fa4": "fa4", "flashmla": "flashmla"}.get(backend)
    with pytest.MonkeyPatch.context() as patch:
        if backend in stand_in_flashinfer.KINDS:
            patch.setattr(resolve, "gpu_arch", lambda device: arch)
            kernels = "trtllm-gen" if arch == "sm_100" else "xqa"
            with stand_in_flashinfer.registered(kernels):
                yield backend
        elif package is not None:
            patch.setattr(resolve, "gpu_arch", lambda device: arch)
            with stand_ins.registered(PACKAGES[package]) as name:
                yield name
        else:
            yield backend


@cache
def prompts() -> list[list[int]]:
    draw = random.Random(5)
    stem = [draw.randrange(96) for _ in range(70)]
    return [stem[:66], stem[:40], stem[50:53]]


def texts(
    label: str,
    algorithm: str,
    backend: str,
    record: bool = False,
    setting: str = "attention_backend",
) -> list[list[int]]:
    """Of the prompts twice, so that the second time their prefixes are cached."""
    chosen: dict[str, Any] = {setting: backend}
    with TemporaryDirectory() as root:
        target, draft = folders_of(Path(root), small(label), algorithm)
        with LLM(
            target,
            load_format="dummy_normal",
            dtype="float32",
            skip_tokenizer_init=True,
            speculative_algorithm=algorithm,
            speculative_draft_model_path=None if draft is None else str(draft),
            speculative_adaptive=False,
            **chosen,
            chunked_prefill_size=48,
            page_size=64,
            max_running_requests=6,
            device="cuda" if backend == "triton" else "cpu",
        ) as llm:
            poison_on_release(llm)
            ask = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
            asked = prompts() + prompts()
            out = [o.output_ids for o in llm.generate(input_ids=asked, sampling_params=ask)]
            llm.engine.check()
            if record:
                assert out == plain(label, "triton" if backend == "triton" else "torch_native")
                passed(llm, __file__)
            return out


@cache
def plain(label: str, backend: str = "torch_native") -> list[list[int]]:
    return texts(label, "NONE", backend)


def hold(label: str, algorithm: str, backend: str) -> None:
    """`backend`: on which GPU (its stand-in), and for which phase if not for all."""
    where, _, phase = backend.partition(" for ")
    setting = f"{phase}_attention_backend" if phase else "attention_backend"
    with named(*where.split(" on ")) as name:
        try:
            texts(label, algorithm, name, record=True, setting=setting)
        except ConfigError as error:
            assert any(reason in str(error) for reason in REFUSALS)
            pytest.skip(str(error))


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    "backend",
    [
        "torch_native on CPU",
        "trtllm_mha on sm_90",
        "trtllm_mha on sm_100",
        "flashinfer on sm_90",
        "fa3 on sm_90",
        "fa4 on sm_90 for prefill",
        "fa4 on sm_100",
    ],
)
@pytest.mark.parametrize("algorithm", BUILT_IN)
@pytest.mark.parametrize("label", DENSE)
def test_dense(label: str, algorithm: str, backend: str) -> None:
    hold(label, algorithm, backend)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    "backend",
    [
        "torch_native on CPU",
        "flashinfer_mla on sm_90",
        "flashmla on sm_90",
        "fa3 on sm_90",
        "fa4 on sm_100",
    ],
)
@pytest.mark.parametrize("algorithm", BUILT_IN)
@pytest.mark.parametrize("label", LATENT)
def test_latent(label: str, algorithm: str, backend: str) -> None:
    hold(label, algorithm, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", BUILT_IN)
@pytest.mark.parametrize("label", MODELS)
def test_on_a_gpu(label: str, algorithm: str) -> None:
    """Captured, on our own kernels: float32 there too gives the text of plain decoding."""
    hold(label, algorithm, "triton on sm_90")


def test_the_texts_differ() -> None:
    """Models and prompts have texts of their own, which are more than one token."""
    for label in ("Qwen3-8B", "DeepSeek-V3"):
        assert len({token for text in plain(label) for token in text}) > 5
