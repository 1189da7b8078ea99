"""The launcher's workers and their current roles. Pure: reports and a clock value in, changes out.

A worker is named after the role in which it was started and keeps its name when its role changes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, Role, WorkerInfo

NAME_PREFIX: dict[Role, str] = {"prefill": "prefill", "decode": "decode", "any": "worker"}
ORDER_S = 8.0
"""Seconds for which an ordered role counts although reports, which may be older than the order, show another. More than
the 4 to 6 s for which a silent connection keeps what a proxy has sent to a worker: it may take the role until then."""


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
