"""What operations in order may cost: nothing.

A drain, a role change, a scaling, a rolling restart or a decision of the planner loses no attempt, kills no process and
cuts no stream. Retries would heal such losses, so they are counted where they happen. A loss is explained by a fault:
after the first one of a run, everything that is lost may be its consequence. Until then nothing may be lost, except
what a worker still holds at the end of its drain.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tandem.deploy.autoscale.planner import COOLDOWN_S, DOWN_AFTER_S
from tandem.deploy.launch.worker_roles import ORDER_S
from tandem.protocol.messages.membership import Role, SetWorkerRole
from tandem.proxy.dispatch.sequence import Attempt
from tandem.runtime.errors import ConfigError, TandemError
from tandem.simulator.scenario import COMMANDS, FaultKind

LATE_S = 3.0
"""By which a drain may exceed its limit. Also the time in which the launcher learns of a role that an operator gave."""


class Leaving(Protocol):
    """What is asked of a simulated process. pids: of its ranks, the one that talks first."""

    name: str
    pids: list[int]


@dataclass(frozen=True)
class _Told:
    """The role that a worker was told last. is_launchers: whether its launcher has given the order."""

    role: Role
    at: float
    is_launchers: bool


class Orderly:
    """The rules of one run. clock: virtual time. report(rule, details): called when a rule is broken.

    drain_s: seconds for which a process that was told to leave may finish what it holds.
    """

    def __init__(self, clock: Callable[[], float], report: Callable[[str, str], None], drain_s: float) -> None:
        self._clock = clock
        self._report = report
        self._drain_s = drain_s
        self._asked: dict[int, float] = {}  # when a process was first told to leave, by pid
        self._ended_at: dict[str, float] = {}  # when the last process of a name ended
        self._by_hand: set[int] = set()  # pids of processes that got a signal that the launcher does not know of
        self._ordered: dict[str, float] = {}  # when the launcher last ordered a worker to take a role
        self._told: dict[str, _Told] = {}
        self.ordered_roles: dict[tuple[str, int], Role] = {}
        """Roles of the launcher's orders that have reached a proxy, by worker and number."""
        self._num_commands = 0
        self.disturbed_by = ""
        """The first fault; empty until then."""

        self.max_away = 0.0
        """Workers that the operations so far may keep from serving at the same time."""

    def on_fault(self, kind: FaultKind) -> None:
        """Something happens, in order or not."""
        if kind not in COMMANDS:
            self.disturb(kind)
        self.max_away += {"leave": 1, "restart all": 1, "drain for good": 1, "scale": math.inf}.get(kind, 0)

    def disturb(self, fault: str) -> None:
        self.disturbed_by = self.disturbed_by or fault

    # ---- ends of processes

    def on_signal_by_hand(self, process: Leaving) -> None:
        """Somebody signals a process without its launcher."""
        self._by_hand.add(process.pids[0])

    def is_signalled_by_hand(self, process: Leaving) -> bool:
        """Whether its launcher takes its end for a crash, unless the process says first that it leaves."""
        return process.pids[0] in self._by_hand

    def on_told_to_leave(self, process: Leaving, by_signal: bool) -> None:
        """A second signal ends a process at once. The launcher sends none, but it does not know of those by hand."""
        pid = process.pids[0]
        if by_signal and pid in self._asked and pid in self._by_hand:
            self.disturb(f"a second signal to {process.name}")
        self._asked.setdefault(pid, self._clock())

    def is_leaving(self, process: Leaving, for_s: float = 0.0) -> bool:
        """Whether a process was told to leave, so many seconds ago."""
        return self._clock() >= self._asked.get(process.pids[0], math.inf) + for_s

    def on_exit(self, process: Leaving, code: int) -> None:
        asked_at = self._asked.get(process.pids[0], math.inf)
        self._ended_at[process.name] = self._clock()
        if self.disturbed_by:
            return
        if code == -signal.SIGKILL:
            self._report("a process is killed in order", process.name)
        elif asked_at == math.inf:
            self._report("a process ends that was not told to", f"{process.name}: {code}")
        elif self._clock() - asked_at > self._drain_s + LATE_S:
            self._report("a drain has no end", f"{process.name}: {self._clock() - asked_at:.1f} s")

    def on_lost_attempt(self, proxy: str, attempt: Attempt) -> None:
        limits = (self._asked.get(worker.pid, math.inf) + self._drain_s for worker in attempt.route.workers)
        if not self.disturbed_by and self._clock() < min(limits):
            self._report("an attempt is lost in order", f"{proxy}: {attempt.attempt_id}: {attempt.error}")

    # ---- commands

    def on_command(self) -> int:
        """An operator gives a command. Returns how many have begun and ended by now, without it."""
        self._num_commands += 1
        return self._num_commands - 1

    def on_outcome(self, number: int, command: str, error: TandemError | None) -> None:
        """A command ends, which began at this number. It may be refused, and fail if others were given meanwhile."""
        is_alone = number % 2 == 0 and self._num_commands == number + 1  # all before had ended
        self._num_commands += 1
        if error is not None and not isinstance(error, ConfigError) and is_alone and not self.disturbed_by:
            self._report("a command fails in order", f"{command}: {error.message}")

    # ---- roles

    @property
    def has_moved(self) -> bool:
        """Whether a worker was told another role."""
        return bool(self._told or self._ordered)

    def on_order(self, order: SetWorkerRole) -> None:
        """An order of the launcher has reached a proxy."""
        self._ordered[order.worker_id] = self._clock()
        self.ordered_roles[order.worker_id, order.number] = order.role

    def on_told_role(self, worker: str, role: Role) -> None:
        now = self._clock()
        is_launchers = now - self._ordered.get(worker, -math.inf) < ORDER_S
        self._told[worker] = _Told(role, now, is_launchers)

    def on_new_worker(self, worker: str) -> None:
        self._told.pop(worker, None)
        self._ordered.pop(worker, None)

    def on_new_launcher(self) -> None:
        self._told.clear()
        self._ordered.clear()

    def on_start(self, worker: str, role: Role, written_s: float = 0.0) -> None:
        """A worker that comes back has the role that it was told last.

        The launcher learns of a role that an operator gave from reports, which do not count for a while after its own
        orders. written_s: time in which its process before had to write the role down, and may have been killed.
        """
        told, now, ordered_at = self._told.get(worker), self._clock(), self._ordered.get(worker, -math.inf)
        if told is None or told.role == role or ordered_at > told.at:
            return
        if written_s and told.at > self._ended_at.get(worker, math.inf) - written_s:
            return
        if not told.is_launchers and (self.disturbed_by or now < max(told.at, ordered_at + ORDER_S) + LATE_S):
            return
        self._report("a worker comes back in another role", f"{worker}: {role}, told {told.role} at {told.at:.3f}")


class PlannerRules:
    """How often the planner may change its mind. most: workers that it may start."""

    def __init__(self, clock: Callable[[], float], report: Callable[[str, str], None], most: int) -> None:
        self._clock = clock
        self._report = report
        self._most = most
        self._began_at = clock()
        self._last: dict[
            Role, tuple[float, int]
        ] = {}  # when the planner last changed the number of a role, and to what

    def on_decision(self, before: Mapping[Role, int], counts: Mapping[Role, int]) -> None:
        """before: numbers of workers at present. It moves workers sooner where both roles need more than there are."""
        now, changed = self._clock(), [role for role in counts if counts[role] != before[role]]
        details = f"{dict(before)} to {dict(counts)}"
        num_before, num_after = sum(before.values()), sum(counts.values())
        if num_after < num_before <= self._most and now - self._began_at < DOWN_AFTER_S:
            self._report("the planner stops workers too soon", f"{details} after {now - self._began_at:.1f} s")
        for role in changed if num_after < self._most else ():
            at, count = self._last.get(role, (-math.inf, 0))
            if count == before[role] and now - at < COOLDOWN_S - 0.1:  # else a worker has come or gone meanwhile
                self._report("the planner changes its mind too often", f"{details}, {role} at {at:.1f}")
        self._last.update({role: (now, counts[role]) for role in changed})
