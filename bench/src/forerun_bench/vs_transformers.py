"""Forerun against `transformers` on the bundled target: same weights, dtype, prompts and process.

Every engine continues every prompt greedily, one request at a time; runs are interleaved. Whole
requests are timed, prefill included. A prompt's figure is the median over its repetitions, a ratio
the median over prompts. Forerun's prefix cache is flushed before each run; `transformers` has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forerun import LLM, SamplingParams
from forerun.core.errors import ExecutorError
from forerun.evals.prompts import Prompt
from forerun.evals.timing import flush_caches, interleaved, median
from forerun.llm.bundled import bundled

Generate = Callable[[Prompt], list[int]]  # the new token ids

REFERENCE = "transformers"
LOOKUP = "transformers, prompt lookup"
PLAIN = "forerun, plain"


@dataclass(frozen=True)
class Row:
    """One engine."""

    name: str
    tok_s: tuple[float, ...]  # of each prompt
    identical: int  # prompts with the token ids of `transformers`

    def ratio(self, other: Row) -> float:
        """Median over prompts of this engine's speed over the other's."""
        return median([a / b for a, b in zip(self.tok_s, other.tok_s, strict=True)])


def reference(dtype: torch.dtype, device: torch.device) -> Any:
    """The bundled target in `transformers`' fastest configuration at batch size 1: SDPA."""
    transformers_logging.disable_progress_bar()
    folder = str(bundled("target"))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device).eval()


def by_transformers(model: Any, device: torch.device, tokens: int, **options: Any) -> Generate:
    def generate(prompt: Prompt) -> list[int]:
        ids = torch.tensor([prompt.ids], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                **options,
            )
        return [int(token) for token in out[0, ids.shape[1] :].tolist()]

    return generate


def by_forerun(llm: LLM, tokens: int) -> Generate:
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens)

    def generate(prompt: Prompt) -> list[int]:
        output = llm.generate(input_ids=list(prompt.ids), sampling_params=params)
        if output.error is not None:
            raise ExecutorError(f"a request was aborted: {output.error}")
        return list(output.output_ids)

    return generate


def compare_engines(
    plain: LLM,
    spec: LLM,
    model: Any,
    device: torch.device,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    repetitions: int,
) -> list[Row]:
    """`transformers`, its prompt lookup, plain decoding, speculation; in this order."""
    algorithm = spec.explain()["algorithm"]
    engines = {
        REFERENCE: by_transformers(model, device, max_new_tokens),
        LOOKUP: by_transformers(model, device, max_new_tokens, prompt_lookup_num_tokens=10),
        PLAIN: by_forerun(plain, max_new_tokens),
        f"forerun, {algorithm}": by_forerun(spec, max_new_tokens),
    }
    return _measure(engines, prompts, repetitions, partial(flush_caches, plain, spec))


def _measure(
    engines: dict[str, Generate],
    prompts: Sequence[Prompt],
    repetitions: int,
    flush: Callable[[], None],
) -> list[Row]:
    for generate in engines.values():
        generate(prompts[0])  # warm-up
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    identical = dict.fromkeys(engines, 0)
    for prompt in prompts:
        runs = {name: partial(generate, prompt) for name, generate in engines.items()}
        timed = interleaved(runs, repetitions, before=flush)
        expected = timed[REFERENCE][0].value
        for name, results in timed.items():
            speeds[name].append(median([len(r.value) / r.seconds for r in results]))
            identical[name] += all(r.value == expected for r in results)
    return [Row(name, tuple(speeds[name]), identical[name]) for name in engines]
