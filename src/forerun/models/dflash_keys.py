"""What is read of a DFlash draft's `config.json`: keys, their types and their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from forerun.config.schema import LayerId, Layers, Object, Positions, Positive, Size, Token

# Of bodies; text models' names stand in files that others have written.
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
FOLDERS = ("dflash_config", "dspark_config")  # of keys
# DeepSpec's of Gemma 4, whose layers are other ones: GELU, four norms, values that are keys.
UNSUPPORTED = {"Gemma4DSparkModel": "the Gemma 4 body of DSpark"}
Block = Annotated[int, Meta(ge=2, le=1 << 16)]


class DFlashKeys(msgspec.Struct, kw_only=True):
    """What is read of `dflash_config`, of the top of `config.json`, or of either: the same keys."""

    block_size: Block | None = None
    mask_token_id: Token | None = None
    mask_token: str | None = None
    target_layer_ids: list[LayerId] | None = None
    # The same, with the embedding as 0.
    aux_hidden_state_layer_ids: list[LayerId] | None = None
    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None
    num_target_layers: Layers | None = None
    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    # Which token of a block predicts what.
    sample_from_anchor: bool | None = None
    query_zero_predicts_next: bool | None = None
    shift_label: bool | None = None  # the same in Domino's and ModelOpt's files
    # Attention.
    is_causal: bool | None = None
    causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    use_swa: bool | None = None
    swa_window_size: Positions | None = None
    sliding_window: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    attention_value_scale: Positive | None = None
    attention_sink_bias: bool | None = None
    add_swa_attention_sink_bias: bool | None = None
    add_full_attention_sink_bias: bool | None = None
    # RoPE: halves of a head, not neighbouring dims.
    is_neox_style: bool | None = None
    rope_is_neox_style: bool | None = None
    use_gemma_norm: bool | None = None
    # Around the sublayers.
    conv_kernel_size: Annotated[int, Meta(ge=0, le=64)] | None = None
    conv_group_size: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    # Of the embeddings of a block.
    input_embedding_scale: Positive | None = None
    # What the tensors say, too.
    has_embed_tokens: bool | None = None
    has_lm_head: bool | None = None

    @property
    def layers_from_1(self) -> list[list[int]]:
        """The target's layers, from keys that count the embedding as 0."""
        both = self.aux_hidden_state_layer_ids, self.eagle_aux_hidden_state_layer_ids
        return [ids for ids in both if ids is not None]


class OuterKeys(msgspec.Struct):
    """`config.json` of either format."""

    architectures: list[str] | None = None
    speculators_model_type: str | None = None
    dflash_config: Object | None = None
    dspark_config: Object | None = None  # SGLang's
    transformer_layer_config: Object | None = None

    @property
    def inner(self) -> dict[str, Any]:
        """Keys of the folders, of which SGLang's wins."""
        return {**(self.dflash_config or {}), **(self.dspark_config or {})}


# What is read of the layers' own keys, besides those of a draft.
BODY = (
    "attention_bias",
    "attention_out_bias",
    "mlp_bias",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "no_rope_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "vocab_size",
)
# Keys that nothing a draft computes depends on, in files of every kind.
HARMLESS = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "speculators_config",
    "speculators_version",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

# Keys that change what a body computes, and the values that are supported.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),  # the counts of heads say which
    "output_multiplier": (1,),
    "final_logit_softcapping": (),
}
