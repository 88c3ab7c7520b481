"""`model_impl transformers`: its modules over our paged K/V give its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    FalconH1Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    MambaConfig,
    OlmoeConfig,
    OPTConfig,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
    T5Config,
)

from forerun.core.errors import ConfigError
from forerun.models.loader import load_transformers_target
from forerun.models.transformers_model import TransformersForCausalLM, load_transformers_config
from tests.models.support import _COMMON, CPU, CPU_F32, FAMILIES, Loop, random_hf, save
from tests.models.test_families import LENGTH, close, reference

OTHERS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "cohere": (CohereConfig, {"logit_scale": 0.3}),
    "cohere2": (
        Cohere2Config,
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (GPT2Config, {"n_positions": 128}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "sliding_window": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "experts_implementation": "eager",
        },
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": (StableLmConfig, {}),
    "starcoder2": (Starcoder2Config, {"sliding_window": 6}),
}
CASES = OTHERS | {name: FAMILIES[name] for name in ("gemma2", "gemma3-linear-softcap", "granite")}


def made(of: type[PreTrainedConfig], changes: dict[str, Any], folder: Path) -> Any:
    hf = random_hf(of(**{**_COMMON, **changes}))
    save(hf, folder)
    return hf


def loaded(folder: Path) -> Any:
    return load_transformers_target(folder, torch.float32, CPU)


@pytest.mark.parametrize("name", CASES)
def test_prefill_chunks_and_decode(name: str, tmp_path: Path) -> None:
    hf = made(*CASES[name], tmp_path)
    ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))
    want, hidden = reference(hf, ids)
    model = loaded(tmp_path)

    def logits(out: tuple[Tensor, Any]) -> Tensor:
        found: Tensor = model.compute_logits(out[0])
        assert torch.equal(model.compute_argmax(out[0]), found.argmax(-1))
        return found

    loop = Loop.of_model(model)
    close(logits(loop.ragged([(0, ids[:7])])), want[:7])
    close(logits(loop.ragged([(7, ids[7:])])), want[7:])

    loop = Loop.of_model(model, requests=2)  # of different lengths, in one forward
    _, captured = loop.ragged([(0, ids[:5]), (0, ids[:13])], (1, 0))
    both = torch.cat((hidden[2], hidden[1]), 1)
    close(captured, torch.cat((both[:5], both[:13])))
    for width in (1, 4):
        starts = [5, 13] if width == 1 else [6, 14]
        tokens = torch.cat([ids[s : s + width] for s in starts])
        got = logits(loop.fixed(starts, tokens))
        close(got, torch.cat([want[s : s + width] for s in starts]))


def test_the_last_layer_is_captured_before_the_final_norm(tmp_path: Path) -> None:
    hf = made(*CASES["granite"], tmp_path)
    ids = torch.arange(LENGTH)
    model = loaded(tmp_path)
    hidden, captured = Loop.of_model(model).ragged([(0, ids)], (2,))
    close(hf.model.norm(captured), hidden)


@pytest.mark.parametrize(
    ("of", "changes", "reason"),
    [
        (BertConfig, {}, "not causal"),
        (FalconConfig, {}, "FalconForCausalLM"),
        (FalconH1Config, {}, "recurrent state"),
        (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}, "does not make its logits"),
        (MambaConfig, {}, "recurrent state|no plain language model"),
        (T5Config, {"d_model": 32, "num_layers": 3}, "encoder|no plain language model"),
        (*FAMILIES["deepseek-v3"], "one head dim"),
        (*FAMILIES["phi4-mini"], "depends on the batch"),
    ],
    ids=["bert", "falcon", "falcon-h1", "opt", "mamba", "t5", "mla", "longrope"],
)
def test_refusals(
    of: type[PreTrainedConfig], changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = of(**{**_COMMON, **changes})
    config.architectures = [of.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        TransformersForCausalLM(load_transformers_config(tmp_path), CPU_F32, 1)
    assert "\n" not in str(caught.value)


def test_dummy_weights_are_refused(tmp_path: Path) -> None:
    made(*CASES["granite"], tmp_path)
    with pytest.raises(ConfigError, match="load_format dummy is not available"):
        load_transformers_target(tmp_path, torch.float32, CPU, "dummy")
