"""What becomes of a damaged pair: a refusal in one line, or an engine with the right text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun import LLM
from forerun.core.errors import ConfigError, RequestError
from tests.mutations.damage import TEMPLATE, Damage

PROMPT = "def add(a, b):\n"
CHAT = [{"role": "user", "content": "add"}]
TOKENS = 24
OF_CHAT = (TEMPLATE, "tokenizer_config.json", "tokenizer.json")


@dataclass(frozen=True)
class Outcome:
    kind: str  # "refused", "same", "as transformers"; "wrong": to be mended
    detail: str = ""
    cpu_seconds: float = 0.0


def outcome(
    damage: Damage, reference: tuple[int, ...], compare: Callable[[Path, list[int]], list[int]]
) -> Outcome:
    """Loads the pair and completes a prompt.

    Args:
        reference: ids of the completion by the undamaged pair.
        compare: what transformers completes the ids with, in a folder. A damaged number may well
            be that of another model.
    """
    try:
        prompt, ids = completion(*damage.folders, chat=damage.file in OF_CHAT)
    except (ConfigError, RequestError) as error:
        one_line = "\n" not in str(error) and len(str(error)) < 2000
        return Outcome("refused" if one_line else "wrong", str(error))
    if ids == reference:
        return Outcome("same")
    if damage.part == "draft":  # no draft changes the text
        return Outcome("wrong", f"{ids} for {reference}")
    want = tuple(compare(damage.folders[0], list(prompt)))
    kind = "as transformers" if want[: len(ids)] == ids else "wrong"
    return Outcome(kind, f"{ids}, transformers {want}")


def completion(
    target: Path, draft: Path, chat: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the prompt and of its greedy completion with the draft.

    Args:
        chat: whether a conversation has to work as well.
    """
    with LLM(
        target,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(draft),
        dtype="float32",
        max_running_requests=1,
        max_total_tokens=2048,
        speculative_adaptive=False,
        disable_cuda_graph=True,
    ) as llm:
        params = {"temperature": 0, "max_new_tokens": TOKENS}
        output = llm.generate(PROMPT, params)
        ended = output.meta_info["finish_reason"]
        if ended["type"] == "abort":
            raise RequestError(ended["message"])
        if chat:
            llm.chat(CHAT, {**params, "max_new_tokens": 1})
        prompt = llm.tokenizer(PROMPT)["input_ids"]
    return tuple(prompt), tuple(output.output_ids)


def transformers_ids(folder: Path, prompt: list[int]) -> list[int]:
    """Its own greedy completion."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    out: list[int] = ids[0, len(prompt) :].tolist()
    return out
