"""Unmodified clients and tools against a live server, in an environment of their own.

    python -m venv clients && clients/bin/pip install -r tests/server/clients/requirements.txt
    FORERUN_CLIENTS_PYTHON=clients/bin/python pytest tests/server/test_other_clients.py

What is not installed there is skipped, and without that variable everything is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forerun.llm.bundled import bundled
from tests.server.support import ENGINE, LiveServer, flags

pytest.importorskip("xgrammar")

PYTHON = os.environ.get("FORERUN_CLIENTS_PYTHON")
CLIENTS = Path(__file__).parent / "clients"
TASKS = CLIENTS / "lm_eval_tasks"
CALL = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "How warm is it in Paris?"}]
# Look-ups on the Hub fail at once. If the Hub is said to be offline, aiperf takes no folder.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
    "HF_ENDPOINT": "http://127.0.0.1:9",
}


def installed() -> set[str]:
    """Names of the distributions that the clients' Python has."""
    if PYTHON is None:
        return set()
    code = "from importlib import metadata as m; print(*[d.name for d in m.distributions()])"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return {name.lower().replace("_", "-") for name in done.stdout.split()}


INSTALLED = installed()


def needs(package: str) -> Callable[[Any], Any]:
    where = PYTHON or "an environment that FORERUN_CLIENTS_PYTHON names"
    reason = f"{package} is not installed in {where}"
    marked: Callable[[Any], Any] = pytest.mark.skipif(package not in INSTALLED, reason=reason)
    return marked


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled template takes no calls; grammars can make the model write some."""
    folder = tmp_path_factory.mktemp("batches")
    more = {"log_level": "info", "tool_call_parser": "hermes", "batch_folder": folder}
    with LiveServer(*flags(**ENGINE, **more)) as live:
        yield live


@pytest.fixture(scope="module")
def greedy(server: LiveServer) -> str:
    """What all greedy answers to the question must be."""
    return answer_of(server, QUESTION)


def answer_of(server: LiveServer, messages: list[dict[str, str]]) -> str:
    body = {"model": "bundled", "messages": messages, "temperature": 0, "max_tokens": 400}
    answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def finished(command: list[str], folder: Path | None = None) -> str:
    """What a command prints that must succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(server: LiveServer, script: str) -> dict[str, Any]:
    """What a client's script prints."""
    assert PYTHON is not None
    out = finished([PYTHON, str(CLIENTS / script), server.url])
    got: dict[str, Any] = json.loads(out.splitlines()[-1])
    return got


def command(name: str) -> str:
    """A command that a package has installed beside the clients' Python."""
    assert PYTHON is not None
    return str(Path(PYTHON).absolute().parent / name)


def check_answer(value: Any) -> None:
    assert value["city"] in ("Paris", "Rome") and 0 <= value["degrees"] <= 99


def check_texts(server: LiveServer, got: dict[str, Any], greedy: str) -> None:
    assert got["chat"] == got["stream"] == got["responses"] == greedy
    completion = server.client().completions.create(
        model="bundled", prompt="def f(x):", max_tokens=8, temperature=0
    )
    assert got["completion"] == completion.choices[0].text
    for name, value in got.items():
        if "tool " in name:
            jsonschema.validate(value, CALL)


@needs("openai")
def test_openai(server: LiveServer, greedy: str) -> None:
    got = run(server, "openai_client.py")
    texts = [got[name] for name in ("responses", "responses stream", "background", "batch")]
    assert texts == [greedy] * 4
    assert got["roles"] == ["user", "assistant", "user"]
    assert got["conversation"] == 3
    first, other, again = got["embeddings"]
    assert first == pytest.approx(again, abs=1e-5) and first != pytest.approx(other, abs=1e-2)


@needs("anthropic")
def test_anthropic(server: LiveServer, greedy: str) -> None:
    got = run(server, "anthropic_client.py")
    assert got["chat"] == got["stream"] == greedy
    assert {got["tool"]["city"], got["stream tool"]["city"]} <= {"Paris", "Rome"}
    assert got["stop"] == "tool_use" and got["answer"] > 0
    assert got["count"] == got["input"] > 0


@needs("openai-agents")
def test_openai_agents(server: LiveServer, greedy: str) -> None:
    got = run(server, "openai_agents_client.py")
    for api in ("chat", "responses"):
        ran = got[api]
        assert ran["results"] in (["Paris: 20"], ["Rome: 20"])
        assert ran["answer"] > 0 and ran["last agent"] == "other"
        assert ran["text"] == ran["stream"] == greedy
        check_answer(ran["typed"])
    answered = {"role": "assistant", "content": greedy}
    more = [*QUESTION, answered, {"role": "user", "content": "And in Rome?"}]
    assert got["chains"] == [answer_of(server, more)] * 3
    assert got["items"] == 4


@needs("langchain-openai")
def test_langchain(server: LiveServer, greedy: str) -> None:
    got = run(server, "langchain_client.py")
    check_texts(server, got, greedy)
    assert got["batch"] == [greedy] * 2
    assert got["usage"]["output_tokens"] > 0
    assert got["logprobs"] > 0
    for choice in ("any", "weather"):
        assert got[f"result {choice}"] == f"{got[f'tool {choice}']['city']}: 20"
    for method in ("json_schema", "function_calling"):
        check_answer(got[method])


@needs("litellm")
def test_litellm(server: LiveServer, greedy: str) -> None:
    got = run(server, "litellm_client.py")
    check_texts(server, got, greedy)
    assert got["usage"] == got["stream usage"] > 0
    jsonschema.validate(got["json_schema"], CALL)


@needs("outlines")
def test_outlines(server: LiveServer, greedy: str) -> None:
    for kind, got in run(server, "outlines_client.py").items():
        assert got["text"] == got["stream"] == greedy
        assert got["json"] == got["json stream"]
        check_answer(got["json"])
        if kind != "openai":
            assert got["choice"] in ("Paris", "Rome")
            assert re.fullmatch("[A-Z][a-z]{3,5}", got["regex"])
            assert got["json spaced"] == got["json"]


@needs("guidance")
def test_guidance(server: LiveServer) -> None:
    got = run(server, "guidance_client.py")
    for kind in ("openai", "sglang"):
        assert got[kind]["text"]
        check_answer(got[kind]["json"])
    assert re.fullmatch("[A-Z][a-z]{3,5}", got["sglang"]["regex"])


@needs("instructor")
def test_instructor(server: LiveServer) -> None:
    answers = run(server, "instructor_client.py")
    assert len(answers) == 6
    for answer in answers.values():
        check_answer(answer)


@needs("lm-eval")
def test_lm_eval(server: LiveServer, tmp_path: Path) -> None:
    """Log-probabilities of choices and of texts, and generation; tokens come from the server."""
    arguments = f"model=bundled,base_url={server.url}/v1/completions,num_concurrent=2"
    names = ("choices", "answers", "perplexity")
    finished([
        command("lm-eval"), "run", "--model", "local-completions", "--model_args", arguments,
        "--include_path", str(TASKS), "--tasks", *(f"forerun_{name}" for name in names),
        "--output_path", str(tmp_path),
    ], TASKS)  # fmt: skip
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["forerun_choices"]["acc,none"] == 1
    assert results["forerun_answers"]["exact_match,none"] >= 0.5
    assert results["forerun_perplexity"]["byte_perplexity,none"] > 1


@needs("aiperf")
def test_aiperf(server: LiveServer, tmp_path: Path) -> None:
    finished([
        command("aiperf"), "profile", "--model", "bundled", "--url", server.url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(bundled("target")),
        "--request-count", "8", "--concurrency", "4", "--prompt-input-tokens-mean", "40",
        "--prompt-output-tokens-mean", "16", "--ui", "none", "--no-gpu-telemetry",
        "--output-artifact-dir", str(tmp_path),
    ], tmp_path)  # fmt: skip
    (file,) = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(file.read_text())
    assert figures["request_count"]["avg"] == 8
    assert figures["time_to_first_token"]["avg"] > 0
    assert figures["output_sequence_length"]["avg"] > 1
    assert not figures.get("error_request_count")


@needs("guidellm")
def test_guidellm(server: LiveServer, tmp_path: Path) -> None:
    finished([
        command("guidellm"), "run", "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=9",
        "--tokenizer", f"kind=hf_auto,model={bundled('target')}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16",
        "--output", "kind=json,path=report.json", "--disable-console-interactive",
    ], tmp_path)  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (9, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16
