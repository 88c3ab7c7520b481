"""Folders of weights: a safetensors file or shards with an index, or a GGUF file.

Nothing is ever unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from os.path import isfile
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from forerun.config.json_files import check_regular, read_json
from forerun.config.schema import IndexKeys, checked
from forerun.core.errors import ConfigError, first_line, shown
from forerun.models.formats.base import Header
from forerun.models.gguf import GGUF
from forerun.models.gguf.weights import gguf_headers

log = logging.getLogger("forerun")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
FIX_FILE = "Download it again"
FIX_FOLDER = "give the path of a Hugging Face model folder, or org/name of one on the Hub"
MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
SAMPLES, SAMPLE_BYTES = 8, 4096  # of a file's data, in its fingerprint

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
    if (folder / GGUF).exists():
        return [folder / GGUF]
    if _has_index(folder):
        files = [folder / name for name in shard_names(folder)]
        absent = [file.name for file in files if not isfile(file)]
        if absent:
            raise ConfigError(
                f"{folder / INDEX} names {listing(absent, 'shard')}, not in the folder."
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


def read_headers(folder: Path) -> dict[str, Header]:
    """Reads the header of every tensor. The index says which of several files has a tensor.

    Raises:
        ConfigError: a file is missing or broken, or lacks what the index says it holds.
    """
    if not _has_index(folder):
        return {name: header for f in _files(folder) for name, header in _headers_of(f).items()}
    weight_map, out, others = _weight_map(folder), dict[str, Header](), set[str]()
    for file in _files(folder):
        for name, header in _headers_of(file).items():
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
            listing(sorted(others)),
        )
    return out


def fingerprint(folder: Path, weights: bool = True) -> str:
    """A digest of config.json, and of headers and samples of `weights`.

    Raises:
        ConfigError: there are no weights, or files cannot be read.
    """
    digest = sha256()
    with readable(folder / "config.json"):
        digest.update((folder / "config.json").read_bytes())
    for file in sorted(_files(folder)) if weights else ():
        with readable(file), file.open("rb") as stream:
            size, length = file.stat().st_size, int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, size, MAX_HEADER)))
            for part in range(1, SAMPLES + 1):
                stream.seek(max(0, size * part // SAMPLES - SAMPLE_BYTES))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _headers_of(file: Path) -> dict[str, Header]:
    """Names, types and shapes, compared with the file's size.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file.name == GGUF:
        return gguf_headers(file)
    out: dict[str, Header] = {}
    with readable(file), safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118  not a dict
            tensor = tensors.get_slice(name)
            out[name] = Header(file, name, tensor.get_dtype(), tuple(tensor.get_shape()))
    return out


@contextmanager
def readable(file: Path) -> Iterator[None]:
    check_regular(file)
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {first_line(error)}. {FIX_FILE}.") from None


def _is_plain(name: str) -> bool:
    """Whether a name can stand in an error as it is."""
    return 0 < len(name) < 200 and name.isprintable()


def listing(names: list[str], noun: str = "tensor") -> str:
    """`"2 tensors: a, b"`, the first few."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    plural = "s" if len(names) > 1 else ""
    few = ", ".join(name if _is_plain(name) else shown(name, 200) for name in names[:3])
    return f"{len(names)} {noun}{plural}: {few}{more}"
