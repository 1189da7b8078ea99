"""Runs one seed: starts the cluster, sends the load, lets the faults happen, and checks the rules.

The rules: each request ends once, with the only right tokens or an error that its client may expect. No engine reads
a block with other content than its sequence's. No callback and no task of the product raises. Once the faults are over,
all requests end, all workers are known to all proxies and ready, nothing is held for a request that has ended, and
proxies' metrics count what their clients saw.
"""

from __future__ import annotations

import logging
import random
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest.mock import patch

from tandem.simulator.batches import Batches
from tandem.simulator.clients import Clients, client_of
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.engine import StepFailed
from tandem.simulator.event_log import EventLog
from tandem.simulator.invariants import Invariants
from tandem.simulator.messages import REST_S, Messages
from tandem.simulator.plans import play_demand
from tandem.simulator.processes import SimulatedProxy
from tandem.simulator.scenario import START_S, Request, Scenario
from tandem.simulator.timeline import Timeline
from tandem.simulator.views import wrong_view

RECOVERY_S = 100.0
"""Time in which all requests end after the last fault, besides that for shipping their prompts; a minute later the
cluster is whole. The longest wait is that for a worker, 60 s (`proxy.config.ProxyConfig.worker_wait_s`); a pair is
opened again within 27 s."""

RESTART_ALL_S = 240.0
"""Time to restart all processes one after the other, as they need up to 10 s each."""
BATCH_S = 90.0
"""Time for the lines of batches: refused ones wait for up to 30 s, and those that may end a proxy run alone."""
CONNECT_S = 0.05
LOOK_S = 0.2
"""Between two looks whether the cluster is at rest."""
MAX_LOOKS = 8
"""Looks at a cluster's messages, until one shows only those of a cluster at rest."""


@dataclass(frozen=True)
class Violation:
    """A rule that was broken, at a virtual time."""

    at: float
    rule: str
    details: str

    def __str__(self) -> str:
        return f"{self.at:.4f} s: {self.rule}: {self.details}"


@dataclass
class Result:
    """What came of a run."""

    log: EventLog
    violations: list[Violation] = field(default_factory=list)
    num_events: int = 0
    virtual_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)


@contextmanager
def seeded_ids(rng: random.Random) -> Iterator[None]:
    """Ids come from the seed, instead of the system's random numbers."""
    with patch.object(secrets, "token_hex", lambda num_bytes=16: rng.randbytes(num_bytes).hex()):
        yield


class LogHandler(logging.Handler):
    """Reports errors that the product logs with their traceback, because it expects none.

    on_lost: called with a worker's id, its epoch and a reason when a proxy says that it has lost it.
    """

    def __init__(
        self, report: Callable[[str, str], None], on_lost: Callable[[str, str, str], None] = lambda *lost: None
    ) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self._on_lost = on_lost

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, StepFailed):
            return
        if error is not None:
            self._report("a logged error", f"{record.getMessage()}: {_described(error)}")
        elif record.msg == "lost %s (epoch %s): %s" and isinstance(record.args, tuple):
            self._on_lost(*map(str, record.args))


@contextmanager
def hidden_logs(handler: logging.Handler = logging.NullHandler()) -> Iterator[None]:  # noqa: B008  # has no state
    """Shows no log lines of the product. handler: gets them."""
    logger = logging.getLogger("tandem")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def run(scenario: Scenario) -> Result:
    """Runs a scenario to its end, or to its first violation."""
    rng = random.Random(f"run {scenario.seed}")
    with seeded_ids(rng):
        running = _Run(scenario, rng)
        with hidden_logs(LogHandler(running.report, running.on_lost)):
            return running.run()


class _Run:
    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self._scenario = scenario
        self._timeline = Timeline(rng, lambda name, error: self.report("an error", f"{name}: {_described(error)}"))
        self._log = EventLog(lambda: self._timeline.now)
        self._result = Result(self._log)
        num_kills = sum(fault.kind in ("kill", "fail starts") for fault in scenario.faults)
        self._clients = Clients(
            self.report, self._log.note, num_kills, scenario.cluster.config.admission,
            steps_fail=scenario.cluster.step_failure_share > 0,
        )  # fmt: skip
        lines = [request for request in scenario.requests if request.is_of_batch]
        self._batches = Batches(self.report, self._clients.answer, self._clients.end) if lines else None
        self._cluster = SimulatedCluster(
            scenario.cluster,
            self._timeline,
            rng,
            self.report,
            self._log.note,
            self._on_proxy_end,
            self._batches.start if self._batches is not None else lambda proxy: None,
            lambda *taken: self._invariants.check_delta(*taken),
            self._on_message,
        )
        self._messages = Messages(self._cluster, self.report)
        self._invariants = Invariants(self._cluster, self._timeline, self.report)
        for request in scenario.requests:
            if not request.is_of_batch:
                self._cluster.world.call_at(request.at, self._send, request)
        for client in sorted({client_of(line) for line in lines}):
            of_client = [line for line in lines if client_of(line) == client]
            self._cluster.world.call_at(of_client[0].at, self._submit, client, of_client)
        for fault in scenario.faults:
            self._cluster.world.call_at(fault.at, self._cluster.strike, fault)

    def run(self) -> Result:
        begun = [request.at for request in self._scenario.requests]
        last = max([START_S, *begun, *(fault.at + fault.duration_s for fault in self._scenario.faults)])
        self._timeline.run(self._is_broken, last)
        if self._scenario.cluster.config.autoscale:
            play_demand(random.Random(f"plans {self._scenario.seed}"), self.report)
        self._cluster.end_faults()
        recovered_at = last + RECOVERY_S + self._scenario.work_s
        recovered_at += BATCH_S * (self._batches is not None)
        recovered_at += RESTART_ALL_S * any(fault.kind == "restart all" for fault in self._scenario.faults)
        self._expect("a request does not end", self._unfinished, recovered_at)
        self._expect("the cluster does not recover", self._cluster.not_whole, recovered_at + 60)
        self._expect("a view is wrong at rest", self._wrong_view, recovered_at + 60)
        self._check_rest()
        for proxy in self._cluster.proxies.values() if not self._is_broken() else ():
            if (problem := self._clients.miscounted(proxy)) is not None:
                self.report("metrics count otherwise than clients", f"{proxy.name}: {problem}")
        if self._clients.num_failed > self._cluster.num_failed_requests:
            self.report("more requests failed than were in failed steps", str(self._clients.num_failed))
        shape = self._scenario.cluster
        if not self._is_broken() and not self._scenario.faults and not shape.failure_share and not shape.corrupt_share:
            self._check_undisturbed()
        result = self._result
        result.num_events, result.virtual_s = self._timeline.num_events, self._timeline.now
        for outcome in self._clients.outcomes.values():
            result.outcomes[outcome] = result.outcomes.get(outcome, 0) + 1
        for loop in self._timeline.loops:
            loop.discard()
        if self._batches is not None:
            self._batches.close()
        self._cluster.close()
        return result

    def _on_message(self, sender: str, receiver: str, message: Any) -> None:
        self._log.on_message(sender, receiver, message)
        self._messages.on_message(sender, receiver, message)

    def _wrong_view(self) -> str | None:
        return self._cluster.not_whole() or wrong_view(self._cluster)

    def _check_rest(self) -> None:
        """Counts messages for a moment, unless a planner may still change the numbers of workers."""
        if self._is_broken() or self._scenario.cluster.config.autoscale:
            return
        for _ in range(MAX_LOOKS):  # what a silent network has kept comes first
            self._messages.begin_rest()
            self._timeline.run(self._is_broken, self._timeline.now + REST_S)
            if (problem := self._messages.end_rest()) is None:
                return
        self.report("messages at rest", str(problem))

    def on_lost(self, worker_id: str, epoch: str, reason: str) -> None:
        self._log.note("a proxy lost %s (%s): %s", worker_id, epoch, reason)
        self._invariants.on_lost(worker_id, epoch, reason)
        self._messages.on_lost(epoch)

    def _send(self, request: Request) -> None:
        """Sends a request once its proxy accepts connections."""
        if (proxy := self._accepting(request)) is None:
            self._cluster.world.call_later(CONNECT_S, self._send, request)
        else:
            self._clients.send(request, proxy)

    def _submit(self, client: str, lines: list[Request]) -> None:
        """Makes a batch of a client's lines, once a proxy accepts connections."""
        if (proxy := self._accepting(lines[0])) is None or self._batches is None:
            self._cluster.world.call_later(CONNECT_S, self._submit, client, lines)
        else:
            self._batches.submit(client, lines, proxy)

    def _accepting(self, request: Request) -> SimulatedProxy | None:
        proxy = self._cluster.proxies.get(f"proxy-{request.proxy}")
        return proxy if proxy is not None and proxy.accepts else None

    def _on_proxy_end(self, proxy_id: str) -> None:
        self._clients.on_proxy_end(proxy_id)
        if self._batches is not None:
            self._batches.on_proxy_end(proxy_id)

    def _is_broken(self) -> bool:
        return bool(self._result.violations)

    def _expect(self, rule: str, missing: Callable[[], str | None], deadline: float) -> None:
        """Runs until nothing is missing. Reports a violation if that takes too long."""
        while not self._is_broken() and missing() is not None:
            if self._timeline.now >= deadline:
                self.report(rule, str(missing()))
            self._timeline.run(self._is_broken, self._timeline.now + LOOK_S)

    def _unfinished(self) -> str | None:
        ended = self._clients.outcomes
        if self._batches is not None:
            self._batches.check()
        if len(ended) == len(self._scenario.requests):
            return None
        missing = [request.number for request in self._scenario.requests if request.number not in ended]
        return f"requests {missing}"

    def _check_undisturbed(self) -> None:
        """Without faults no lease expires, and no attempt is lost, unless the planner stops workers."""
        for name, worker in self._cluster.workers.items():
            if num := worker.outgoing.num_expired_leases:
                self.report("leases expired without a fault", f"{name}: {num}")
        for proxy in self._cluster.proxies.values() if not self._scenario.cluster.config.autoscale else ():
            if num := int(proxy.metrics.migrated._value.get()):
                self.report("attempts were lost without a fault", f"{proxy.name}: {num}")

    def report(self, rule: str, details: str) -> None:
        self._log.note("VIOLATION: %s: %s", rule, details)
        self._result.violations.append(Violation(self._timeline.now, rule, details))


def _described(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    return "".join(lines[-4:]).strip()


T = TypeVar("T")


def shrink(scenario: Scenario, result: Result, max_runs: int = 200) -> tuple[Scenario, Result]:
    """Returns the smallest scenario that was found, and its result. result: of the scenario, with a violation."""
    rule = result.violations[0].rule
    num_left = max_runs

    def still_fails(smaller: Scenario) -> bool:
        nonlocal scenario, result, num_left
        num_left -= 1
        found = run(smaller)
        if not found.violations or found.violations[0].rule != rule:
            return False
        scenario, result = smaller, found
        return True

    for name in ("faults", "requests"):
        size = max(1, len(getattr(scenario, name)) // 2)
        while True:
            number = 0
            while number * size < len(items := getattr(scenario, name)) and num_left > 0:
                if not still_fails(_with(scenario, name, _without(items, number * size, size))):
                    number += 1
            if size == 1 or num_left <= 0:
                break
            size //= 2
    return scenario, result


def _with(scenario: Scenario, name: str, items: tuple[Any, ...]) -> Scenario:
    changes: dict[str, Any] = {name: items}
    return replace(scenario, **changes)


def _without(items: Sequence[T], first: int, count: int) -> tuple[T, ...]:
    return (*items[:first], *items[first + count :])
