"""Memory of weights on a CPU in large pages."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forerun.kernels.cpu import large_pages, library
from forerun.kernels.cpu.large_pages import ALIGNMENT, BLOCK

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs a C++ compiler")


def test_tensors_are_aligned_and_apart() -> None:
    """Also of several threads, past the end of a block, and of more than a block."""
    sizes = [0, 1, 63, 64, 65, 3 << 20, BLOCK - 1, BLOCK, BLOCK + 1, 5 << 20] * 2
    with ThreadPoolExecutor(4) as threads:
        tensors = list(threads.map(large_pages.empty, sizes))
    assert [x.nbytes for x in tensors] == sizes
    assert all(x.dtype == torch.uint8 and x.data_ptr() % ALIGNMENT == 0 for x in tensors if len(x))
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors if len(x))
    ends = [end for _, end in spans[:-1]]
    assert all(end <= begin for end, (begin, _) in zip(ends, spans[1:], strict=True))


def test_small_weights_share_a_block_that_is_freed_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[object]] = []
    new_block = large_pages._new_block

    def recorded(nbytes: int) -> object:
        block = new_block(nbytes)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(large_pages, "_new_block", recorded)
    monkeypatch.setattr(large_pages, "_blocks", large_pages._Blocks())
    tensors = [large_pages.empty(1 << 20) for _ in range(BLOCK >> 20)]
    assert len(made) == 1
    del tensors[1:]
    gc.collect()
    assert made[0]() is not None
    del tensors
    gc.collect()
    assert made[0]() is None
    large_pages.empty(1)
    assert len(made) == 2
