"""Stop strings: found across token boundaries, never shown, never held back longer than they might still match."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Filters the text of one choice. Text is released as soon as it cannot be the start of a stop string."""

    __slots__ = ("_first", "_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings; of several that match, the one that completes first wins."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text to release, whether a stop string matched). After a match nothing more may be fed."""
        text = self._held + text
        best_end, best_start = len(text) + 1, -1
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and start + len(stop) < best_end:
                best_end, best_start = start + len(stop), start
        if best_start >= 0:
            self._held = ""
            return text[:best_start], True
        cut = self._possible_start(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """First position from which the rest of `text` is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first:
                rest = text[start:]
                if any(stop.startswith(rest) for stop in self._stops):
                    return start
        return len(text)
