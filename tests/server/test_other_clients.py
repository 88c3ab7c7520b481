"""`langchain-openai` and `litellm` against a live server, in an environment of their own:

python -m venv clients && clients/bin/pip install langchain-openai litellm mcp
FORERUN_CLIENTS_PYTHON=clients/bin/python pytest tests/server/test_other_clients.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.server.support import LiveServer

pytest.importorskip("xgrammar")

PYTHON = os.environ.get("FORERUN_CLIENTS_PYTHON", sys.executable)
CLIENTS = Path(__file__).parent / "clients"
CALL = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "How warm is it in Paris?"}]


def run(server: LiveServer, package: str, script: str) -> dict[str, Any]:
    """What a client's script prints."""
    if subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package} is not installed in {PYTHON}; FORERUN_CLIENTS_PYTHON names another")
    done = subprocess.run(
        [PYTHON, str(CLIENTS / script), server.url], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return got


def check_texts(server: LiveServer, got: dict[str, Any]) -> None:
    client = server.client()
    call: Any = {"model": "bundled", "seed": 3, "temperature": 0}
    chat = client.chat.completions.create(**call, messages=QUESTION, max_tokens=60)
    want = chat.choices[0].message.content
    assert got["chat"] == got["stream"] == got["responses"] == want
    completion = client.completions.create(**call, prompt="def f(x):", max_tokens=8)
    assert got["completion"] == completion.choices[0].text
    for name, value in got.items():
        if "tool " in name:
            jsonschema.validate(value, CALL)


def test_langchain(server: LiveServer) -> None:
    got = run(server, "langchain_openai", "langchain_client.py")
    check_texts(server, got)
    assert got["batch"] == [got["chat"]] * 2
    assert got["usage"]["output_tokens"] > 0
    assert got["logprobs"] > 0
    for choice in ("any", "weather"):
        assert got[f"result {choice}"] == f"{got[f'tool {choice}']['city']}: 20"
    for method in ("json_schema", "function_calling"):
        assert got[method]["city"] in ("Paris", "Rome")
        assert 0 <= got[method]["degrees"] <= 99


def test_litellm(server: LiveServer) -> None:
    got = run(server, "litellm", "litellm_client.py")
    check_texts(server, got)
    assert got["usage"] == got["stream usage"] > 0
    jsonschema.validate(got["json_schema"], CALL)
