"""Takes off the marks that some families put around their answers, such as `<response>`. Pure, incremental."""

from __future__ import annotations

from tandem.proxy.parsers.held_text import MAX_SPACE_CHARACTERS, SPACE, HeldText, Markers, after_space
from tandem.proxy.parsers.parsed import Cut


class AnswerMarks:
    """The marks of one sequence.

    openings: count only at the beginning of the answer. closings: count only at its end, with white space around them;
    elsewhere both are text.
    """

    def __init__(self, openings: tuple[str, ...], closings: tuple[str, ...]) -> None:
        self._openings = openings
        self._closings = Markers(closings) if closings else None
        self._held = HeldText()
        self._is_begun = False
        self._is_opened = False  # white space after an opening is layout
        self._pending: list[str] = []  # a closing, and white space: content only if more text follows
        self._has_closing = False

    def push(self, text: str, is_end: bool = False, cut: Cut | None = None) -> str:
        """Returns what the text adds to the answer."""
        held = self._held
        held.push(text)
        if not self._is_begun and not self._begin(is_end, cut):
            return ""
        if self._closings is None:
            return held.take()
        pieces: list[str] = []
        while (found := self._closings.find(held)) is not None:
            self._add(held.take(found.start()), pieces)
            self._pending.append(held.take(found.end()))
            self._has_closing = True
        certain = self._closings.end_of_certain(held)
        if is_end and cut != "length":
            certain = len(held.text)
        self._add(held.take(certain), pieces)
        if is_end:
            held.take()
            if not self._has_closing:
                pieces += self._pending
        return "".join(pieces)

    def _begin(self, is_end: bool, cut: Cut | None) -> bool:
        """Skips the openings. Returns whether what follows is known to be the answer."""
        held = self._held
        start = after_space(held)
        while start - held.at <= MAX_SPACE_CHARACTERS:
            found = next((mark for mark in self._openings if held.text.startswith(mark, start)), None)
            if found is None:
                rest = held.text[start : start + max(map(len, self._openings), default=0)]
                if any(mark.startswith(rest) for mark in self._openings):
                    if not is_end:
                        return False
                    if rest and cut == "length":
                        held.take()
                break
            held.at = start + len(found)
            self._is_opened = True
            start = after_space(held)
        if self._is_opened:
            held.at = max(held.at, start)
        self._is_begun = True
        return True

    def _add(self, text: str, pieces: list[str]) -> None:
        """Adds text that is no mark. White space at its end waits, because a closing may follow."""
        end = len(text.rstrip(SPACE))
        if end:
            pieces += (*self._pending, text[:end])
            self._pending, self._has_closing = [], False
        if text[end:]:
            self._pending.append(text[end:])
