"""Text of one sequence: detokenises its tokens and ends it at stop strings.

Text that may be the beginning of a stop string is held back, and so are bytes that are no whole character yet. So a
delta may have tokens without text, and the last one text of tokens before it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.telemetry.proxy_metrics import SequenceTimer

_MAX_TOKENS_AT_ONCE = 64
"""Tokens detokenised before yielding to the event loop (about 0.5 ms). Many wait when a client reads slowly."""


class PromptTokens(msgspec.Struct, frozen=True):
    """A prompt as its client sees it."""

    token_ids: bytes
    """Packed, see `protocol.messages.token_ids`."""
    text: str
    """Empty unless it is echoed."""
    logprobs: list[bytes]
    """Those of all tokens but the first, packed; empty unless requested."""
    skips_special: bool = True
    """Whether the text is without special tokens."""


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of one sequence's text, and its tokens."""

    index: int
    """Prompt index * n + number of the sequence."""
    text: str
    """May be empty while a possible stop string is held back."""
    tokens: list[SampledToken]
    num_shown: int
    """How many of the tokens are part of the text; a stop token is not."""
    finish_reason: FinishReason | None
    is_first: bool = False
    """Whether no delta of the sequence came before."""
    prompt: PromptTokens | None = None
    """On the first delta of all sequences of the prompt, if the client asked for it; not part of the text."""
    stop_reason: int | str | None = None
    """The stop string or the token of `stop_token_ids` that ended the sequence."""
    embedding: bytes | None = None
    """Embedding of the prompt, if one was asked for instead of text; float32, packed."""
    begins_text: bool = False
    """Whether the detokeniser sees these tokens as the first of a text, whose leading blank may not be shown."""


class SequenceText:
    """Turns the tokens of one sequence into text deltas.

    stop_token_ids: those that the client named; a sequence that ends with another token has no stop reason. min_tokens:
    stop strings that are complete within this many tokens do not end the text.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        timer: SequenceTimer,
        clock: Callable[[], float],
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0  # of all attempts
        self._has_ended = False
        self.index = index
        self.timer = timer
        self._clock = clock
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings

    async def push(
        self,
        tokens: list[SampledToken],
        finish_reason: FinishReason | None,
        is_first: bool,
        prompt: PromptTokens | None,
    ) -> TextDelta:
        """Returns the delta for these tokens. It ends earlier than they do when a stop string is complete."""
        assert not self._has_ended
        pieces: list[str] = []
        begins_text = self._detokenizer.begins_text
        # A stop token ends the text without being part of it, but was generated and counts.
        num_shown = len(tokens) - (finish_reason == "stop")
        for number in range(num_shown):
            if number % _MAX_TOKENS_AT_ONCE == _MAX_TOKENS_AT_ONCE - 1:
                await asyncio.sleep(0)
            self._num_tokens += 1
            text = self._detokenizer.step(tokens[number].token_id)
            piece, stopped = self._stop_strings.push(text, may_end=self._num_tokens > self._min_tokens)
            pieces.append(piece)
            if stopped:
                tokens, num_shown, finish_reason = tokens[: number + 1], number + 1, "stop"
                break
        else:
            if finish_reason is not None:
                may_end = self._num_tokens > self._min_tokens
                piece, stopped = self._stop_strings.push(self._detokenizer.flush(), may_end)
                pieces += (piece, "" if stopped else self._stop_strings.flush())
                if stopped:
                    finish_reason = "stop"
        now = self._clock()
        self.timer.on_text(now)
        if finish_reason is not None:
            self._has_ended = True
            self.timer.on_finished(now)
        assert 0 <= num_shown <= len(tokens)
        stop_reason: int | str | None = self._stop_strings.matched
        if finish_reason == "stop" and stop_reason is None and tokens[-1].token_id in self._stop_token_ids:
            stop_reason = tokens[-1].token_id
        return TextDelta(
            self.index,
            "".join(pieces),
            tokens,
            num_shown,
            finish_reason,
            is_first,
            prompt,
            stop_reason,
            None,
            begins_text,
        )


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
