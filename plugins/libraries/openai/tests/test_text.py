"""Text comes out piece by piece, and never differs from the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from jackfield_openai.text import TextStream


def decode(token_ids: Sequence[int]) -> str:
    """Token ids are bytes."""
    return bytes(token_ids).decode(errors="replace")


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), max_size=8).map(sorted)


@given(text=st.text(st.sampled_from("abé四\U0001f600 "), max_size=30), data=st.data())
def test_pieces_are_the_text_cut_at_its_first_stop_string(text: str, data: st.DataObject) -> None:
    stop = data.draw(st.lists(st.text(st.sampled_from("abé "), min_size=1, max_size=3), max_size=3))
    token_ids = text.encode()
    places = [0, *data.draw(cuts(len(token_ids))), len(token_ids)]
    stream = TextStream(decode, stop)
    pieces = [stream.feed(token_ids[begin:end]) for begin, end in itertools.pairwise(places)]
    found = [place for string in stop if (place := text.find(string)) >= 0]
    assert text[: min(found, default=len(text))] == "".join(pieces) + stream.finish()


def test_a_character_waits_for_its_last_byte() -> None:
    stream = TextStream(decode)
    first, second = "é".encode()
    assert ["a", "", "é"] == [stream.feed(b"a"), stream.feed([first]), stream.feed([second])]


def test_what_may_begin_a_stop_string_is_held_until_it_is_none() -> None:
    stream = TextStream(decode, ["END"])
    assert ["a", "", "ENa", "b", ""] == [stream.feed(each) for each in (b"aE", b"N", b"a", b"bEN", b"Dc")]
    assert "" == stream.finish()


def test_bytes_that_stay_broken_come_at_the_end() -> None:
    stream = TextStream(decode)
    assert "a" == stream.feed(b"a")
    assert "" == stream.feed([0xC3])
    assert "\ufffd" == stream.finish()
