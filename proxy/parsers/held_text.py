"""Generated text that is not parsed yet, with the place up to which it is parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPACE = " \t\r\n"
MAX_SPACE_CHARACTERS = 1024
"""White space before a call or after thinking that is layout. Of a longer run only this much is dropped, so that a
parser need not hold more of it back."""


class HeldText:
    """Parsing moves `at` forward instead of copying the rest, so it takes time linear in the length of the text.

    Parsers may leave only a bounded number of characters unparsed, because `push` copies them.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0

    def push(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def num_left(self) -> int:
        return len(self.text) - self.at

    def take(self, end: int | None = None) -> str:
        """Returns the text up to `end`, or all that is left, and moves there."""
        end = len(self.text) if end is None else end
        taken = self.text[self.at : end]
        self.at = end
        return taken


class Markers:
    """A set of texts that divide generated text, none of which begins with another one."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._max_characters = max(map(len, markers))

    def find(self, held: HeldText) -> re.Match[str] | None:
        """Returns the first marker that is complete."""
        return self._pattern.search(held.text, held.at)

    def end_of_certain(self, held: HeldText) -> int:
        """Returns the end of the text that cannot be part of a marker. No marker may be complete."""
        last = held.text[max(held.at, len(held.text) - self._max_characters) :]
        return len(held.text) - _num_held_back(last, self._markers)


def _num_held_back(text: str, markers: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a marker that is not complete."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0 and not marker.startswith(text[start:]):
            start = text.find(marker[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


def start_of_space(text: str, start: int, end: int) -> int:
    """Returns where the white space at the end of text[start:end] begins, of which at most so much is layout."""
    first = max(start, end - MAX_SPACE_CHARACTERS)
    return first + len(text[first:end].rstrip(SPACE))


_NO_SPACE = re.compile(f"[^{SPACE}]")


def after_space(held: HeldText) -> int:
    """Returns where the white space at the beginning of the unparsed text ends."""
    found = _NO_SPACE.search(held.text, held.at)
    return len(held.text) if found is None else found.start()
