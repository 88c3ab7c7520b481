"""Gemma 4's assistant: transformers' `Gemma4AssistantForCausalLM`, a draft without K/V of its own.

    pre_projection([the target's embedding of a token | a hidden state of the target's size])
    -> layers of Gemma 4 -> norm -> logits; post_projection -> the hidden state for the next token

Its layers have queries alone. They read the K/V of the last layer of the target that has some and
is of their type, so that neither a prompt nor accepted tokens need a pass of the draft. Every draft
of a step is computed at one position, that of the last token, over the K/V before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig, parse_model_config
from forerun.config.schema import Object, Size, checked
from forerun.core.errors import ConfigError, OtherDraftError
from forerun.layers.communication import Communicator, WeightPlacement
from forerun.layers.linear import Linear
from forerun.layers.module import Module
from forerun.layers.residual import NO_CAPTURE
from forerun.models.checkpoint import HARMLESS, Checkpoint
from forerun.models.decoder import Scales
from forerun.models.draft_base import HINT, draft_config_file, quantize_draft
from forerun.models.dummy_weights import DUMMY_FORMATS, fill_dummy
from forerun.models.gemma4 import (
    Gemma4DecoderLayer,
    Gemma4ForCausalLM,
    Gemma4SharedAttention,
    kv_sources,
)
from forerun.models.registry import check_layers

ARCHITECTURE = "Gemma4AssistantForCausalLM"
TARGET = "Gemma4ForCausalLM"


class AssistantKeys(msgspec.Struct):
    architectures: list[str] | None = None
    text_config: Object | None = None
    backbone_hidden_size: Size | None = None
    tie_word_embeddings: bool | None = None
    use_ordered_embeddings: bool | None = None
    num_centroids: Size | None = None
    centroid_intermediate_top_k: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None


class AssistantConfig:
    """Shape of an assistant; `model`: its layers, a Gemma 4."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        """Raises ConfigError: not an assistant, or one that is not supported."""
        keys = checked(AssistantKeys, raw, where)
        if keys.architectures != [ARCHITECTURE] or keys.text_config is None:
            raise OtherDraftError(f"{where} is not a {ARCHITECTURE} with a text_config.")
        if keys.backbone_hidden_size is None:
            raise ConfigError(f"{where} lacks 'backbone_hidden_size'.")
        self.target_hidden_size = keys.backbone_hidden_size
        tied = keys.tie_word_embeddings is not False
        own = {"architectures": [TARGET], "tie_word_embeddings": tied}
        self.model = parse_model_config({**keys.text_config, **own}, f"{where}, text_config")
        check_layers(self.model, Gemma4ForCausalLM)
        for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
            if self.model.raw.get(name):
                raise ConfigError(f"{where}: {name} of an assistant is not supported.")
        self.centroids = self.chosen = 0
        if keys.use_ordered_embeddings:
            self._read_centroids(keys, where)

    def _read_centroids(self, keys: AssistantKeys, where: str) -> None:
        count, chosen = keys.num_centroids or 2048, keys.centroid_intermediate_top_k or 32
        vocab = self.model.vocab_size
        if vocab % count or chosen > count or not self.model.tie_word_embeddings:
            raise ConfigError(
                f"{where}: {chosen} of {count} centroids cannot choose among {vocab} tokens; their"
                " number must divide the vocabulary, and the LM head be the embedding."
            )
        self.centroids, self.chosen = count, chosen

    def sources(self, target: ModelConfig, where: str) -> tuple[int, ...]:
        """Layers of the target whose K/V the layers read.

        Raises:
            ConfigError: the target is no Gemma 4, or its K/V is of another shape.
        """
        if target.architecture != TARGET:
            raise ConfigError(
                f"{where} drafts for Gemma 4, and the target is {target.architecture}; use another"
                " draft or speculative_algorithm."
            )
        model, layers, found = self.model, kv_sources(target), []
        for i, kind in enumerate(model.raw["layer_types"]):
            source = layers.get(kind)
            dim = model.layer_head_dims[i]
            if source is None or target.layer_head_dims[source] != dim:
                raise ConfigError(
                    f"{where}: layer {i} reads K/V of a {kind} layer with heads of {dim}, and the"
                    " target has none. Use the assistant of this target."
                )
            if model.num_heads % target.layer_kv_heads[source]:
                raise ConfigError(
                    f"{where}: {model.num_heads} query heads cannot be shared among the target's"
                    f" {target.layer_kv_heads[source]} key-value heads."
                )
            found.append(source)
        return tuple(found)

    def heads_of(self, comm: Communicator) -> int:
        """Query heads of a rank, whose other parts can be divided too.

        Raises:
            ConfigError: they cannot.
        """
        place = WeightPlacement(torch.float32, torch.device("meta"), comm)
        Gemma4Assistant(self, tuple(range(self.model.num_layers)), place, 1)  # nothing is computed
        return self.model.num_heads // comm.size

    @property
    def layer_masks(self) -> tuple[LayerMask, ...]:
        """The masks of queries at the last position with K/V: a window does not count that one."""
        windows = self.model.windows
        return tuple(LayerMask(Mask.CAUSAL, None if w is None else w + 1) for w in windows)


def load_assistant_config(folder: Path) -> AssistantConfig:
    """Reads a draft's `config.json`.

    Raises:
        ConfigError: as `AssistantConfig`, or the file is missing or broken.
    """
    path = draft_config_file(folder)
    return AssistantConfig(dict(read_json(path)), str(path))


class AssistantLayer(Gemma4DecoderLayer):
    self_attn: Gemma4SharedAttention

    @classmethod
    def make_attention(
        cls, config: ModelConfig, layer_id: int, mask: LayerMask, place: WeightPlacement
    ) -> Gemma4SharedAttention:
        return Gemma4SharedAttention(config, layer_id, mask, place, source=layer_id)


class MaskedEmbedding(Module):
    """Logits of the tokens whose centroids have the largest ones, -inf for all others.

    `token_ordering` [V] int64: the tokens of the first centroid, then those of the second, ...
    """

    def __init__(self, config: AssistantConfig, place: WeightPlacement) -> None:
        model = config.model
        self.centroids = Linear(model.hidden_size, config.centroids, False, place)
        self.centroids.quantizable = False  # it chooses
        self.token_ordering = torch.empty(model.vocab_size, dtype=torch.int64, device=place.device)
        self._count, self._chosen = config.centroids, config.chosen

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return super().weights(prefix) | {f"{prefix}token_ordering": self.token_ordering}

    def tokens(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, n] int64, the tokens to score."""
        chosen = self.centroids(hidden_states).topk(self._chosen, -1).indices
        clusters = self.token_ordering.view(self._count, -1)
        return clusters[chosen].flatten(1)


class Gemma4Assistant(Gemma4ForCausalLM):
    decoder_layer = AssistantLayer

    def __init__(
        self,
        config: AssistantConfig,
        sources: tuple[int, ...],
        place: WeightPlacement,
        max_positions: int,
    ) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`.

        Args:
            sources: of `AssistantConfig.sources`.
            max_positions: length of the rotary tables.
        """
        super().__init__(config.model, place, max_positions)
        size, outer = config.model.hidden_size, config.target_hidden_size
        self.pre_projection = Linear(2 * outer, size, False, place)
        self.post_projection = Linear(size, outer, False, place)
        self.masked_embedding = MaskedEmbedding(config, place) if config.centroids else None
        layers = zip(self.model.layers, sources, config.layer_masks, strict=True)
        for layer, source, mask in layers:
            assert isinstance(layer, AssistantLayer)
            layer.self_attn.read_from(source, mask)

    @classmethod
    def scales_of(cls, config: ModelConfig) -> Scales:
        return Scales()

    def draft(
        self, embeds: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers over the target's K/V, and writes none.

        Args:
            embeds: [T, H_t], the target's, of the last token.
            hidden_states: [T, H_t], the target's after its final norm, or what this gave.
            positions: [T] int32 or int64.
            ctx: attention over the target's pools.

        Returns:
            [T, H] for `compute_logits`; [T, H_t] for one token further.
        """
        x = self.pre_projection(torch.cat((embeds, hidden_states), 1))
        x = self.model.run(x, positions, ctx, NO_CAPTURE)
        return x, self.post_projection(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        if self.masked_embedding is None:
            return super().compute_logits(hidden_states)
        tokens = self.masked_embedding.tokens(hidden_states)
        rows = self.embed(tokens.flatten()).view(*tokens.shape, -1)
        logits = (rows @ hidden_states.unsqueeze(-1)).squeeze(-1)
        out = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return out.scatter_(1, tokens, logits)


def load_assistant(
    folder: Path,
    config: AssistantConfig,
    sources: tuple[int, ...],
    place: WeightPlacement,
    max_positions: int,
    load_format: str = "auto",
    quantization: str | None = None,
) -> Gemma4Assistant:
    """Builds and fills a draft. `quantization`: of its linears (`quantize_draft`).

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    draft = Gemma4Assistant(config, sources, place, max_positions)
    if load_format in DUMMY_FORMATS:
        fill_dummy(draft.weights(), load_format, shards=draft.shards(), comm=place.comm)
    else:
        parts = draft.shards(), place.comm
        Checkpoint(folder).read_into(draft.weights(), _harmless(config), HINT, *parts)
    ordering = None if draft.masked_embedding is None else draft.masked_embedding.token_ordering
    if ordering is not None and not 0 <= int(ordering.min()) <= int(ordering.max()) < len(ordering):
        raise ConfigError(f"{folder}: token_ordering leads outside the vocabulary.")
    quantize_draft(draft, quantization)
    draft.prepare()
    return draft


def check_assistant_files(folder: Path, config: AssistantConfig) -> None:
    """Compares a draft's weights with its config, and loads nothing.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    place = WeightPlacement(torch.bfloat16, torch.device("meta"))
    any_sources = tuple(range(config.model.num_layers))  # nothing is computed
    draft = Gemma4Assistant(config, any_sources, place, 1)
    Checkpoint(folder).check(draft.weights(), _harmless(config), HINT)


def _harmless(config: AssistantConfig) -> tuple[str, ...]:
    tied = config.model.tie_word_embeddings  # then a stored head is the embedding again
    return (*HARMLESS, "lm_head.weight") if tied else HARMLESS
