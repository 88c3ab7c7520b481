"""MessagePack encoding of plans and results, for an executor in another process. No pickle."""

from __future__ import annotations

import msgspec

from forerun.core.executor import ExecutorInfo
from forerun.core.plan import StepPlan, StepResult

__all__ = ["decode_info", "decode_plan", "decode_result", "encode"]

_encoder = msgspec.msgpack.Encoder()
_plan = msgspec.msgpack.Decoder(StepPlan)
_result = msgspec.msgpack.Decoder(StepResult)
_info = msgspec.msgpack.Decoder(ExecutorInfo)


def encode(value: StepPlan | StepResult | ExecutorInfo) -> bytes:
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


def decode_info(data: bytes) -> ExecutorInfo:
    """
    Raises:
        msgspec.ValidationError: the bytes are not an `ExecutorInfo`.
    """
    return _info.decode(data)
