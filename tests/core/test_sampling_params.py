"""Sampling parameters: types, ranges, and a one-line refusal for everything else."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import RequestError, nearest, shown
from forerun.core.sampling_params import (
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    SamplingParams,
)
from tests.property_examples import examples

LONG = "x" * 100_000
NAN, INF = math.nan, math.inf


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no repr")


STRANGE = [None, "", "abc", LONG, 5, -1, 0, 2.5, NAN, INF, -INF, 2**31, 2**63, 2**64, -(2**70),
           10**400, True, False, b"x", [], [1], ["a"], [None], {}, {"a": 1}, (), object(), 1j,
           Decimal("1.5"), Fraction(1, 2), Broken(), [LONG], [[1]], "\ud800"]  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams)])
def test_any_value_is_taken_or_refused_in_one_line(name: str) -> None:
    for value in STRANGE:
        try:
            params = SamplingParams.of({name: value})
        except RequestError as error:
            message = str(error)
            assert name in message or name == "stop", message
            assert len(message) < 300 and "\n" not in message and message.endswith(".")
        else:
            assert isinstance(hash(params), int)
            kind = type(getattr(SamplingParams(), name))
            if getattr(SamplingParams(), name) is not None:
                assert type(getattr(params, name)) is kind


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_k": 2**31}, "fit in 32 bits, got 2147483648"),
        ({"top_k": 2**63}, "fit in 32 bits"),
        ({"top_k": 2.0}, "top_k must be an integer, got 2.0"),
        ({"max_new_tokens": 2**31}, "fit in 32 bits"),
        ({"sampling_seed": 2**63}, "64 bits"),
        ({"sampling_seed": 1.0}, "sampling_seed must be an integer"),
        ({"temperature": 1e39}, "float32"),
        ({"temperature": 10**400}, "must be finite"),
        ({"temperature": True}, "must be a number"),
        ({"top_p": NAN}, "must be finite, got nan"),
        ({"ignore_eos": "abc"}, "ignore_eos must be true or false, got 'abc'"),
        ({"ignore_eos": NAN}, "true or false"),
        ({"skip_special_tokens": "no"}, "true or false"),
        ({"speculative": 1}, "true or false"),
        ({"n": 10**9}, "at most 1024"),
        ({"stop": 5}, "string or a list of strings, got 5"),
        ({"stop": [5]}, "non-empty strings, got 5"),
        ({"stop": [""]}, "non-empty strings"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "at most 32 strings, got 33"),
        ({"stop": LONG}, "at most 1024 characters, got 100000"),
        ({"stop_token_ids": 5}, "list of integers, got 5"),
        ({"stop_token_ids": "5"}, "list of integers"),
        ({"stop_token_ids": [1.0]}, "must be an integer, got 1.0"),
        ({"stop_token_ids": [1] * (MAX_STOP_TOKENS + 1)}, "at most 1024 ids"),
        ({"max_draft_tokens": -1}, ">= 0"),
        ({"max_tokens": 5}, "max_tokens is called max_new_tokens here"),
        ({"seed": 5}, "called sampling_seed"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be in [-2, 2], got 2.1"),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3.0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in [1e-06, 2], got 0.0"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty must be in [1e-06, 2]"),
        ({"repetition_penalty": NAN}, "must be finite"),
        ({"logit_bias": 5}, "logit_bias must be a mapping of token ids to biases, got 5"),
        ({"logit_bias": {"a": 1}}, "logit_bias has token ids as keys, got 'a'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has token ids as keys"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias has token ids as keys"),
        ({"logit_bias": {1.0: 1}}, "A key of logit_bias must be an integer, got 1.0"),
        ({"logit_bias": {5: "x"}}, "logit_bias must be a number, got 'x'"),
        ({"logit_bias": {5: 101}}, "logit_bias must be in [-100, 100], got 101.0 for token 5"),
        ({"logit_bias": {5: 1, "5": 2}}, "logit_bias has token 5 twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "at most 1024 tokens, got 1025"),
        ({"guided_json": "{}"}, "guided_json is called json_schema here"),
        ({"response_format": {}}, "not supported yet: grammars are given as json_schema, regex"),
        ({"bad_words": []}, "not supported yet: logits are changed by logit_bias"),
        ({"logprobs": 5}, "log-probabilities are asked for with generate("),
        ({"top_logprobs_num": 5}, "return_logprob=True, top_logprobs_num=n"),
        ({LONG: 1}, "Unknown sampling parameter 'xxx"),
    ],
)
def test_refusals_say_what_is_wrong(params: dict[str, Any], words: str) -> None:
    for make in (SamplingParams.of, lambda given: SamplingParams(**given)):
        with pytest.raises(RequestError) as caught:
            make(params)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["cls", "self", "init"])
def test_names_of_python(name: str) -> None:
    with pytest.raises(RequestError, match=f"Unknown sampling parameter '{name}'"):
        SamplingParams.of({name: 1})


def test_it_is_a_class_as_others() -> None:
    class Creative(SamplingParams):
        def __init__(self, creativity: float) -> None:
            super().__init__(temperature=creativity)

    assert Creative(creativity=0.3).temperature == 0.3
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["temperature", "top_p"]
    with pytest.raises(TypeError, match="positional arguments"):
        SamplingParams(*range(40))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.5)
    assert copy.deepcopy(params) == replace(params) == params


def test_what_users_may_give() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=1,
        top_k=np.int64(2**31 - 1),  # type: ignore[arg-type]
        sampling_seed=np.int64(-1),  # type: ignore[arg-type]
        stop="x" * MAX_STOP_LENGTH,  # type: ignore[arg-type]
        stop_token_ids={np.int32(7)},  # type: ignore[arg-type]
        logit_bias={"3": 1, np.int64(4): -2.5},  # type: ignore[arg-type]
        repetition_penalty=2,
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=1.0,
        top_k=2**31 - 1,
        sampling_seed=-1,
        stop=("x" * MAX_STOP_LENGTH,),
        stop_token_ids=(7,),
        logit_bias=((3, 1.0), (4, -2.5)),
        repetition_penalty=2.0,
    )
    assert type(params.top_k) is type(params.stop_token_ids[0]) is int
    assert type(params.temperature) is float
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


@examples(300)
@given(st.integers(), st.floats(), st.integers(), st.integers())
def test_what_is_taken_fits_the_device_tables(
    k: int, temperature: float, seed: int, new: int
) -> None:
    try:
        params = SamplingParams(
            top_k=k,
            temperature=temperature,
            sampling_seed=seed,
            max_new_tokens=new,
            max_draft_tokens=k,
        )
    except RequestError:
        return
    assert np.array([params.top_k, params.max_new_tokens], dtype=np.int32) is not None
    assert np.array([params.sampling_seed], dtype=np.int64) is not None
    assert np.isfinite(np.float32(params.temperature))


def test_shown() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown(LONG)) == 80 and shown(LONG).endswith("...")
    assert "repr fails" in shown(Broken())
    assert "\n" not in shown(np.zeros((9, 9)))


def test_shown_writes_no_more_than_it_shows() -> None:
    """The whole texts of these would have 10^12 characters."""
    row = ["x" * 10**6] * 1000
    beginning = "['" + "x" * 200
    assert shown([row] * 1000) == f"[{beginning}"[:77] + "..."
    assert shown({"a": [row] * 1000}) == f"{{'a': [{beginning}"[:77] + "..."
    assert shown(dict.fromkeys(range(1000), row)) == f"{{0: {beginning}"[:77] + "..."
    small = (1, [2.5, None], {"a": ("b", b"c"), 2: [[]]}, "d" * 9)
    assert shown(small) == repr(small)
    numbers = list(range(500))
    assert shown(numbers) == repr(numbers)[:77] + "..."
    assert nearest("x" * 10**8, ["x"]) == ""
