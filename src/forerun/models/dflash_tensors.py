"""The tensors of a DFlash draft's files, under the names of the model's parts."""

from __future__ import annotations

from pathlib import Path

from forerun.models.checkpoint import Checkpoint
from forerun.models.heads.base import HeadConfig

# Other writers' names for parts of the body, by how they begin; first `model.` is dropped.
ALIASES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


def named_tensors(folder: Path, head: HeadConfig | None) -> Checkpoint:
    """Returns all of them, also those that the draft does not have.

    Raises:
        ConfigError: a file is missing or broken.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.rename({"model.": "", "logit_head.": ""})  # early heads have the latter
    checkpoint.rename(ALIASES | ({} if head is None else dict(head.files.aliases)))
    return checkpoint
