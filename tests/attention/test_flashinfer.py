"""FlashInfer's backends over a stand-in of its calls, compared with the plain backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from forerun.attention.base import AttentionNeed, LayerMask, Mask
from forerun.attention.capabilities import Phase
from forerun.attention.flashinfer import FlashInfer, TreeMask
from forerun.attention.flashinfer_mla import FlashInferMla
from forerun.attention.select import survey
from forerun.attention.trtllm_mha import TrtllmMha, pack_mask, pack_tree
from tests.attention import stand_in_flashinfer as stand_in
from tests.attention.pair import BLOCK, CAUSAL, Pair, Sizes, trees

CPU = torch.device("cpu")
NEED = AttentionNeed("cpu", torch.float32, 0, 0, 0, frozenset(), arch="sm_90")
H200 = AttentionNeed(
    "cuda", torch.bfloat16, 128, 32, 8, frozenset({CAUSAL}), graph=True, arch="sm_90"
)
B200 = replace(H200, arch="sm_100")
DENSE, LATENT = Sizes(6, 2, 32), Sizes(4, 1, 24, latent=16)
WINDOW = LayerMask(window=7)
CHUNKS = [((0, 20), (0, 1), (0, 33)), ((20, 3), (1, 90), (33, 2))]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, _interpreter: None) -> Iterator[None]:
    """Our own kernels are replaced by their reference implementations: they have other tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with stand_in.installed():
        yield


def pair(name: str, page: int, masks: list[LayerMask], need: AttentionNeed = NEED) -> Pair:
    sizes = LATENT if name == "flashinfer_mla" else DENSE
    return Pair(stand_in.KINDS[name], sizes, page, masks, need)


def run(each: Pair, widths: tuple[int, ...] = (1, 5, 16), prefills: bool = True) -> None:
    """Prompts in two ragged chunks, then steps of several widths and lengths."""
    for spans in CHUNKS:
        each.prefill(spans, prefills)
    for width in widths:
        each.step([23, 91, 35], width)
        each.step([24, 3, 120], width)


# --- equality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16, 64])
def test_flashinfer(page: int) -> None:
    run(pair("flashinfer", page, [CAUSAL, WINDOW, BLOCK]))
    # fa3 prefills; windows and steps, which split long contexts, are fa2's.
    assert {"fa3 True", "fa3 False", "fa2 True", "fa2 False"} == set(stand_in.calls)


@pytest.mark.parametrize("page", [16, 64])
def test_flashinfer_mla(page: int) -> None:
    run(pair("flashinfer_mla", page, [CAUSAL, BLOCK]))
    assert {"mla fa3 True", "mla fa3 False"} == set(stand_in.calls)


@pytest.mark.parametrize("page", [16, 64, 128])
def test_xqa(page: int) -> None:
    run(pair("trtllm_mha", page, [CAUSAL, BLOCK]), (1, 5, 16, 33), prefills=False)
    assert set(stand_in.calls) == {f"xqa {width}" for width in (1, 5, 16, 33)}


def test_a_window_of_one_token_a_request() -> None:
    one = replace(NEED, phase=Phase.DECODE)
    run(pair("trtllm_mha", 16, [CAUSAL, WINDOW], one), (1,), prefills=False)


def test_trtllm_gen() -> None:
    """On Blackwell: causal, with windows, and no mask is passed."""
    with stand_in.installed("trtllm-gen"):
        need = replace(NEED, arch="sm_100")
        run(pair("trtllm_mha", 64, [CAUSAL, WINDOW], need), prefills=False)


def test_sinks() -> None:
    each = pair("trtllm_mha", 16, [CAUSAL])
    each.sinks = torch.linspace(-1, 2, DENSE.heads)
    run(each, prefills=False)


@pytest.mark.parametrize("name", ["flashinfer", "trtllm_mha"])
@pytest.mark.parametrize("width", [2, 7, 16, 40, 64, 100])
def test_trees(name: str, width: int) -> None:
    """Another tree for every request; contexts shorter than a byte of mask bits too."""
    each = pair(name, 16, [CAUSAL])
    for spans in CHUNKS:
        each.prefill(spans, subject_attends=False)
    for starts in ([23, 91, 35], [24, 3, 120], [0, 1, 5]):
        each.step(starts, width, trees(width, CPU))


def test_layers_with_blocks_keep_them_beside_a_tree() -> None:
    each = pair("trtllm_mha", 16, [CAUSAL, BLOCK])
    each.prefill(CHUNKS[0], subject_attends=False)
    each.step([20, 1, 33], 5, trees(5, CPU))


# --- planning on the host -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tree"), [("flashinfer", False), ("flashinfer_mla", False)])
def test_a_replay_without_a_plan_is_wrong(name: str, tree: bool) -> None:
    each = pair(name, 16, [CAUSAL])
    for spans in CHUNKS:
        each.prefill(spans)
    each.step([23, 91, 35], 4)
    buffers = each.buffers[4, False]  # planned for other lengths
    with pytest.raises(AssertionError, match="not close"):
        each.compare(each.batch([9, 40, 35], 4), buffers, 16, 12, [CAUSAL])


def test_a_step_in_flight_keeps_its_plan() -> None:
    """The next prefill is planned while a step is in flight: with other wrappers."""
    each = pair("flashinfer", 16, [CAUSAL])
    batches = []
    for spans in CHUNKS:
        each.prefill(spans)
        assert isinstance(each.subject, FlashInfer)
        batches.append(each.subject._prefill[-1][CAUSAL])
    assert batches[0] is not batches[1]


def test_the_scale_of_mla_is_learned_before_capture() -> None:
    """A plan made with another scale is made again in the first forward, and kept after that."""
    each = pair("flashinfer_mla", 16, [CAUSAL])
    run(each)
    assert isinstance(each.subject, FlashInferMla)
    assert each.subject._scale == LATENT.dim**-0.5
    buffers = each.prepared([5, 6, 7], 4, None)
    passes = buffers.of(each.subject, each.batch([5, 6, 7], 4), 0)
    assert vars(passes)["scale"] == LATENT.dim**-0.5


# --- masks --------------------------------------------------------------------------------------


def test_masks_fill_whole_words() -> None:
    assert pack_mask(Mask.CAUSAL, 3, CPU).tolist() == [[[1, 0], [3, 0], [7, 0]]]
    assert pack_mask(Mask.BLOCK, 33, CPU).shape == (1, 33, 4)
    assert pack_mask(Mask.BLOCK, 33, CPU)[0, 0].tolist() == [65535, 65535, 1, 0]
    assert pack_tree(torch.tensor([[[1], [3], [5]]])).tolist() == [[[1, 0], [3, 0], [5, 0]]]
    last = torch.zeros(1, 64, 1, dtype=torch.int64)
    last[0, 63] = -(1 << 63) | 1 << 40 | 1
    assert pack_tree(last)[0, 63].tolist() == [1, 0, 256, 32768]
    wide = torch.zeros(1, 80, 2, dtype=torch.int64)
    wide[0, 79, 1] = 1 << 15
    assert pack_tree(wide).shape == (1, 80, 6)
    assert pack_tree(wide)[0, 79].tolist() == [0, 0, 0, 0, 32768, 0]


def test_a_tree_mask_forgets_the_step_before() -> None:
    device_shape = pair("flashinfer", 16, [CAUSAL])
    shape = device_shape.batch([0, 0, 0], 9, trees(9, CPU)).decode_shape(64)
    written, fresh = TreeMask(shape), TreeMask(shape)
    start = torch.tensor([3, 40, 1, 0], dtype=torch.int32)
    written.write(torch.tensor([9, 2, 30, 0], dtype=torch.int32), trees(9, CPU).flip(0))
    written.write(start, trees(9, CPU))
    fresh.write(start, trees(9, CPU))
    assert torch.equal(written.bits, fresh.bits)
    hidden = 81 - int(stand_in.bits_of(trees(9, CPU)[0].flatten().view(torch.uint8), 9 * 64).sum())
    own = written.bits[: -(-9 * 12 // 8)]
    assert int((stand_in.bits_of(own, 9 * 12) == 0).sum()) == hidden


# --- what they refuse ---------------------------------------------------------------------------


def test_what_is_refused() -> None:
    assert TrtllmMha.why_not(H200) == FlashInfer.why_not(H200) == []
    block, tree = frozenset({BLOCK}), frozenset({LayerMask(Mask.CUSTOM)})
    window = frozenset({WINDOW})
    for masks in (block, tree):
        assert TrtllmMha.why_not(replace(H200, masks=masks)) == []
        (reason,) = TrtllmMha.why_not(replace(B200, masks=masks))
        assert "TRTLLM-gen (sm_100) is causal only" in reason
    assert TrtllmMha.why_not(replace(B200, masks=window, phase=Phase.VERIFY)) == []
    (reason,) = TrtllmMha.why_not(replace(H200, masks=window, phase=Phase.VERIFY))
    assert "window is the same for all tokens" in reason
    assert TrtllmMha.why_not(replace(H200, phase=Phase.PREFILL)) == ["it does not serve prefill"]
    assert "gfx942" in TrtllmMha.why_not(replace(H200, arch="gfx942"))[0]
    fp8 = replace(H200, kv_dtype=torch.float8_e4m3fn)
    for kind in (TrtllmMha, FlashInfer):
        assert any("float8" in reason for reason in kind.why_not(fp8))
    mla = replace(H200, mla=True, dense=False, head_dim=576, latent_dim=512, num_kv_heads=1)
    assert FlashInferMla.why_not(mla) == []
    (reason,) = FlashInferMla.why_not(replace(mla, latent_dim=448))
    assert reason == "its latent rows are 512 + 64, not 448 + 128"
    assert "it has no custom mask" in FlashInferMla.why_not(replace(mla, masks=tree))
    assert "it has no attention over K and V (MLA only)" in FlashInferMla.why_not(H200)


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flashinfer", "flashinfer.decode", "flashinfer.mla"):
        monkeypatch.delitem(sys.modules, module)
    reasons = survey(H200)
    for name in ("trtllm_mha", "flashinfer", "flashinfer_mla"):
        assert (
            "flashinfer-python is not installed (pip install flashinfer-python)" in reasons[name][0]
        )
