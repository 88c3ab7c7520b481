"""`LLM`, its parameters and its outputs."""

import numpy  # noqa: F401  before torch, whose C code swallows errors of this import

from forerun.core.sampling_params import SamplingParams
from forerun.llm.llm import LLM
from forerun.llm.output import EmbeddingOutput, RequestOutput
from forerun.llm.pooling import PoolingParams

__all__ = ["LLM", "EmbeddingOutput", "PoolingParams", "RequestOutput", "SamplingParams"]
