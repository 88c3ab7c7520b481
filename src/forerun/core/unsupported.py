"""Parameters of other engines: why they are refused, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.core.scheduling_params import SCHEDULING_KEYWORDS

RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "stop_strings": "stop",
    "prompt": "prompts",
    "text": "prompts",
    "prompt_token_ids": "input_ids",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
}

LOGPROBS = (  # names of this engine and of others
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "logprobs",
    "prompt_logprobs",
    "top_logprobs",
    "logprob_token_ids",
)

_REASONS = {
    "log-probabilities come with token ids; leave it out": "return_text_in_logprobs",
    "hidden states are not returned; leave it out": "return_hidden_states",
    "grammars are given as json_schema, regex, ebnf or structural_tag; use one of them": (
        "structured_outputs guided_choice guided_decoding response_format"
    ),
    "logits are changed by logit_bias and the penalties alone; use logit_bias": (
        "logits_processors custom_logit_processor custom_params allowed_token_ids bad_words"
    ),
    "adapters cannot be loaded; merge the adapter into the model": "lora_path lora_request",
    "the input is text or token ids only": (
        "image_data audio_data video_data multi_modal_data mm_processor_kwargs input_embeds"
        " prompt_embeds"
    ),
    "there is no beam search; use n > 1 with a temperature and choose": (
        "best_of use_beam_search length_penalty early_stopping"
    ),
    "stop strings are cut off, and they are plain strings; use stop": (
        "no_stop_trim include_stop_str_in_output stop_regex"
    ),
    "text is decoded as the tokenizer spells it; leave it out": (
        "spaces_between_special_tokens detokenize clean_up_tokenization_spaces"
    ),
}
UNSUPPORTED = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def refusal(name: str, known: Iterable[str] = ()) -> str | None:
    """Why another engine's parameter is refused; None if `name` is not known as one.

    Args:
        known: parameters that exist here; a new name is suggested only if it is among them.
    """
    if name in RENAMED and (RENAMED[name] in known or not known):
        return f"{name} is called {RENAMED[name]} here."
    if name in LOGPROBS:
        return (
            f"{name} is not known here: log-probabilities are asked for with generate(...,"
            " return_logprob=True, top_logprobs_num=n), and of the prompt with logprob_start_len."
        )
    if name in SCHEDULING_KEYWORDS:
        return f"{name} is not a sampling parameter: generate(..., {name}=...)."
    if name in UNSUPPORTED:
        return f"{name} is not supported yet: {UNSUPPORTED[name]}."
    return None
