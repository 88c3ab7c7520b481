"""JSON files of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.config.json_files import read_json
from forerun.core.errors import ConfigError


@pytest.mark.parametrize("text", [r'{"\ud800": 1}', r'{"a": [{"b": "x\udfff"}]}'])
def test_half_a_character_is_refused(text: str, tmp_path: Path) -> None:
    """As a key or a value: nothing that is told of it could be written."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is half a character") as caught:
        read_json(path)
    assert str(caught.value).isascii()
    path.write_text(r'{"a": "\ud83d\ude00"}')
    assert read_json(path) == {"a": "\U0001f600"}
