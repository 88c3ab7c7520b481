"""Benchmarks of others against the server: SGLang's own client, and the requests of z-lab's.

SGLang's client needs an environment of its own, since the package pins torch:

    python -m venv sgl && sgl/bin/pip install sglang
    FORERUN_SGLANG_PYTHON=sgl/bin/python pytest tests/server/test_benchmark_clients.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from forerun.evals.prompts import held_out
from tests.server.support import QUESTION, LiveServer

PYTHON = os.environ.get("FORERUN_SGLANG_PYTHON")
needs_sglang = pytest.mark.skipif(
    PYTHON is None, reason="FORERUN_SGLANG_PYTHON is not set: a Python that has SGLang"
)
COUNT = 12
SIZES = ("--num-prompts", str(COUNT), "--random-input-len", "48", "--random-output-len", "16")
LOGPROBS = ("--return-logprob", "--top-logprobs-num", "2", "--logprob-start-len", "0")


@needs_sglang
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("sglang", ("--dataset-name", "random")),
        ("sglang-oai", ("--dataset-name", "random")),
        ("sglang-oai-chat", ("--dataset-name", "random")),
        ("vllm", ("--dataset-name", "random")),
        ("vllm-chat", ("--dataset-name", "random-ids")),
        ("sglang", ("--dataset-name", "random-ids", "--tokenize-prompt", "--cache-report")),
        ("sglang", ("--dataset-name", "random-ids", "--disable-stream")),
        ("sglang", ("--dataset-name", "random-ids", *LOGPROBS)),
        ("sglang-oai-chat", ("--dataset-name", "random-ids", "--disable-stream")),
    ],
)
def test_sglangs_bench_serving(
    server: LiveServer, tmp_path: Path, backend: str, options: tuple[str, ...]
) -> None:
    """Unmodified, and no request fails."""
    rows = [{"conversations": [{"value": row["prompt"]}, {"value": "pass"}]} for row in held_out()]
    dataset, results = tmp_path / "sharegpt.json", tmp_path / "results.jsonl"
    dataset.write_text(json.dumps(rows))
    assert PYTHON is not None
    done = subprocess.run(
        [
            PYTHON, "-m", "sglang.bench_serving", "--backend", backend, "--base-url", server.url,
            "--dataset-path", str(dataset), *SIZES, "--request-rate", "50", "--flush-cache",
            "--output-file", str(results), "--output-details", *options,
        ],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"Successful requests:\s+(\d+)", done.stdout)
    assert said is not None and int(said[1]) == COUNT, done.stdout
    (line,) = results.read_text().splitlines()
    figures = json.loads(line)
    assert figures["completed"] == COUNT
    assert not any(figures["errors"])
    assert sum(figures["output_lens"]) == figures["total_output_tokens"] > 0
    if backend.startswith("sglang"):
        assert figures["accept_length"] >= 1


def test_requests_of_z_labs_benchmark(server: LiveServer) -> None:
    """`dflash benchmark openai` 0.1.0, on a model without reasoning."""
    body = {
        "model": "bundled",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 1.0,
        "chat_template_kwargs": {},
        "return_meta_info": True,
    }
    answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    meta, tokens = answer["meta_info"], answer["usage"]["completion_tokens"]
    assert meta["completion_tokens"] == tokens > 0
    assert meta["spec_accept_length"] == tokens / meta["spec_verify_ct"] > 1
    assert answer["choices"][0]["meta_info"] == meta

    two = server.http.post("/v1/chat/completions", json=body | {"n": 2}).raise_for_status().json()
    assert "meta_info" not in two
    assert len({choice["meta_info"]["id"] for choice in two["choices"]}) == 2
    plain = server.http.post("/v1/chat/completions", json=body | {"return_meta_info": False})
    assert "meta_info" not in plain.json() and "meta_info" not in plain.json()["choices"][0]
    refused = server.http.post("/v1/chat/completions", json=body | {"stream": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_meta_info"


def test_requests_of_z_labs_older_benchmark(server: LiveServer) -> None:
    """`python -m dflash.benchmark --backend sglang`: flush with GET, and /generate."""
    server.wait_idle()
    assert server.http.get("/flush_cache").status_code == 200
    params = {"temperature": 0.0, "top_p": 1.0, "top_k": 1, "max_new_tokens": 48}
    answer = server.http.post("/generate", json={"text": QUESTION, "sampling_params": params})
    meta = answer.raise_for_status().json()["meta_info"]
    assert meta["completion_tokens"] > 0
    assert float(meta["spec_accept_length"]) >= 1 and int(meta["spec_verify_ct"]) > 0
