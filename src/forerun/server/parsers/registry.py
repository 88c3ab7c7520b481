"""Parsers by name."""

from __future__ import annotations

from forerun.server.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from forerun.server.parsers.hermes import HermesParser
from forerun.server.parsers.llama3 import Llama3Parser
from forerun.server.parsers.tool_parser import ToolParser

AUTO, NONE = "auto", "none"
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3": Llama3Parser,
    "deepseekv3": DeepSeekV3Parser,
    "deepseekv31": DeepSeekV31Parser,
}
# Where the prompt does not say whether the output begins with reasoning: whether it does.
REASONING_PARSERS = {"deepseek-r1": True, "qwen3": False}
