"""Events come out the same however the bytes are cut; what is not an event is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun_bench.serving.http import RequestFailed
from forerun_bench.serving.sse import EventParser

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


def events(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser()
    out = [event for piece in pieces for event in parser.feed(piece)]
    parser.close()
    return out


@given(
    st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.data(),
)
def test_events_do_not_depend_on_the_cuts(
    messages: list[list[str]], end: str, data: st.DataObject
) -> None:
    stream = "".join(
        "".join(f"data: {line}{end}" for line in lines) + end for lines in messages
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert events(pieces) == ["\n".join(lines).encode() for lines in messages]


def test_comments_and_other_fields_are_no_data() -> None:
    stream = b": ping\n\nevent: message\nid: 3\nretry: 10\ndata:x\n\n\n\ndata: y\n\n"
    assert events([stream]) == [b"x", b"y"]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"Internal Server Error\n", "not a server-sent event: b'Internal Server Error'"),
        (b'{"error": {"message": "x"}}\n\n', "not a server-sent event"),
        (b"dat: x\n\n", "not a server-sent event"),
        (b"data: x\n", "ended within an event"),
        (b"data: x", "ended within an event"),
    ],
)
def test_malformed_streams_are_refused(stream: bytes, message: str) -> None:
    with pytest.raises(RequestFailed, match="malformed stream") as caught:
        events([stream])
    assert message in str(caught.value)
