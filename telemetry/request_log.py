"""The log of requests: timelines and one log line for each, with the stages of its sequences (`telemetry.stages`).

Timelines and log lines hold ids, counts and times, and no prompts, answers or keys.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.telemetry.stages import AttemptTimes, stage_times

if TYPE_CHECKING:  # loads prometheus_client, which commands that read timelines do without
    from tandem.telemetry.proxy_metrics import ProxyMetrics

log = logging.getLogger("request")

NUM_KEPT = 2000
"""Timelines that a proxy keeps, about 3 KiB each, and 32 KiB with MAX_SHOWN_SEQUENCES and MAX_SHOWN_ATTEMPTS."""
MAX_SHOWN_SEQUENCES = 8
"""Sequences of a request that its timeline shows. The other figures are of all its sequences."""
NUM_KEPT_REFUSED = 200
"""Timelines of refused requests. They are kept apart, so that an overload does not displace the others."""
MAX_SHOWN_ATTEMPTS = 6
"""Attempts of a sequence whose events its timeline has: the first and the last ones."""


class SequenceTimer:
    """Measures one sequence by the moments at which its tokens arrived (seconds of one monotonic clock).

    attempts: filled in by the dispatcher. stages: seconds by name, once the sequence has finished.
    """

    def __init__(self, metrics: ProxyMetrics, arrived_at: float, attempts: list[AttemptTimes]) -> None:
        self._metrics = metrics
        self._tally = metrics.per_token
        self._arrived_at = arrived_at
        self._attempts = attempts
        self._first_at = 0.0
        self._last_at = 0.0
        self._finished_at: float | None = None
        self._detokenize_s = 0.0
        self.num_tokens = 0
        self.stages: dict[str, float] | None = None

    @property
    def ttft_s(self) -> float | None:
        return self._first_at - self._arrived_at if self._first_at else None

    @property
    def e2e_s(self) -> float | None:
        return None if self._finished_at is None else self._finished_at - self._arrived_at

    def on_tokens(self, now: float, num_tokens: int) -> None:
        if self._first_at:
            self._tally.on_tokens(now, num_tokens, now - self._last_at)
        else:
            self._first_at = now
            if self._attempts:
                self._on_first_token(now, self._attempts[-1])
            self._metrics.ttft.observe(now - self._arrived_at)
            self._tally.on_tokens(now, num_tokens, None)
        self._last_at = now
        self.num_tokens += num_tokens

    def _on_first_token(self, now: float, attempt: AttemptTimes) -> None:
        attempt.delivered_at = now
        self._metrics.placements.labels(attempt.placement).inc()
        if attempt.predicted_ttft_s:
            self._metrics.predictions.observe("ttft", attempt.predicted_ttft_s, now - attempt.dispatched_at)

    def on_text(self, now: float) -> None:
        """The tokens of the last `on_tokens` have been detokenised."""
        self._detokenize_s += now - self._last_at

    def on_finished(self, now: float) -> None:
        """Observes TPOT, E2E and the stages of a sequence that ended normally. Failed and aborted ones are left out."""
        self._finished_at = now
        if self.num_tokens > 1:
            tpot_s = (self._last_at - self._first_at) / (self.num_tokens - 1)
            self._metrics.tpot.observe(tpot_s)
            if len(self._attempts) == 1 and (predicted_s := self._attempts[0].predicted_itl_s):
                self._metrics.predictions.observe("itl", predicted_s, tpot_s)
        self._metrics.e2e.observe(now - self._arrived_at)
        if self._attempts:
            self.stages = stage_times(self._arrived_at, self._attempts, now, self._detokenize_s)
            for name, seconds in self.stages.items():
                self._metrics.stages[name].observe(seconds)

    def keep_shown(self) -> None:
        """Forgets the attempts that `events` leaves out, once the sequence has ended."""
        self._attempts = self._shown()

    def _shown(self) -> list[AttemptTimes]:
        attempts = self._attempts
        if len(attempts) <= MAX_SHOWN_ATTEMPTS:
            return attempts
        return attempts[: MAX_SHOWN_ATTEMPTS // 2] + attempts[-(MAX_SHOWN_ATTEMPTS // 2) :]

    def num_events(self) -> int:
        """Returns how many `events` there are."""
        own = bool(self._first_at) + (self._finished_at is not None)
        return own + sum(attempt.num_events() for attempt in self._shown())

    def events(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yields (moment, name, details) of the first and the last attempts, MAX_SHOWN_ATTEMPTS together."""
        for attempt in self._shown():
            yield from attempt.events()
        if self._first_at:
            yield self._first_at, "first token delivered", {}
        if self._finished_at is not None:
            yield self._finished_at, "last text", {"tokens": self.num_tokens}


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of all sequences of a request."""

    num_sequences: int
    ttft_s: float | None
    stages: dict[str, float]


@dataclass(eq=False, slots=True)
class RequestRecord:
    """One HTTP request."""

    request_id: str
    api: str
    traceparent: str = ""
    """The client's header, or empty."""
    arrived_at: float = field(default_factory=time.monotonic)
    """Time on the monotonic clock."""
    arrived_unix_s: float = field(default_factory=time.time)
    """The same moment on the wall clock."""
    read_at: float | None = None
    """Time when its prompts were tokenised."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    sequences: list[SequenceTimer] = field(default_factory=list)
    """One timer for each sequence, in order; after the end, those of the sequences that the timeline shows."""
    outcome: str = ""
    """stop, length, aborted or an error's code; empty while the request runs."""
    ended_at: float | None = None
    _figures: _Figures | None = None

    def end(self, outcome: str) -> None:
        """Notes the outcome, and keeps no more than what the timeline shows."""
        self._figures = _Figures(len(self.sequences), self.ttft_s, self.stages())
        self.ended_at, self.outcome = time.monotonic(), outcome
        del self.sequences[MAX_SHOWN_SEQUENCES:]
        for timer in self.sequences:
            timer.keep_shown()

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token of any sequence."""
        if self._figures is not None:
            return self._figures.ttft_s
        return min((timer.ttft_s for timer in self.sequences if timer.ttft_s is not None), default=None)

    def stages(self) -> dict[str, float]:
        """Returns seconds by stage of the slowest sequence, or nothing when none has finished."""
        if self._figures is not None:
            return self._figures.stages
        done = [timer for timer in self.sequences if timer.stages is not None]
        slowest = max(done, key=lambda timer: timer.e2e_s or 0.0, default=None)
        return slowest.stages or {} if slowest is not None else {}

    def fields(self) -> dict[str, Any]:
        """Returns the fields of its log line."""
        ttft_s = self.ttft_s
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "api": self.api,
            "outcome": self.outcome,
            "sequences": self._figures.num_sequences if self._figures is not None else len(self.sequences),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": self.num_completion_tokens,
            "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 1),
            "e2e_ms": None if self.ended_at is None else round(1000 * (self.ended_at - self.arrived_at), 1),
        }
        fields.update({f"{name}_ms": round(1000 * seconds, 1) for name, seconds in self.stages().items() if seconds})
        return {name: value for name, value in fields.items() if value is not None}

    def num_events(self) -> int:
        """Returns how many events `timeline` has."""
        own = 1 + (self.read_at is not None) + (self.ended_at is not None)
        return own + sum(timer.num_events() for timer in self._shown())

    def _shown(self) -> list[SequenceTimer]:
        return self.sequences[:MAX_SHOWN_SEQUENCES]

    def timeline(self) -> dict[str, Any]:
        """Returns the timeline for JSON. Events are in seconds since the request arrived.

        It has those of the first MAX_SHOWN_SEQUENCES sequences, and of each, those of a few attempts.
        """
        events: list[tuple[float, str, dict[str, Any]]] = [(self.arrived_at, "arrived", {})]
        if self.read_at is not None:
            events.append((self.read_at, "tokenized", {"prompt_tokens": self.num_prompt_tokens}))
        for index, timer in enumerate(self._shown()):
            for moment, name, details in timer.events():
                events.append((moment, name, {"sequence": index, **details}))
        if self.ended_at is not None:
            events.append((self.ended_at, "ended", {"outcome": self.outcome}))
        events.sort(key=lambda event: event[0])
        return {
            **self.fields(),
            "outcome": self.outcome or "running",
            "arrived_unix_s": round(self.arrived_unix_s, 6),
            "stages_s": {name: round(seconds, 6) for name, seconds in self.stages().items()},
            "events": [
                {"at_s": round(moment - self.arrived_at, 6), "event": name, **details}
                for moment, name, details in events
            ],
        }


def ignore(record: RequestRecord) -> None:
    """The default for `RequestLog.on_end`."""


class RequestLog:
    """on_end: called with each record that has ended, for example by the tracer."""

    def __init__(self, on_end: Callable[[RequestRecord], None] = ignore, num_kept: int = NUM_KEPT) -> None:
        self._on_end = on_end
        self._records = _Ring(num_kept)
        self._refused = _Ring(NUM_KEPT_REFUSED)

    def begin(self, request_id: str, api: str, traceparent: str = "") -> RequestRecord:
        """Starts a record. The oldest one is forgotten when there are too many, also while it runs."""
        record = RequestRecord(request_id, api, traceparent)
        self._records.keep(record)
        return record

    def rename(self, record: RequestRecord, request_id: str) -> None:
        """Changes the id to the one in the request's body."""
        if request_id != record.request_id:
            self._records.forget(record)
            record.request_id = request_id
            self._records.keep(record)

    def end(self, record: RequestRecord, outcome: str, is_refused: bool = False) -> None:
        """Idempotent: the first outcome counts. is_refused: by admission."""
        if record.ended_at is not None:
            return
        record.end(outcome)
        if is_refused:
            self._records.forget(record)
            self._refused.keep(record)
        log.info("ended", extra={"fields": record.fields()})
        self._on_end(record)

    def find(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id) or self._refused.get(request_id)


class _Ring(OrderedDict[str, RequestRecord]):
    """Records by id. The oldest are forgotten when there are more than `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def keep(self, record: RequestRecord) -> None:
        self.pop(record.request_id, None)  # of several with one id, the newest
        self[record.request_id] = record
        if len(self) > self._size:
            self.popitem(last=False)

    def forget(self, record: RequestRecord) -> None:
        if self.get(record.request_id) is record:
            del self[record.request_id]
