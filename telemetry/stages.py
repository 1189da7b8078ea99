"""Where the time of a sequence goes: the moments of its attempts, and the stages between them.

A sequence's time is split into consecutive stages (`STAGES`) that add up to the latency the client saw. All moments are
on the proxy's monotonic clock. Workers report durations, because clocks differ between hosts. A duration is cut where
it exceeds the time between its surrounding moments, so the stages always add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

STAGES: Final = {
    "tokenize": "Reading the body, rendering the template and tokenising, up to the dispatch.",
    "dispatch": "Messages between proxy and prefill, and waiting for the proxy's event loop.",
    "queue": "Waiting on the prefill worker, as it reports.",
    "prefill": "Computing the prompt, as the prefill worker reports.",
    "reserve": "The first token is held until decode has reserved blocks.",
    "transfer": "From the first token to the complete KV cache on decode, as far as prefill did not hide it.",
    "decode_wait": "From the complete KV cache to the end of decode's running step.",
    "decode": "Generating, from the sequence's first decode step to its last token.",
    "detokenize": "From tokens to text, stop strings included.",
    "interrupted": "From the loss of an attempt to the next token of its successor.",
}
"""By name, in order; the first five make up TTFT."""


Placement = Literal["same", "two", "deflected", "prefill_only"]
"""Where a sequence ran: prefill and decode on one worker, without a transfer; on two workers; on one worker whose role
is decode; or prefill alone, because one token was requested."""
PLACEMENTS: Final[tuple[Placement, ...]] = get_args(Placement)


@dataclass(slots=True)
class AttemptTimes:
    """The moments of one attempt at a sequence; None for those that have not happened."""

    dispatched_at: float
    attempt_id: str = ""
    """As in the workers' log lines."""
    prefill: str = ""
    """Worker that computes the prompt."""
    decode: str = ""
    """Worker that decodes: the same if no KV moves, and empty if one token was requested."""
    is_shipped: bool = True
    """Whether KV moves between workers."""
    placement: Placement = "two"
    predicted_ttft_s: float = 0.0
    """Time to first token as predicted, from the dispatch."""
    predicted_itl_s: float = 0.0
    """Predicted seconds between tokens; 0 if unknown."""
    first_token_at: float | None = None
    """The message of the first token arrived, with queue_s and prefill_s."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    reserved_at: float | None = None
    """Decode reserved blocks."""
    delivered_at: float | None = None
    """The request took the first token."""
    began_at: float | None = None
    """Decode's first token arrived, with decode_wait_s, step_s and num_kv_bytes."""
    decode_wait_s: float = 0.0
    step_s: float = 0.0
    num_kv_bytes: int = 0
    lost_at: float | None = None
    """The attempt ended before the sequence did."""

    def on_first_token(self, now: float, queue_s: float, prefill_s: float) -> None:
        if self.first_token_at is None:
            self.first_token_at, self.queue_s, self.prefill_s = now, queue_s, prefill_s

    def on_began(self, now: float, decode_wait_s: float, step_s: float, num_kv_bytes: int = 0) -> None:
        if self.began_at is None:
            self.began_at, self.decode_wait_s, self.step_s = now, decode_wait_s, step_s
            self.num_kv_bytes = num_kv_bytes

    def num_events(self) -> int:
        """Returns how many `events` there are."""
        moments = (self.first_token_at, self.reserved_at, self.began_at, self.lost_at)
        return 1 + sum(moment is not None for moment in moments)

    def events(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yields (moment, name, details) of what has happened."""
        details: dict[str, Any] = {
            "attempt": self.attempt_id,
            "prefill": self.prefill,
            "decode": self.decode or None,
            "placement": self.placement,
            "kv_shipped": self.is_shipped,
            "predicted_ttft_s": round(self.predicted_ttft_s, 6),
            "predicted_itl_s": round(self.predicted_itl_s, 6) or None,
        }
        yield self.dispatched_at, "dispatched", {name: value for name, value in details.items() if value is not None}
        if self.first_token_at is not None:
            details = {"queue_s": round(self.queue_s, 6), "prefill_s": round(self.prefill_s, 6)}
            yield self.first_token_at, "first token computed", details
        if self.reserved_at is not None:
            yield self.reserved_at, "decode reserved", {}
        if self.began_at is not None:
            details = {"decode_wait_s": round(self.decode_wait_s, 6), "step_s": round(self.step_s, 6)}
            if self.num_kv_bytes:
                details["kv_bytes"] = self.num_kv_bytes
            yield self.began_at, "decode began", details
        if self.lost_at is not None:
            yield self.lost_at, "attempt over", {"attempt": self.attempt_id}


def stage_times(
    arrived_at: float, attempts: Sequence[AttemptTimes], finished_at: float, detokenize_s: float
) -> dict[str, float]:
    """Returns seconds for each of `STAGES`, none negative, that add up to finished_at - arrived_at.

    attempts: at least one, in order. detokenize_s: total time spent on text during decode.
    """
    times = dict.fromkeys(STAGES, 0.0)
    clock = _Clock(arrived_at, finished_at)
    times["tokenize"] = clock.until(attempts[0].dispatched_at)
    for number, attempt in enumerate(attempts):
        if number:
            times["interrupted"] += clock.until(attempt.dispatched_at)
        end = attempt.lost_at if attempt.lost_at is not None else finished_at
        if attempt.first_token_at is None:
            times["interrupted" if attempt.lost_at is not None or number else "dispatch"] += clock.until(end)
        elif number:
            times["interrupted"] += clock.until(_released_at(attempt))
            _after_first_token(times, clock, attempt, end)
        else:
            _before_first_token(times, clock, attempt)
            _after_first_token(times, clock, attempt, end)
    times["interrupted"] += clock.until(finished_at)
    detokenize_s = min(detokenize_s, times["decode"])
    times["decode"] -= detokenize_s
    times["detokenize"] = detokenize_s
    return times


class _Clock:
    """Moves forward only, and no further than `end`, so that stages never overlap."""

    def __init__(self, start: float, end: float) -> None:
        self._now = start
        self._end = end

    def until(self, moment: float) -> float:
        before, self._now = self._now, max(self._now, min(moment, self._end))
        return self._now - before


def _released_at(attempt: AttemptTimes) -> float:
    assert attempt.first_token_at is not None
    return max(attempt.first_token_at, attempt.reserved_at or 0.0)


def _before_first_token(times: dict[str, float], clock: _Clock, attempt: AttemptTimes) -> None:
    assert attempt.first_token_at is not None
    left = clock.until(attempt.first_token_at)
    times["queue"] = min(max(0.0, attempt.queue_s), left)
    left -= times["queue"]
    times["prefill"] = min(max(0.0, attempt.prefill_s), left)
    times["dispatch"] = left - times["prefill"]
    times["reserve"] = clock.until(_released_at(attempt))
    if attempt.delivered_at is not None:
        times["dispatch"] += clock.until(attempt.delivered_at)


def _after_first_token(times: dict[str, float], clock: _Clock, attempt: AttemptTimes, end: float) -> None:
    if attempt.began_at is not None:
        left = clock.until(min(attempt.began_at, end))
        step_s = min(max(0.0, attempt.step_s), left)
        wait_s = min(max(0.0, attempt.decode_wait_s), left - step_s)
        times["decode"] += step_s
        times["decode_wait"] += wait_s
        times["transfer" if attempt.is_shipped else "decode"] += left - step_s - wait_s
    times["decode"] += clock.until(end)
