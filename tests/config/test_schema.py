"""Anything may stand in a config: it is a model's shape, or refused in one line."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from forerun.config.hf_config import FAMILIES
from forerun.config.model_config import parse_model_config
from forerun.config.schema import ConfigKeys, QuantizationKeys, RopeKeys, checked
from forerun.core.errors import ConfigError
from forerun.models.formats.registry import weight_format

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
JUNK = (
    None, True, 0, 1, -3, 10**9, 10**30, 0.5, 1e40, math.nan, math.inf, "", "x", [], [1], ["x"],
    [None], {}, {"a": 1}, {"full_attention": {"factor": "x"}}, [[[]]],
)  # fmt: skip


def keys(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return struct.__struct_fields__


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", *FAMILIES])
def test_any_value_of_any_key(architecture: str) -> None:
    raw = {"architectures": [architecture], **SIZES}
    parsed = 0
    for key in keys(ConfigKeys):
        for value in JUNK:
            try:
                weight_format(parse_model_config({**raw, key: value}))
                parsed += 1
            except ConfigError as error:
                assert "\n" not in str(error) and len(str(error)) < 500
    assert parsed > 2 * len(keys(ConfigKeys))  # nulls, and more


@pytest.mark.parametrize(
    ("key", "struct"), [("rope_parameters", RopeKeys), ("quantization_config", QuantizationKeys)]
)
def test_any_value_within_an_object(key: str, struct: type[msgspec.Struct]) -> None:
    kinds = ("linear", "llama3", "yarn", "longrope", "fp8", "awq", "gptq", "compressed-tensors")
    for kind in kinds:
        for inner in keys(struct):
            for value in JUNK:
                spec = {"rope_type": kind, "quant_method": kind, "bits": 4, inner: value}
                raw = {"architectures": ["LlamaForCausalLM"], **SIZES, key: spec}
                try:
                    weight_format(parse_model_config(raw))
                except ConfigError as error:
                    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"vocab_size": "many"}, "c: vocab_size is 'many', expected int. Correct the file."),
        ({"head_dim": 10**9}, "c: head_dim is 1000000000, expected int <= 16777216."),
        ({"num_key_value_heads": -2}, "c: num_key_value_heads is -2, expected int >= 1."),
        ({"rms_norm_eps": math.nan}, "c: rms_norm_eps is nan, expected float >= 0.0."),
        ({"eos_token_id": [1, None]}, "c: eos_token_id[1] is None, expected int."),
        ({"text_config": {"hidden_size": 1.5}}, "c: text_config.hidden_size is 1.5, expected int."),
        ([1], "c: it is [1], expected object."),
    ],
)
def test_messages_name_key_and_value(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(ConfigKeys, raw, "c")
    assert str(caught.value).startswith(message)


def test_keys_that_are_not_known_are_let_through() -> None:
    checked(ConfigKeys, {"vocab_size": None, "anything": {"a": [math.inf]}}, "c")


def test_null_is_the_default() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **SIZES}
    nulls = {key: None for key in keys(ConfigKeys) if key not in raw}
    config = parse_model_config({**raw, **nulls})
    assert {**vars(config), "raw": 0} == {**vars(parse_model_config(raw)), "raw": 0}
