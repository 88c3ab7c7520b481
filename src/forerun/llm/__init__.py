"""`LLM`, `SamplingParams`, `RequestOutput`."""

from forerun.core.sampling_params import SamplingParams
from forerun.llm.llm import LLM
from forerun.llm.output import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
