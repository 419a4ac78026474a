"""Stop strings against their definition: cut the whole text before the stop that completes first."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from router.stops import StopScanner

TEXT = st.text(alphabet="ab<>", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<>", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """Piece by piece, look at all the text so far."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(stop) + len(stop), i, text.find(stop)) for i, stop in enumerate(stops) if stop in text]
        if found:
            return text[: min(found)[2]], True
    return text, False


@given(pieces=st.lists(TEXT, max_size=12), stops=STOPS)
@example(pieces=["aab"], stops=["ab", "aab"])
@example(pieces=["a", "a", "b"], stops=["ab"])
def test_any_split_gives_the_same_text(pieces: list[str], stops: list[str]) -> None:
    scanner, released, matched = StopScanner(stops), "", False
    for piece in pieces:
        text, matched = scanner.feed(piece)
        released += text
        if matched:
            break
    if not matched:
        released += scanner.flush()
    assert (released, matched) == expected(pieces, stops)


@given(text=TEXT, stops=STOPS)
def test_nothing_is_held_back_that_cannot_match(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    released, matched = scanner.feed(text)
    if not matched:
        held = scanner.flush()
        assert released + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_flows_while_no_stop_is_near() -> None:
    scanner = StopScanner(["<stop>"])
    assert scanner.feed("hello <") == ("hello ", False)
    assert scanner.feed("st") == ("", False)
    assert scanner.feed("rong> <stop> tail") == ("<strong> ", True)
