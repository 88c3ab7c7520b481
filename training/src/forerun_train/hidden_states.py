"""The frozen target: hidden states of packed sequences, its embedding and its LM head.

The target is the model that serves (`forerun.models`), over an attention backend that keeps no K/V:
whole sequences of several documents go through at once, and no document sees another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionNeed,
    AttentionSpec,
    Buffers,
    LayerMask,
    Plan,
)
from forerun.attention.capabilities import Capabilities
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import DenseKV
from forerun.kvcache.pools import ModelPools
from forerun.layers.communication import WeightPlacement
from forerun.llm.hub import with_local_paths
from forerun.models.base import CausalLM
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.loader import load_target
from forerun.models.registry import model_class
from forerun.platform.device import memory
from forerun_train.batch import Batch, HiddenStates
from forerun_train.masks import AttentionMask, MaskShape, attend, causal_in_documents, make_mask

GIB = 1 << 30


@dataclass
class PackedPlan(Plan):
    """Sequences of one forward; K/V of the layer that is running."""

    document_ids: Tensor  # [B, T]
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[LayerMask, AttentionMask] = field(default_factory=dict)

    def mask(self, layer: LayerMask) -> AttentionMask:
        """Returns a layer's mask, made once for all layers alike."""
        if layer not in self.masks:
            batch, length = self.document_ids.shape
            shape = MaskShape(batch, length, length, self.document_ids.device)
            self.masks[layer] = make_mask(
                causal_in_documents(self.document_ids, layer.window), shape
            )
        return self.masks[layer]


class PackedAttention(AttentionBackend):
    """Attention of packed sequences, over the keys and values of this forward alone."""

    name = "packed"
    capabilities = Capabilities(graph=False)

    def __init__(self) -> None:
        # No pools, and nothing to choose by.
        super().__init__(cast(AttentionNeed, None), cast(ModelPools, SimpleNamespace()))

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> Plan:
        raise NotImplementedError("plans are made of sequences")

    def write(self, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
        assert isinstance(plan, PackedPlan)
        plan.kv = {layer: (k, v)}

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, PackedPlan)
        size = plan.document_ids.shape
        heads = [x.unflatten(0, size).transpose(1, 2) for x in (q, *plan.kv[layer])]
        out = attend(heads[0], heads[1], heads[2], plan.mask(spec.mask), spec.scale)
        return out.transpose(1, 2).flatten(0, 1)


class FrozenTarget:
    """A target that is not trained."""

    def __init__(self, model: CausalLM, folder: Path, device: torch.device) -> None:
        self.model, self.folder = model, folder
        self.config: ModelConfig = model.config
        self.head = _head_weight(model, device)  # [V, H]
        scales = model.scales if isinstance(model, DecoderForCausalLM) else None
        self._soft_cap = None if scales is None else scales.logit_softcap
        self._backend = PackedAttention()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        return self.head.device

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Its weights on the meta device, for their sizes: the model may have packed its own."""
        return _weights_without_values(self.config, self.dtype)

    @torch.no_grad()
    def hidden_states(self, batch: Batch, layer_ids: tuple[int, ...]) -> HiddenStates:
        """Runs the target over packed sequences, unless their states were stored.

        `layer_ids`: the decoder layers whose outputs are captured, in this order.
        """
        if batch.states is not None:
            return batch.states
        size = batch.input_ids.shape
        plan = PackedPlan(batch.document_ids)
        start = batch.position_ids.new_zeros(size[0], dtype=torch.int32)
        whole = AttentionBatch(start.unsqueeze(1), start, size[1], q_len=size[1])
        ctx = AttentionContext(self._backend, plan, whole)
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        final, aux = self.model.forward(ids, positions, ctx, layer_ids)
        assert aux is not None
        return HiddenStates(aux.unflatten(0, size), final.unflatten(0, size))

    @torch.no_grad()
    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids, any shape -> [..., H]."""
        embeds: Tensor = self.model.embed(input_ids.flatten()).unflatten(0, input_ids.shape)
        return embeds

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """hidden [..., H] -> [..., V], or of `columns` [V_d] only; gradients reach `hidden`."""
        weight = self.head if columns is None else self.head[columns]
        return self.capped(F.linear(hidden, weight))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the family caps them."""
        cap = self._soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _weights_without_values(config: ModelConfig, dtype: torch.dtype) -> Mapping[str, Tensor]:
    model = model_class(config)(config, WeightPlacement(dtype, torch.device("meta")), 1)
    return {n: w for n, w in model.weights().items() if isinstance(w, Tensor)}


def check_room(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Checks, before a target is loaded, that its weights fit.

    Raises:
        ConfigError: they do not.
    """
    weights = _weights_without_values(config, dtype).values()
    needed, free = sum(w.numel() * w.element_size() for w in weights), memory(device)[0]
    if needed > free:
        raise ConfigError(
            f"The weights of the target alone take {needed / GIB:.1f} GiB in"
            f" {str(dtype).removeprefix('torch.')}, and {free / GIB:.1f} GiB of {device} are free."
            " Take a smaller target, or a device with more memory."
        )


def load_frozen_target(
    path: str, dtype: torch.dtype, device: torch.device, seq_len: int
) -> FrozenTarget:
    """Loads the target of a training run.

    Args:
        path: a model folder, a GGUF file, or org/name.
        seq_len: tokens of a sequence.

    Raises:
        ConfigError: it cannot be loaded, its hidden states cannot be captured, or it has no
            positions for so long a sequence.
    """
    folder = target_folder(path)
    config = load_model_config(folder)
    longest = config.longest_context
    if seq_len > longest:
        raise ConfigError(f"seq_len {seq_len} is more than the target's context, {longest} tokens.")
    check_room(config, dtype, device)
    model = load_target(folder, dtype, device, max_positions=seq_len)
    _check(model, folder)
    return FrozenTarget(model, folder, device)


def target_folder(path: str) -> Path:
    """The local folder of a target; downloads what the cache lacks.

    Raises:
        ConfigError: there is no such model.
    """
    found = with_local_paths(EngineConfig(model_path=path)).model_path
    assert found is not None
    return Path(found)


def _check(model: CausalLM, folder: Path) -> None:
    why = None
    if model.has_recurrent_layers:
        why = "it has recurrent layers"
    elif not all(isinstance(each, DenseKV) for each in model.kv_layout(torch.float32).layers):
        why = "not all of its layers keep K and V per head"
    elif model.has_attention_sinks or model.has_logit_softcap:
        why = "its attention has sinks or caps its scores"
    if why is not None:
        raise ConfigError(
            f"{folder}: hidden states of {model.config.architecture} cannot be captured for"
            f" training: {why}. Take a target of plain attention layers."
        )


@torch.no_grad()
def _head_weight(model: CausalLM, device: torch.device) -> Tensor:
    """The LM head [V, H] as a plain matrix, whatever form it is kept in: its outputs for unit
    vectors, which are exact.
    """
    dtype = model.embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
    units = torch.eye(model.config.hidden_size, dtype=dtype, device=device)
    logits = model.lm_head(units)
    if isinstance(model, DecoderForCausalLM):
        logits = logits / model.scales.logits
    return logits.t().contiguous()
