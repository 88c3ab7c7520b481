"""Parsers by name: SGLang's names, and vLLM's."""

from __future__ import annotations

from forerun.server.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from forerun.server.parsers.gemma4 import Gemma4Parser
from forerun.server.parsers.granite import GraniteParser
from forerun.server.parsers.harmony import HARMONY, HarmonyParser
from forerun.server.parsers.hermes import HermesParser
from forerun.server.parsers.kimi_k2 import KimiK2Parser
from forerun.server.parsers.llama3 import Llama3Parser
from forerun.server.parsers.mistral import MistralParser
from forerun.server.parsers.pythonic import Llama4Parser, Olmo3Parser
from forerun.server.parsers.reasoning import THINK, ReasoningSyntax
from forerun.server.parsers.tool_parser import ToolParser
from forerun.server.parsers.xml_calls import (
    Glm45Parser,
    GlmParser,
    MiniMaxM2Parser,
    Qwen3CoderParser,
)

AUTO, NONE = "auto", "none"
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "qwen25": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "llama3": Llama3Parser,
    "llama3_json": Llama3Parser,
    "llama4_json": Llama3Parser,
    "pythonic": Llama4Parser,
    "llama4_pythonic": Llama4Parser,
    "deepseekv3": DeepSeekV3Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseekv31": DeepSeekV31Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "gpt-oss": HarmonyParser,
    "openai": HarmonyParser,
    "glm": Glm45Parser,
    "glm45": Glm45Parser,
    "glm47": GlmParser,
    "kimi_k2": KimiK2Parser,
    "gemma4": Gemma4Parser,
    "mistral": MistralParser,
    "minimax-m2": MiniMaxM2Parser,
    "minimax_m2": MiniMaxM2Parser,
    "granite": GraniteParser,
    "granite-20b-fc": GraniteParser,
    "granite4": HermesParser,
    "olmo3": Olmo3Parser,
}

_OPENED = ReasoningSyntax(opened=True)
REASONING_PARSERS: dict[str, ReasoningSyntax] = {
    "deepseek-r1": _OPENED,
    "deepseek_r1": _OPENED,
    "deepseek-v3": THINK,
    "deepseek_v3": THINK,
    "qwen3": THINK,
    "qwen3-thinking": _OPENED,
    "glm45": THINK,
    "gpt-oss": HARMONY,
    "openai_gptoss": HARMONY,
    "kimi": ReasoningSyntax(("◁think▷",), ("◁/think▷",)),
    "kimi_k2": THINK,
    "gemma4": ReasoningSyntax(("<|channel>thought",), ("<channel|>",), following=""),
    "mistral": ReasoningSyntax(("[THINK]",), ("[/THINK]",)),
    "minimax": _OPENED,
    "minimax_m2": _OPENED,
    "granite": ReasoningSyntax(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        following="[ \\n]{0,2}",
    ),
    "olmo3": _OPENED,
}
