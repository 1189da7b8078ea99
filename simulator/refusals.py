"""Why a proxy refuses requests: only for what the limits say, which count what clients have in flight.

A client sees a token later than its proxy, so it counts at least as many sequences that wait for their first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.proxy.admission.admission import DEFAULT_PRIORITY, MIN_WAITING, Admission, QueueFull, Ticket
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import TandemError
from tandem.simulator.scenario import Request


@dataclass(eq=False)
class _Open:
    """A request in flight, as its client sees it."""

    request: Request
    client: str
    begun_at: float
    asked_at: float | None = None
    """When it asked to be admitted, once the limits of the model are known."""
    streams: dict[int, float] = field(default_factory=dict)
    """Sequences with a token, and when it came."""

    @property
    def num_sequences(self) -> int:
        return len(self.request.prompts) * self.request.num_sequences


class CheckedAdmission(Admission):
    """Reports what is admitted beyond a limit, and streams that have begun and are displaced. Other arguments: see
    `Admission`."""

    def __init__(self, report: Callable[[str, str], None], settings: AdmissionSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self._report = report
        self._displaced: list[Ticket] = []  # by the request that is being admitted

    def admit(
        self,
        client: str,
        prompt_tokens: Sequence[int],
        priority: int = DEFAULT_PRIORITY,
        on_displaced: Callable[[QueueFull], None] = lambda error: None,
    ) -> Ticket:
        self._displaced.clear()
        begun = {ticket for ticket in self._open if len(ticket.waiting) < ticket.num_sequences}
        before = Counter(self._waiting_of)

        def on_this_displaced(error: QueueFull) -> None:
            self._displaced.append(admitted)
            on_displaced(error)

        admitted = super().admit(client, prompt_tokens, priority, on_this_displaced)
        details = f"{client}, priority {priority}, {len(prompt_tokens)} sequences"
        if begun.intersection(self._displaced):
            self._report("a request that streams is displaced", details)
        share = CLIENT_SHARE * self._max_waiting()[0]
        if any(each.priority <= priority and before[each.client] <= share for each in self._displaced):
            self._report("a client that has no more than its share is displaced", details)
        own = sum(ticket.num_sequences for ticket in self._open if ticket.client == client)
        if 0 < self._settings.max_requests_per_client < own:
            self._report("a client has more in flight than it may", f"{details}: {own}")
        others = sum(len(ticket.waiting) for ticket in self._open if ticket is not admitted)
        if others and others + len(prompt_tokens) > self._settings.max_waiting_requests:
            self._report("more requests wait than may", f"{details} besides {others}")
        return admitted


class RefusalRules:
    """Of one proxy. clock: virtual time. report(rule, details): called when a rule is broken. wait_s: for a worker."""

    def __init__(
        self, clock: Callable[[], float], report: Callable[[str, str], None], limits: AdmissionSettings, wait_s: float
    ) -> None:
        self._clock = clock
        self._report = report
        self._limits = limits
        self._wait_s = wait_s
        self._open: dict[int, _Open] = {}  # by number
        self._asked: list[tuple[float, int]] = []  # when requests asked to be admitted, and their priorities

    def begin(self, request: Request, client: str) -> None:
        self._open[request.number] = _Open(request, client, self._clock())

    def ask(self, request: Request) -> None:
        """The request is admitted or refused now."""
        self._open[request.number].asked_at = self._clock()
        self._asked.append((self._clock(), request.priority))

    def late(self, timeout_s: float) -> list[int]:
        """Returns the numbers of admitted requests that are open beyond their time-outs. timeout_s: the server's."""
        open_for = [each for each in self._open.values() if each.asked_at is not None]
        return [
            each.request.number for each in open_for
            if self._clock() > max(each.begun_at + min(timeout_s, each.request.timeout_s), each.asked_at or 0.0)
        ]  # fmt: skip

    def on_token(self, request: Request, index: int) -> None:
        self._open[request.number].streams.setdefault(index, self._clock())

    def end(self, request: Request, error: TandemError | None) -> None:
        """The request has ended, or its client has left."""
        ended = self._open.pop(request.number)
        if error is None:
            return
        others, code = [each for each in self._open.values() if each.asked_at is not None], error.code
        now, details = self._clock(), f"request {request.number}: {error.message}"
        if code in ("overloaded", "too_many_requests", "ttft_slo_unreachable") and ended.streams:
            # Tokens that a proxy has got before the error still reach the client.
            if not self._sooner(ended, min(ended.streams.values())):
                self._report("a stream that has begun is displaced", details)
        elif code == "too_many_requests":
            self._check_client(ended, others, details)
        elif isinstance(error, QueueFull):
            self._check_queue(ended, others, details)
        elif code == "no_worker_ready" and now - ended.begun_at < self._wait_s - 0.01:
            self._report("a prompt does not wait for a worker", f"{details}, after {now - ended.begun_at:.3f} s")

    def _sooner(self, ended: _Open, until: float) -> bool:
        """Whether a request of a sooner priority came between this one and a time."""
        began_at, own = ended.asked_at or 0.0, ended.request.priority
        return any(began_at <= at <= until and priority < own for at, priority in self._asked)

    def _check_client(self, ended: _Open, others: list[_Open], details: str) -> None:
        mine = [each for each in others if each.client == ended.client]
        own = sum(each.num_sequences for each in mine)
        num_waiting = ended.num_sequences + sum(each.num_sequences - len(each.streams) for each in mine)
        if self._clock() != ended.asked_at or num_waiting > CLIENT_SHARE * self._limits.max_waiting_requests:
            return  # displaced, because others came: `CheckedAdmission` checks that the client had more than its share
        if own + ended.num_sequences <= self._limits.max_requests_per_client:
            self._report("a client is refused for what others have", f"{details}, of which {own} are its own")

    def _check_queue(self, ended: _Open, others: list[_Open], details: str) -> None:
        """A request is refused at once if the queue is full, and displaced later by one of a sooner priority."""
        waiting = [each for each in others if len(each.streams) < each.num_sequences]
        is_refused = self._clock() == ended.asked_at
        if self._sooner(ended, self._clock()):
            priority = ended.request.priority
            later = [
                each for each in waiting
                if not each.streams and (each.asked_at or 0.0) < self._clock()
                and (each.request.priority, each.asked_at or 0.0) > (priority, ended.asked_at or 0.0)
            ]  # fmt: skip
            if later and not is_refused:  # at that moment it may be either
                self._report("a request is displaced before a later one", f"{details}, {later[0].request.number}")
            return
        if not is_refused:
            self._report("a request is displaced by an equal one", details)
        num_waiting = sum(each.num_sequences - len(each.streams) for each in waiting)
        limit = self._limits.max_waiting_requests
        if self._limits.ttft_slo_ms:  # the limit is lower while the queue is standing
            limit = min(limit, MIN_WAITING)
        if num_waiting + ended.num_sequences <= limit:
            self._report("a request is refused although there is room", f"{details}, {num_waiting} wait")
