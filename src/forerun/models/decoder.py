"""The decoder that Llama-shaped families share; a family states its differences as values."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.model_config import ModelConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.attention import Attention
from forerun.layers.linear import Linear
from forerun.layers.mlp import MLP
from forerun.layers.norm import RMSNorm
from forerun.layers.rope import Rope
from forerun.models.base import CausalLM


class DecoderLayer:
    """Pre-norm attention and feed-forward. Each half ends in the norm that follows it."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        mask: LayerMask,
        qk_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.attention = Attention(config, layer, mask, qk_norm, dtype, device)
        self.mlp = MLP(config, dtype, device)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return {
            **self.attention.weights(f"{prefix}self_attn."),
            **self.mlp.weights(f"{prefix}mlp."),
            f"{prefix}input_layernorm.weight": self.input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_norm.weight,
        }

    def prepare(self) -> None:
        for part in (self.attention, self.mlp, self.input_norm, self.post_norm):
            part.prepare()


def join(
    linear: Linear, norm: RMSNorm, reader: Linear, x: Tensor, residual: Tensor
) -> tuple[Tensor | DeferredNorm, Tensor]:
    """(norm(sum), sum) of residual + linear(x), where `reader` alone takes the normed rows."""
    if linear.can_defer_norm(x) and reader.accepts_deferred_norm(x):
        return linear.add_deferred_norm(x, residual, norm.weight, norm.eps)
    return join_whole(linear, norm, x, residual)


def join_whole(linear: Linear, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) of residual + linear(x); the sum is fused into one or the other."""
    if linear.fuses_add:
        residual = linear.add(x, residual)
        return norm(residual), residual
    return norm.add(linear.split_k_partials(x), residual)


class Decoder:
    """The layers, the final norm and the rope; no embedding, no head."""

    def __init__(
        self,
        config: ModelConfig,
        masks: tuple[LayerMask, ...],
        qk_norm: bool,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = [
            DecoderLayer(config, i, mask, qk_norm, dtype, device) for i, mask in enumerate(masks)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.rope = Rope(config.rope, config.head_dim, max_positions, dtype, device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        out = {f"{prefix}norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            out |= layer.weights(f"{prefix}layers.{i}.")
        return out

    def prepare(self) -> None:
        for layer in self.layers:
            layer.prepare()
        self.norm.prepare()

    def run(
        self, x: Tensor, positions: Tensor, ctx: AttentionContext, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings x [T, H] -> as `CausalLM.forward`."""
        rows = self.rope.rows(positions)
        residual, outputs = x, {}
        normed: Tensor | DeferredNorm = self.layers[0].input_norm(x)
        for i, layer in enumerate(self.layers):
            attention, mlp = layer.attention, layer.mlp
            x = attention(normed, rows, ctx)
            normed, residual = join(attention.o, layer.post_norm, mlp.gate_up, x, residual)
            x = mlp(normed)
            if i + 1 < len(self.layers):
                after = self.layers[i + 1]
                normed, residual = join(
                    mlp.down, after.input_norm, after.attention.qkv, x, residual
                )
            else:
                x, residual = join_whole(mlp.down, self.norm, x, residual)
            if i in capture:
                outputs[i] = residual
        return x, torch.cat([outputs[i] for i in capture], 1) if capture else None


class DecoderLM(CausalLM):
    """Embedding, decoder, head. Tensor names are Hugging Face's."""

    qk_norm: ClassVar[bool] = False

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int
    ) -> None:
        self.config = config = self.adapt(config)
        self.layer_masks = tuple(LayerMask(Mask.CAUSAL, window) for window in config.windows)
        self.embedding = torch.empty(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.decoder = Decoder(config, self.layer_masks, self.qk_norm, max_positions, dtype, device)
        self.head = (
            Linear.of(self.embedding)
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype, device)
        )

    @classmethod
    def adapt(cls, config: ModelConfig) -> ModelConfig:
        """What the family fixes and its `config.json` does not say."""
        return config

    def weights(self) -> dict[str, Tensor]:
        out = {"model.embed_tokens.weight": self.embedding, **self.decoder.weights("model.")}
        if not self.config.tie_word_embeddings:
            out["lm_head.weight"] = self.head.weight
        return out

    def prepare(self) -> None:
        self.decoder.prepare()
        self.head.pack(shared=self.config.tie_word_embeddings)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        return self.decoder.run(self.embed(ids), positions, ctx, capture)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def lm_head_argmax(self, hidden: Tensor) -> Tensor:
        return self.head.argmax(hidden)
