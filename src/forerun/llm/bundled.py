"""The small trained pair that ships with the package."""

from __future__ import annotations

from pathlib import Path

from forerun.core.errors import ConfigError

PAIR = Path(__file__).resolve().parent.parent / "assets" / "pair"


def bundled(name: str) -> Path:
    """The folder of a bundled model ("target", or a draft's name)."""
    folder = PAIR / name
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"The bundled model {name!r} is not in this installation ({folder}); give a model_path."
        )
    return folder
