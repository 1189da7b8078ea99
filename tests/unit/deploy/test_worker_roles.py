"""Which workers change their role, start or drain, and which role each has at present."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.launch.worker_roles import (
    ORDER_S,
    RoleChanges,
    WorkerRoles,
    free_names,
    last_of_phase,
    num_pairs,
    start_role,
)
from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, Role, WorkerInfo

ROLES: tuple[Role, ...] = typing.get_args(Role)
counts_of_roles = st.fixed_dictionaries({role: st.integers(0, 4) for role in ROLES})


def workers(counts: dict[Role, int]) -> WorkerRoles:
    found = WorkerRoles()
    for role, count in counts.items():
        names = free_names(role, ())
        for _ in range(count):
            found.add(next(names), role)
    return found


def shown(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(name, f"{name}/1", role, "", 1)


@given(counts_of_roles, counts_of_roles)
def test_changes_lead_to_the_wanted_numbers_with_the_fewest_processes(
    before: dict[Role, int], wanted: dict[Role, int]
) -> None:
    roles = workers(before)
    changes = roles.changes(wanted, lambda name, role: True)
    assert len(changes.added) == max(0, sum(wanted.values()) - sum(before.values()))
    assert len(changes.removed) == max(0, sum(before.values()) - sum(wanted.values()))
    assert not changes.moved.keys() & set(changes.removed)
    for name, role in changes.moved.items():
        roles.on_order(0.0, name, role)
    for name in changes.removed:
        roles.remove(name)
    for role in changes.added:
        roles.add(next(free_names(role, roles.names)), role)
    assert roles.counts == wanted


def test_workers_that_cannot_move_are_replaced() -> None:
    changes = workers({"prefill": 1, "decode": 3}).changes({"prefill": 2, "decode": 2}, lambda name, role: False)
    assert changes == RoleChanges(["prefill"], {}, ["decode-2"])
    only_first = workers({"prefill": 1, "decode": 3}).changes(
        {"prefill": 3, "decode": 1}, lambda name, role: name == "decode-1"
    )
    assert only_first == RoleChanges(["prefill"], {"decode-1": "prefill"}, ["decode-2"])


def test_roles_that_are_not_mentioned_stay() -> None:
    changes = workers({"prefill": 2, "decode": 2, "any": 2}).changes({"decode": 1}, lambda name, role: True)
    assert changes == RoleChanges(removed=["decode-1"])


def test_a_moved_worker_keeps_its_name_and_counts_in_its_new_role() -> None:
    roles = workers({"prefill": 1, "decode": 2})
    roles.on_order(0.0, "decode-1", "prefill")
    assert roles.counts == {"prefill": 2, "decode": 1, "any": 0}
    assert roles.names == {"prefill-0", "decode-0", "decode-1"}
    assert roles.changes({"prefill": 1}, lambda name, role: True).removed == ["decode-1"]
    assert next(free_names("decode", roles.names)) == "decode-2"
    assert [start_role(name) for name in ("decode-1", "worker-0-host", "prefill-10")] == ["decode", "any", "prefill"]


def test_reports_show_the_role_except_shortly_after_an_order() -> None:
    roles = workers({"prefill": 1, "decode": 2})
    roles.on_order(10.0, "decode-1", "prefill")
    assert not roles.on_report(10.0 + ORDER_S - 0.1, [shown("decode-1", "decode")]), "the report may be older"
    assert roles.on_report(10.0, [shown("decode-0", "any"), shown("decode-0-far", "any")]) == {"decode-0": "any"}
    assert roles.on_report(10.0 + ORDER_S, [shown("decode-1", "decode")]) == {"decode-1": "decode"}
    roles.on_order(20.0, "decode-1", "prefill")
    roles.on_refused("decode-1")
    assert roles.on_report(20.1, [shown("decode-1", "decode")]) == {"decode-1": "decode"}
    assert roles.counts == {"prefill": 1, "decode": 1, "any": 1}


@given(counts_of_roles)
def test_pairs_are_counted_in_each_direction_between_different_workers(counts: dict[Role, int]) -> None:
    everyone = [(role, number) for role, count in counts.items() for number in range(count)]
    expected = [(a, b) for a in everyone for b in everyone if a != b and a[0] in PREFILL_ROLES and b[0] in DECODE_ROLES]
    assert num_pairs(counts) == len(expected)


@pytest.mark.parametrize(
    ("wanted", "phase"),
    [({"prefill": 0}, "prefill"), ({"decode": 0}, "decode"), ({"prefill": 0, "any": 1}, ""), ({"decode": 5}, "")],
)
def test_the_last_worker_of_a_phase_is_noticed(wanted: dict[Role, int], phase: str) -> None:
    assert last_of_phase({"prefill": 1, "decode": 1, "any": 0}, wanted) == phase
    assert last_of_phase({"prefill": 0, "decode": 1, "any": 0}, {"decode": 2}) == ""
    without = last_of_phase({"prefill": 1, "decode": 1, "any": 0}, wanted, decode_may_prefill=True)
    assert without == ("decode" if wanted == {"decode": 0} else ""), "decode workers compute all prompts then"
