"""The MTP layer of DeepSeek-V3-style checkpoints: one more layer that predicts one token further.

    at p:  eh_proj([enorm(embedding of the token at p + 1) | hnorm(h at p)])
           -> a decoder layer like the target's -> shared_head.norm -> the target's LM head,
           which predicts the token at p + 2

(DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2; tensors as its README_WEIGHTS names
them; `further_layers.py` has other families' names.) The report leaves open which h is meant. It is
the target's hidden state after the final norm, as the checkpoint's own modeling_deepseek.py hands
it over; and to predict further the layer reads its own output after `shared_head.norm`: feeding it
back before that norm costs acceptance (2.84 against 2.94 tokens a step, DeepSeek-R1 at 3 drafts,
ROCm/ATOM 1764; the same in vllm 47448). The embedding at position 0 is not masked (vllm 33299).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.attention import KVLayer
from forerun.layers.communication import SINGLE_RANK, Communicator, WeightPlacement
from forerun.layers.linear import Hidden, Linear
from forerun.layers.module import Module
from forerun.layers.moe import Experts, choose_expert_layout
from forerun.layers.residual import NO_CAPTURE, FinalRMSNorm
from forerun.layers.rope import Rope
from forerun.layers.sharding import Shard
from forerun.models.checkpoint import DUMMY_FORMATS, FIX_FOLDER, Checkpoint, fill_dummy
from forerun.models.further_layers import COUNT, count_layers, prefix_of, prefixes_to_rename
from forerun.models.quantization import weight_format
from forerun.models.registry import model_class

SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's


class NextNConfig:
    """What the layer takes from the `config.json` of the model it was trained with."""

    def __init__(self, model: ModelConfig, where: str) -> None:
        """Raises ConfigError: the checkpoint has no such layer, or more than one."""
        count = count_layers(model)
        if count == 0:
            raise ConfigError(
                f"{where} has no layer that predicts further ahead ({COUNT} is missing or 0);"
                " set speculative_draft_model_path to a checkpoint that has, or use another"
                " speculative_algorithm."
            )
        if count > 1:
            raise ConfigError(f"{where}: {COUNT} {count} is not supported; it must be 1.")
        self.model, self.family = model, model_class(model)
        self.prefix = prefix_of(model)
        # Built like the target's layers, the last of them.
        self.mask = LayerMask(Mask.CAUSAL, self.model.windows[-1])


def load_nextn_config(folder: Path) -> NextNConfig:
    """Reads the config of the checkpoint in `folder`.

    Raises:
        ConfigError: it has no such layer, or an architecture that Forerun lacks.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    return NextNConfig(load_model_config(folder), where=str(folder))


class NextNDraft(Module):
    """A draft without embedding and LM head: these are the target's."""

    def __init__(self, config: NextNConfig, place: WeightPlacement, max_positions: int) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`."""
        model, size, eps = config.model, config.model.hidden_size, config.model.rms_norm_eps
        self.config = config
        norm = config.family.rms_norm
        self.enorm = norm(size, eps, place)
        self.hnorm = norm(size, eps, place)
        self.eh_proj = Linear(2 * size, size, bias=False, place=place)
        # Its number says what it is made of (DeepSeek: a mixture of experts).
        self.layer = config.family.decoder_layer(model, model.num_layers, config.mask, place)
        for i, kept in enumerate(self.layer.modules(KVLayer)):
            kept.layer_id = i  # in pools of its own
        self.norm = FinalRMSNorm(size, eps, place, norm)
        self.rope = Rope(model.rope, model.rotary_dim, max_positions, place.dtype, place.device)

    @classmethod
    def kv_layout(
        cls, config: NextNConfig, dtype: torch.dtype, comm: Communicator = SINGLE_RANK
    ) -> ModelLayout:
        """What the layer keeps on a rank: that of the target's layers."""
        place = WeightPlacement(dtype, torch.device("meta"), comm)
        layers = cls(config, place, max_positions=1).layer.modules(KVLayer)
        return ModelLayout(tuple(kept.kv_layout(dtype) for kept in layers))

    def forward(
        self, embeds: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> Tensor:
        """Runs the layer over any tokens and writes their K/V, layer 0 of the draft's pools.

        Args:
            embeds: [T, H]: for position p, the embedding of the token at p + 1.
            hidden_states: [T, H]: the target's at p, after its final norm; or what this gave at
                p - 1.
            positions: [T] int32 or int64, below `max_positions`.
            ctx: the draft's attention backend with its plan for these tokens.

        Returns:
            [T, H], for the target's LM head and for one position further.
        """
        both = torch.cat((self.enorm(embeds), self.hnorm(hidden_states)), 1)
        x: Hidden = self.eh_proj(both)
        x, residual = self.layer(x, None, self.rope.rows(positions), ctx, NO_CAPTURE)
        out, _ = self.norm(x, residual)
        return out

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The parts stand side by side under the layer's name."""
        p = f"{prefix}{self.config.prefix}"
        return {
            **self.enorm.weights(f"{p}enorm."),
            **self.hnorm.weights(f"{p}hnorm."),
            **self.eh_proj.weights(f"{p}eh_proj."),
            **self.layer.weights(p),
            **self.norm.weights(f"{p}shared_head.norm."),
        }

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Only the decoder layer is divided."""
        return self.layer.shards(f"{prefix}{self.config.prefix}")


def load_nextn(
    folder: Path,
    config: NextNConfig,
    place: WeightPlacement,
    max_positions: int,
    load_format: str = "auto",
) -> NextNDraft:
    """Builds and fills the layer of the checkpoint in `folder`; its other tensors are not read.

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    if load_format in DUMMY_FORMATS:
        draft = NextNDraft(config, place, max_positions)
        for experts in draft.modules(Experts):
            experts.fused = True  # thousands of tensors fewer
        fill_dummy(draft.weights(), load_format, shards=draft.shards(), comm=place.comm)
    else:
        checkpoint = Checkpoint(folder, weight_format(config.model))
        checkpoint.rename(prefixes_to_rename(config.model))
        checkpoint.keep(lambda name: name.startswith(config.prefix))
        hint = f"{COUNT} in config.json promises one layer more than num_hidden_layers."
        shape = NextNDraft(config, place.on_meta(), 1)
        choose_expert_layout(shape, checkpoint.headers)
        checkpoint.check(shape.weights(), SHARED, hint, shape.shards())
        draft = NextNDraft(config, place, max_positions)
        choose_expert_layout(draft, checkpoint.headers)
        checkpoint.read_into(draft.weights(), SHARED, hint, draft.shards(), place.comm)
    draft.prepare()
    return draft
