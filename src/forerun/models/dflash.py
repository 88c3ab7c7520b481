"""The DFlash draft: a few Qwen3 layers that fill a block of masks in one pass (arXiv 2602.06036).

Every token of a block attends to the whole block and to context K/V. The draft makes context K/V
itself from hidden states of the target: C = hidden_norm(fc(aux_hidden_states)) goes without an
input norm into the k and v projections of every layer. A head (`models/heads`) chooses the drafts.
Reads checkpoints of z-lab, speculators, DeepSpec, SpecForge and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, KVNormRope, LayerMask, RopeInput
from forerun.core.errors import ConfigError
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, rotate
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Hidden, Linear, LinearBase, PendingGemm, QKVLinear
from forerun.layers.mlp import GatedMLP
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.layers.residual import NO_CAPTURE, AuxHiddenStates, FinalRMSNorm
from forerun.layers.rope import LayerRopes, rotary_order
from forerun.models.block_convolution import BlockConvolution, ConvolutionConfig
from forerun.models.checkpoint import Checkpoint
from forerun.models.decoder_layer import SinkAttention
from forerun.models.dflash_config import DFlashConfig, load_dflash_config
from forerun.models.dflash_tensors import named_tensors
from forerun.models.draft_base import (
    DraftModel,
    DraftVocab,
    TargetVocab,
    check_draft,
    dummy_draft,
    own_parts,
    read_draft,
)
from forerun.models.dummy_weights import DUMMY_FORMATS
from forerun.models.heads.base import HeadConfig
from forerun.models.heads.plain import PlainHead
from forerun.models.heads.registry import refuse_other_tensors
from forerun.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer

MASK_EMBEDDING = "mask_embedding"


@dataclass(frozen=True)
class DFlashServing:
    """How a draft is served."""

    block_size: int | None = None  # rows of a block; None: as in training
    window: int | None = None  # context positions that a block attends to; None: all
    options: Mapping[str, Any] = field(default_factory=dict)  # values of the head's options
    quantization: str | None = None  # of linears (`quantize_draft`)


AS_TRAINED = DFlashServing()


class DFlashSinkAttention(SinkAttention, Qwen3Attention):
    """Adds a logit per head, without a value, to the softmax (MiMo, Nemotron)."""

    sinks_name = "attention_sink_bias"


class SinkDecoderLayer(Qwen3DecoderLayer):
    attention = DFlashSinkAttention


class ConvolvedDecoderLayer(Qwen3DecoderLayer):
    """Convolves the block's rows around each sublayer (DFlash2)."""

    mlp: GatedMLP

    def add_convolutions(
        self, config: ConvolutionConfig, hidden_size: int, rows: int, place: WeightPlacement
    ) -> None:
        """`rows`: of a block; every pass is over whole blocks."""
        self.attention_conv = BlockConvolution(config, hidden_size, place)
        self.mlp_conv = BlockConvolution(config, hidden_size, place)
        self._rows = rows

    def prepare(self) -> None:
        for _, child in self.children():  # no norm is linked to a GEMM: a convolution reads it
            child.prepare()

    def __call__(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: RopeInput,
        ctx: AttentionContext,
        aux: AuxHiddenStates,
    ) -> tuple[Hidden, Tensor]:
        normed, residual = self.input_layernorm(x, residual)
        out = self._around(self.attention_conv, normed, lambda y: self.self_attn(y, rope, ctx))
        normed, residual = self.post_attention_layernorm(out, residual)
        return self._around(self.mlp_conv, normed, self.mlp), residual

    def _around(
        self,
        convolution: BlockConvolution,
        x: Tensor | DeferredNorm,
        sublayer: Callable[[Tensor], PendingGemm],
    ) -> Tensor:
        """x [T, H], normed -> the sublayer's output [T, H], both convolved."""
        assert isinstance(x, Tensor)
        rows = x.view(-1, self._rows, x.shape[1])
        dynamic = convolution.dynamic(rows)
        out = sublayer(convolution.convolve(rows, dynamic, 0).view_as(x)).result()
        return convolution.convolve(out.view_as(rows), dynamic, 1).view_as(x)


class SinkConvolvedDecoderLayer(ConvolvedDecoderLayer):
    attention = DFlashSinkAttention


class DFlashDraft(DraftModel):
    """The layers, the path that makes context K/V, and the head."""

    def __init__(
        self,
        config: DFlashConfig,
        place: WeightPlacement,
        max_positions: int,
        target: TargetVocab,
        serving: DFlashServing = AS_TRAINED,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`.

        Args:
            max_positions: length of the rotary tables.
            own: the checkpoint's vocabulary parts (`own_parts`).
        """
        model, eps = config.model, config.model.rms_norm_eps
        sizes = model.vocab_size, config.draft_vocab_size, model.hidden_size
        super().__init__(DraftVocab(*sizes, own), target, place)
        self.config, self.layer_masks = config, config.layer_masks(serving.window)
        self._quantization = place.quantization
        self.fc = Linear(config.aux_hidden_size, model.hidden_size, bias=False, place=place)
        self.hidden_norm = RMSNorm(model.hidden_size, eps, place)
        self.layers = [
            self._layer(i, mask, sinks, serving, place)
            for i, (mask, sinks) in enumerate(zip(self.layer_masks, config.sinks, strict=True))
        ]
        self.norm = FinalRMSNorm(model.hidden_size, eps, place)
        ropes = [(rope, model.head_dim) for rope in model.layer_ropes]
        self.ropes = LayerRopes(ropes, max_positions, place.dtype, place.device)
        self.mask_embedding: Tensor | None = None
        if MASK_EMBEDDING in own:  # files have [H] or [1, H]
            self.mask_embedding = place.empty(1, 1, model.hidden_size)
        self.head = (
            PlainHead()
            if config.head is None
            else config.head.build(config.body_sizes, place, serving.options)
        )
        # Context K/V is made of rows of the projections, and heads read weights themselves.
        for linear in (*self.modules(QKVLinear), *self.head.modules(LinearBase)):
            linear.quantizable = False

    def _layer(
        self,
        index: int,
        mask: LayerMask,
        sinks: bool,
        serving: DFlashServing,
        place: WeightPlacement,
    ) -> Qwen3DecoderLayer:
        model, convolution = self.config.model, self.config.convolution
        if convolution is None:
            return (SinkDecoderLayer if sinks else Qwen3DecoderLayer)(model, index, mask, place)
        kind = SinkConvolvedDecoderLayer if sinks else ConvolvedDecoderLayer
        layer = kind(model, index, mask, place)
        rows = serving.block_size or self.config.block_size
        layer.add_convolutions(convolution, model.hidden_size, rows, place)
        return layer

    def children(self) -> Iterator[tuple[str, Module]]:
        """The parts; those of the head have no prefix in checkpoints."""
        for name, child in super().children():
            yield from child.children() if child is self.head else [(name, child)]

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        own = self.mask_embedding
        return super().weights(prefix) | ({} if own is None else {f"{prefix}{MASK_EMBEDDING}": own})

    def embed_block(self, ids: Tensor) -> Tensor:
        """Tokens of blocks [B, R], anchor and masks -> [B · R, H]."""
        embeds = self.embed(ids.flatten())
        if self.mask_embedding is not None:
            embeds = embeds.view(*ids.shape, -1).clone()
            embeds[:, 1:] = self.mask_embedding
            embeds = embeds.flatten(0, 1)
        scale = self.config.embedding_scale
        return embeds if scale == 1 else embeds * scale

    def forward(self, embeds: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Embedded block tokens [T, H] -> hidden_states [T, H] after the final norm."""
        x: Hidden = embeds
        residual: Tensor | None = None
        for layer, rope in zip(self.layers, self.ropes.rows(positions), strict=True):
            x, residual = layer(x, residual, rope, ctx, NO_CAPTURE)
        hidden_states, _ = self.norm(x, residual)
        return hidden_states

    def combine_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        """The target's hidden states [T, n · H_t] -> C [T, H]."""
        return self.hidden_norm(self.fc(aux_hidden_states))

    def write_context_kv(
        self,
        aux_hidden_states: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        num_committed: Tensor | None,
    ) -> Tensor:
        """Stores every layer's context K/V of the tokens at absolute `positions` [T]; returns C.

        One GEMM makes k and v of all layers.

        Args:
            num_committed: [B] int32, tokens of each request whose K/V is needed; None: all.
        """
        context = self.combine_hidden_states(aux_hidden_states)
        kv = self._context_kv(context)
        ctx.write_layers(kv, self._context_norm_rope, self.ropes.rows(positions), num_committed)
        return context

    def prepare(self) -> None:
        """Copies every layer's k and v weights into one matrix, before they are packed.

        `value_scale`, the order of rotated dims and the offset of norms go into the weights, so
        that they hold for context and block alike.
        """
        if self.config.unit_offset_norms:
            for norm in self._body_norms():
                norm.weight.add_(1)
        self._put_rotated_dims_first()
        if self.config.value_scale != 1:
            for layer in self.layers:
                layer.self_attn.qkv_proj.scale_part("v_proj", self.config.value_scale)
        qkv = [layer.self_attn.qkv_proj.weights() for layer in self.layers]

        def stacked(kind: str) -> Tensor:  # [k of all layers | v of all layers]
            return torch.cat(
                [views[f"{name}.{kind}"] for name in ("k_proj", "v_proj") for views in qkv]
            )

        bias = stacked("bias") if self.config.model.qkv_bias else None
        self._context_kv = Linear.of(stacked("weight"), bias, self._quantization)
        self._context_kv.prepare()
        q_norm = self.layers[0].self_attn.q_norm
        k_norms = torch.stack([layer.self_attn.k_norm.weight for layer in self.layers])
        norms = HeadNorms(q_norm.weight, k_norms, q_norm.eps)
        kv_heads = self.layers[0].self_attn.qkv_proj.num_kv_heads  # of this rank
        self._context_norm_rope = ContextKVNormRope(kv_heads, norms)
        super().prepare()

    def _body_norms(self) -> Iterator[RMSNorm]:
        """All but those of the head."""
        yield from (self.hidden_norm, self.norm.norm)
        for layer in self.layers:
            yield from layer.modules(RMSNorm)

    def _put_rotated_dims_first(self) -> None:
        model, interleaved = self.config.model, self.config.rope_interleaved
        for layer, rope in zip(self.layers, model.layer_ropes, strict=True):
            if interleaved or rope.partial_rotary_factor != 1:
                layer.self_attn.reorder(rotary_order(rope, model.head_dim, interleaved))


class ContextKVNormRope(KVNormRope):
    """K norm and RoPE of all layers."""

    def __init__(self, kv_heads: int, norms: HeadNorms) -> None:
        self.norms = norms
        self.layers, self.dim = norms.k.shape
        stacked = norms.k.repeat_interleave(kv_heads, 0)
        self.norm = RMSNorm.of(stacked, norms.eps)

    def split(self, kv: Tensor, ropes: Sequence[RopeInput]) -> list[tuple[Tensor, Tensor]]:
        k, v = kv.view(kv.shape[0], -1, self.dim).chunk(2, 1)
        keys, values = self.norm(k).chunk(self.layers, 1), v.chunk(self.layers, 1)
        rotated = [rotate(key, rope.cos_sin) for key, rope in zip(keys, ropes, strict=True)]
        return list(zip(rotated, values, strict=True))


def load_dflash(
    folder: Path,
    place: WeightPlacement,
    max_positions: int,
    target: TargetVocab,
    serving: DFlashServing = AS_TRAINED,
    load_format: str = "auto",
) -> DFlashDraft:
    """Builds and fills a draft.

    Args:
        max_positions: length of the rotary tables.
        load_format: "auto", or one of `DUMMY_FORMATS`: random weights, a config is enough.

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    config = load_dflash_config(folder)
    if load_format in DUMMY_FORMATS:
        draft = DFlashDraft(config, place, max_positions, target, serving)
        return dummy_draft(draft, load_format, place.comm, serving.quantization)
    stored = _stored(folder, config, target, serving)
    return read_draft(*stored, place, max_positions, serving.quantization)


def check_dflash_files(folder: Path) -> None:
    """Compares a draft's weights with its config, and loads nothing.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    no_target = cast(TargetVocab, None)  # nothing is computed
    place = WeightPlacement(torch.bfloat16, torch.device("meta"))
    check_draft(*_stored(folder, load_dflash_config(folder), no_target, AS_TRAINED), place)


def _stored(
    folder: Path, config: DFlashConfig, target: TargetVocab, serving: DFlashServing
) -> tuple[Callable[[WeightPlacement, int], DFlashDraft], Checkpoint]:
    """What builds the draft (as `read_draft` calls it), and its tensors."""
    checkpoint = _named_tensors(folder, config.head)
    own = own_parts(checkpoint, config.draft_vocab_size, config.vocab_size)
    own |= {MASK_EMBEDDING} & checkpoint.headers.keys()

    def build(place: WeightPlacement, positions: int) -> DFlashDraft:
        return DFlashDraft(config, place, positions, target, serving, own)

    return build, checkpoint


def _named_tensors(folder: Path, head: HeadConfig | None) -> Checkpoint:
    """The folder's tensors, if the draft has them all.

    Raises:
        ConfigError: there is more than the config describes, which would be left out.
    """
    checkpoint = named_tensors(folder, head)
    refuse_other_tensors(checkpoint.headers, head, str(folder))
    if (folder / f"{MASK_EMBEDDING}.pt").exists():
        raise ConfigError(
            f"{folder}: {MASK_EMBEDDING}.pt is a pickle, which can run code when it is read. Load"
            " it with torch.load(..., weights_only=True), add it to the tensors of"
            " model.safetensors (load_file, save_file of safetensors.torch) as"
            f" {MASK_EMBEDDING}, and remove the .pt file."
        )
    return checkpoint
