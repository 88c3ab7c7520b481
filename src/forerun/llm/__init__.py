"""`LLM`, `SamplingParams`, `RequestOutput`."""

import numpy  # noqa: F401  before torch, whose C code swallows errors of this import

from forerun.core.sampling_params import SamplingParams
from forerun.llm.llm import LLM
from forerun.llm.output import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
