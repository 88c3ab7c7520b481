"""The page allocator compared with a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import ConfigError, InternalError
from forerun.kvcache.pages import PageAllocator
from tests.property_examples import examples


def test_a_fresh_allocator_gives_ascending_pages_and_never_page_zero() -> None:
    allocator = PageAllocator(6)
    assert allocator.capacity == allocator.num_free == 5
    assert allocator.allocate(2) == [1, 2]
    assert allocator.allocate(0) == []
    assert allocator.allocate(3) == [3, 4, 5]
    assert allocator.num_free == 0
    assert allocator.allocate(1) is None


def test_a_failed_allocation_changes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.allocate(3) == [1, 2, 3]


def test_pages_freed_together_are_allocated_in_order() -> None:
    allocator = PageAllocator(100)
    pages = allocator.allocate(10)
    assert pages is not None
    allocator.free(pages[4:8])
    assert allocator.allocate(4) == pages[4:8]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [([2], "Page 2 was freed twice"), ([0], "Page 0 "), ([9], r"1\.\.4"), ([-1], "Page -1 ")],
)
def test_freeing_a_page_that_is_not_allocated_is_an_error(wrong: list[int], message: str) -> None:
    allocator = PageAllocator(5)
    allocator.allocate(4)
    allocator.free([2])
    with pytest.raises(InternalError, match=message) as caught:
        allocator.free(wrong)
    assert isinstance(caught.value, AssertionError)


def test_the_same_page_twice_in_one_call_is_a_double_free() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(4)
    with pytest.raises(InternalError, match="Page 3 was freed twice"):
        allocator.free([3, 1, 3])


def test_a_negative_count_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="-1 pages"):
        PageAllocator(5).allocate(-1)


def test_a_pool_without_pages_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 .* raise mem_fraction_static"):
        PageAllocator(1)


@examples(60)
@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_equals_a_set(num_pages: int, calls: list[tuple[bool, int]]) -> None:
    allocator, other = PageAllocator(num_pages), PageAllocator(num_pages)
    out: list[int] = []
    for take, n in calls:
        if take:
            room = num_pages - 1 - len(out)
            pages = allocator.allocate(n)
            assert pages == other.allocate(n)  # the order depends on the calls alone
            assert (pages is None) == (n > room)
            if pages is not None:
                assert len(pages) == n
                out += pages
        else:
            back = out[::3][:n]
            out = [page for page in out if page not in back]
            allocator.free(back)
            other.free(back)
        assert len(set(out)) == len(out) and all(0 < page < num_pages for page in out)
        assert allocator.num_free == num_pages - 1 - len(out)
        assert [allocator.is_out(page) for page in range(num_pages)] == [
            page in out for page in range(num_pages)
        ]
