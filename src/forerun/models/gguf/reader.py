"""Reads GGUF files: metadata, and tensors as they are stored or dequantized.

The header is parsed here, in bounded time and memory, since a file may be anything: no count is
believed before the file is long enough for it. (The reader of the package `gguf` makes an object of
every token: 3.7 s for 49 thousand.) What the package knows of tensor types, and its
dequantization, are used. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.config.json_files import check_regular
from forerun.core.errors import ConfigError, first_line, shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_ENTRIES = 1 << 16  # keys of the metadata, and tensors
MAX_DIMS = 4
MAX_NAME = 1024  # bytes of a tensor's name; llama.cpp: 64
KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K",
)  # fmt: skip
SCALARS = {  # number of a type -> (its code for `struct`, its dtype)
    0: ("B", "<u1"), 1: ("b", "<i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"),
    5: ("i", "<i4"), 6: ("f", "<f4"), 7: ("?", "?"), 10: ("Q", "<u8"), 11: ("q", "<i8"),
    12: ("d", "<f8"),
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor in a file."""

    name: str
    kind: str  # one of `KINDS`
    shape: tuple[int, ...]  # rows first, as in PyTorch
    offset: int  # bytes from the file's begin
    bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata, with the format's keys, and its tensors."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, strings, lists of strings, arrays of numbers
    tensors: Mapping[str, GgufTensor]

    def stored(self, name: str) -> np.ndarray:
        """Bytes of a tensor, memory-mapped: [rows, bytes of a row] uint8.

        Raises:
            ConfigError: the file has changed.
        """
        tensor = self.tensors[name]
        try:
            whole = np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.bytes,))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} cannot be read: {first_line(error)}.") from None
        return whole.reshape(-1 if tensor.shape else 1, _row_bytes(tensor.kind, tensor.shape))

    def dequantized(self, name: str) -> Tensor:
        """A tensor's values: float32, of kinds F16 and BF16 in their own dtype."""
        tensor, data = self.tensors[name], self.stored(name)
        if tensor.kind in ("F16", "BF16"):
            dtype = torch.float16 if tensor.kind == "F16" else torch.bfloat16
            return torch.from_numpy(data.copy()).view(dtype).reshape(tensor.shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(data, GGMLQuantizationType[tensor.kind])
        return torch.from_numpy(np.array(values, np.float32)).reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Reads a file's header, once for as long as the file stays as it is.

    Raises:
        ConfigError: it is not a regular file, not GGUF, truncated, or has tensors of an unknown
            kind.
    """
    check_regular(path)
    try:
        state = path.stat()
        return _read(path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}.") from None


@lru_cache(maxsize=4)
def _read(path: Path, size: int, modified: int) -> GgufFile:
    """`modified`: a file that changes is read again."""
    if size < 24:
        raise _broken(path, "it is too short")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if data[:4] != MAGIC:
            raise _broken(path, "it does not begin with GGUF")
        cursor.at = 4
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise _broken(path, f"its version is {version}, and 2 and 3 are known (little-endian)")
        num_tensors, num_keys = cursor.count(24), cursor.count(12)
        metadata = {}
        for _ in range(num_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors = [cursor.tensor() for _ in range(num_tensors)]
        return GgufFile(path, metadata, _placed(path, size, cursor.at, metadata, tensors))


class _Cursor:
    """A place in the header; what lies beyond the file's end is an error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, count: int) -> int:
        """Where the next `count` bytes begin."""
        begin = self.at
        if count > len(self.data) - begin:
            raise _broken(self.path, "it is truncated")
        self.at = begin + count
        return begin

    def scalar(self, code: str) -> Any:
        begin = self.take(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.data, begin)[0]

    def count(self, least: int) -> int:
        """A number of entries, of which each takes at least so many bytes."""
        number: int = self.scalar("Q")
        if number > min(MAX_ENTRIES, len(self.data) // least):
            raise _broken(self.path, f"it claims {number} entries")
        return number

    def string(self) -> str:
        length: int = self.scalar("Q")
        begin = self.take(length)
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise _broken(self.path, f"a value has the unknown type {kind}")
        return self.scalar(SCALARS[kind][0])

    def array(self) -> list[str] | np.ndarray:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            if length > len(self.data) // 8:
                raise _broken(self.path, "it is truncated")
            return [self.string() for _ in range(length)]
        if kind not in SCALARS:
            raise _broken(self.path, f"an array has elements of the unsupported type {kind}")
        dtype = np.dtype(SCALARS[kind][1])
        begin = self.take(length * dtype.itemsize)
        return np.frombuffer(self.data, dtype, length, begin).copy()

    def tensor(self) -> GgufTensor:
        """A tensor whose offset still counts from the begin of the data."""
        name = self.string()
        if len(name) > MAX_NAME:
            raise _broken(self.path, f"a tensor's name has {len(name)} characters")
        dims = self.scalar("I")
        if dims > MAX_DIMS:
            raise _broken(self.path, f"{shown(name)} has {dims} dimensions")
        sizes = [self.scalar("Q") for _ in range(dims)]
        number, offset = self.scalar("I"), self.scalar("Q")
        kind = _kind(number)
        if kind is None:
            raise ConfigError(
                f"{self.path}: {shown(name)} is of kind {_name(number)}, which is not supported."
                f" Known: {', '.join(KINDS)}; choose another file of the model."
            )
        return GgufTensor(name, kind, tuple(reversed(sizes)), offset, 0)


def _placed(
    path: Path, size: int, end: int, metadata: Mapping[str, Any], tensors: list[GgufTensor]
) -> dict[str, GgufTensor]:
    """The tensors with their places in the file, which must hold all of them.

    As in llama.cpp each begins where the one before ends, aligned: a kind or size that is damaged
    does not go unnoticed.

    Args:
        end: of the header, after which the data begins, aligned.
    """
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment.bit_count() > 1:
        raise _broken(path, f"general.alignment is {shown(alignment)}, expected a power of two")
    data, next_offset = -(-end // alignment) * alignment, 0
    out: dict[str, GgufTensor] = {}
    for tensor in tensors:
        rows = 1
        for each in tensor.shape[:-1]:
            rows *= each
        length = rows * _row_bytes(tensor.kind, tensor.shape)
        if rows < 1 or length < 1 or data + tensor.offset + length > size:
            raise _broken(path, f"{shown(tensor.name)} {list(tensor.shape)} does not lie in it")
        if tensor.offset != next_offset:
            raise _broken(
                path,
                f"{shown(tensor.name)} begins at {tensor.offset} and what is before it ends at"
                f" {next_offset}",
            )
        next_offset += -(-length // alignment) * alignment
        if tensor.name in out:
            raise _broken(path, f"{shown(tensor.name)} is there twice")
        out[tensor.name] = GgufTensor(
            tensor.name, tensor.kind, tensor.shape, data + tensor.offset, length
        )
    return out


def _row_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a row; 0: rows are not of whole blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    columns = shape[-1] if shape else 1
    return 0 if columns % block else columns // block * size


def _kind(number: int) -> str | None:
    name = _name(number)
    return name if name in KINDS else None


def _name(number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return str(number)


def _broken(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is not a usable GGUF file: {reason}. Download it again.")
