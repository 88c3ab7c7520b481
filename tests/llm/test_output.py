"""Statistics of requests that are cut: by a stop string, and by what is held back of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.core.request import RequestRecord, drop_last
from forerun.llm.output import Progress, meta_info


@given(
    steps=st.lists(st.integers(1, 5), max_size=12) | st.lists(st.just(1), max_size=12),
    cut=st.integers(0, 20),
    data=st.data(),
)
def test_accepted_drafts_never_exceed_the_tokens_of_their_step(
    steps: list[int], cut: int, data: st.DataObject
) -> None:
    """`steps`: tokens of each, of which all but the last are drafts."""
    tokens = 1 + sum(steps)
    record = RequestRecord("r", (1, 2), arrival=0.0)
    record.output = list(range(tokens))
    record.accept_lengths = list(steps)
    record.correct_drafts = [length - 1 for length in steps]
    plain = max(steps, default=1) == 1 and data.draw(st.booleans())
    record.proposed = 0 if plain else 5 * len(steps)
    record.trim(max(tokens - cut, 0))
    held = data.draw(st.integers(0, len(record.output)))
    info = meta_info(record, Progress.of(record, len(record.output) - held))

    lengths = drop_last(record.accept_lengths, held)
    correct = list(map(min, record.correct_drafts, lengths))
    assert info["spec_accept_lengths"] == lengths
    assert info["spec_num_correct_drafts"] == sum(correct)
    histogram = info["spec_correct_drafts_histogram"]
    assert histogram == [correct.count(n) for n in range(max(correct, default=-1) + 1)]
    assert sum(histogram) == info["spec_verify_ct"] == len(lengths)
