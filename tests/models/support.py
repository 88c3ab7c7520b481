"""Small random models, and a loop that runs them on K/V pages without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from forerun.attention.base import AttentionBatch, AttentionContext, AttentionNeed, LayerMask
from forerun.attention.torch_native import TorchNative
from forerun.kernels.runtime.fp8 import FP8
from forerun.kvcache.layouts import DenseKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.layers.communication import WeightPlacement

CPU = torch.device("cpu")
CPU_F32 = WeightPlacement(torch.float32, CPU)
PAGE = 4
PAGES_PER_REQUEST = 32  # 128 positions
MOST_TOKENS = 8  # of a request, in a forward with the shape of a decode step

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
_MLA = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,  # not that of the inner norms
}
_MOE = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
}
_DENSE = {"first_k_dense_replace": 3}
_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "experts_implementation": "eager",
}
_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-2,  # keeps rounding errors small where the output of a head is near 0
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0],
}
_GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-2,  # scores are not scaled down: with less, rounding errors grow
}

# name -> (config class, overrides)
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied-mqa": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-3.1": (LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-sliding-tied": (Qwen2Config, {**_SLIDING, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-bias-sliding": (Qwen3Config, {"head_dim": 8, "attention_bias": True, **_SLIDING}),
    "qwen3-tied-mha": (
        Qwen3Config,
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "qwen3-yarn": (Qwen3Config, {"head_dim": 16, "rope_parameters": _YARN}),
    "deepseek-v2-dense": (
        DeepseekV2Config,
        {
            **_MLA,
            **_DENSE,
            "q_lora_rank": 20,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v2-groups": (
        DeepseekV2Config,
        {
            **_MLA,
            **_MOE,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek-v2-lite": (DeepseekV2Config, {**_MLA, **_MOE, "tie_word_embeddings": True}),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            **_MLA,
            **_MOE,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "kimi-k2": (
        DeepseekV3Config,
        {**_MLA, **_MOE, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (Gemma3TextConfig, _GEMMA3),
    "gemma3-linear-softcap": (
        Gemma3TextConfig,
        {
            **_GEMMA3,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.6,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "experts_implementation": "eager",
        },
    ),
    "gemma4-per-layer": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 96,
        },
    ),
    "glm4": (Glm4Config, {"head_dim": 16, "attention_bias": True}),
    "glm4-moe": (
        Glm4MoeConfig,
        {**_MOE, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_group": 2},
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 0.7,  # so that something is clamped
            "rope_parameters": {**_YARN, "truncate": False},
            "experts_implementation": "eager",
        },
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralConfig, {"sliding_window": 6, "head_dim": 16}),
    "mixtral": (
        MixtralConfig,
        {"num_local_experts": 4, "sliding_window": 6, "experts_implementation": "eager"},
    ),
    "olmo2": (Olmo2Config, {"rms_norm_eps": 1e-6}),
    "olmo3": (
        Olmo3Config,
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": 9}),
    "phi4-mini": (
        Phi3Config,
        {
            "head_dim": 16,
            "num_attention_heads": 2,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 8,
            "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 8},
            "tie_word_embeddings": True,
        },
    ),
    "seed-oss": (SeedOssConfig, {"head_dim": 16}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "qwen3-next": (Qwen3NextConfig, {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3-next-dense-layers": (
        Qwen3NextConfig,
        {
            **_DELTA,
            **_EXPERTS,
            "mlp_only_layers": [0, 3],
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 24,
            "attention_bias": True,
            "linear_num_value_heads": 6,
        },
    ),
    "qwen3.5": (
        Qwen3_5TextConfig,
        {
            **_DELTA,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-tied-mha": (
        Qwen3_5TextConfig,
        {**_DELTA, "linear_num_key_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3-moe": (Qwen3MoeConfig, _EXPERTS),
    "qwen3-moe-dense-layers": (
        Qwen3MoeConfig,
        {**_EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3-moe-sparse-step-sliding": (
        Qwen3MoeConfig,
        {**_EXPERTS, **_SLIDING, "decoder_sparse_step": 2, "num_experts_per_tok": 8},
    ),
}


def random_hf(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A transformers model with random weights, including norms and biases."""
    return randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), seed)


def randomised(model: Any, seed: int = 0) -> Any:
    """With random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms are initialised with 1, or with 0 where 1 is added to them.
            mean = weight.mean().item() if "norm" in name else 0.0
            weight.normal_(mean, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2, generator=generator)
    return model


def family(name: str, **more: Any) -> Any:
    """A small random model of transformers; `more`: keys of its config."""
    kind, changes = FAMILIES[name]
    return random_hf(kind(**{**_COMMON, **changes, **more}))


@dataclass
class Loop:
    """K/V pages of up to `requests` requests, and forwards that use them."""

    forward: Any  # (ids or embeddings, positions, ctx, ...) -> the model's outputs
    backend: TorchNative
    table: Tensor

    @classmethod
    def over(
        cls,
        forward: Any,
        layout: ModelLayout,
        masks: tuple[LayerMask, ...],
        heads: int,
        requests: int,
    ) -> Loop:
        kind = layout.paged[0]
        dense = isinstance(kind, DenseKV)
        need = AttentionNeed(
            device="cpu",
            dtype=torch.float32 if kind.dtype == FP8 else kind.dtype,
            kv_dtype=kind.dtype,
            head_dim=kind.head_dim if dense else kind.dim,
            num_heads=heads,
            num_kv_heads=kind.num_kv_heads if dense else 1,
            masks=frozenset(masks),
            mla=not dense,
            dense=dense,
        )
        assert TorchNative.why_not(need) == []
        pages = 1 + requests * PAGES_PER_REQUEST
        shape = PoolShape(pages, PAGE, requests + 1, num_verify_tokens=MOST_TOKENS)
        backend = TorchNative(need, ModelPools(layout, shape, CPU))
        # Shuffled, so that ignoring the page table gives wrong results.
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        return cls(forward, backend, order.view(requests, PAGES_PER_REQUEST).to(torch.int32))

    @classmethod
    def of_model(cls, model: Any, requests: int = 1, kv_dtype: torch.dtype | None = None) -> Loop:
        layout = model.kv_layout(kv_dtype or model.embed(torch.tensor([0])).dtype)
        return cls.over(model.forward, layout, model.layer_masks, model.config.num_heads, requests)

    def ragged(self, parts: list[tuple[int, Tensor]], *args: Any) -> Any:
        """Prefill chunks (start, ids or embeddings) of requests 0, 1, ... in one forward."""
        starts = [start for start, _ in parts]
        positions = [torch.arange(s, s + len(x)) for s, x in parts]
        batch = AttentionBatch(
            page_table=self.table[: len(parts)],
            start=torch.tensor(starts, dtype=torch.int32),
            kv_len_ub=max(s + len(x) for s, x in parts),
            ragged=tuple((s, len(x)) for s, x in parts),
            slots=torch.arange(len(parts)),
        )
        return self._run(torch.cat([x for _, x in parts]), torch.cat(positions), batch, *args)

    def fixed(
        self, starts: list[int], x: Tensor, *args: Any, num_committed: int | None = None
    ) -> Any:
        """A forward with the shape of a decode step: W tokens per request, x [B * W, ...].

        `num_committed`: of each request's tokens; None: all.
        """
        width = len(x) // len(starts)
        start = torch.tensor(starts, dtype=torch.int32)
        batch = AttentionBatch(
            page_table=self.table[: len(starts)],
            start=start,
            kv_len_ub=max(starts) + width,
            q_len=width,
            slots=torch.arange(len(starts)),
        )
        positions = (start[:, None] + torch.arange(width, dtype=torch.int32)).flatten()
        out = self._run(x, positions, batch, *args)
        committed = width if num_committed is None else num_committed
        assert batch.slots is not None
        self.backend.pools.commit(batch.slots, torch.full_like(start, committed))
        return out

    def context(self, batch: AttentionBatch) -> AttentionContext:
        return AttentionContext(self.backend, self.backend.plan(batch), batch)

    def _run(self, x: Tensor, positions: Tensor, batch: AttentionBatch, *args: Any) -> Any:
        with torch.inference_mode():
            return self.forward(x, positions, self.context(batch), *args)


def save(model: Any, folder: Path, **kwargs: Any) -> Path:
    model.save_pretrained(folder, **kwargs)
    return folder


def absent(_: Tensor) -> Tensor:
    raise AssertionError("the draft has its own")


ABSENT = SimpleNamespace(embed=absent, compute_logits=absent, compute_argmax=absent)


def vocab_of(table: Tensor) -> Any:
    """A target's embedding and LM head, both `table` [V, H]."""
    return SimpleNamespace(
        embed=lambda ids: table[ids],
        compute_logits=lambda x: x @ table.T,
        compute_argmax=lambda x: (x @ table.T).argmax(-1),
        lm_head=lambda x: x @ table.T,
    )
