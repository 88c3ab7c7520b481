"""The body of a DFlash draft in training: all blocks of all sequences in one pass.

Parameters have the names of z-lab's checkpoints. What is computed is `models/dflash.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.core.errors import ConfigError
from forerun.models.dflash_config import DFlashConfig
from forerun_train.drafts.parts import (
    BlockConvolution,
    GatedMLP,
    Injected,
    InjectedAttention,
    Linear,
    RMSNorm,
    RopeTables,
)
from forerun_train.masks import AttentionMask


class Layer(nn.Module):
    """One layer; with convolutions around its sublayers in DFlash2's bodies."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        model, size = config.model, config.hidden_size
        self.self_attn = InjectedAttention(model)
        self.mlp = GatedMLP(size, model.intermediate_size)
        self.input_layernorm = RMSNorm(size, model.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, model.rms_norm_eps)
        self.rows = config.block_size
        self.attention_conv = self.mlp_conv = None
        if config.convolution is not None:
            self.attention_conv = BlockConvolution(config.convolution, size)
            self.mlp_conv = BlockConvolution(config.convolution, size)

    def forward(self, x: Tensor, injected: Injected, mask: AttentionMask) -> Tensor:
        """x [B, Q, H], the residual stream -> the same."""
        normed = self.input_layernorm(x)
        if self.attention_conv is None or self.mlp_conv is None:
            x = x + self.self_attn(normed, injected, mask)
            out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
            return out
        dynamic, normed = self._before(self.attention_conv, normed)
        attended = self.self_attn(normed, injected, mask)
        x = x + self._after(self.attention_conv, attended, dynamic)
        dynamic, normed = self._before(self.mlp_conv, self.post_attention_layernorm(x))
        return x + self._after(self.mlp_conv, self.mlp(normed), dynamic)

    def _before(self, convolution: BlockConvolution, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, Q, H] -> the dynamic kernels of its blocks, and x convolved."""
        blocks = x.view(-1, self.rows, x.shape[-1])
        dynamic = convolution.dynamic(blocks)
        return dynamic, convolution.convolve(blocks, dynamic, 0).view_as(x)

    def _after(self, convolution: BlockConvolution, x: Tensor, dynamic: Tensor) -> Tensor:
        blocks = x.view(-1, self.rows, x.shape[-1])
        return convolution.convolve(blocks, dynamic, 1).view_as(x)


class DFlashBody(nn.Module):
    """fc, hidden_norm, layers and norm."""

    def __init__(
        self, config: DFlashConfig, max_positions: int, activation_checkpointing: bool = False
    ) -> None:
        """`max_positions`: length of the rotary tables.

        Raises:
            ConfigError: the config has what training does not compute.
        """
        super().__init__()
        _check(config)
        size, eps = config.hidden_size, config.model.rms_norm_eps
        self.fc = Linear(config.aux_hidden_size, size)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(size, eps)
        self.rope = RopeTables(config.model, max_positions)
        self._checkpoints = activation_checkpointing

    def forward(
        self,
        embeds: Tensor,
        aux: Tensor,
        positions: tuple[Tensor, Tensor],
        masks: Sequence[AttentionMask],
    ) -> Tensor:
        """Hidden states of all rows, after the final norm.

        Args:
            embeds: [B, Q, H], anchors and masks of all blocks, Q = N · R.
            aux: [B, T, k · H], hidden states of the target.
            positions: of the context [B, T] and of the rows [B, Q], in their documents.
            masks: of every layer, over T context tokens and Q rows.

        Returns:
            [B, Q, H] in the dtype of `embeds`.
        """
        context = self.hidden_norm(self.fc(aux.to(embeds.dtype)))
        injected = Injected(context, self.rope(positions[0]), self.rope(positions[1]))
        x = embeds
        for layer, mask in zip(self.layers, masks, strict=True):
            if self._checkpoints and self.training:
                x = checkpoint(layer, x, injected, mask, use_reentrant=False)
            else:
                x = layer(x, injected, mask)
        hidden: Tensor = self.norm(x)
        return hidden


def _check(config: DFlashConfig) -> None:
    others = [
        name
        for name, there in (
            ("attention sinks", any(config.sinks)),
            ("attention_value_scale", config.value_scale != 1),
            ("input_embedding_scale", config.embedding_scale != 1),
            ("use_gemma_norm", config.unit_offset_norms),
            ("biases of q, k and v", config.model.qkv_bias),
            ("layers of different RoPE", len(set(config.model.layer_ropes)) > 1),
            ("partial_rotary_factor", config.model.rope.partial_rotary_factor != 1),
            ("is_neox_style false", config.rope_interleaved),
        )
        if there
    ]
    if others:
        raise ConfigError(f"A draft with {', '.join(others)} cannot be trained here.")
