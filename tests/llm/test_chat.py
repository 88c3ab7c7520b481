"""How the prompt of `LLM.chat` ends: vLLM's `add_generation_prompt`, `continue_final_message`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun import LLM
from forerun.core.errors import RequestError

TALK = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "2 + 3"}]
FEW = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_running_requests=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("keywords", "add", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": True}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_the_prompt_is_the_one_of_transformers(
    llm: LLM, keywords: dict[str, bool], add: bool, continues: bool
) -> None:
    text = llm.tokenizer.apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=add, continue_final_message=continues
    )
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    got, want = llm.chat(TALK, FEW, **keywords), llm.generate(input_ids=ids, sampling_params=FEW)
    assert got.meta_info["prompt_tokens"] == len(ids)
    assert got.output_ids == want.output_ids


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "both true"),
        ({"continue_final_message": 1}, "continue_final_message must be true or false, got 1"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be true or false"),
    ],
)
def test_what_is_refused(llm: LLM, keywords: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.chat(TALK, FEW, **keywords)
