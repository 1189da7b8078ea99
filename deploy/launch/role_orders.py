"""Orders to workers to take another role, which the launcher gives through a proxy. Pure.

An order is on its way to one proxy at a time, and it is void for every other process than the one that it was sent to,
and after VALID_S by the clock of that one. So when a proxy is restarted or frozen, what waits for it in a queue changes
nothing once the launcher has asked another proxy, or has given the order up.

A proxy's clock is known from its report: at a time `t` of the launcher's clock it shows at least the time of the report
plus what has passed since the launcher got it. An order that is void from then on by the proxy's clock is thereby void
by the launcher's too, whatever the clocks show.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.deploy.launch.worker_roles import ORDER_S
from tandem.protocol.messages.membership import Role, SetWorkerRole, StatusReport, WorkerInfo, WorkerOrdered

VALID_S = 1.5
"""Time in which a proxy may act on an order. Less than `deploy.launch.worker_roles.ORDER_S`, so that reports show what
came of it before they count."""
MAX_WAIT_S = 30.0
"""Time after which an order that no proxy has taken is given up. A proxy is replaced sooner."""
MAX_AGE_S = 3.0
"""Age of a proxy's report at which no order is sent to it: it is restarted, frozen or cut off."""


@dataclass(frozen=True, slots=True)
class _Proxy:
    """What a proxy's last report says. workers: that the last one with workers names."""

    proxy_id: str
    clock_s: float
    heard_at: float
    workers: frozenset[str]


@dataclass(slots=True)
class _Order:
    number: int
    role: Role
    given_at: float
    proxy: str = ""
    """Which has it now, or had it last."""
    void_at: float = 0.0
    """Time of the launcher's clock from which on that proxy does not act on it."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By proxy."""


class RoleOrders:
    """Orders that no proxy has taken yet, by worker."""

    def __init__(self) -> None:
        self._orders: dict[str, _Order] = {}
        self._proxies: dict[str, _Proxy] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._orders

    def give(self, now: float, worker_id: str, role: Role) -> None:
        """Begins an order, in place of an earlier one to the same worker. It is not sent before that one is void."""
        before = self._orders.get(worker_id)
        void_at = before.void_at if before is not None else 0.0
        self._orders[worker_id] = _Order(next(self._numbers), role, now, void_at=void_at)

    def cancel(self, worker_id: str) -> None:
        """Forgets the order to a worker that leaves."""
        self._orders.pop(worker_id, None)

    def on_report(self, now: float, proxy: str, report: StatusReport) -> None:
        before = self._proxies.get(proxy)
        workers = frozenset(each.worker.worker_id for each in report.workers)
        if not workers and report.ready and before is not None and before.proxy_id == report.proxy_id:
            workers = before.workers  # it was not asked for them
        self._proxies[proxy] = _Proxy(report.proxy_id, report.clock_s, now, workers)

    def on_exit(self, proxy: str) -> None:
        """A proxy's process has ended. Its successor is known when it reports."""
        self._proxies.pop(proxy, None)

    def due(self, now: float) -> Iterator[tuple[str, SetWorkerRole]]:
        """Yields what is to be sent now, and to which proxy: orders that none has, or none can act on any more."""
        for worker_id, order in self._orders.items():
            if now < order.void_at:
                continue
            able = [name for name in self._able(now, worker_id) if name not in order.refusals]
            if not able:
                continue
            order.proxy = max(able, key=lambda name: (name != order.proxy, self._proxies[name].heard_at))
            order.void_at = now + VALID_S
            proxy = self._proxies[order.proxy]
            until_s = proxy.clock_s + (order.void_at - proxy.heard_at)
            yield order.proxy, SetWorkerRole(worker_id, order.role, order.number, proxy.proxy_id, until_s)

    def _able(self, now: float, worker_id: str) -> list[str]:
        """Proxies that respond and know the worker."""
        return [
            name
            for name, each in self._proxies.items()
            if now - each.heard_at < MAX_AGE_S and worker_id in each.workers
        ]

    def settled(self, report: StatusReport) -> Iterator[WorkerInfo]:
        """Yields the workers whose roles the report shows: not those to which an order is on its way, or from which the
        proxy has heard nothing since the last one."""
        for each in report.workers:
            if each.worker.worker_id not in self._orders and each.silence_s < ORDER_S:
                yield each.worker

    def on_answer(self, now: float, proxy: str, answer: WorkerOrdered) -> tuple[Role | None, str]:
        """Returns the role of an order that is decided by this answer, and why it is refused or "".

        Returns no role for an answer to an earlier order, or if another proxy can be asked.
        """
        order = self._orders.get(answer.worker_id)
        if order is None or order.number != answer.number:
            return None, ""
        if answer.error:
            order.refusals[proxy] = answer.error
            if proxy == order.proxy:
                order.void_at = now
            if now < order.void_at or any(name not in order.refusals for name in self._able(now, answer.worker_id)):
                return None, ""
        del self._orders[answer.worker_id]
        return order.role, answer.error

    def given_up(self, now: float) -> dict[str, str]:
        """Returns the workers whose orders no proxy has taken in time, each once, and the reason."""
        late = {
            name: order
            for name, order in self._orders.items()
            if now >= order.void_at and now - order.given_at > MAX_WAIT_S
        }
        for name in late:
            del self._orders[name]
        return {
            name: next(iter(order.refusals.values()), f"no proxy has taken the order within {MAX_WAIT_S:.0f} s")
            for name, order in late.items()
        }
