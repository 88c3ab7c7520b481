"""Backends over libraries of others, compared with the plain one.

On a CPU a stand-in of the library's calls takes its place (`stand_ins.py`); on a GPU the libraries
that are installed run themselves (`test_vendor_gpu.py`), over the same forwards (`pair.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionSpec, LayerMask, Mask
from forerun.attention.capabilities import AttentionNeed, Phase
from forerun.attention.fa3 import LIBRARIES, LIBRARY_VARIABLE, Fa3, SglFa3, UpstreamFa3, VllmFa3
from forerun.attention.fa4 import Fa4
from forerun.attention.flash import EXPANDED_DIMS, FlashMask, UnpagedInput
from forerun.attention.flashmla import FlashMla
from forerun.attention.paged import LATENT_ROW
from forerun.attention.select import Wanted, select
from forerun.core.errors import ConfigError
from forerun.kernels.runtime import nvrtc
from forerun.kvcache.layouts import ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from tests.attention import stand_ins
from tests.attention.pair import BLOCK, CAUSAL, Expand, Pair, Sizes

CPU = torch.device("cpu")
KINDS = stand_ins.stand_ins()
DENSE = [name for name in KINDS if name != "flashmla"]
WINDOW = LayerMask(window=7)
SLIDING = [LayerMask(Mask.SLIDING_BLOCK, window) for window in (3, 20)]


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch, _interpreter: None) -> None:
    """Our own kernels are replaced by their reference implementations: they have other tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    stand_ins.calls.clear()


def pages_of(name: str) -> list[int]:
    sizes = KINDS[name].capabilities.page_sizes
    assert sizes is not None
    return [size for size in (1, 16, 64, 128) if size in sizes]


PAGED = [(name, page) for name in DENSE for page in pages_of(name)]


def pair(
    name: str, sizes: Sizes, page: int, masks: list[LayerMask], sinks: Tensor | None = None
) -> Pair:
    need = AttentionNeed("cpu", torch.float32, 0, 0, 0, frozenset())
    made = Pair(KINDS[name], sizes, page, masks, need)
    made.sinks = sinks
    return made


@pytest.mark.parametrize(("name", "page"), PAGED)
def test_chunks_then_steps(name: str, page: int) -> None:
    """Prompts in two ragged chunks, then W = 1, 5 and 16 tokens, two layers with several masks."""
    each = pair(name, Sizes(6, 2, 32), page, [CAUSAL, WINDOW])
    each.prefill([(0, 20), (0, 1), (0, 33)])
    each.prefill([(20, 3), (1, 90), (33, 2)])
    each.masks = [CAUSAL, WINDOW, BLOCK, *SLIDING]
    for width in (1, 5, 16):
        each.step([23, 91, 35], width)
    each.same_pools()


@pytest.mark.parametrize("name", ["fa3-vllm", "fa3-upstream", "fa3-sgl"])
def test_layers_share_a_schedule(name: str) -> None:
    """One per mask and forward; a stale one is refused by the stand-in."""
    each = pair(name, Sizes(4, 2, 16, layers=3), 16, [CAUSAL, BLOCK])
    each.prefill([(0, 9), (0, 5), (0, 7)])
    assert stand_ins.calls.count("get_scheduler_metadata") == 0
    for starts in ([9, 5, 7], [11, 6, 7]):
        stand_ins.calls.clear()
        each.step(starts, 2)
        assert stand_ins.calls.count("fwd") == 6
        assert stand_ins.calls.count("get_scheduler_metadata") == 2


@pytest.mark.parametrize("name", ["fa3-vllm", "fa3-sgl", "fa4"])
def test_sinks(name: str) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])  # exact in bfloat16
    each = pair(name, Sizes(4, 2, 16, layers=1), 64, [CAUSAL, WINDOW], sinks)
    each.prefill([(0, 9), (0, 5), (0, 30)])
    each.step([9, 5, 30], 3)


@pytest.mark.parametrize("name", [*DENSE, "flashmla"])
def test_latent(name: str) -> None:
    """Absorbed MLA at DeepSeek's sizes."""
    each = pair(name, Sizes(4, 1, sum(LATENT_ROW), LATENT_ROW[0]), 64, [CAUSAL, BLOCK])
    # A chunk of prompts is another backend's where this one has no prefill.
    each.prefill([(0, 20), (0, 1), (0, 33)], Phase.PREFILL in KINDS[name].capabilities.phases)
    for width in (1, 5, 16):
        each.step([20, 1, 33], width)
    each.same_pools()
    assert stand_ins.calls.count("get_mla_metadata") == (6 if name == "flashmla" else 0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("expanded_bytes", [1 << 30, 1])
@pytest.mark.parametrize("name", ["fa3-vllm", "fa3-upstream", "fa4"])
def test_latent_prefill_with_expanded_heads(
    name: str, expanded_bytes: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.attention.latent.EXPANDED_BYTES", expanded_bytes)
    sizes = Sizes(3, 1, 24 + 64, 24)
    each, expand = pair(name, sizes, 64, []), Expand(sizes, CPU)
    assert (expand.dims.qk, expand.dims.v) == EXPANDED_DIMS
    spec = AttentionSpec(LayerMask(window=window), 0.1)
    for spans in ([(0, 70), (0, 1), (0, 33)], [(70, 3), (1, 40), (33, 2)]):
        each.prefill_expanded(spans, spec, expand)
    assert {"fwd", "varlen", "cute"}.intersection(stand_ins.calls)
    each.same_pools()


def test_other_expanded_heads_are_computed_plainly() -> None:
    sizes = Sizes(3, 1, 24 + 8, 24, layers=1)
    each, spec = pair("fa3-vllm", sizes, 64, []), AttentionSpec(CAUSAL, 0.1)
    each.prefill_expanded([(0, 20), (0, 1), (0, 3)], spec, Expand(sizes, CPU))
    assert stand_ins.calls == []


# --- refusals ----------------------------------------------------------------------------------

GPU = AttentionNeed(
    "cuda", torch.bfloat16, 128, 32, 8, frozenset({CAUSAL}), arch="sm_90", phase=Phase.PREFILL
)
MLA = replace(GPU, mla=True, dense=False, head_dim=576, latent_dim=512, num_kv_heads=1)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """None of the packages is installed but those that a test puts into this folder."""
    modules = {library.package.module for library in (*LIBRARIES, Fa4, FlashMla)}
    if any(importlib.util.find_spec(module) for module in modules):
        pytest.skip("a package is really here")
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in modules]:
        del sys.modules[name]


def install(folder: Path, *files: str, broken: bool = True) -> None:
    """Files that are found but cannot be imported, or have just what is asked when loaded."""
    text = (
        "raise ImportError('built for another torch')"
        if broken
        else "def has_legacy(): return True"
    )
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    importlib.invalidate_caches()


PACKAGES = {
    "fa3": ["sgl_kernel/__init__.py", "sgl_kernel/flash_attn.py"],
    "fa4": ["flash_attn/cute/interface.py"],
    "flashmla": ["flash_mla/__init__.py"],
}
REAL: dict[str, type[AttentionBackend]] = {"fa3": Fa3, "fa4": Fa4, "flashmla": FlashMla}


@pytest.mark.parametrize("name", REAL)
def test_a_missing_package_is_named(name: str, bare: Path) -> None:
    kind, need = REAL[name], GPU if name != "flashmla" else replace(MLA, phase=Phase.DECODE)
    [reason] = kind.why_not(need)
    assert "is not installed" in reason and "pip install" in reason
    install(bare, *PACKAGES[name])
    assert kind.why_not(need) == []  # found without importing it, which would fail


@pytest.mark.parametrize("module", ["flash_attn", "vllm", "sgl_kernel"])
def test_a_package_without_the_kernels_is_none(module: str, bare: Path) -> None:
    """FlashAttention 2 is called flash_attn too."""
    install(bare, f"{module}/__init__.py")
    assert Fa3.find() is None
    assert Fa4.package.find() is None


def test_the_first_build_found_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(bare, *PACKAGES["fa3"])
    assert Fa3.find() is SglFa3
    install(bare, "vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    assert Fa3.find() is VllmFa3
    install(bare, "flash_attn_interface.py")
    assert Fa3.find() is UpstreamFa3
    library = bare / "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library))
    assert Fa3.find() is VllmFa3
    assert VllmFa3.find() == library
    monkeypatch.setenv(LIBRARY_VARIABLE, str(bare / "nothing.so"))
    with pytest.raises(ConfigError, match=r"nothing\.so, which is not a file"):
        Fa3.find()


@pytest.mark.parametrize("name", REAL)
def test_a_package_that_does_not_load_is_refused_at_the_start(name: str, bare: Path) -> None:
    install(bare, *PACKAGES[name])
    pools = ModelPools(ModelLayout(()), PoolShape(1, 64), CPU)
    with pytest.raises(ConfigError, match=r"built for another torch.*choose another"):
        REAL[name](GPU, pools)


def test_another_version_of_a_package_is_passed_over(bare: Path) -> None:
    """DeepSeek's flash_mla has no `has_legacy`."""
    (bare / "flash_mla").mkdir()
    (bare / "flash_mla" / "__init__.py").write_text("def get_mla_metadata(): ...")
    importlib.invalidate_caches()
    [reason] = FlashMla.why_broken(MLA)
    assert "has_legacy" in reason
    assert default(replace(MLA, phase=Phase.DECODE)) == "triton"


def test_older_builds_return_the_log_sum_exp_too() -> None:
    def varlen(q: Tensor, *rest: object, **named: object) -> tuple[Tensor, Tensor]:
        return q, q.new_zeros(1)

    ends = torch.tensor([0, 2], dtype=torch.int32)
    q = torch.randn(2, 3, 8)
    library = UpstreamFa3(SimpleNamespace(flash_attn_varlen_func=varlen))
    x = UnpagedInput(q, q, q, ends, ends, 2, 2)
    assert library.attend_unpaged(x, FlashMask(causal=True), 1.0) is q


@pytest.mark.parametrize(
    ("name", "need", "reason"),
    [
        ("fa3", replace(GPU, masks=frozenset({LayerMask(Mask.CUSTOM)})), "no custom mask"),
        ("fa3", replace(GPU, masks=frozenset({LayerMask(Mask.BLOCK, 8)})), "block mask has no win"),
        ("fa3", replace(GPU, dtype=torch.float32), "not torch.float32"),
        ("fa3", replace(GPU, kv_dtype=torch.float8_e4m3fn), "not torch.float8_e4m3fn"),
        ("fa3", replace(GPU, kv_dtype=torch.float16), "q's dtype .torch.bfloat16., not torch.fl"),
        ("fa3", replace(GPU, head_dim=260), "head dim 260 is not a multiple of 8 up to 256"),
        ("fa3", replace(GPU, head_dim=36), "head dim 36 is not a multiple of 8"),
        ("fa3", replace(GPU, arch="sm_100"), "it runs on sm_90, not sm_100"),
        ("fa3", replace(GPU, arch="gfx942"), "it runs on sm_90, not gfx942"),
        ("fa3", replace(GPU, device="cpu", arch=None), "it runs on cuda, not cpu"),
        ("fa3", replace(GPU, page_sizes=frozenset({256})), "not of 256"),
        ("fa3", replace(GPU, sinks=True, num_heads=128), "at most 64 heads"),
        ("fa3", replace(GPU, logit_softcap=True), "soft-cap"),
        ("fa3", replace(MLA, head_dim=320, latent_dim=256), "512 . 64, not 256 . 64"),
        ("fa3", replace(MLA, latent_dim=448), "512 . 64, not 448 . 128"),
        ("fa3", replace(MLA, masks=frozenset({LayerMask(window=8)})), "latent.*no window"),
        ("fa3", replace(MLA, sinks=True), "latent.*no sinks"),
        ("fa4", replace(GPU, arch="sm_80"), "it runs on sm_100 and sm_90, not sm_80"),
        ("fa4", replace(GPU, phase=Phase.DECODE), "on sm_90: prefill only"),
        ("fa4", replace(MLA), "no latent .MLA. attention on sm_90"),
        ("fa4", replace(GPU, arch="sm_100", head_dim=256), "256 is more than 128 on sm_100"),
        ("fa4", replace(GPU, page_sizes=frozenset({16})), "pages of 64, 128 tokens, not of 16"),
        ("flashmla", replace(MLA), "it does not serve prefill"),
        ("flashmla", replace(GPU, phase=Phase.DECODE), "no attention over K and V"),
        ("flashmla", replace(MLA, phase=Phase.DECODE, latent_dim=448), "512 . 64, not 448 . 128"),
        ("flashmla", replace(MLA, phase=Phase.DECODE, head_dim=544), "512 . 64, not 512 . 32"),
        ("flashmla", replace(MLA, kv_dtype=torch.float8_e4m3fn), "not torch.float8_e4m3fn"),
        ("flashmla", replace(MLA, phase=Phase.VERIFY, arch="sm_100"), "not sm_100"),
    ],
)
def test_refusals(name: str, need: AttentionNeed, reason: str, bare: Path) -> None:
    install(bare, *PACKAGES[name])
    reasons = REAL[name].why_not(need)
    assert [said for said in reasons if re.search(reason, said)], reasons


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("fa3", GPU),
        ("fa3", replace(GPU, head_dim=32, phase=Phase.VERIFY, graph=True)),
        ("fa3", replace(GPU, masks=frozenset({CAUSAL, WINDOW, BLOCK}), phase=Phase.EXTEND)),
        ("fa3", replace(GPU, masks=frozenset({BLOCK, *SLIDING}), phase=Phase.VERIFY)),
        ("fa3", MLA),
        ("fa3", replace(MLA, phase=Phase.DECODE, num_heads=128, graph=True)),
        ("fa3", replace(GPU, sinks=True, num_heads=64)),
        ("fa4", GPU),
        *(("fa4", replace(GPU, arch="sm_100", phase=phase)) for phase in Phase),
        *(("fa4", replace(MLA, arch="sm_100", phase=phase)) for phase in Phase),
        *(
            ("flashmla", replace(MLA, phase=phase, graph=True))
            for phase in (Phase.DECODE, Phase.VERIFY)
        ),
    ],
)
def test_what_is_served(name: str, need: AttentionNeed, bare: Path) -> None:
    install(bare, *PACKAGES[name])
    assert REAL[name].why_not(need) == []


def default(need: AttentionNeed) -> str:
    return select(need, Wanted()).backend.name


def test_defaults_without_and_with_packages(
    bare: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages of 16 all but steps over K and V goes to fa3, with 64 only MLA prefill."""
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    mla = [replace(MLA, phase=phase) for phase in Phase]
    dense = [replace(GPU, phase=phase, page_sizes=frozenset({16})) for phase in Phase]
    assert {default(need) for need in dense} == {"triton"}
    files = [file for files in PACKAGES.values() for file in files]
    install(bare, *files)  # they are there, and do not load
    assert {default(need) for need in dense} == {"triton"}
    assert "fa3 is passed over: its library cannot be loaded with torch" in caplog.text
    assert "built for another torch" in caplog.text
    install(bare, *files, broken=False)
    assert [default(need) for need in dense] == ["fa3", "triton", "triton", "triton"]
    assert {default(replace(need, page_sizes=None)) for need in dense} == {"triton"}
    assert [default(need) for need in mla] == ["fa3", "triton", "triton", "triton"]
    assert {default(replace(need, page_sizes=frozenset({16}))) for need in mla} == {"fa3"}
    for arch in ("gfx942", "gfx950", "sm_80", "sm_100", None):
        assert {default(replace(need, arch=arch)) for need in dense} == {"triton"}
    trees = frozenset({CAUSAL, LayerMask(Mask.CUSTOM)})
    assert default(replace(GPU, masks=trees, phase=Phase.VERIFY)) == "triton"
    assert default(replace(GPU, page_sizes=frozenset({256}))) == "triton"


def test_builds_without_sinks_say_so(bare: Path) -> None:
    install(bare, "flash_attn_interface.py")
    assert Fa3.why_not(GPU) == []
    [reason] = Fa3.why_not(replace(GPU, sinks=True))
    assert reason == "flash_attn_interface has no attention sinks"
