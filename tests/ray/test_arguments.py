"""Arguments of `forerun.ray:deployment`, and what requests are routed by; without Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import ConfigError
from forerun.ray import deployment
from forerun.ray.deployment import Arguments
from forerun.ray.prompt_keys import BLOCK_CHARACTERS, prompt_keys

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ray_serve"


def test_arguments_go_where_they_belong() -> None:
    made = Arguments.of(
        {"model_path": "a/b", "api_key": "k", "num_replicas": 3, "page_size": 16, "num_gpus": 2}
    )
    assert made.server == {"api_key": "k"}
    assert made.engine == {"model_path": "a/b", "page_size": 16}
    assert made.scaling == {"num_replicas": 3}
    assert made.resources == {"num_cpus": 1, "num_gpus": 2}
    assert Arguments.of({}).resources["num_gpus"] == 1
    assert Arguments.of({"tp_size": 4}).resources["num_gpus"] == 4
    with pytest.raises(ConfigError, match="nnodes is not available with Ray Serve"):
        Arguments.of({"tp_size": 4, "nnodes": 2, "dist_init_addr": "a:1"})
    assert Arguments.of({"device": "cpu", "num_cpus": 4}).resources == {
        "num_cpus": 4,
        "num_gpus": 0,
    }
    scaled = Arguments.of({"autoscaling_config": {"max_replicas": 2}}).scaling
    assert scaled == {"autoscaling_config": {"max_replicas": 2}}


@pytest.mark.parametrize(
    "given, match",
    [
        ({"port": 1}, "port is Ray Serve's: set http_options.port there instead"),
        ({"dp_size": 2}, "set num_replicas there instead"),
        ({"page_sise": 16}, "Did you mean 'page_size'"),
        ({"max_n": 0}, "max_n must be >= 1"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "exclude each other"),
        ({"speculative_algorithm": "NO"}, "NO"),
    ],
)
def test_bad_arguments(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        deployment(given)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[ray\]'"):
        deployment({"device": "cpu"})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (application,) = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]
    assert application["import_path"] == "forerun.ray:deployment"
    Arguments.of(application["args"])


def keys(**body: Any) -> list[int]:
    return prompt_keys(json.dumps(body).encode())


def test_keys_of_prompts() -> None:
    """Of whole blocks; equal as far as the text is."""
    text = "".join(chr(97 + i % 26) for i in range(5 * BLOCK_CHARACTERS))
    whole = keys(prompt=text)
    assert len(whole) == len(set(whole)) == 5
    assert keys(text=text[: 3 * BLOCK_CHARACTERS + 7], stream=True) == whole[:3]
    assert keys(prompt=text[:300] + "?" + text[301:])[:2] == whole[:2]
    assert keys(prompt=text[:300] + "?" + text[301:])[2:] != whole[2:]
    talk = [{"role": "user", "content": text}]
    more = [*talk, {"role": "assistant", "content": text}]
    assert keys(messages=more)[: len(keys(messages=talk)) - 1] == keys(messages=talk)[:-1]
    assert len(keys(input_ids=list(range(1000)))) > 10
    for body in (b"", b"{", b"[1]", b"3", b"{}", b'{"prompt": null}', b'{"prompt": "short"}'):
        assert prompt_keys(body) == []
