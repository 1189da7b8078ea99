"""Where the time of a sequence went: stages that follow each other and add up to what the client saw. Pure.

All moments are of the proxy's monotonic clock. What workers report are durations, since clocks differ between hosts;
a duration is cut where it would reach past the moments around it, so that the sum holds whatever they report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

STAGES: Final = {
    "tokenize": "Reading the body, rendering the template and tokenising, up to the dispatch.",
    "dispatch": "Messages between proxy and prefill on their way, and turns on the proxy's loop.",
    "queue": "Waiting on the prefill worker, as it reports.",
    "prefill": "Computing the prompt, as the prefill worker reports.",
    "reserve": "The first token is here and held, because decode has no room yet.",
    "transfer": "From the first token to the KV cache being whole on decode; what prefill's computing did not hide.",
    "decode_wait": "The KV cache is whole, and decode's running step has to end first.",
    "decode": "Generating, from the sequence's first decode step to its last token.",
    "detokenize": "From tokens to text, stop strings included.",
    "interrupted": "From losing the place on a worker to the next token elsewhere.",
}
"""By name, in order; the first five make up TTFT."""

FIRST_TOKEN_STAGES: Final = tuple(STAGES)[:5]


@dataclass(slots=True)
class AttemptTimes:
    """The moments of one attempt at a sequence, as they become known; None for what has not come (yet).

    first_token_at: its message is here; queue_s and prefill_s came with it. reserved_at: decode has room. delivered_at:
    the client's side has taken the first token. began_at: the first token that decode chose is here; decode_wait_s and
    step_s came with it. is_shipped: KV moves between workers. lost_at: the attempt ended without ending the sequence.
    attempt_id, prefill, decode: for the timeline; workers' log lines name the attempt so.
    """

    dispatched_at: float
    attempt_id: str = ""
    prefill: str = ""
    decode: str = ""
    is_shipped: bool = True
    first_token_at: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    reserved_at: float | None = None
    delivered_at: float | None = None
    began_at: float | None = None
    decode_wait_s: float = 0.0
    step_s: float = 0.0
    lost_at: float | None = None

    def on_first_token(self, now: float, queue_s: float, prefill_s: float) -> None:
        if self.first_token_at is None:
            self.first_token_at, self.queue_s, self.prefill_s = now, queue_s, prefill_s

    def on_began(self, now: float, decode_wait_s: float, step_s: float) -> None:
        if self.began_at is None:
            self.began_at, self.decode_wait_s, self.step_s = now, decode_wait_s, step_s

    def events(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """(moment, name, details) of what has come."""
        workers = {"prefill": self.prefill, "decode": self.decode}
        yield (
            self.dispatched_at,
            "dispatched",
            {"attempt": self.attempt_id, **{role: worker for role, worker in workers.items() if worker}},
        )
        if self.first_token_at is not None:
            details = {"queue_s": round(self.queue_s, 6), "prefill_s": round(self.prefill_s, 6)}
            yield self.first_token_at, "first token computed", details
        if self.reserved_at is not None:
            yield self.reserved_at, "decode reserved", {}
        if self.began_at is not None:
            details = {"decode_wait_s": round(self.decode_wait_s, 6), "step_s": round(self.step_s, 6)}
            yield self.began_at, "decode began", details
        if self.lost_at is not None:
            yield self.lost_at, "attempt over", {"attempt": self.attempt_id}


def stage_times(
    arrived_at: float, attempts: Sequence[AttemptTimes], finished_at: float, detokenize_s: float
) -> dict[str, float]:
    """Seconds by stage, all of `STAGES`; they are none of them negative and add up to finished_at - arrived_at.

    attempts: at least one, in order. detokenize_s: spent on text in all, while decode went on.
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
    """Goes forward only, and no further than `end`: whatever is told, stages cannot overlap."""

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
