"""Small random models in the layouts of Qwen3-Embedding and Qwen3-Reranker, and their oracles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from forerun.llm.bundled import bundled
from tests.models.support import _COMMON, random_hf, save

EOS = "<|im_end|>"
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"


def sizes(vocab_size: int) -> dict[str, Any]:
    return {
        **_COMMON,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "head_dim": 16,
        "attn_implementation": "eager",
    }


def embedding_folder(
    folder: Path, pooling: str = "lasttoken", tied: bool = False, normalize: bool = True
) -> Path:
    """Tensors without `model.` and LM head, and a tokenizer that ends texts with EOS."""
    tokenizer = AutoTokenizer.from_pretrained(bundled("target"))
    eos = tokenizer.convert_tokens_to_ids(EOS)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, eos)]
    )
    torch.manual_seed(3)
    config = Qwen3Config(**sizes(len(tokenizer)), tie_word_embeddings=tied)
    save(AutoModel.from_config(config).float(), folder)
    tokenizer.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = ["Qwen3ForCausalLM"]  # as Qwen3-Embedding's says
    (folder / "config.json").write_text(json.dumps(written))
    write_modules(folder, pooling, normalize)
    return folder


def write_modules(folder: Path, pooling: str, normalize: bool = True, *others: str) -> None:
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *others]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    written = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **written, "include_prompt": True})
    )


def embeddings(
    folder: Path, texts: Sequence[str], pooling: str = "lasttoken", at_most: int | None = None
) -> list[NDArray[np.float64]]:
    """Normalized embeddings by transformers, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    out = []
    for text in texts:
        cut = {} if at_most is None else {"truncation": True, "max_length": at_most}
        ids = tokenizer(text, return_tensors="pt", **cut)["input_ids"]
        with torch.inference_mode():
            states = model(ids).last_hidden_state[0].double().numpy()
        vector = {"lasttoken": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
        out.append(vector / np.linalg.norm(vector))
    return out


def reranker_folder(folder: Path) -> Path:
    """A causal LM whose tokenizer knows yes, no and the tokens of reasoning."""
    tokenizer = AutoTokenizer.from_pretrained(bundled("target"))
    tokenizer.add_tokens(["yes", "no", "<think>", "</think>"])
    config = Qwen3Config(**sizes(len(tokenizer)), tie_word_embeddings=True)
    save(random_hf(config, seed=5), folder)
    tokenizer.save_pretrained(folder)
    return folder


def yes_probabilities(
    folder: Path, query: str, documents: Sequence[str], instruct: str = INSTRUCT
) -> list[float]:
    """As the model card of Qwen3-Reranker computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answers = [tokenizer.convert_tokens_to_ids(each) for each in ("no", "yes")]
    out = []
    for document in documents:
        content = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
        ids = tokenizer(prefix + content + suffix, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, answers]
        out.append(float(torch.log_softmax(logits, 0)[1].exp()))
    return out
