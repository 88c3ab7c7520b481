"""The models that ship with the package, and the configs of known ones."""

from __future__ import annotations

from pathlib import Path

from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError, nearest

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PAIR, PRESETS = ASSETS / "pair", ASSETS / "presets"
REAL_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"  # on the Hub
REAL_DRAFT = ASSETS / "smollm2-135m-instruct"
REAL_KIND = "draft"  # the one of the bundled pair's drafts that it is like


def bundled(name: str) -> Path:
    """The folder of a bundled model ("target", or a draft's name).

    Raises:
        ConfigError: this installation does not have it.
    """
    folder = PAIR / name
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"The bundled model {name!r} is not in this installation ({folder}); give a model_path."
        )
    return folder


def real_draft() -> Path | None:
    """The draft that ships for `REAL_TARGET`; None: this installation has none."""
    return REAL_DRAFT if (REAL_DRAFT / "config.json").exists() else None


def real_draft_for(target: ModelConfig) -> Path | None:
    """The draft that ships for `REAL_TARGET`, where `target` has the sizes that it reads."""
    folder = real_draft()
    if folder is None:
        return None
    draft = read_json(folder / "config.json")
    read = draft["vocab_size"], draft["hidden_size"], draft["num_target_layers"]
    return folder if read == (target.vocab_size, target.hidden_size, target.num_layers) else None


def preset(name: str) -> tuple[Path, Path | None]:
    """Config-only folders of a known target and of its draft, if there is one.

    For benchmarks with random weights. A target may have an MTP layer that its release has not.

    Raises:
        ConfigError: unknown name.
    """
    known = sorted(folder.name for folder in PRESETS.iterdir() if folder.is_dir())
    if name not in known:
        raise ConfigError(
            f"Unknown preset {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
        )
    draft = PRESETS / name / "draft"
    return PRESETS / name / "target", draft if draft.is_dir() else None
