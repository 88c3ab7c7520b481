"""Drafting heads side by side: step times with random weights, beside a draft without a head.

Step times do not depend on the weights. So a head costs what its draft's step takes beside that of
a plain DFLASH draft which verifies as many tokens, both in turns on one device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun import LLM
from forerun.evals.timing import flush_caches, interleaved, median
from forerun_bench.one_batch import Shape, random_prompts, trace

PLAIN = "none"
# Keys of `dflash_config`. Ranks and candidates as published for Qwen3-8B; Domino's and LiLiCorr's
# sizes are not in their papers' tables and were chosen here.
HEADS: Mapping[str, Mapping[str, Any]] = {
    "dspark": {
        "projector_type": "dspark",
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    "domino": {
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
    },
    "lilicorr": {
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": 8,
        "lilicorr_hidden_size": 512,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 8,
        "lilicorr_mlp_ratio": 4.0,
        "lilicorr_factor_dim": 128,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10.0,
    },
}
ARCHITECTURES = {
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
    "domino": "DominoDraftModel",
    "lilicorr": "LiLiCorrDraftModel",
}
ANCHOR_ROW_DRAFTS = {"dspark"}  # as many drafts as rows, so one row less for the same width


@dataclass(frozen=True)
class HeadStep:
    """Medians over the steps of the whole batch, in seconds."""

    head: str
    width: int  # tokens that a step verifies per request
    batch_size: int
    step_seconds: float
    plain_seconds: float  # of the draft without a head, in turns with it

    @property
    def extra(self) -> float:
        """The share by which the head's steps are longer."""
        return self.step_seconds / self.plain_seconds - 1


def write_draft(base: Path, head: str, width: int, folder: Path) -> Path:
    """Writes the config of `base` with a head and a block that is verified in `width` tokens.

    Raises:
        KeyError: no such head.
    """
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["block_size"] = width - 1 if head in ANCHOR_ROW_DRAFTS else width
    if head != PLAIN:
        config["architectures"] = [ARCHITECTURES[head]]
        config["dflash_config"] = {**config["dflash_config"], **HEADS[head]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def compare_steps(
    plain: LLM, headed: LLM, head: str, width: int, shapes: Sequence[Shape], repetitions: int
) -> list[HeadStep]:
    """Steps of both engines at each shape, in turns."""
    engines = {"plain": plain, "headed": headed}
    found = []
    for shape in shapes:
        vocab = plain.engine.info.vocab_size
        prompts = random_prompts(vocab, shape.batch_size, shape.input_len)
        runs = {
            name: partial(trace, llm.engine, prompts, shape.output_len)
            for name, llm in engines.items()
        }
        for run in runs.values():
            run()
        timed = interleaved(runs, repetitions, before=lambda: flush_caches(plain, headed))
        times = {
            name: median([s for run in results for s in run.value.step_seconds])
            for name, results in timed.items()
        }
        found.append(HeadStep(head, width, shape.batch_size, times["headed"], times["plain"]))
    return found
