"""Parameters and settings of other engines: why they are refused, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from string import Formatter

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

# Settings of vLLM and llama.cpp, and short ones of SGLang, that are unlike ours.
RENAMED_SETTINGS = {
    "block_size": "page_size",
    "c": "context_length",
    "ctx_size": "context_length",
    "data_parallel_size": "dp_size",
    "disable_prefill_cuda_graph": "no_enable_piecewise_cuda_graph",
    "dp": "dp_size",
    "draft": "speculative_num_draft_tokens",
    "draft_max": "speculative_num_draft_tokens",
    "draft_model": "speculative_draft_model_path",
    "enable_expert_parallel": "ep_size",
    "enforce_eager": "disable_cuda_graph",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "hf": "model_path",
    "hf_repo": "model_path",
    "m": "model_path",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "md": "speculative_draft_model_path",
    "model": "model_path",
    "model_draft": "speculative_draft_model_path",
    "n": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "no_enable_prefix_caching": "disable_radix_cache",
    "np": "max_running_requests",
    "num_speculative_tokens": "speculative_num_draft_tokens",
    "parallel": "max_running_requests",
    "seed": "random_seed",
    "speculative_model": "speculative_draft_model_path",
    "temp": "temperature",
    "tensor_parallel_size": "tp_size",
    "tokenizer": "tokenizer_path",
    "tp": "tp_size",
}
_SETTING_REASONS = {
    "adapters cannot be loaded; merge the adapter into the model": (
        "enable_lora lora_modules lora_paths max_loras max_lora_rank lora"
    ),
    "prefixes are cached unless {disable_radix_cache} is set": "enable_prefix_caching",
    "prompts are always computed in chunks, of {chunked_prefill_size} tokens": (
        "enable_chunked_prefill"
    ),
    "grammars are always xgrammar's; leave it out": "guided_decoding_backend grammar_backend",
    "tools need no switch; for a model's own format set {tool_call_parser}": (
        "enable_auto_tool_choice"
    ),
    "requests are logged with {log_requests} alone; leave it out": (
        "disable_log_requests disable_log_stats"
    ),
    "up to 20 log-probabilities of a token are returned; leave it out": "max_logprobs",
    "code of a model's is never run; leave it out": "trust_remote_code",
    "a conversation is written as the template in the tokenizer's folder says; change it there": (
        "chat_template"
    ),
    "layers cannot be divided among GPUs, and weights can; set {tp_size}": (
        "pipeline_parallel_size pp_size pp"
    ),
    "all layers are on one device; leave it out, or set {device}": "n_gpu_layers gpu_layers ngl",
    "kernels are chosen by {attention_backend}": "flash_attn fa",
    "its keys are settings: {speculative_algorithm}, {speculative_draft_model_path} and others": (
        "speculative_config"
    ),
    "steps take as many threads as are fastest; OMP_NUM_THREADS is the most": (
        "threads threads_batch t tb"
    ),
}
UNSUPPORTED_SETTINGS = {n: why for why, names in _SETTING_REASONS.items() for n in names.split()}


def setting_refusal(
    name: str, known: Collection[str], spelled: Callable[[str], str] = str
) -> tuple[str | None, str | None]:
    """What another engine's setting is called here, or else why there is none.

    Args:
        known: settings that exist where it was given; no others are named.
        spelled: how a setting is written there.
    """
    for names in (RENAMED, RENAMED_SETTINGS):
        ours = names.get(name)
        if ours is not None and ours in known:
            return ours, None
    why = UNSUPPORTED_SETTINGS.get(name, "")
    named = [field for _, field, _, _ in Formatter().parse(why) if field]
    if not why or not all(field in known for field in named):
        return None, None
    return None, why.format(**{field: spelled(field) for field in named})


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
