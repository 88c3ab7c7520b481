"""The MTP layer of DeepSeek-V3-style checkpoints: one more layer that predicts one token further.

    row at p:  eh_proj([enorm(embedding of the token at p + 1) | hnorm(h at p)])
               -> a decoder layer like the target's -> shared_head.norm -> the target's head,
               which predicts the token at p + 2

(DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2; tensors as its README_WEIGHTS names
them, under `model.layers.{num_hidden_layers}.`.) The report leaves open which h is meant. It is the
target's hidden state after the final norm, as the checkpoint's own modeling_deepseek.py hands it
over; and to predict further the layer reads what it gave itself after `shared_head.norm`: feeding
it back before that norm costs acceptance (2.84 against 2.94 tokens a step, DeepSeek-R1 at 3 drafts,
ROCm/ATOM 1764; the same in vllm 47448). The embedding at position 0 is not masked (vllm 33299).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.checkpoint import DUMMY_FORMATS, FIX_FOLDER, Checkpoint, fill_dummy
from forerun.models.decoder import Decoder
from forerun.models.registry import model_class

COUNT = "num_nextn_predict_layers"
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's


class NextNConfig:
    """What the layer takes from the `config.json` of the model it was trained with."""

    def __init__(self, model: ModelConfig, where: str) -> None:
        """Raises ConfigError: the checkpoint has no such layer, or more than one."""
        count = int(model.raw.get(COUNT) or 0)
        if count == 0:
            raise ConfigError(
                f"{where} has no layer that predicts further ahead ({COUNT} is missing or 0);"
                " set speculative_draft_model_path to a checkpoint that has, or use another"
                " speculative_algorithm."
            )
        if count > 1:
            raise ConfigError(f"{where}: {COUNT} {count} is not supported; it must be 1.")
        family = model_class(model)
        self.model, self.qk_norm = family.adapt(model), family.qk_norm
        self.prefix = f"model.layers.{model.num_layers}."
        # Built like the target's layers, the last of them.
        self.mask = LayerMask(Mask.CAUSAL, self.model.windows[-1])


def load_nextn_config(folder: Path) -> NextNConfig:
    """Of the checkpoint in `folder`.

    Raises:
        ConfigError: it has no such layer, or an architecture that Forerun lacks.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    return NextNConfig(load_model_config(folder), where=str(folder))


class NextNDraft:
    """The layer, without embedding and head: `embed` and `logits` are the target's."""

    def __init__(
        self, config: NextNConfig, dtype: torch.dtype, device: torch.device, max_positions: int
    ) -> None:
        """Weights are uninitialised until a loader fills them; then `prepare`."""
        model = config.model
        self.config = config
        self.eh_proj = Linear(2 * model.hidden_size, model.hidden_size, dtype, device)
        self.enorm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)
        self.hnorm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)
        # Its final norm is `shared_head.norm`.
        self.decoder = Decoder(model, (config.mask,), config.qk_norm, max_positions, dtype, device)

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into."""
        p = self.config.prefix
        return {
            f"{p}eh_proj.weight": self.eh_proj.weight,
            f"{p}enorm.weight": self.enorm.weight,
            f"{p}hnorm.weight": self.hnorm.weight,
            f"{p}shared_head.norm.weight": self.decoder.norm.weight,
            **self.decoder.layers[0].weights(p),
        }

    def prepare(self) -> None:
        """Once, after the weights are in."""
        self.eh_proj.pack()
        for part in (self.enorm, self.hnorm, self.decoder):
            part.prepare()

    def forward(
        self, embedded: Tensor, h: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> Tensor:
        """Runs the layer over any rows and writes their K/V, layer 0 of the draft's pool.

        Args:
            embedded: [T, H]: of the row at position p, the embedding of the token at p + 1.
            h: [T, H]: the target's hidden state at p, after its final norm; or what this gave at
                p - 1.
            positions: [T] int32 or int64, below the loader's `max_positions`.
            ctx: the draft's attention backend with its plan for these rows.

        Returns:
            [T, H], for the target's head and for the rows one position further.
        """
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(h)), 1))
        return self.decoder.run(x, positions, ctx)[0]


def load_nextn(
    folder: Path,
    config: NextNConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    load_format: str = "auto",
) -> NextNDraft:
    """Builds and fills the layer of the checkpoint in `folder`; its other tensors are not read.

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    draft = NextNDraft(config, dtype, device, max_positions)
    if load_format in DUMMY_FORMATS:
        fill_dummy(draft.weights(), load_format)
    else:
        checkpoint = Checkpoint(folder)
        checkpoint.keep(lambda name: name.startswith(config.prefix))
        hint = f"{COUNT} in config.json promises one layer more than num_hidden_layers."
        checkpoint.read_into(draft.weights(), SHARED, hint)
    draft.prepare()
    return draft
