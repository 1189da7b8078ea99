"""Runs one seed: starts the cluster, sends the load, lets the faults happen, and checks the rules.

The rules: each request ends once, with the only right tokens or an error that its client may expect. No engine reads
a block with other content than its sequence's. No callback and no task of the product raises. Once the faults are over,
all requests end, all workers are known to all proxies and ready, and nothing is held for a request that has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from tandem.protocol.codec import Codec
from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.protocol.messages.membership import FromProxyControl, WorkerExited
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import TandemError
from tandem.runtime.tasks import start
from tandem.simulator.engine import answer
from tandem.simulator.network import SimulatedNetwork, Switch
from tandem.simulator.processes import BLOCK_SIZE, Machine, SimulatedProxy, SimulatedWorker
from tandem.simulator.scenario import LOAD_S, NO_TIMEOUT_S, START_S, Fault, Request, Scenario
from tandem.simulator.timeline import Timeline

RESTART_S = 0.8
"""From the exit of a process to its successor's start."""
RECOVERY_S = 100.0
"""Within this time after the last fault all requests end, and within a minute more the cluster is whole. The longest
wait is that for a worker, 60 s (`proxy.config.ProxyConfig.worker_wait_s`); a pair is opened again within 27 s."""
EXPECTED_ERRORS = {"deadline_exceeded", "no_worker_ready"}
"""Codes that a client may get. A lost worker alone costs no request."""


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
    """What came of a run. log: what happened, a line each."""

    violations: list[Violation] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    num_events: int = 0
    virtual_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)


@contextmanager
def seeded_ids(rng: random.Random) -> Iterator[None]:
    """Ids come from the seed, instead of the system's random numbers."""
    with patch.object(secrets, "token_hex", lambda num_bytes=16: rng.randbytes(num_bytes).hex()):
        yield


class _ErrorHandler(logging.Handler):
    def __init__(self, report: Callable[[str, str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._report("a logged error", f"{record.getMessage()}: {_described(record.exc_info[1])}")


@contextmanager
def hidden_logs() -> Iterator[None]:
    """Shows no log lines of the product."""
    logger, handler = logging.getLogger("tandem"), logging.NullHandler()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


@contextmanager
def logged_errors(report: Callable[[str, str], None]) -> Iterator[None]:
    """Reports errors that the product logs with their traceback, because it expects none."""
    logger, handler = logging.getLogger("tandem"), _ErrorHandler(report)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def run(scenario: Scenario) -> Result:
    """Runs a scenario to its end, or to its first violation."""
    rng = random.Random(f"run {scenario.seed}")
    with hidden_logs(), seeded_ids(rng):
        running = _Run(scenario, rng)
        with logged_errors(running.report):
            return running.run()


class _Run:
    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self._scenario = scenario
        self._result = Result()
        self._timeline = Timeline(rng, lambda name, error: self.report("an error", f"{name}: {_described(error)}"))
        self._switch = Switch(self._timeline, scenario.max_queued)
        self._pids = itertools.count(1000)
        self._proxy_numbers = itertools.count()
        block_s = scenario.block_s
        self._machine = Machine(
            self._timeline, self._switch, {}, {}, self.report, lambda: rng.uniform(0.5, 1.5) * block_s,
            lambda: self._has_faults and rng.random() < scenario.failure_share,
        )  # fmt: skip
        self._has_faults = True
        self._launcher = self._timeline.new_loop("launcher")
        names = [f"{role}-{number}" for number, role in enumerate(scenario.roles)]
        self._roles = dict(zip(names, scenario.roles, strict=True))
        self._workers: dict[str, SimulatedWorker] = {}
        self._proxies: dict[str, SimulatedProxy] = {}
        self._clients: defaultdict[str, set[int]] = defaultdict(set)  # requests by proxy
        self._ended: dict[int, str] = {}  # outcomes by request
        self._launcher.call_soon(self._begin)

    def run(self) -> Result:
        last = START_S + LOAD_S + max((fault.duration_s for fault in self._scenario.faults), default=0.0)
        self._timeline.run(self._is_broken, last)
        self._has_faults = False
        self._expect("a request does not end", self._unfinished, last + RECOVERY_S)
        self._expect("the cluster does not recover", self._not_whole, last + RECOVERY_S + 60)
        if not self._scenario.faults and not self._scenario.failure_share:
            self._check_undisturbed()
        result = self._result
        result.num_events, result.virtual_s = self._timeline.num_events, self._timeline.now
        for outcome in self._ended.values():
            result.outcomes[outcome] = result.outcomes.get(outcome, 0) + 1
        for loop in self._timeline.loops:
            loop.discard()
        return result

    def _is_broken(self) -> bool:
        return bool(self._result.violations)

    def _expect(self, rule: str, missing: Callable[[], str | None], deadline: float) -> None:
        """Runs until nothing is missing. Reports a violation if that takes too long."""
        if not self._timeline.run(lambda: self._is_broken() or missing() is None, deadline):
            self.report(rule, str(missing()))

    def _check_undisturbed(self) -> None:
        """Without faults no lease expires, and no attempt is lost."""
        for name, worker in self._workers.items():
            if num := worker.worker._scheduler.prefill.num_expired_leases:
                self.report("leases expired without a fault", f"{name}: {num}")
        for proxy in self._proxies.values():
            if num := int(proxy.metrics.migrated._value.get()):
                self.report("attempts were lost without a fault", f"{proxy.name}: {num}")

    # ---- processes

    def _begin(self) -> None:
        """Runs on the launcher's loop, as its timers do."""
        for number in range(self._scenario.num_proxies):
            self._start_proxy(f"proxy-{number}")
        for name in self._roles:
            self._start_worker(name)
        network = SimulatedNetwork(self._switch, self._launcher)
        codec: Codec[FromProxyControl] = Codec(FromProxyControl)
        self._controls = [
            network.dealer(f"ipc:///simulated/proxy-{number}", codec, lambda message: None, peer="proxy")
            for number in range(self._scenario.num_proxies)
        ]
        for request in self._scenario.requests:
            self._launcher.call_at(request.at, self._send, request)
        for fault in self._scenario.faults:
            self._launcher.call_at(fault.at, self._strike, fault)

    def _start_proxy(self, name: str) -> None:
        self._note(f"{name} starts")
        self._proxies[name] = SimulatedProxy(
            self._machine, name, next(self._proxy_numbers), self._scenario.num_proxies
        )  # fmt: skip

    def _start_worker(self, name: str) -> None:
        pid, scenario = next(self._pids), self._scenario
        self._note(f"{name} starts as {pid}")
        endpoints = [f"ipc:///simulated/proxy-{number}" for number in range(scenario.num_proxies)]
        worker = SimulatedWorker(
            self._machine, pid, name, self._roles[name], endpoints, scenario.num_blocks, scenario.lease_s
        )
        self._workers[name] = worker
        self._machine.watch_exit(self._launcher, pid, partial(self._on_exit, worker))

    def _on_exit(self, worker: SimulatedWorker) -> None:
        self._note(f"{worker.worker_id} ({worker.pid}) has exited")
        for control in self._controls:
            control.send(WorkerExited(worker.worker_id, worker.pid, has_crashed=False))
        self._launcher.call_later(RESTART_S, self._start_worker, worker.worker_id)

    def _strike(self, fault: Fault) -> None:
        workers, proxies = list(self._workers.values()), list(self._proxies.values())
        worker, proxy = workers[fault.target % len(workers)], proxies[fault.target % len(proxies)]
        other = workers[fault.other % len(workers)]
        struck = proxy.name if "proxy" in fault.kind else worker.worker_id
        self._note(f"fault: {fault.kind}, {struck}, {fault.duration_s:.3f} s")
        match fault.kind:
            case "kill":
                worker.exit()
            case "leave":
                if not worker.loop.is_dead and hasattr(worker, "worker"):
                    worker.loop.call_soon(worker.worker.drain)
            case "freeze":
                worker.loop.freeze()
                self._launcher.call_later(fault.duration_s, worker.loop.wake)
            case "break connections":
                self._switch.break_connections(lambda one, two: worker.worker_id in (one, two))
            case "partition":
                peer = proxy.name if fault.other % 2 else other.worker_id
                self._switch.partition(worker.worker_id, peer)
                self._launcher.call_later(fault.duration_s, self._switch.heal)
            case "kill proxy":
                if not proxy.loop.is_dead:
                    proxy.exit()
                    self._end_requests_of(proxy.name)
                    self._launcher.call_later(RESTART_S, self._start_proxy, proxy.name)
            case "freeze proxy":
                proxy.loop.freeze()
                self._launcher.call_later(fault.duration_s, proxy.loop.wake)

    # ---- clients

    def _send(self, request: Request) -> None:
        proxy = self._proxies[f"proxy-{request.proxy}"]
        if proxy.loop.is_dead:
            self._end(request, "connection refused")
            return
        self._clients[proxy.name].add(request.number)
        proxy.loop.call_soon(lambda: start(self._serve(request, proxy)))

    def _end_requests_of(self, proxy: str) -> None:
        """Clients of a dead proxy see their connections break."""
        for number in self._clients.pop(proxy, set()):
            if number not in self._ended:
                self._ended[number] = "connection broke"

    async def _serve(self, request: Request, proxy: SimulatedProxy) -> None:
        """Does what `proxy.dispatch.generation` does: reads the sequences of one prompt to their ends."""
        token_ids, dispatcher = pack_token_ids(list(request.prompt)), proxy.dispatcher
        hashes = pack_short_hashes(BlockHasher(BLOCK_SIZE, "simulated").prompt_hashes(token_ids))
        prompt = Prompt(token_ids, len(request.prompt), priority=request.priority, prefix_hashes=hashes)
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        tokens: dict[DispatchedSequence, list[int]] = {}
        outcome = "finished"
        wanted = answer(request.prompt, request.max_tokens)
        try:
            samplings = [SamplingParams(temperature=0.0)] * request.num_sequences
            stop = StopConditions(request.max_tokens)
            sequences = dispatcher.start(prompt, samplings, stop, request.timeout_s, ready.put_nowait)
            tokens = {sequence: [] for sequence in sequences}
            num_open = len(sequences)
            while num_open:
                sequence = await ready.get()
                if (delta := dispatcher.take(sequence)) is None:
                    continue
                got = tokens[sequence]
                got += [token.token_id for token in delta.tokens]
                if got != wanted[: len(got)]:
                    self.report("wrong tokens", f"request {request.number}: {got} instead of {wanted[: len(got)]}")
                if delta.finish_reason is not None:
                    num_open -= 1
                    if len(got) != len(wanted):
                        self.report("a short answer", f"request {request.number}: {len(got)} of {len(wanted)} tokens")
                    dispatcher.drop(sequence)
                if request.stops_after is not None and len(got) > request.stops_after:
                    outcome = "client left"
                    break
        except TandemError as error:
            outcome = error.code
            if outcome not in EXPECTED_ERRORS or (outcome == "deadline_exceeded" and request.timeout_s == NO_TIMEOUT_S):
                self.report("an unexpected error", f"request {request.number}: {outcome}: {error.message}")
        finally:
            for sequence in tokens:
                dispatcher.drop(sequence)
        self._end(request, outcome)

    def _end(self, request: Request, outcome: str) -> None:
        if request.number in self._ended:
            self.report("two ends", f"request {request.number}: {self._ended[request.number]}, then {outcome}")
        self._ended[request.number] = outcome
        self._note(f"request {request.number}: {outcome}")

    # ---- rules

    def report(self, rule: str, details: str) -> None:
        self._note(f"VIOLATION: {rule}: {details}")
        self._result.violations.append(Violation(self._timeline.now, rule, details))

    def _note(self, line: str) -> None:
        self._result.log.append(f"{self._timeline.now:.6f} {line}")

    def _unfinished(self) -> str | None:
        missing = [request.number for request in self._scenario.requests if request.number not in self._ended]
        return f"requests {missing}" if missing else None

    def _not_whole(self) -> str | None:
        """Returns what is missing for a cluster at rest, or None."""
        for proxy in self._proxies.values():
            if proxy.loop.is_dead:
                return f"{proxy.name} is dead"
            if proxy.dispatcher.num_running:
                return f"{proxy.name} holds {proxy.dispatcher.num_running} sequences"
            if proxy.dispatcher._running:
                return f"{proxy.name} holds attempts {list(proxy.dispatcher._running)}"
            if (problem := proxy.table.why_not_ready()) is not None:
                return f"{proxy.name}: {problem}"
            if (trouble := proxy.table.pair_trouble()) is not None:
                return f"{proxy.name}: {trouble}"
            known = {worker.worker_id: worker.epoch for worker in proxy.table.workers()}
            if proxy.network.num_dealers != len(known):
                return f"{proxy.name} has {proxy.network.num_dealers} connections to {len(known)} workers"
            for record in proxy.table.prefill_workers + proxy.table.decode_workers:
                if record.use._num_own or record.use._num_promised or not record.use.prompts.is_empty:
                    return f"{proxy.name} counts sequences or prompts on {record.worker.worker_id} that have ended"
            for name, worker in self._workers.items():
                epoch = self._epoch(worker)
                if epoch is None or known.get(name) != epoch:
                    return f"{proxy.name} does not know {name}"
        for name, worker in self._workers.items():
            scheduler = worker.worker._scheduler
            if not scheduler.is_idle:
                return f"{name} holds {scheduler.num_running} running and {scheduler.num_waiting} waiting requests"
            num_pairs = len(worker.worker._traffic.status())
            if worker.network.num_dealers != self._scenario.num_proxies + num_pairs:
                return f"{name} has {worker.network.num_dealers} connections for {num_pairs} pairs"
            blocks = scheduler.blocks
            if blocks.num_quarantined or blocks.num_free != blocks.num_blocks:
                num_held = blocks.num_blocks - blocks.num_free
                return f"{name} holds {num_held} blocks, {blocks.num_quarantined} of them in quarantine"
            blocks.check()
        return None

    def _epoch(self, worker: SimulatedWorker) -> str | None:
        presence: Any = getattr(getattr(worker, "worker", None), "_presence", None)
        return presence.info.epoch if presence is not None and not worker.loop.is_dead else None


def _described(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    return "".join(lines[-4:]).strip()
