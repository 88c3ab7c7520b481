"""Writes docs/support.md: model x algorithm x attention backend, from the code's own answers.

    python -m tests.support_table > docs/support.md

A model's needs follow from a config of real sizes, an algorithm's from its `resolve`, and a backend
says for each phase whether it serves them, or why not. Tests that ran such an engine and found
its text right are in support_cells.json (`support_cells.py`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from forerun.attention.capabilities import Phase
from forerun.attention.select import BACKENDS
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.executor.attention_setup import TARGET, ModelNeed, Placement, model_needs
from forerun.layers.communication import WeightPlacement
from forerun.llm.bundled import PRESETS
from forerun.models.registry import model_class
from forerun.speculative.check import resolve_caps
from forerun.speculative.registry import BUILT_IN, all_options, get_algorithm
from tests.kernels.compiled import TARGETS
from tests.support_cells import Cell, read_cells

META = WeightPlacement(torch.bfloat16, torch.device("meta"))
Config = dict[str, Any]

# --- models and drafts: configs of real sizes -----------------------------------------------------


def preset(name: str) -> Config:
    found: Config = json.loads((PRESETS / name / "target" / "config.json").read_text())
    return found


_DENSE: Config = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
_MLA: Config = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "vocab_size": 102400,
    "max_position_embeddings": 32768,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
}
# By label; as published, but for what attention does not depend on.
MODELS: dict[str, Config] = {
    "Llama-3.1-8B": _DENSE | {"architectures": ["LlamaForCausalLM"]},
    "Mistral-7B-v0.1": _DENSE
    | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "model_type": "mistral"},
    "Qwen2.5-7B": _DENSE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen3-8B": preset("qwen3-8b"),
    "Qwen3-30B-A3B": _DENSE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "DeepSeek-V2-Lite": preset("deepseek-v2-lite"),
    "DeepSeek-V3": _MLA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
    },
}
MODELS |= {
    "Gemma-2-9B": _DENSE
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 3584,
        "num_attention_heads": 16,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "Gemma-3-4B": _DENSE
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,  # 6; both kinds are among the few layers here
    },
    "Gemma-4-31B": _DENSE
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
    },
    "Qwen3.5-9B": preset("qwen3.5-9b"),
    "gpt-oss-20b": _DENSE
    | {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "OLMo-3-7B": _DENSE | {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 4096},
}
# Architectures whose attention is that of another row.
ALIKE: dict[str, str] = {
    "Glm4ForCausalLM": "Llama-3.1-8B",
    "Glm4MoeForCausalLM": "Llama-3.1-8B",
    "GraniteForCausalLM": "Llama-3.1-8B",
    "MixtralForCausalLM": "Llama-3.1-8B",
    "Olmo2ForCausalLM": "Llama-3.1-8B",
    "Phi3ForCausalLM": "Llama-3.1-8B",  # those with a window: Mistral's
    "Qwen3NextForCausalLM": "Qwen3.5-9B",
    "Qwen3_5MoeForCausalLM": "Qwen3.5-9B",
    "SeedOssForCausalLM": "Llama-3.1-8B",
    "SmolLM3ForCausalLM": "Llama-3.1-8B",
}
LAYERS = 4


def shrunk(config: Config) -> Config:
    """With few layers: they are alike."""
    small = config | {"num_hidden_layers": LAYERS}
    small.pop("layer_types", None)
    if "first_k_dense_replace" in small:
        small["first_k_dense_replace"] = 1
    return small


def with_mtp(config: Config) -> Config:
    """With a multi-token prediction layer, which NEXTN needs of a checkpoint."""
    return config | {"num_nextn_predict_layers": 1}


def draft_config(algorithm: str, target: Config) -> Config | None:
    """Of a draft for this target; None: it has no folder of its own."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    if target.get("hidden_size", 0) >= 1024:
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    shared = {key: target[key] for key in ("hidden_size", "vocab_size")}
    base = {
        **shared,
        **heads,
        "intermediate_size": 2 * target["hidden_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
    }
    if algorithm in ("DFLASH", "DDTREE"):
        return base | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "block_size": 8,
            "num_target_layers": target["num_hidden_layers"],
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
        }
    if algorithm == "EAGLE3":
        return base | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": target["vocab_size"],
            "target_hidden_size": target["hidden_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
    if algorithm == "STANDALONE":
        return base | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    if algorithm == "FROZEN_KV_MTP":
        text = base if "global_head_dim" not in target else target | {"hidden_size": 96}
        kinds = ["sliding_attention", "full_attention"]
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "backbone_hidden_size": target["hidden_size"],
            "text_config": text
            | {"num_hidden_layers": 2, "layer_types": kinds, "hidden_size_per_layer_input": 0},
        }
    return None


def save(folder: Path, config: Config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def folders_of(root: Path, config: Config, algorithm: str) -> tuple[Path, Path | None]:
    """Folders of the target and, where the algorithm has one, of its draft: configs alone."""
    if algorithm in ("NEXTN", "EAGLE"):
        return save(root / "target", with_mtp(config)), None
    draft = draft_config(algorithm, config)
    folder = None if draft is None else save(root / "draft", draft)
    return save(root / "target", config), folder


def needs_of(config: Config, algorithm: str) -> list[ModelNeed]:
    """What target and draft need of attention in bfloat16.

    Raises:
        ConfigError: this algorithm does not fit this model.
    """
    with tempfile.TemporaryDirectory() as root:
        folder, draft = folders_of(Path(root), config, algorithm)
        target = load_model_config(folder)
        settings = EngineConfig(
            model_path=str(folder),
            skip_tokenizer_init=True,
            speculative_algorithm=algorithm,
            speculative_draft_model_path=None if draft is None else str(draft),
            algorithm_options={option.name: option.default for option in all_options()},
        )
        made = get_algorithm(algorithm)()
        caps = resolve_caps(made, settings, target, META.dtype)
        model = model_class(target)(target, META, max_positions=1)
        where = Placement(torch.device("cuda"), META.dtype, META.dtype, graphs=True)
        return model_needs(settings, model, caps, where)


# --- platforms and backends -----------------------------------------------------------------------


@dataclass(frozen=True)
class Platform:
    label: str
    device: str
    arch: str | None

    def asks(self, need: ModelNeed, phase: Phase) -> Any:
        graph = self.device == "cuda" and phase is not Phase.PREFILL
        found = need.need_of(phase)
        return replace(found, device=self.device, arch=self.arch, graph=graph)


PLATFORMS = (
    Platform("H200", "cuda", "sm_90"),
    Platform("B200", "cuda", "sm_100"),
    Platform("MI300X", "cuda", "gfx942"),
    Platform("CPU", "cpu", None),
)
LETTERS = {Phase.PREFILL: "p", Phase.DECODE: "d", Phase.VERIFY: "v", Phase.EXTEND: "e"}


@dataclass
class Notes:
    """Reasons, numbered as they occur."""

    numbers: dict[str, int] = field(default_factory=dict)

    def mark(self, reasons: Sequence[str]) -> str:
        if not reasons:
            return ""
        text = "; ".join(dict.fromkeys(reasons))
        return f" [{self.numbers.setdefault(text, len(self.numbers) + 1)}]"


@dataclass(frozen=True)
class Verdict:
    """What one backend says about one model and algorithm on one platform."""

    served: str  # letters of the phases, capital for the target's
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, name: str, needs: Sequence[ModelNeed], platform: Platform) -> Verdict:
        kind, served, reasons = BACKENDS[name](), "", []
        for need in needs:
            letters = ""
            for phase in need.phases:
                why = kind.why_unfit(platform.asks(need, phase))
                letters += "" if why else LETTERS[phase]
                reasons += why
            served += letters.upper() if need.name == TARGET else letters and f" {letters}"
        never = {f"it does not serve {phase.value}" for phase in Phase}
        return cls(served.strip(), tuple(reason for reason in reasons if reason not in never))


def status(cell: Cell, cells: Mapping[Cell, str], platform: Platform) -> str:
    """How a cell that a backend serves was tested, as of `LEGEND`."""
    if platform.device == "cpu":
        return "CPU" if replace(cell, on="CPU") in cells else "not run"
    if any(cell == replace(known, on=cell.on) and platform.label in known.on for known in cells):
        return platform.label
    if replace(cell, on=f"stand-in for {platform.arch}") in cells:
        return "stand-in"
    if cell.backend == "triton" and platform.arch in TARGETS:
        return "compiled"
    return "not run"


def names_of(platform: Platform, needs: Mapping[Any, Any]) -> list[str]:
    """The backends that serve anything there, in their order."""
    if platform.device == "cpu":
        return ["torch_native"]
    fits = [
        name
        for name in BACKENDS
        if any(
            Verdict.of(name, each, platform).served
            for each in needs.values()
            if not isinstance(each, ConfigError)
        )
    ]
    return [name for name in fits if name != "torch_native"]


LEGEND = """# Support

Written by `python -m tests.support_table`; a test holds it to the code and to the recorded results.
[The backends](add-an-attention-backend.md) has the attention backends.

A row is a model and an algorithm, with drafts of real sizes: NEXTN and EAGLE with an MTP layer in
the checkpoint, FROZEN_KV_MTP with an assistant, the others with a dense draft. A cell says how a
backend was tested, then the phases that it serves: of the target P(refill), D(ecode), V(erify), of
the draft p, d, v (blocks), e (draft extend). Phases that are missing go to the next backend. A
number is a reason, listed below the table; without phases the cell is refused for this reason.

| status | an engine with this model, algorithm and backend gave the text of plain decoding |
| --- | --- |
| H200 | on an H200 |
| CPU | on a CPU |
| stand-in | on a CPU, over a stand-in of the package's calls (signatures as recorded) |
| compiled | not yet: the kernels run in Triton's interpreter and are compiled ahead for this GPU |
| not run | not together: the [backend](add-an-attention-backend.md) says that it serves them |
"""


def lines() -> Iterator[str]:
    cells = read_cells()
    needs: dict[tuple[str, str], list[ModelNeed] | ConfigError] = {}
    for label, config in MODELS.items():
        for algorithm in BUILT_IN:
            try:
                needs[label, algorithm] = needs_of(shrunk(config), algorithm)
            except ConfigError as error:
                needs[label, algorithm] = error
    yield LEGEND
    of = {label: [name for name, row in ALIKE.items() if row == label] for label in MODELS}
    yield "Further architectures, whose attention is that of a row:\n"
    yield from (f"- {label}: {', '.join(names)}" for label, names in of.items() if names)
    yield ""
    for platform in PLATFORMS:
        yield from _table(platform, needs, cells)


def _table(
    platform: Platform,
    needs: Mapping[tuple[str, str], list[ModelNeed] | ConfigError],
    cells: Mapping[Cell, str],
) -> Iterator[str]:
    names, notes = names_of(platform, needs), Notes()
    arch = f" ({platform.arch})" if platform.arch else ""
    yield f"## {platform.label}{arch}\n"
    yield f"| model | algorithm | {' | '.join(f'`{name}`' for name in names)} |"
    yield "| --- " * (2 + len(names)) + "|"
    for (label, algorithm), each in needs.items():
        row = [label, algorithm]
        for name in names:
            if isinstance(each, ConfigError):
                row.append(f"–{notes.mark([_plain(each)])}")
                continue
            verdict = Verdict.of(name, each, platform)
            cell = Cell("", MODELS[label]["architectures"][0], algorithm, name)
            told = f"{status(cell, cells, platform)} {verdict.served}" if verdict.served else "–"
            row.append(told + notes.mark(verdict.reasons))
        yield f"| {' | '.join(row)} |"
    yield ""
    for text, number in notes.numbers.items():
        yield f"{number}. {text}"
    yield ""


def _plain(error: ConfigError) -> str:
    """Without the temporary folder's name."""
    words = str(error).split()
    return " ".join("the checkpoint" if "/target" in w or "/draft" in w else w for w in words)


@cache
def table() -> str:
    return "\n".join(lines()).rstrip() + "\n"


if __name__ == "__main__":
    print(table(), end="")
