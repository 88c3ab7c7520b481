"""`benchmarks/determinism.py`: configs of its cases, and a small one from end to end on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from forerun.config.model_config import load_model_config
from forerun.doctor.determinism import Sizes
from forerun.kernels.cpu import library
from forerun.models.dflash_config import load_dflash_config
from tests.scripts import BENCHMARKS, load_script

SCRIPT = BENCHMARKS / "determinism.py"
SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_cases_keep_the_widths_of_their_presets(script: ModuleType, tmp_path: Path) -> None:
    drafted = 0
    for name, case in script.CASES.items():
        folder = tmp_path / name
        folder.mkdir()
        script.write_target(case, folder / "target")
        whole = load_model_config(script.preset(case.preset)[0])
        first = load_model_config(folder / "target")
        assert first.num_layers == case.layers < whole.num_layers
        assert (first.hidden_size, first.vocab_size) == (whole.hidden_size, whole.vocab_size)
        ways = list(script.ways(case, folder, Sizes()))
        assert len({way.name for way in ways}) == len(ways) >= 8
        if (folder / "draft").exists():
            drafted += 1
            read = load_dflash_config(folder / "draft").target_layer_ids
            assert max(read) < case.layers
    assert drafted >= 2


@pytest.mark.skipif(library.compiled().library is None, reason="bfloat16 needs kernels in C++")
def test_a_small_case(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_cpu_kernels: None
) -> None:
    small = script.write_config(SIZES, tmp_path / "small")
    monkeypatch.setattr(script, "preset", lambda name: (small, None))
    monkeypatch.setitem(script.CASES, "small", script.Case("small"))
    lines = list(script.run("small", tmp_path, Sizes(requests=6, tokens=40), "cpu"))
    assert not [line["name"] for line in lines if line["refused"] is not None]
    assert not sum(line["differing_tokens"] for line in lines)
    assert all(line["requests"] >= 6 and line["tokens"] > 0 for line in lines)
    by_name = {line["name"]: line for line in lines}
    assert by_name["prefix hits"]["requests"] == 12
    assert by_name["preemption"]["preemptions"] > 0
    assert by_name["the target as its own draft"]["accept_length"] > 3
