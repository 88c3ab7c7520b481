"""Safetensors folders: one file or shards with an index. Nothing is ever unpickled.

A model states a map from tensor name to the view it is copied into (`weights()`), so fused
matrices, other name schemes and drafts all load through the same function. The view of a tensor
that a model keeps in parts has one dimension split: [n, I, H] or [H, n, I] where the files have
[n * I, H] or [H, n * I]. Every name and shape is checked against the files' headers before any
data is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from os.path import isfile
from pathlib import Path, PurePosixPath
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.config.json_files import check_regular, read_json
from forerun.config.schema import IndexKeys, checked
from forerun.core.errors import ConfigError, first_line, shown
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.kernels.gemm.quantized import Fp8Weight, Largest, QuantizedWeight
from forerun.layers.communication import SINGLE_RANK, Communicator
from forerun.layers.sharding import Shard
from forerun.models.int4_formats import Int4Format
from forerun.models.quantization import (
    BLOCKS,
    E4M3,
    KV_SCALES,
    SCALE_NAMES,
    SCALES,
    UNUSED_SCALES,
    Fp8Format,
    Mxfp4,
    WeightFormat,
)
from forerun.platform.progress import progress

log = logging.getLogger("forerun")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HARMLESS = ("rotary_emb.inv_freq",)  # old buffers, in many checkpoints; computed here
PICKLES = ("*.bin", "*.pt", "*.pth")
FIX_FILE = "Download it again"
FIX_FOLDER = "give the path of a Hugging Face model folder, or org/name of one on the Hub"
MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
SAMPLES, SAMPLE_BYTES = 8, 4096  # of a file's data, in its fingerprint

View = Tensor | QuantizedWeight  # what a tensor of a checkpoint is copied into

_FLOATS = {"BF16", "F16", "F32", "F64"}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class Header:
    """Where one tensor is, its dtype and shape."""

    file: Path
    stored_as: str  # its name in the file
    dtype: str  # safetensors' name: "BF16", "I64", ...
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _SIZES.get(self.dtype, 1)


class Checkpoint:
    """The tensors of a folder, by name; data stays on disk until `read_into`."""

    def __init__(self, folder: Path, weight_format: WeightFormat | None = None) -> None:
        """`weight_format`: of what is quantized; what fills a plain view is dequantized.

        Raises:
            ConfigError: no safetensors, a shard absent, a file broken or not as indexed.
        """
        self.folder = folder
        self.fp8 = weight_format if isinstance(weight_format, Fp8Format) else None
        self.mxfp4 = weight_format if isinstance(weight_format, Mxfp4) else None
        self.int4 = weight_format if isinstance(weight_format, Int4Format) else None
        self.headers = text_part(_headers(folder))

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name].shape

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU."""
        header = self.headers[name]
        with _readable(header.file), safe_open(header.file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(header.stored_as)
        return tensor

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Takes tensors under other names: those that begin with a key begin with its value."""
        out: dict[str, Header] = {}
        for name, header in self.headers.items():
            old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            out[prefixes.get(old, "") + name.removeprefix(old)] = header
        self.headers = out

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Forgets the tensors whose names are not wanted, where others read these."""
        self.headers = {name: header for name, header in self.headers.items() if wanted(name)}

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor is there, and stored in the checkpoint's FP8 format."""
        return self.fp8 is not None and name in self.headers and self.headers[name].dtype == E4M3

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is stored as 4-bit integers."""
        return self.int4 is not None and _stem(name) + self.int4.key in self.headers

    def read_into(
        self,
        views: Mapping[str, View],
        harmless: Collection[str] = (),
        hint: str = "",
        shards: Mapping[str, Shard] | None = None,
        comm: Communicator = SINGLE_RANK,
    ) -> None:
        """Copies every tensor named in `views` into its view, one at a time, converting floats.

        A tensor is copied from its memory-mapped file to the view's device and released; a file is
        unmapped before the next is opened. So at most one tensor is held twice.

        Args:
            views: name -> destination view; plain tensors are quantized for a quantized one.
            harmless: endings of names that may be in the files without a view.
            hint: a sentence added when a tensor is missing or unexpected.
            shards: of tensors, by the names of their plain ones, of which a part is read.
            comm: the ranks that read the other parts, of which all call this.

        Raises:
            ConfigError: a tensor missing, unexpected, of another shape or kind, or unreadable; a
                part that divides what is quantized together.
        """
        parts = shards or {}
        stored = self.check(views, harmless, hint, parts)
        packed, int4, plain = self._by_format(views)
        scales = self._scales(plain)
        total = sum(self.headers[name].bytes for name in (*plain, *stored))
        with progress("loading weights", total, "B") as stage:
            named = {self._scale_name(name): scale for name, scale in scales.items()}
            self._copy(named, {}, _Parts({}, SINGLE_RANK), lambda _: None)
            self._copy(plain, scales, _Parts(parts, comm), stage.advance)
            for name, view in packed.items():
                self._copy_mxfp4(name, view, parts.get(name), stage.advance)
            for name, target in int4.items():
                self._copy_int4(name, target, parts.get(name), stage.advance)

    def check(
        self,
        views: Mapping[str, View],
        harmless: Collection[str] = (),
        hint: str = "",
        shards: Mapping[str, Shard] | None = None,
    ) -> dict[str, Tensor]:
        """Compares names, shapes and kinds with the files' headers, as `read_into` does first.

        With views on the meta device this is before there is memory for anything.

        Returns:
            The tensors in the files that views of other formats are made of, without data.
        """
        parts = shards or {}
        packed, int4, plain = self._by_format(views)
        stored = {**self._stored_as_mxfp4(packed, parts), **self._stored_as_int4(int4, parts)}
        scales = self._scales(plain)
        unused: tuple[str, ...] = UNUSED_SCALES if self.fp8 is not None else ()
        unused = unused if self.int4 is None else self.int4.unused
        self._check({**plain, **stored}, scales, (*harmless, *KV_SCALES, *unused), hint)
        self._check_shapes({**plain, **stored}, scales, parts)
        return stored

    def _by_format(
        self, views: Mapping[str, View]
    ) -> tuple[dict[str, Tensor], dict[str, View], dict[str, View]]:
        """Those made of MXFP4, of 4-bit integers, and of one stored tensor each."""
        packed = {
            name: view
            for name, view in views.items()
            if self.mxfp4 and isinstance(view, Tensor) and name + BLOCKS in self.headers
        }
        int4 = {name: view for name, view in views.items() if self.is_int4(name)}
        apart = packed.keys() | int4.keys()
        return packed, int4, {name: view for name, view in views.items() if name not in apart}

    def _stored_as_mxfp4(
        self, packed: Mapping[str, Tensor], shards: Mapping[str, Shard]
    ) -> dict[str, Tensor]:
        """The tensors in the files that these views are made of, without data."""
        out: dict[str, Tensor] = {}
        for name, view in packed.items():
            assert self.mxfp4 is not None
            shard = shards.get(name)
            if shard is not None:
                self.mxfp4.shard_of_rows(shard)  # refuses what cannot be divided
            shapes = self.mxfp4.shapes(view, shard)
            for suffix, shape in zip((BLOCKS, SCALES), shapes, strict=True):
                out[name + suffix] = torch.empty(shape, dtype=torch.uint8, device="meta")
        return out

    def _copy_mxfp4(
        self, name: str, view: Tensor, shard: Shard | None, advance: Callable[[float], None]
    ) -> None:
        """Expert by expert, on the view's device."""
        assert self.mxfp4 is not None
        blocks, scales = self.headers[name + BLOCKS], self.headers[name + SCALES]
        device = str(view.device)
        with (
            _readable(blocks.file),
            safe_open(blocks.file, framework="pt", device=device) as of_blocks,
            _readable(scales.file),
            safe_open(scales.file, framework="pt", device=device) as of_scales,
        ):
            all_blocks = of_blocks.get_slice(blocks.stored_as)
            all_scales = of_scales.get_slice(scales.stored_as)
            part = None if shard is None else self.mxfp4.shard_of_rows(shard)
            whole = shard is not None and shard.dim == 0  # some experts, not a part of each
            numbers = shard.ranges[0] if shard is not None and whole else range(len(view))
            for i, expert in zip(numbers, view, strict=True):
                stored = all_blocks[i], all_scales[i]
                own = stored if part is None else map(part.take, stored)
                rows = self.mxfp4.dequantize(*own)  # [N, K]
                expert.copy_(rows.T.reshape(expert.shape))
        advance(blocks.bytes + scales.bytes)

    def _stored_as_int4(
        self, views: Mapping[str, View], shards: Mapping[str, Shard]
    ) -> dict[str, Tensor]:
        """The tensors in the files that these views are made of, without data."""
        out: dict[str, Tensor] = {}
        for name, view in views.items():
            assert self.int4 is not None
            matrix: tuple[int, ...] = math.prod(view.shape[:-1]), view.shape[-1]
            if name in shards:
                self.int4.shards(shards[name])  # refuses what cannot be divided
                matrix = shards[name].shape_of_whole(matrix)
            for suffix, shape in self.int4.shapes(*matrix).items():
                dtype = torch.float32 if "scale" in suffix else torch.int32
                out[_stem(name) + suffix] = torch.empty(shape, dtype=dtype, device="meta")
        return out

    def _copy_int4(
        self, name: str, view: View, shard: Shard | None, advance: Callable[[float], None]
    ) -> None:
        """Unpacked on the view's device."""
        assert self.int4 is not None
        parts = {} if shard is None else self.int4.shards(shard)
        stored: dict[str, Tensor] = {}
        for suffix in self.int4.axes:
            header = self.headers[_stem(name) + suffix]
            with (
                _readable(header.file),
                safe_open(header.file, framework="pt", device=str(view.device)) as tensors,
            ):
                stored[suffix] = _read_part(tensors, header.stored_as, parts.get(suffix))
            advance(header.bytes)
        if isinstance(view, Int4Weight):
            view.copy_(self.int4.read(stored))
        else:
            _fill(view, self.int4.dequantize(stored))

    def _scales(self, views: Mapping[str, View]) -> dict[str, Tensor]:
        """Makes room for the scales of every tensor that is stored in FP8."""
        out: dict[str, Tensor] = {}
        for name in filter(self.is_fp8, views):
            assert self.fp8 is not None
            shapes, scale = self.fp8.scale_shapes(self.shape(name)), self._scale_name(name)
            known = scale in self.headers and self.shape(scale) in shapes
            shape = self.shape(scale) if known else shapes[0]
            out[name] = torch.empty(shape, dtype=torch.float32, device=views[name].device)
        return out

    def _scale_name(self, name: str) -> str:
        """Returns the name of the scales of an FP8 tensor."""
        names = [name + ending for ending in SCALE_NAMES]
        return next((each for each in names if each in self.headers), names[0])

    def _copy(
        self,
        views: Mapping[str, View],
        scales: Mapping[str, Tensor],
        parts: _Parts,
        advance: Callable[[float], None],
    ) -> None:
        """File by file; what has `scales` is FP8."""
        by_file: dict[Path, list[str]] = {}
        for name in views:
            by_file.setdefault(self.headers[name].file, []).append(name)
        for file, names in by_file.items():
            device = str(views[names[0]].device)
            with _readable(file), safe_open(file, framework="pt", device=device) as tensors:
                for name in names:
                    header, shard = self.headers[name], parts.shards.get(name)
                    data = _read_part(tensors, header.stored_as, shard)
                    fp8 = None
                    if name in scales:
                        assert self.fp8 is not None
                        fp8 = self.fp8.read(data, scales[name], shard)
                    _fill(views[name], data, fp8, parts.across(name, len(header.shape)))
                    advance(header.bytes)

    def _check(
        self,
        views: Mapping[str, View],
        scales: Mapping[str, Tensor],
        harmless: tuple[str, ...],
        hint: str,
    ) -> None:
        named = {self._scale_name(name): scale for name, scale in scales.items()}
        wanted: dict[str, View] = {**views, **named}
        missing = [name for name in wanted if name not in self.headers]
        if missing:
            raise ConfigError(f"{self.folder} lacks {_listing(missing)}. {hint}".rstrip())
        extra = [n for n in self.headers if n not in wanted and not n.endswith(harmless or ("\0",))]
        if extra:
            raise ConfigError(
                f"{self.folder} holds {_listing(extra)}, which this architecture does not have."
                f" {hint}".rstrip()
            )

    def _check_shapes(
        self,
        views: Mapping[str, View],
        scales: Mapping[str, Tensor],
        shards: Mapping[str, Shard],
    ) -> None:
        """Checks shapes and kinds; every name is there."""
        named = {self._scale_name(name): scale for name, scale in scales.items()}
        wanted: dict[str, View] = {**views, **named}
        for name, view in wanted.items():
            header = self.headers[name]
            shapes = _stored_shapes(tuple(view.shape))
            shape = shards[name].shape_in(header.shape) if name in shards else header.shape
            if shape not in shapes:
                if name in shards:
                    shapes = shards[name].shapes_of_whole(shapes)
                raise ConfigError(
                    f"{header.file}: {name} has shape {list(header.shape)}, expected"
                    f" {' or '.join(map(str, map(list, shapes)))} from config.json. The two do not"
                    " belong together."
                )
            if name in scales and name in shards:
                assert self.fp8 is not None
                self.fp8.shard_of_scales(shards[name], len(header.shape))
            floats = isinstance(view, QuantizedWeight) or view.is_floating_point()
            if floats != (header.dtype in _FLOATS) and name not in scales:
                raise ConfigError(
                    f"{header.file}: {name} is {header.dtype}, expected"
                    f" {'BF16, F16 or F32' if floats else 'integers'}."
                    " Quantized checkpoints are not supported; use the bfloat16 one."
                )


def _stem(name: str) -> str:
    """The path of a linear, whose weight it is."""
    return name.removesuffix("weight")


@dataclass(frozen=True)
class _Parts:
    """What a rank reads of tensors, by name, and the ranks that read the rest."""

    shards: Mapping[str, Shard]
    comm: Communicator

    def across(self, name: str, dims: int) -> Largest | None:
        """Whether others have columns of the same rows of a tensor of `dims` dimensions."""
        shard = self.shards.get(name)
        divided = shard is not None and shard.dim == dims - 1 and shard.count < shard.size
        return self.comm.all_reduce_max if divided else None


def _read_part(tensors: Any, stored_as: str, shard: Shard | None) -> Tensor:
    """Reads from an open safetensors file; None: all of it."""
    if shard is None:
        whole: Tensor = tensors.get_tensor(stored_as)
        return whole
    return shard.take(tensors.get_slice(stored_as))


def _fill(
    view: View, data: Tensor, fp8: Fp8Weight | None = None, across: Largest | None = None
) -> None:
    """Fills it with a tensor as it is stored; `fp8`: with the scales that belong to it."""
    if isinstance(view, QuantizedWeight):
        if fp8 is None:
            view.quantize_(data, across)
        else:
            view.copy_(fp8)
    else:
        view.copy_((data if fp8 is None else fp8.dequantize()).reshape(view.shape))


def _stored_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a tensor in a file may have to fill a view of this shape.

    Its own and, from three dimensions on, those with some neighbouring dimensions merged.
    """
    dims = len(shape) if len(shape) > 2 else 0
    runs = [(i, j) for i in range(dims) for j in range(i + 2, dims + 1)]
    return [shape, *((*shape[:i], math.prod(shape[i:j]), *shape[j:]) for i, j in runs)]


# Names of a text model within a multimodal one: those of transformers 5 and 4.
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
OTHER_PARTS = (  # of a multimodal model
    "vision_tower.",
    "audio_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
    "visual.",
)


def text_part(headers: Mapping[str, Header]) -> dict[str, Header]:
    """The tensors of the text model, under the names that it has alone; a text model's own."""
    if not any(name.startswith(tuple(TEXT_PREFIXES)) for name in headers):
        return dict(headers)
    out: dict[str, Header] = {}
    for name, header in headers.items():
        if name.removeprefix("model.").startswith(OTHER_PARTS):
            continue
        prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
        out[TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = header
    return out


def _files(folder: Path) -> list[Path]:
    """Every file with weights.

    Raises:
        ConfigError: the folder or its safetensors are missing, or a shard of the index is.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    if _has_index(folder):
        files = [folder / name for name in shard_names(folder)]
        absent = [file.name for file in files if not isfile(file)]
        if absent:
            raise ConfigError(
                f"{folder / INDEX} names {_listing(absent, 'shard')}, not in the folder."
                " Download the missing files."
            )
        return files
    single = folder / SINGLE
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if found:
        return found
    if any(file for pattern in PICKLES for file in folder.glob(pattern)):
        raise ConfigError(
            f"{folder} holds pickled weights only, which Forerun never unpickles; convert them"
            " to safetensors (transformers: save_pretrained(folder))."
        )
    raise ConfigError(
        f"{folder} holds no *.safetensors. Download the weights, or use load_format dummy for"
        " random ones."
    )


def _has_index(folder: Path) -> bool:
    """Whether it counts: beside a single file it is a leftover, as for transformers."""
    return not (folder / SINGLE).exists() and (folder / INDEX).exists()


def shard_names(folder: Path) -> list[str]:
    """File names of the shards that the index lists.

    Raises:
        ConfigError: the index cannot be read or lists nothing, or a file outside of the folder.
    """
    return sorted(set(_weight_map(folder).values()))


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file holds a tensor, by the tensor's name."""
    index = folder / INDEX
    weight_map = checked(IndexKeys, read_json(index), str(index)).weight_map
    if not weight_map:
        raise ConfigError(f"{index} has no weight_map. {FIX_FILE}.")
    for name in set(weight_map.values()):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index} names {shown(name)}, expected a safetensors file in the folder."
                f" {FIX_FILE}."
            )
    return weight_map


def _headers(folder: Path) -> dict[str, Header]:
    """Reads the header of every tensor. The index says which of several files has a tensor.

    Raises:
        ConfigError: a file is missing or broken, or lacks what the index says it holds.
    """
    if not _has_index(folder):
        return {name: header for f in _files(folder) for name, header in _read_headers(f).items()}
    weight_map, out, others = _weight_map(folder), dict[str, Header](), set[str]()
    for file in _files(folder):
        for name, header in _read_headers(file).items():
            if name in weight_map and folder / weight_map[name] == file:
                out[name] = header
            else:
                others.add(name)
    lacking = next((name for name in weight_map if name not in out), None)
    if lacking is not None:
        file = folder / weight_map[lacking]
        raise ConfigError(f"{file} lacks {lacking}, which the index says it holds.")
    if others:
        log.warning(
            "%s: %s, in files other than the index gives for them, are ignored.",
            folder,
            _listing(sorted(others)),
        )
    return out


def fingerprint(folder: Path, weights: bool = True) -> str:
    """A digest of config.json, and of headers and samples of `weights`.

    Raises:
        ConfigError: there are no weights, or files cannot be read.
    """
    digest = sha256()
    with _readable(folder / "config.json"):
        digest.update((folder / "config.json").read_bytes())
    for file in sorted(_files(folder)) if weights else ():
        with _readable(file), file.open("rb") as stream:
            size, length = file.stat().st_size, int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, size, MAX_HEADER)))
            for part in range(1, SAMPLES + 1):
                stream.seek(max(0, size * part // SAMPLES - SAMPLE_BYTES))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _read_headers(file: Path) -> dict[str, Header]:
    """Names, types and shapes, compared with the file's size.

    Raises:
        ConfigError: the file cannot be read.
    """
    out: dict[str, Header] = {}
    with _readable(file), safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118  not a dict
            tensor = tensors.get_slice(name)
            out[name] = Header(file, name, tensor.get_dtype(), tuple(tensor.get_shape()))
    return out


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    check_regular(file)
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {first_line(error)}. {FIX_FILE}.") from None


def _listing(names: list[str], noun: str = "tensor") -> str:
    """`"2 tensors: a, b"`, the first few."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    plural = "s" if len(names) > 1 else ""
    few = ", ".join(name if len(name) < 200 else f"{name[:200]}..." for name in names[:3])
    return f"{len(names)} {noun}{plural}: {few}{more}"


DUMMY_FORMATS = ("dummy", "dummy_normal")


def fill_dummy(
    views: Mapping[str, View],
    load_format: str,
    seed: int = 0,
    shards: Mapping[str, Shard] | None = None,
    comm: Communicator = SINGLE_RANK,
) -> None:
    """Random weights from a seed and their names: the same for any number of ranks.

    Experts have other names, and so other weights, where groups of several ranks have them
    (1 < ep_size < tp_size).

    Args:
        load_format: "dummy": everything U(-0.001, 0.001), as SGLang and vLLM fill theirs. Layers
            then add little to the embedding, and the tokens of a block are nearly equal, which a
            GPU at its power limit multiplies faster. "dummy_normal": norms 1, biases 0,
            matrices N(0, 0.02²), like an untrained model; tokens differ as those of text do.
            Quantized weights are the plain ones, rounded.
    """
    if not views:
        return
    generator = torch.Generator(next(iter(views.values())).device)
    plain_views = [view for view in views.values() if isinstance(view, Tensor)]
    dtype = next(view.dtype for view in plain_views if view.is_floating_point())
    parts = _Parts(shards or {}, comm)
    for name, view in views.items():
        generator.manual_seed(crc32(f"{seed} {name}".encode()))
        shard, shape = parts.shards.get(name), tuple(view.shape)
        if shard is None and isinstance(view, Tensor) and view.is_contiguous():
            _fill_dummy(name, view, load_format, generator)
            continue
        if shard is not None:
            shape = shard.shapes_of_whole(_stored_shapes(shape))[0]
        kind = view.dtype if isinstance(view, Tensor) else dtype
        whole = torch.empty(shape, dtype=kind, device=view.device)
        _fill_dummy(name, whole, load_format, generator)
        part = whole if shard is None else shard.take(whole)
        _fill(view, part, across=parts.across(name, len(shape)))


def _fill_dummy(name: str, view: Tensor, load_format: str, generator: torch.Generator) -> None:
    if not view.is_floating_point():  # codes and exponents of MXFP4
        view.random_(112, 124, generator=generator)
    elif load_format == "dummy":
        view.uniform_(-1e-3, 1e-3, generator=generator)
    elif name.endswith("norm.weight"):
        view.fill_(1)
    elif name.endswith("bias"):
        view.zero_()
    else:
        view.normal_(0, 0.02, generator=generator)
