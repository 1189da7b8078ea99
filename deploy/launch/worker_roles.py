"""The launcher's workers, their current roles, and orders to take another one. Pure: reports and a clock value in.

A worker is named after the role in which it was started and keeps its name when its role changes.

The launcher gives an order through a proxy. It is on its way to one proxy at a time, and it is void for every other
process than the one that it was sent to, and after VALID_S by the clock of that one. So when a proxy is restarted or
frozen, what waits for it in a queue changes nothing once the launcher has asked another proxy, or has given the order
up:

    given -> sent -> taken
              |   -> refused, when every proxy that could be asked has refused it
              `-> void, then sent to another proxy, or given up after MAX_WAIT_S

A proxy's clock is known from its report: at a time `t` of the launcher's clock it shows at least the time of the report
plus what has passed since the launcher got it. An order that is void from then on by the proxy's clock is thereby void
by the launcher's too, whatever the clocks show.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    Role,
    SetWorkerRole,
    StatusReport,
    WorkerInfo,
    WorkerOrdered,
)

NAME_PREFIX: dict[Role, str] = {"prefill": "prefill", "decode": "decode", "any": "worker"}
ORDER_S = 8.0
"""Seconds for which an ordered role counts although reports, which may be older than the order, show another. More than
the 4 to 6 s for which a silent connection keeps what a proxy has sent to a worker: it may take the role until then."""
VALID_S = 1.5
"""Time in which a proxy may act on an order. Less than ORDER_S, so that reports show what
came of it before they count."""
MAX_WAIT_S = 30.0
"""Time after which an order that no proxy has taken is given up. A proxy is replaced sooner."""
MAX_AGE_S = 3.0
"""Age of a proxy's report at which no order is sent to it: it is restarted, frozen or cut off."""


def is_worker_name(name: str) -> bool:
    """Whether a process of this name is a worker, and neither a proxy nor the media cache."""
    return name.startswith(tuple(f"{prefix}-" for prefix in NAME_PREFIX.values()))


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """Changes that lead to other numbers of workers. added: roles of new workers. moved: new roles of running ones."""

    added: list[Role] = field(default_factory=list)
    moved: dict[str, Role] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)


class WorkerRoles:
    """Roles of the workers that are not being removed, by name."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}
        self._ordered: dict[str, float] = {}  # name: time until which the order counts

    def __contains__(self, name: str) -> bool:
        return name in self._roles

    @property
    def names(self) -> set[str]:
        return set(self._roles)

    @property
    def counts(self) -> dict[Role, int]:
        """Number of workers by role, also of roles without workers."""
        found = Counter(self._roles.values())
        return {role: found[role] for role in NAME_PREFIX}

    def add(self, name: str, role: Role) -> None:
        self._roles[name] = role

    def remove(self, name: str) -> None:
        self._roles.pop(name, None)
        self._ordered.pop(name, None)

    def on_order(self, now: float, name: str, role: Role) -> None:
        """Records that the worker has been told to take this role."""
        self._roles[name], self._ordered[name] = role, now + ORDER_S

    def on_refused(self, name: str) -> None:
        """Records that the last order was refused; the next report shows the role."""
        self._ordered.pop(name, None)

    def on_report(self, now: float, workers: Iterable[WorkerInfo]) -> dict[str, Role]:
        """Takes the roles from a proxy's report. Returns those that have changed."""
        changed = {
            worker.worker_id: worker.role
            for worker in workers
            if worker.role != self._roles.get(worker.worker_id, worker.role)
            and now >= self._ordered.get(worker.worker_id, 0.0)
        }
        self._roles.update(changed)
        return changed

    def changes(self, wanted: Mapping[Role, int], may_move: Callable[[str, Role], bool]) -> RoleChanges:
        """Returns the changes that lead to the wanted numbers. Running workers change their role before others start or
        drain.

        may_move(name, role): whether this worker can take that role. Of each role, the workers with the highest numbers
        leave.
        """
        current = self.counts
        surplus = [name for role, count in wanted.items() for name in self._of_role(role)[count:]]
        added = [role for role, count in wanted.items() for _ in range(count - current[role])]
        moved: dict[str, Role] = {}
        for role in list(added):
            name = next((each for each in surplus if may_move(each, role)), None)
            if name is not None:
                moved[name] = role
                surplus.remove(name)
                added.remove(role)
        return RoleChanges(added, moved, surplus)

    def _of_role(self, role: Role) -> list[str]:
        names = (name for name, each in self._roles.items() if each == role)
        return sorted(names, key=lambda name: (int(name.rpartition("-")[2]), name))


def free_names(role: Role, taken: Collection[str]) -> Iterator[str]:
    """Yields names for new workers, lowest numbers first."""
    return (name for i in itertools.count() if (name := f"{NAME_PREFIX[role]}-{i}") not in taken)


def num_pairs(counts: Mapping[Role, int]) -> int:
    """Returns the number of ordered pairs of two workers of which the first may prefill and the second may decode."""
    return sum(counts[role] for role in PREFILL_ROLES) * sum(counts[role] for role in DECODE_ROLES) - counts["any"]


def start_role(name: str) -> Role:
    """Returns the role in which a worker of this name was started."""
    return next(role for role, prefix in NAME_PREFIX.items() if name.startswith(f"{prefix}-"))


def last_of_phase(
    counts: Mapping[Role, int], wanted: Mapping[Role, int], *, decode_may_prefill: bool = False
) -> str:  # fmt: skip
    """Returns the phase that some workers do now and none would do with the wanted numbers; "" if there is none.

    decode_may_prefill: whether decode workers compute prompts while there is no other worker that does.
    """
    after = {**counts, **wanted}
    prefill_roles = PREFILL_ROLES | DECODE_ROLES if decode_may_prefill else PREFILL_ROLES
    for phase, roles in (("prefill", prefill_roles), ("decode", DECODE_ROLES)):
        if any(counts[role] for role in roles) and not any(after[role] for role in roles):
            return phase
    return ""


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
