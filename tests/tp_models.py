"""A target that two tensor-parallel ranks can share."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.golden_engine import GOLDEN


def with_a_sixth_head(path: Path) -> Path:
    """The golden target, which has 5 heads: one more, that adds nothing."""
    config = json.loads((GOLDEN / "target" / "config.json").read_text())
    dim = config["head_dim"]
    config["num_attention_heads"] += 1
    weights = load_file(GOLDEN / "target" / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat((weight, torch.zeros(dim, weight.shape[1])))
        if name.endswith("o_proj.weight"):
            zeros = torch.zeros(weight.shape[0], dim)
            weights[name] = torch.cat((weight, zeros), 1).contiguous()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path
