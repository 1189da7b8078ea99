"""A simulated cluster that a test drives: it asks, waits for a moment, lets something happen and looks at the outcome.

The rules of `simulator.run` hold throughout: wrong tokens, unexpected errors, exceptions and leaks fail the test.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, SetWorkerRole, WorkerReport
from tandem.simulator.clients import Clients
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.network import SimulatedNetwork
from tandem.simulator.processes import Note
from tandem.simulator.run import LogHandler, hidden_logs, seeded_ids
from tandem.simulator.scenario import NO_TIMEOUT_S, ClusterShape, Fault, FaultKind, Request, cluster_config
from tandem.simulator.timeline import Timeline

FIXED = ClusterShape(cluster_config(prefill=2, decode=2, proxies=2), num_blocks=100)
"""Workers prefill-0, prefill-1, decode-0 and decode-1."""
ELASTIC = FIXED.with_config(prefill=0, decode=0, workers=3)
"""Workers worker-0, worker-1 and worker-2."""
START_LIMIT_S = 20.0
END_LIMIT_S = 160.0
"""As `simulator.run.RECOVERY_S` and the minute after it."""


class LeavingClients(Clients):
    """Clients that can be told to disconnect."""

    def __init__(self, report: Callable[[str, str], None], note: Note) -> None:
        super().__init__(report, note)
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    async def _serve(self, request: Request, proxy: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks[request.number] = task
        await super()._serve(request, proxy)


class DrivenCluster:
    """Starts with all workers ready."""

    def __init__(self, shape: ClusterShape, seed: int = 0) -> None:
        self.violations: list[str] = []
        self.log: list[str] = []
        rng = random.Random(seed)
        self.timeline = Timeline(rng, lambda name, error: self.report("an error", f"{name}: {error!r}"))
        self.clients = LeavingClients(self.report, self._note)
        self.cluster = SimulatedCluster(
            shape, self.timeline, rng, self.report, self._note, self.clients.on_proxy_end
        )  # fmt: skip
        self._cuts: list[tuple[str, str]] = []
        self.requests: list[Request] = []
        self.answers: list[Any] = []
        """What proxies answered to `tell`."""

    def report(self, rule: str, details: str) -> None:
        self.violations.append(f"{self.timeline.now:.4f} s: {rule}: {details}")

    def _note(self, line: str, *args: Any) -> None:
        self.log.append(f"{self.timeline.now:.4f} {line % args if args else line}")

    # ---- time

    def reaches(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Lets time pass until the condition holds. Returns whether it does within the limit."""
        held = self.timeline.run(lambda: bool(self.violations) or condition(), self.timeline.now + limit_s)
        assert not self.violations, "\n".join([*self.log, *self.violations])
        return held

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        assert self.reaches(condition, limit_s), "\n".join([*self.log, f"not within {limit_s} s"])

    def pass_time(self, seconds: float) -> None:
        self.reaches(lambda: False, seconds)

    # ---- clients

    def ask(
        self,
        num_prompt_tokens: int = 200,
        max_tokens: int = 30,
        proxy: int = 0,
        num_sequences: int = 1,
        timeout_s: float = NO_TIMEOUT_S,
    ) -> int:
        """Sends a request whose prompt shares no prefix with others. Returns its number."""
        number = len(self.requests)
        prompt = tuple(1 + (number * 7919 + position * 31) % 40_000 for position in range(num_prompt_tokens))
        request = Request(
            number, self.timeline.now, proxy, prompt, max_tokens, num_sequences, priority=0, timeout_s=timeout_s,
            stops_after=None,
        )  # fmt: skip
        self.requests.append(request)
        self._send(request)
        return number

    def _send(self, request: Request) -> None:
        proxy = self.cluster.proxies.get(f"proxy-{request.proxy}")
        if proxy is None or not proxy.accepts:  # its socket stays open
            self.cluster.world.call_later(0.05, self._send, request)
        else:
            self.clients.send(request, proxy)

    def keep_asking(self, interval_s: float, limit_s: float, done: Callable[[], bool]) -> None:
        """Sends a request by each proxy in turn, again and again until the condition holds."""
        until_s = self.timeline.now + limit_s
        while not done():
            assert self.timeline.now < until_s, "\n".join([*self.log, f"not within {limit_s} s"])
            self.ask(60, 20, proxy=len(self.requests) % len(self.cluster.proxies))
            self.pass_time(interval_s)

    def disconnect(self, number: int) -> None:
        """The client of a request goes away."""
        loop = self.cluster.proxies[f"proxy-{self.requests[number].proxy}"].loop
        loop.call_soon(lambda: self.clients.tasks[number].cancel())
        self.clients.outcomes[number] = "client left"

    def outcome(self, number: int) -> str:
        return self.clients.outcomes.get(number, "")

    def has_ended(self) -> bool:
        return len(self.clients.outcomes) == len(self.requests)

    def finish(self, limit_s: float = END_LIMIT_S) -> list[str]:
        """Runs until all requests have ended and the cluster is whole. Returns the outcomes by request."""
        self.until(self.has_ended, limit_s)
        self.pass_time(0.01)
        is_whole = self.reaches(lambda: self.cluster.not_whole() is None, limit_s)
        assert is_whole, "\n".join([*self.log, str(self.cluster.not_whole())])
        return [self.outcome(request.number) for request in self.requests]

    # ---- what happens to processes

    def strike(self, kind: FaultKind, name: str, duration_s: float = 0.0) -> None:
        """name: of a worker, a proxy or the launcher."""
        names = list(self.cluster.proxies if "proxy" in name else self.cluster.workers)
        number = names.index(name) if name != "launcher" else 0
        fault = Fault(self.timeline.now, kind, number, 0, duration_s)
        self.cluster.world.call_soon(self.cluster.strike, fault)

    def cut(self, name: str, *others: str) -> None:
        """Cuts a process off from others, or from all."""
        for other in others or self.cluster.workers | self.cluster.proxies:
            self.cut_one_way(name, other)
            self.cut_one_way(other, name)

    def cut_one_way(self, dealer: str, router: str) -> None:
        """Cuts the connection that one process has opened to another."""
        self.cluster.orderly.disturb("a cut")
        self.cluster.switch.cut(dealer, router)
        self._cuts.append((dealer, router))

    def heal(self) -> None:
        while self._cuts:
            self.cluster.switch.heal(*self._cuts.pop())

    def tell(self, message: msgspec.Struct, proxy: int = 0) -> None:
        """Sends what an operator's command sends to a proxy."""
        if isinstance(message, SetWorkerRole):
            self.cluster.operator.moved.add(message.worker_id)
        network = SimulatedNetwork(self.cluster.switch, self.cluster.world)
        codec: Codec[FromProxyControl] = Codec(FromProxyControl)
        endpoint = f"ipc:///simulated/proxy-{proxy}"
        before = len(self.answers)
        dealer = network.dealer(endpoint, codec, self.answers.append, peer="proxy")
        dealer.send(message)
        self.until(lambda: len(self.answers) > before)
        dealer.close()

    # ---- what an operator sees

    def reports(self, proxy: int = 0) -> dict[str, WorkerReport]:
        """Workers that a proxy knows."""
        found = self.cluster.proxies[f"proxy-{proxy}"].table.report(self.timeline.now)
        return {report.worker.worker_id: report for report in found}

    def epochs(self, proxy: int = 0) -> dict[str, str]:
        return {name: report.worker.epoch for name, report in self.reports(proxy).items()}

    def pairs(self) -> set[tuple[str, str]]:
        """Epochs of the pairs that are ready."""
        return {
            (report.worker.epoch, pair.decode_epoch)
            for report in self.reports().values() for pair in report.pairs if pair.state == "ready"
        }  # fmt: skip

    def num_migrated(self) -> int:
        return sum(int(proxy.metrics.migrated._value.get()) for proxy in self.cluster.proxies.values())

    def scheduler(self, name: str) -> Any:
        return self.cluster.workers[name].worker._scheduler

    def attempt(self, proxy: int = 0) -> Any:
        """The first attempt that is in flight, or None."""
        return next(iter(self.cluster.proxies[f"proxy-{proxy}"].dispatcher._running.values()), None)

    def placement(self) -> tuple[str, str]:
        """Workers that compute and decode the first proxy's request. Before its dispatch, the first and the last."""
        if (attempt := self.attempt()) is None:
            names = list(self.cluster.workers)
            return names[0], names[-1]
        route = attempt.route
        return route.prefill.worker_id, (route.decode or route.prefill).worker_id

    def phase(self) -> str:
        """How far the first proxy's request has come."""
        if (attempt := self.attempt()) is None:
            return "dispatching"
        if attempt.first_token is None:
            return "prefilling"
        return "decoding" if attempt.has_decoded else "shipping"


@contextmanager
def simulated_site(shape: ClusterShape = FIXED, seed: int = 0) -> Iterator[DrivenCluster]:
    with hidden_logs(), seeded_ids(random.Random(seed)):
        site = DrivenCluster(shape, seed)
        try:
            with hidden_logs(LogHandler(site.report)):
                site.pass_time(1.0)
                site.until(lambda: site.cluster.not_whole() is None, START_LIMIT_S)
                yield site
                site.pass_time(0.0)
        finally:
            for loop in site.timeline.loops:
                loop.discard()
