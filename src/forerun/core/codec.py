"""MessagePack encoding of plans and results, for an executor in another process. No pickle."""

from __future__ import annotations

import msgspec

from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.plan import StepPlan, StepResult
from forerun.core.profile import ProfileParams

__all__ = [
    "decode_grammar",
    "decode_info",
    "decode_lengths",
    "decode_plan",
    "decode_profile",
    "decode_result",
    "encode",
]

_encoder = msgspec.msgpack.Encoder()
_plan = msgspec.msgpack.Decoder(StepPlan)
_result = msgspec.msgpack.Decoder(StepResult)
_grammar = msgspec.msgpack.Decoder(Grammar)
_profile = msgspec.msgpack.Decoder(ProfileParams)
_lengths = msgspec.msgpack.Decoder(list[float])
_info = msgspec.msgpack.Decoder(ExecutorInfo)


def encode(
    value: StepPlan | StepResult | ExecutorInfo | Grammar | ProfileParams | list[float],
) -> bytes:
    return _encoder.encode(value)


def decode_plan(data: bytes) -> StepPlan:
    """
    Raises:
        msgspec.ValidationError: the bytes are not a plan.
    """
    return _plan.decode(data)


def decode_result(data: bytes) -> StepResult:
    """
    Raises:
        msgspec.ValidationError: the bytes are not a result.
    """
    return _result.decode(data)


def decode_grammar(data: bytes) -> Grammar:
    """
    Raises:
        msgspec.ValidationError: the bytes are not a grammar.
    """
    return _grammar.decode(data)


def decode_profile(data: bytes) -> ProfileParams:
    """
    Raises:
        msgspec.ValidationError: the bytes are not `ProfileParams`.
    """
    return _profile.decode(data)


def decode_lengths(data: bytes) -> list[float]:
    """
    Raises:
        msgspec.ValidationError: the bytes are no list of numbers.
    """
    return _lengths.decode(data)


def decode_info(data: bytes) -> ExecutorInfo:
    """
    Raises:
        msgspec.ValidationError: the bytes are not an `ExecutorInfo`.
    """
    return _info.decode(data)
