"""Stop strings end a text in the same place whatever pieces it comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.stop_strings import StopStrings


def _feed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    holder = StopStrings(stops)
    released = [holder.push(piece) for piece in pieces]
    return [*released, holder.finish()], holder.match


@pytest.mark.parametrize(
    ("stops", "pieces", "released", "match"),
    [
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], ["", "", "", "", ""], "DEFGHIJ"),
        (["DEFGHIJ"], ["xDE", "F", "GX"], ["x", "", "DEFGX", ""], None),
        (["DEFGHIJ"], ["y", "DEF"], ["y", "", "DEF"], None),
        (["b", "abc"], ["abcd"], ["", ""], "abc"),
        (["b", "abc"], ["a", "b", "c", "d"], ["", "", "", "", ""], "abc"),
        (["b", "abc"], ["a", "b", "d"], ["", "", "a", ""], "b"),
        (["b", "abc"], ["a", "b"], ["", "", "a"], "b"),
        (["aab"], ["aa", "ab"], ["", "a", ""], "aab"),
        (["abc", "ab"], ["xabc"], ["x", ""], "ab"),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_stop_string_over_pieces_is_cut(
    stops: list[str], pieces: list[str], released: list[str], match: str | None
):
    assert _feed(stops, pieces) == (released, match)


def test_text_after_a_stop_string_is_dropped():
    stops = StopStrings(["."])
    assert stops.push("One. Two.") == "One"
    assert stops.push(" Three.") == ""
    assert stops.finish() == ""
    assert stops.match == "."


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        StopStrings(["a", ""])


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
)
def test_released_text_is_the_text_up_to_the_earliest_match(pieces: list[str], stops: list[str]):
    text = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    released, match = _feed(stops, pieces)
    assert "".join(released) == text[: min(found, default=len(text))]
    assert (match is None) == (not found)
