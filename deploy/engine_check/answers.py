"""Greedy answers of two clusters, compared token by token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TIE = 0.25
"""Two tokens whose log-probabilities differ by less may change places where products have other numbers of rows: 16-bit
logits of 16 to 32 have steps of 0.125."""


@dataclass
class CheckedAnswer:
    """Tokens of a greedy answer, and the log-probabilities of the likeliest tokens at the place of each."""

    token_ids: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class AnswerDifference:
    """The first token that differs."""

    position: int
    expected: int
    found: int
    gap: float
    """Between the two tokens' log-probabilities, the larger one of both answers; infinite if an answer does not have
    both among its likeliest tokens."""

    @property
    def is_tie(self) -> bool:
        return self.gap <= TIE

    def __str__(self) -> str:
        what = "two tokens about equally likely" if self.is_tie else f"their log-probabilities differ by {self.gap:.3g}"
        return f"token {self.position} is {self.found} in place of {self.expected} ({what})"


def first_difference(expected: CheckedAnswer, found: CheckedAnswer) -> AnswerDifference | None:
    """Returns None for equal answers. An answer that is too short differs by a token -1."""
    length = max(len(expected.token_ids), len(found.token_ids))
    for position in range(length):
        one, other = (_at(each.token_ids, position) for each in (expected, found))
        if one != other:
            tops = [each.top[position] if position < len(each.top) else {} for each in (expected, found)]
            gaps = [abs(top[one] - top[other]) if one in top and other in top else float("inf") for top in tops]
            return AnswerDifference(position, one, other, max(gaps))
    return None


def largest_error(expected: CheckedAnswer, found: CheckedAnswer) -> float:
    """Returns the largest difference of a token's log-probability, up to the first token that differs."""
    errors = [0.0]
    for one, other, ours, theirs in zip(expected.token_ids, found.token_ids, expected.top, found.top, strict=False):
        if one != other:
            break
        if one in ours and other in theirs:
            errors.append(abs(ours[one] - theirs[other]))
    return max(errors)


def _at(token_ids: Sequence[int], position: int) -> int:
    return token_ids[position] if position < len(token_ids) else -1
