"""Model paths: a local folder or GGUF file, or a repository on the Hugging Face Hub.

Repositories are written `org/name[@revision]`, of GGUF files `org/name[@revision]:QUANT` as for
llama.cpp and Ollama. `huggingface_hub` downloads into its cache, and the engine gets a folder:
nothing below this module knows about the Hub. The library reads HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE and HF_TOKEN when it is first imported. Only safetensors, GGUF, JSON and tokenizer
files are fetched: no pickled weights, no code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, first_line, shown
from forerun.llm.download_progress import DownloadProgress, progress_bar_class
from forerun.models.dummy_weights import DUMMY_FORMATS
from forerun.models.embedding_layout import MODULES
from forerun.models.gguf.folder import SUFFIX, TOKENIZER, gguf_folder, is_gguf
from forerun.models.safetensors_files import INDEX, SINGLE, shard_names

CONFIG, README = "config.json", "README.md"  # in every request, since the library warns
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
SUBFOLDERS = ("*/*",)  # other formats of the same model (onnx/, original/): never read

# As huggingface_hub.utils.validate_repo_id, with the organization required.
_REPO = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]{0,95}/\w(?:[\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)
# As `git check-ref-format`; a ref is a file name in the cache, so ".." must not pass.
_REVISION = re.compile(r"(?!.*(?:\.\.|//|@\{))[^\s~^:?*\[\\/.-][^\s~^:?*\[\\]*(?<![/.])")
_QUANT = re.compile(r"[A-Za-z0-9]+(_[A-Za-z0-9]+)*")  # Q4_K_M
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{4,39}")


@dataclass(frozen=True)
class HubModel:
    """A model repository on the Hub, at a branch, tag or commit (None: the main branch)."""

    setting: str  # the setting that names it, for error messages
    repo: str
    revision: str | None
    progress: DownloadProgress = field(compare=False)
    quant: str | None = None  # of its GGUF files, the one that has this in its name

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def with_local_paths(config: EngineConfig) -> EngineConfig:
    """`config` with local paths in place of Hub names; downloads what the cache does not have.

    A draft path that is no Hub name is passed on as given, since an algorithm may read a single
    file. Configs and tokenizers of all models come first: a mistyped draft is refused before the
    target's weights are downloaded.

    Raises:
        ConfigError: no such folder or repository, no access, no network, or no safetensors.
    """
    weights = config.load_format not in DUMMY_FORMATS
    found: dict[str, Path | HubModel] = {}
    if config.model_path is not None:
        found["model_path"] = locate("model_path", config.model_path)
    if config.tokenizer_path is not None and not config.skip_tokenizer_init:
        found["tokenizer_path"] = locate("tokenizer_path", config.tokenizer_path)
    if config.speculative_draft_model_path is not None and config.speculative_algorithm is not None:
        setting, draft = "speculative_draft_model_path", config.speculative_draft_model_path
        found[setting] = parse(setting, draft) or local_model(setting, draft)
    folders = {
        setting: _fetch_small(source, is_model=setting != "tokenizer_path")
        if isinstance(source, HubModel)
        else source
        for setting, source in sorted(found.items(), key=lambda each: _is_gguf(each[1]))
    }
    for setting, source in found.items():
        is_model = setting != "tokenizer_path"
        if weights and isinstance(source, HubModel) and is_model and not _is_gguf(source):
            _fetch_weights(source, folders[setting])
    local: dict[str, Any] = {setting: str(folder) for setting, folder in folders.items()}
    return replace(config, **local)


def _is_gguf(source: Path | HubModel) -> bool:
    """Whether its config comes with its weights, so that those of others are to be read first."""
    return isinstance(source, HubModel) and source.quant is not None


def config_folder(setting: str, value: str) -> Path:
    """The local folder of a model's config and tokenizer, without weights.

    Raises:
        ConfigError: no such folder or repository, no access, or no network.
    """
    source = locate(setting, value)
    return _fetch_small(source, is_model=True) if isinstance(source, HubModel) else source


def locate(setting: str, value: str) -> Path | HubModel:
    """An existing local folder, or else the Hub repository that `value` names.

    Raises:
        ConfigError: it is neither.
    """
    model = parse(setting, value)
    if model is not None:
        return model
    folder = local_model(setting, value)
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if files and not any((folder / name).exists() for name in (CONFIG, TOKENIZER)):
        raise ConfigError(
            f"{setting} {value!r} is a folder of GGUF files; name one of them, such as {files[0]}."
        )
    if not folder.is_dir():
        if (reason := _gguf_path_problem(setting, value)) is not None:
            raise ConfigError(f"{setting} {value!r}: {reason}")
        raise ConfigError(
            f"{setting} {value!r} is not a folder. Give the path of a Hugging Face model folder or"
            " of a GGUF file, or org/name[@revision] to download one from the Hugging Face Hub"
            " (org/name:QUANT, such as Q4_K_M, for a GGUF file)."
        )
    return folder


def _gguf_path_problem(setting: str, value: str) -> str | None:
    """What is wrong with a path that looks like a GGUF file's and is none; None: it does not."""
    path, colon, quant = value.rpartition(":")
    if colon and local_path(setting, path).is_file():
        return f"a file has one kind; leave out {':' + quant!r}."
    return "there is no such file." if value.lower().endswith(SUFFIX) else None


def local_path(setting: str, value: str) -> Path:
    """The path that `value` is, whether or not something is there.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        path = Path(value).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long; an unknown user's home
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ConfigError(f"{setting} {shown(value)} cannot be a path: {reason}.") from None
    return path


def local_model(setting: str, value: str) -> Path:
    """The path that `value` is; of a GGUF file, the model folder that is made of it.

    Raises:
        ConfigError: it cannot be a path, or is a GGUF file that is broken or not supported.
    """
    path = local_path(setting, value)
    return gguf_folder(path) if path.exists() and is_gguf(path) else path


def parse(setting: str, value: str) -> HubModel | None:
    """The Hub repository that `value` names; None if it exists locally or does not look like one.

    Raises:
        ConfigError: it is empty, cannot be a path, or is a Hub name with an impossible revision.
    """
    if not value.strip():
        raise ConfigError(f"{setting} is empty; leave it out, or name a folder, file or org/name.")
    name, colon, quant = value.partition(":")
    repo, at, revision = name.partition("@")
    is_path = local_path(setting, value).exists() or _gguf_path_problem(setting, value) is not None
    if is_path or not _REPO.fullmatch(repo):
        return None
    if at and (not _REVISION.fullmatch(revision) or revision.endswith(".lock")):
        raise ConfigError(
            f"{setting} {value!r}: {revision!r} cannot be a revision; give a branch, a tag or a"
            f" commit, for example {repo}@main."
        )
    if colon and not _QUANT.fullmatch(quant):
        raise ConfigError(
            f"{setting} {value!r}: {quant!r} is no kind of GGUF file; give one such as"
            f" {name}:Q4_K_M."
        )
    return HubModel(setting, repo, revision or None, DownloadProgress(value), quant or None)


def _fetch_small(model: HubModel, is_model: bool) -> Path:
    """Everything but weights. Returns the snapshot's folder, which is named after the commit.

    Of a GGUF file, the folder that is made of it.
    """
    if model.quant is not None:
        return gguf_folder(_fetch_gguf(model, model.quant))
    folder = _snapshot(model, model.revision, SMALL_FILES)
    if is_model and not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{model.setting}: {model} on the Hugging Face Hub has no {CONFIG}; choose a repository"
            " in the format of transformers, or for GGUF files say which:"
            f" {model}:Q4_K_M (diffusers cannot be loaded)."
        )
    if is_model and (folder / MODULES).is_file():
        _snapshot(model, folder.name, [CONFIG, f"*_Pooling/{CONFIG}"], ignore=())
    return folder


def _fetch_gguf(model: HubModel, quant: str) -> Path:
    """The GGUF file whose name says that it is of this kind.

    Raises:
        ConfigError: there is none, there are several, or it is in several files.
    """
    spellings = dict.fromkeys((quant, quant.upper(), quant.lower()))
    patterns = [f"*{mark}{each}*.gguf" for each in spellings for mark in "-._"]
    folder = _snapshot(model, model.revision, [*patterns, README])
    ends = re.compile(rf"[-._]{re.escape(quant)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
    files = sorted(path for path in folder.glob("*.gguf") if ends.search(path.name))
    if files and _SPLIT.search(files[0].name):
        raise ConfigError(
            f"{model.setting}: {quant} of {model} is divided among files; choose another, or merge"
            " them (llama-gguf-split --merge) and give the file."
        )
    if len(files) != 1:
        found = f"{len(files)} GGUF files" if files else "no GGUF file"
        raise ConfigError(
            f"{model.setting}: {model} on the Hugging Face Hub has {found} of kind {quant}; look at"
            f" its files, https://huggingface.co/{model.repo}/tree/main."
        )
    return files[0]


def _fetch_weights(model: HubModel, folder: Path) -> None:
    """The shards that the index lists; without an index the single file, or all there are.

    config.json is in every request: the library warns when nothing matches.
    """
    commit = folder.name
    if (folder / INDEX).is_file():  # exact names, also in subfolders
        _snapshot(model, commit, [CONFIG, *map(escape, shard_names(folder))], ignore=())
        return
    _snapshot(model, commit, [CONFIG, SINGLE])
    if not (folder / SINGLE).is_file():
        _snapshot(model, commit, [CONFIG, "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{model.setting}: {model} on the Hugging Face Hub has no safetensors, and pickled"
            " weights (*.bin, *.pt) are never loaded. Choose a repository that has them, or"
            " convert it with transformers (save_pretrained) and give the folder."
        )


def _snapshot(
    model: HubModel,
    revision: str | None,
    patterns: Sequence[str],
    ignore: Sequence[str] = SUBFOLDERS,
) -> Path:
    # Here and not above: it imports a web client, and reads the environment.
    from huggingface_hub import errors, snapshot_download

    # Errors of the connection itself. The web client's base class differs between releases.
    transport: Any = errors.HfHubHTTPError.__bases__[0]
    try:
        with model.progress:
            folder = snapshot_download(
                model.repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignore),
                tqdm_class=progress_bar_class(model.progress),
            )
    except (transport, OSError, RuntimeError) as error:
        raise ConfigError(f"{model.setting}: {_reason(model, error)}") from error
    return Path(folder)


def _reason(model: HubModel, error: BaseException) -> str:
    """What went wrong, in one line, with the fix."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{model} is gated. Accept its terms at {hub}/{model.repo} and set HF_TOKEN to a token"
            " of that account."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        asked = model.revision or "main"
        fix = "a commit is given in full (40 digits)" if _SHORT_COMMIT.fullmatch(asked) else ""
        fix = fix or f"see the branches and tags at {hub}/{model.repo}/tree/main"
        return f"{model.repo} has no revision {asked!r}; {fix}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{model.repo!r} is neither a local folder nor a model on {hub}. Check the spelling;"
            " for a private model set HF_TOKEN."
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"{model} is not completely in the cache ({cache}), and HF_HUB_OFFLINE forbids"
            " downloading it. Unset HF_HUB_OFFLINE, or give a local folder."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{model} is not completely in the cache ({cache}), and {hub} gives no answer"
            f" ({first_line(error.__cause__ or error)}). Check the network and HF_ENDPOINT, or"
            " give a local folder."
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"{hub} refuses {model} ({first_line(error)}). Check HF_TOKEN."
    return (
        f"Downloading {model} into {cache} failed ({first_line(error)}). Try again (files"
        " that are complete are kept); HF_HOME moves the cache."
    )
