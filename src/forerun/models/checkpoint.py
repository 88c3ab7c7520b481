"""The tensors of a folder of safetensors, read into the views of a model.

A model states a map from tensor name to the view it is copied into (`weights()`), so fused
matrices, other name schemes and drafts all load through the same function. The view of a tensor
that a model keeps in parts has one dimension split: [n, I, H] or [H, n, I] where the files have
[n * I, H] or [H, n * I]. A format (`formats/`) says which tensors in the files make up one of the
model. Every name and shape is checked against the files' headers before any data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.layers.communication import SINGLE_RANK, Communicator
from forerun.layers.quantize_method import QuantizeMethod
from forerun.layers.sharding import Shard
from forerun.models.formats.base import Header, Part, Stored, View, WeightFormat
from forerun.models.formats.gguf import GgufFormat
from forerun.models.formats.plain import PLAIN
from forerun.models.gguf import GGUF, as_given
from forerun.models.gguf.weights import read_gguf_tensor
from forerun.models.safetensors_files import listing, read_headers, readable, text_part
from forerun.platform.progress import progress

HARMLESS = ("rotary_emb.inv_freq",)  # old buffers, in many checkpoints; computed here
# Beside any weights: scales of K/V, which `kv_scales.py` reads, and of what attention computes.
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".prob_output_scale")
GGUF_HINT = "The tensors do not fit the metadata. Download the file again, or take another one."

Parts = dict[str, dict[str, Stored]]  # what each tensor of a model is made of


class Checkpoint:
    """The tensors of a folder, by name; data stays on disk until `read_into`."""

    def __init__(self, folder: Path, weight_format: WeightFormat | None = None) -> None:
        """`weight_format`: of what is quantized; what fills a plain view is dequantized. That of a
        GGUF file is its own.

        Raises:
            ConfigError: no safetensors, a shard absent, a file broken or not as indexed.
        """
        self.folder = folder
        self.weight_format = GgufFormat() if (folder / GGUF).exists() else weight_format
        self.headers = text_part(read_headers(folder))

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name].shape

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU."""
        with _OpenFiles("cpu") as files:
            return files.read(self.headers[name], None)

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

    def is_quantized(self, name: str) -> bool:
        """Whether the files have this tensor in the checkpoint's format."""
        return self._format(name) is not PLAIN

    def method_for(
        self, names: Sequence[str], shards: Mapping[str, Shard]
    ) -> QuantizeMethod | None:
        """What keeps a matrix of these parts, which are all quantized; None: it is plain."""
        assert self.weight_format is not None
        return self.weight_format.method_for(names, self.headers, shards)

    def _format(self, name: str) -> WeightFormat:
        own = self.weight_format
        return own if own is not None and own.reads(name, self.headers) else PLAIN

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
        parts = self.check(views, harmless, hint, shards)
        by_file: dict[Path, list[str]] = {}
        for name, stored in parts.items():
            first = next(iter(stored.values())).name
            by_file.setdefault(self.headers[first].file, []).append(name)
        sizes = {
            name: sum(self.headers[part.name].bytes for part in stored.values())
            for name, stored in parts.items()
        }
        with progress("loading weights", sum(sizes.values()), "B") as stage:
            for names in by_file.values():
                with _OpenFiles(str(views[names[0]].device)) as files:
                    for name in names:
                        tensors = {
                            key: files.read(self.headers[each.name], each.shard, each.as_blocks)
                            for key, each in parts[name].items()
                        }
                        part = Part((shards or {}).get(name), comm)
                        self._format(name).load(views[name], tensors, part)
                        stage.advance(sizes[name])

    def check(
        self,
        views: Mapping[str, View],
        harmless: Collection[str] = (),
        hint: str = "",
        shards: Mapping[str, Shard] | None = None,
    ) -> Parts:
        """Compares names, shapes and kinds with the files' headers, as `read_into` does first.

        With views on the meta device this is before there is memory for anything.

        Returns:
            The tensors in the files that each view is made of.
        """
        parts = {
            name: self._format(name).stored(name, view, (shards or {}).get(name), self.headers)
            for name, view in views.items()
        }
        wanted = {part.name: part for stored in parts.values() for part in stored.values()}
        source = self.folder
        if isinstance(self.weight_format, GgufFormat):
            source, hint = as_given(source / GGUF), GGUF_HINT
        missing = [name for name in wanted if name not in self.headers]
        if missing:
            raise ConfigError(f"{source} lacks {listing(missing)}. {hint}".rstrip())
        unused = () if self.weight_format is None else self.weight_format.unused
        left_out = (*harmless, *KV_SCALES, *unused)
        extra = [n for n in self.headers if n not in wanted and not n.endswith(left_out)]
        if extra:
            raise ConfigError(
                f"{source} holds {listing(extra)}, which this architecture does not have."
                f" {hint}".rstrip()
            )
        for part in wanted.values():
            _check_kind(self.headers[part.name], part)
        return parts


def _check_kind(header: Header, part: Stored) -> None:
    """Checks shape and kind of a tensor."""
    if header.shape not in part.shapes:
        source = "its metadata" if header.file.name == GGUF else "config.json"
        raise ConfigError(
            f"{as_given(header.file)}: {part.name} has shape {list(header.shape)}, expected"
            f" {' or '.join(map(str, map(list, part.shapes)))} from {source}. The two do not"
            " belong together."
        )
    if part.floats is not None and part.floats != header.is_float:
        raise ConfigError(
            f"{header.file}: {part.name} is {header.dtype}, expected"
            f" {'BF16, F16 or F32' if part.floats else 'integers'}."
            " Quantized checkpoints are not supported; use the bfloat16 one."
        )


class _OpenFiles(ExitStack):
    """Files that are open until all tensors of one of them are read."""

    def __init__(self, device: str) -> None:
        """`device`: of the tensors."""
        super().__init__()
        self._device = device
        self._open: dict[Path, Any] = {}

    def read(self, header: Header, shard: Shard | None, as_blocks: bool = False) -> Tensor:
        """`shard`: the part that is read; None: all of it. `as_blocks`: as of `Stored`."""
        if header.file.name == GGUF:
            tensor = read_gguf_tensor(header, as_blocks)
            return (tensor if shard is None else shard.take(tensor)).to(self._device)
        with readable(header.file):
            if header.file not in self._open:
                file = safe_open(header.file, framework="pt", device=self._device)
                self._open[header.file] = self.enter_context(file)
            tensors = self._open[header.file]
            if shard is not None:
                return shard.take(tensors.get_slice(header.stored_as))
            whole: Tensor = tensors.get_tensor(header.stored_as)
            return whole
