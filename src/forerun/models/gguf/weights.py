"""The tensors of a GGUF file under the names that checkpoints have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.models.formats.base import Header
from forerun.models.gguf.config import as_in_checkpoints, stored_name
from forerun.models.gguf.reader import read_gguf


def gguf_headers(path: Path) -> dict[str, Header]:
    """Names, kinds and shapes: what is quantized counts as float32, which it is read as.

    Raises:
        ConfigError: the file cannot be read, or two tensors have one name.
    """
    file, out = read_gguf(path), dict[str, Header]()
    for tensor in file.tensors.values():
        name = stored_name(file, tensor.name)
        if name is None:
            continue
        if name in out:
            raise ConfigError(f"{path} holds {name} twice. Download it again.")
        dtype = tensor.kind if tensor.kind in ("F16", "BF16") else "F32"
        out[name] = Header(path, tensor.name, dtype, tensor.shape)
    return out


def kind_of(header: Header) -> str:
    """One of `KINDS`."""
    return read_gguf(header.file).tensors[header.stored_as].kind


def read_gguf_tensor(header: Header, as_blocks: bool) -> Tensor:
    """A whole tensor with its rows as checkpoints have them, on the CPU.

    Args:
        as_blocks: of a quantized matrix: [rows, bytes of a row] uint8; else its values.
    """
    file, name = read_gguf(header.file), header.stored_as
    tensor = torch.from_numpy(np.array(file.stored(name))) if as_blocks else file.dequantized(name)
    return as_in_checkpoints(file, name, tensor)
