"""Ends streamed text at stop strings; text that may be the beginning of one is held back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache


class _Stop:
    """Searches text that comes in pieces for one stop string, in time linear in the text (Knuth, Morris and Pratt).

    num_matched: characters at the end of the text that are the beginning of the stop string.
    """

    __slots__ = ("_failure", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._failure = _failure(text)

    def push(self, piece: str, may_end: bool) -> int | None:
        """Returns where in the piece the stop string ends first, if it does and may."""
        stop, failure, number, place = self.text, self._failure, self.num_matched, 0
        while place < len(piece):
            if not number:
                place = piece.find(stop[0], place)
                if place < 0:
                    break
            character = piece[place]
            while number and stop[number] != character:
                number = failure[number - 1]
            number += stop[number] == character
            place += 1
            if number == len(stop):
                if may_end:
                    return place
                number = failure[number - 1]
        self.num_matched = number
        return None


@lru_cache(maxsize=1024)
def _failure(text: str) -> array[int]:
    """Returns for each beginning of the text how long a shorter beginning is that it ends with."""
    lengths = array("H", [0])
    number = 0
    for place in range(1, len(text)):
        while number and text[number] != text[place]:
            number = lengths[number - 1]
        number += text[number] == text[place]
        lengths.append(number)
    return lengths


class StopStrings:
    """Stop strings of one sequence. The match that ends first wins, however the text is split into pieces.

    is_shown: the text includes the stop string. matched: the stop string that has ended the text.
    """

    def __init__(self, stops: Sequence[str], is_shown: bool = False) -> None:
        assert all(stops), "validation refuses empty stop strings"
        self._stops = [_Stop(stop) for stop in stops]
        self._is_shown = is_shown
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Returns (text that can be shown, whether a stop string has ended it).

        may_end: whether a stop string that this text completes ends it. One that was completed earlier never does.
        """
        if not self._stops or not text:
            return text, False
        ends = [(end, stop.text) for stop in self._stops if (end := stop.push(text, may_end)) is not None]
        num_before, text = len(self._held), self._held + text
        if ends:
            self._held = ""
            end = num_before + min(end for end, _ in ends)
            self.matched = max((stop for each, stop in ends if num_before + each == end), key=len)
            return text[: end if self._is_shown else end - len(self.matched)], True
        num_held = max(stop.num_matched for stop in self._stops)
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
