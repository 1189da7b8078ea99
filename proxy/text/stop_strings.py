"""Ends streamed text at stop strings; text that may be the beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Stop strings of one sequence. The match that ends first wins, however the text is split into pieces.

    is_shown: the text includes the stop string. matched: the stop string that has ended the text.
    """

    def __init__(self, stops: Sequence[str], is_shown: bool = False) -> None:
        assert all(stops), "validation refuses empty stop strings"
        self._stops = tuple(stops)
        self._is_shown = is_shown
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Returns (text that can be shown, whether a stop string has ended it).

        may_end: whether a stop string that this text completes ends it. One that was completed earlier never does.
        """
        if not self._stops or not text:
            return text, False
        held = len(self._held)
        text = self._held + text
        found = ((stop, text.find(stop, max(0, held + 1 - len(stop)))) for stop in self._stops if may_end)
        matches = [(start + len(stop), start) for stop, start in found if start >= 0]
        if matches:
            self._held = ""
            end, start = min(matches)
            self.matched = text[start:end]
            return text[: end if self._is_shown else start], True
        num_held = num_held_back(text, self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Returns the held text at the end of the sequence."""
        held, self._held = self._held, ""
        return held


def num_held_back(text: str, markers: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a marker that is not complete."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0 and not marker.startswith(text[start:]):
            start = text.find(marker[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
