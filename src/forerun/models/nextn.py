"""The MTP layers of DeepSeek-V3-style checkpoints: each predicts one token further than the last.

    at p:  eh_proj([enorm(embedding of the token at p + 1) | hnorm(h at p)])
           -> a decoder layer like the target's -> shared_head.norm -> the target's LM head,
           which predicts the token at p + 2

Layer i of several reads at p the token at p + 1 + i, and as h what layer i - 1 gave at p.
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
from forerun.core.errors import ConfigError, OtherDraftError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.attention import KVLayer
from forerun.layers.communication import SINGLE_RANK, Communicator, WeightPlacement
from forerun.layers.linear import Hidden, Linear
from forerun.layers.module import Module
from forerun.layers.moe import Experts, choose_expert_layout
from forerun.layers.residual import NO_CAPTURE, FinalRMSNorm
from forerun.layers.rope import Rope
from forerun.layers.sharding import Shard
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_base import quantize_draft
from forerun.models.dummy_weights import DUMMY_FORMATS, fill_dummy
from forerun.models.formats.registry import weight_format
from forerun.models.further_layers import COUNT, prefixes, prefixes_to_rename, share_ends
from forerun.models.registry import model_class
from forerun.models.safetensors_files import FIX_FOLDER
from forerun.models.speculators import refuse_speculators

SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's


class NextNConfig:
    """What the layer takes from the `config.json` of the model it was trained with."""

    def __init__(self, model: ModelConfig, where: str) -> None:
        """Raises OtherDraftError: the checkpoint has no such layer."""
        self.prefixes = prefixes(model)
        if not self.prefixes:
            raise OtherDraftError(
                f"{where} has no layer that predicts further ahead ({COUNT} is missing or 0);"
                " set speculative_draft_model_path to a checkpoint that has, or use another"
                " speculative_algorithm."
            )
        self.model, self.family = model, model_class(model)
        self.shared_ends = share_ends(model)
        # Built like the target's layers, the last of them.
        self.mask = LayerMask(Mask.CAUSAL, self.model.windows[-1])

    @property
    def count(self) -> int:
        return len(self.prefixes)


def load_nextn_config(folder: Path) -> NextNConfig:
    """Reads the config of the checkpoint in `folder`.

    Raises:
        ConfigError: it has no such layer, or an architecture that Forerun lacks.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    refuse_speculators(folder)
    return NextNConfig(load_model_config(folder), where=str(folder))


class NextNEnds(Module):
    """What is around a decoder layer. `norm` is shared_head.norm in checkpoints."""

    stored_names = (("norm", "shared_head.norm"),)

    def __init__(self, config: NextNConfig, place: WeightPlacement) -> None:
        size, eps = config.model.hidden_size, config.model.rms_norm_eps
        norm = config.family.rms_norm
        self.enorm = norm(size, eps, place)
        self.hnorm = norm(size, eps, place)
        self.eh_proj = Linear(2 * size, size, bias=False, place=place)
        self.norm = FinalRMSNorm(size, eps, place, norm)


class NextNDraft(Module):
    """A draft without embedding and LM head: these are the target's."""

    def __init__(self, config: NextNConfig, place: WeightPlacement, max_positions: int) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`."""
        model, build = config.model, config.family.decoder_layer
        self.config = config
        ends = 1 if config.shared_ends else config.count
        self.ends = [NextNEnds(config, place) for _ in range(ends)]
        # Their numbers say what they are made of (DeepSeek: a mixture of experts).
        numbers = range(model.num_layers, model.num_layers + config.count)
        self.layers = [build(model, number, config.mask, place) for number in numbers]
        for i, kept in enumerate(self.modules(KVLayer)):
            kept.layer_id = i  # in pools of its own
        self.rope = Rope(model.rope, model.rotary_dim, max_positions, place.dtype, place.device)

    @classmethod
    def kv_layout(
        cls, config: NextNConfig, dtype: torch.dtype, comm: Communicator = SINGLE_RANK
    ) -> ModelLayout:
        """What the layers keep on a rank: that of the target's layers."""
        place = WeightPlacement(dtype, torch.device("meta"), comm)
        layers = cls(config, place, max_positions=1).modules(KVLayer)
        return ModelLayout(tuple(kept.kv_layout(dtype) for kept in layers))

    def forward(
        self,
        embeds: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        index: int = 0,
    ) -> Tensor:
        """Runs layer `index` over any tokens and writes their K/V, that layer of the draft's pools.

        Args:
            embeds: [T, H]: for position p, the embedding of the token at p + 1 + `index`.
            hidden_states: [T, H]: the target's at p, after its final norm; or what the layer before
                gave at p; or what the last layer gave at p - 1.
            positions: [T] int32 or int64, below `max_positions`.
            ctx: the draft's attention backend with its plan for these tokens.

        Returns:
            [T, H], for the target's LM head and for one position further.
        """
        ends = self.ends[0 if self.config.shared_ends else index]
        x: Hidden = ends.eh_proj(torch.cat((ends.enorm(embeds), ends.hnorm(hidden_states)), 1))
        x, residual = self.layers[index](x, None, self.rope.rows(positions), ctx, NO_CAPTURE)
        out, _ = ends.norm(x, residual)
        return out

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The parts stand side by side under the layers' names."""
        out: dict[str, Tensor] = {}
        for parts in (self.ends, self.layers):
            for name, part in zip(self.config.prefixes, parts, strict=False):
                out |= part.weights(f"{prefix}{name}")
        return out

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Only the decoder layers are divided."""
        out: dict[str, Shard] = {}
        for name, layer in zip(self.config.prefixes, self.layers, strict=True):
            out |= layer.shards(f"{prefix}{name}")
        return out


def load_nextn(
    folder: Path,
    config: NextNConfig,
    place: WeightPlacement,
    max_positions: int,
    load_format: str = "auto",
    quantization: str | None = None,
) -> NextNDraft:
    """Builds and fills the layers of the checkpoint in `folder`; its other tensors are not read.

    `quantization`: of their linears (`quantize_draft`).

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    if load_format in DUMMY_FORMATS:
        draft = NextNDraft(config, place, max_positions)
        for experts in draft.modules(Experts):
            experts.fused = True  # thousands of tensors fewer
        fill_dummy(draft.weights(), load_format, shards=draft.shards(), comm=place.comm)
    else:
        checkpoint = check_nextn_files(folder, config, place.on_meta())
        draft = NextNDraft(config, place, max_positions)
        choose_expert_layout(draft, checkpoint.headers)
        hint = _hint(config)
        checkpoint.read_into(draft.weights(), SHARED, hint, draft.shards(), place.comm)
    quantize_draft(draft, quantization)
    draft.prepare()
    return draft


def check_nextn_files(folder: Path, config: NextNConfig, place: WeightPlacement) -> Checkpoint:
    """Compares the layers' weights with the config, and loads nothing.

    Args:
        place: on the meta device.

    Returns:
        The layers' tensors.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    checkpoint = Checkpoint(folder, weight_format(config.model))
    checkpoint.rename(prefixes_to_rename(config.model))
    checkpoint.keep(lambda name: name.startswith(config.prefixes))
    shape = NextNDraft(config, place, 1)
    choose_expert_layout(shape, checkpoint.headers)
    checkpoint.check(shape.weights(), SHARED, _hint(config), shape.shards())
    return checkpoint


def _hint(config: NextNConfig) -> str:
    return f"config.json promises {config.count} more than num_hidden_layers ({COUNT})."
