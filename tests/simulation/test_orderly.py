"""Rules of `simulator.orderly` and `simulator.refusals`: what is explained by a fault or a limit, and what is not."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.protocol.messages.membership import SetWorkerRole
from tandem.proxy.admission.admission import MIN_WAITING, ClientLimitExceeded, QueueFull, Ticket
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.runtime.errors import ConfigError, InternalError
from tandem.simulator.orderly import Orderly, PlannerRules
from tandem.simulator.refusals import CheckedAdmission, RefusalRules
from tandem.simulator.scenario import Request

DRAIN_S = 20.0
WORKER: Any = SimpleNamespace(name="worker-0", pids=[7])


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.rules: list[str] = []
        self.orderly = Orderly(lambda: self.now, self.report, DRAIN_S)

    def report(self, rule: str, details: str) -> None:
        self.rules.append(rule)

    def lose(self) -> None:
        attempt: Any = SimpleNamespace(
            attempt_id="a", error="lost", route=SimpleNamespace(workers=[SimpleNamespace(pid=7)])
        )
        self.orderly.on_lost_attempt("proxy-0", attempt)


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_lost_before_a_fault_or_the_end_of_a_drain(world: World) -> None:
    world.lose()
    world.orderly.on_told_to_leave(WORKER, by_signal=True)
    world.now = DRAIN_S - 0.1
    world.lose()
    assert world.rules == 2 * ["an attempt is lost in order"]
    world.now = DRAIN_S
    world.lose()
    assert len(world.rules) == 2


def test_everything_may_be_lost_after_a_fault(world: World) -> None:
    world.orderly.on_fault("kill")
    world.lose()
    world.orderly.on_exit(WORKER, -signal.SIGKILL)
    assert not world.rules


def test_processes_end_when_they_are_told_to_and_in_time(world: World) -> None:
    world.orderly.on_exit(WORKER, 0)
    world.orderly.on_told_to_leave(WORKER, by_signal=True)
    world.orderly.on_exit(WORKER, 0)
    world.orderly.on_exit(WORKER, -signal.SIGKILL)
    world.now = DRAIN_S + 10
    world.orderly.on_exit(WORKER, 0)
    assert world.rules == [
        "a process ends that was not told to", "a process is killed in order", "a drain has no end"
    ]  # fmt: skip


def test_a_signal_by_hand_and_another_one_are_a_fault(world: World) -> None:
    world.orderly.on_signal_by_hand(WORKER)
    world.orderly.on_told_to_leave(WORKER, by_signal=True)
    assert not world.orderly.disturbed_by
    world.orderly.on_told_to_leave(WORKER, by_signal=True)
    assert world.orderly.disturbed_by


def test_a_command_may_be_refused_and_may_only_fail_beside_another_one(world: World) -> None:
    orderly = world.orderly
    orderly.on_outcome(orderly.on_command(), "drain", ConfigError("the last worker"))
    first, second = orderly.on_command(), orderly.on_command()
    for number in (first, second):
        orderly.on_outcome(number, "restart", InternalError("late"))
    assert not world.rules
    orderly.on_outcome(orderly.on_command(), "restart", InternalError("late"))
    assert world.rules == ["a command fails in order"]


def test_a_worker_comes_back_in_the_role_that_it_was_told_last(world: World) -> None:
    orderly = world.orderly
    orderly.on_order(SetWorkerRole("worker-0", "decode"))
    orderly.on_told_role("worker-0", "decode")
    orderly.on_start("worker-0", "decode")
    orderly.on_start("worker-0", "any")
    assert world.rules == ["a worker comes back in another role"]
    world.now = 1.0
    orderly.on_order(SetWorkerRole("worker-0", "prefill"))  # has not reached the worker
    orderly.on_start("worker-0", "prefill")
    orderly.on_new_worker("worker-0")
    orderly.on_start("worker-0", "any")
    assert len(world.rules) == 1


def test_a_role_file_may_lack_a_role_that_came_just_before_the_end(world: World) -> None:
    orderly = world.orderly
    orderly.on_order(SetWorkerRole("worker-0", "decode"))
    orderly.on_told_role("worker-0", "decode")
    world.now = 0.04
    orderly.disturb("kill")
    orderly.on_exit(WORKER, -signal.SIGKILL)
    orderly.on_start("worker-0", "any", written_s=0.05)
    assert not world.rules
    orderly.on_start("worker-0", "any", written_s=0.03)
    assert world.rules == ["a worker comes back in another role"]


def test_the_launcher_learns_later_of_a_role_that_an_operator_gave(world: World) -> None:
    world.orderly.on_told_role("worker-0", "decode")
    world.orderly.on_start("worker-0", "any")
    assert not world.rules
    world.now = 5.0
    world.orderly.on_start("worker-0", "any")
    assert world.rules == ["a worker comes back in another role"]


def test_a_planner_keeps_to_a_decision_for_a_while(world: World) -> None:
    rules = PlannerRules(lambda: world.now, world.report, 8)
    rules.on_decision({"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 1})
    world.now = 5.0
    rules.on_decision({"prefill": 2, "decode": 1}, {"prefill": 3, "decode": 1})
    assert not world.rules
    world.now = 6.0
    rules.on_decision({"prefill": 4, "decode": 1}, {"prefill": 3, "decode": 1})  # somebody added one
    assert world.rules == ["the planner stops workers too soon"]
    rules.on_decision({"prefill": 3, "decode": 1}, {"prefill": 4, "decode": 1})
    assert world.rules[1:] == ["the planner changes its mind too often"]


# ---- refusals


def request(number: int, priority: int = 0, num_sequences: int = 1) -> Request:
    return Request(number, 0.0, 0, (1,), 5, num_sequences, priority, 600.0, None)


class Counter(World):
    def __init__(self, **limits: int) -> None:
        super().__init__()
        self.refusals = RefusalRules(lambda: self.now, self.report, AdmissionSettings(**limits), 60.0)

    def ask(self, wanted: Request, client: str = "a") -> None:
        self.refusals.begin(wanted, client)
        self.refusals.ask(wanted)


FULL, TOO_MANY = QueueFull("full", 1), ClientLimitExceeded("too many", 1)


def test_the_queue_is_full_of_those_without_a_token() -> None:
    world = Counter(max_waiting_requests=3)
    for number in range(3):
        world.ask(request(number))
    world.ask(request(3))
    world.refusals.end(request(3), FULL)
    assert not world.rules
    world.refusals.on_token(request(0), 0)
    world.ask(request(4))
    world.refusals.end(request(4), FULL)
    assert world.rules == ["a request is refused although there is room"]


def test_some_may_always_wait_while_the_queue_is_standing() -> None:
    world = Counter(max_waiting_requests=100, ttft_slo_ms=500)
    for number in range(MIN_WAITING):
        world.ask(request(number))
    world.ask(request(MIN_WAITING))
    world.refusals.end(request(MIN_WAITING), FULL)
    assert not world.rules
    world.refusals.on_token(request(0), 0)
    world.ask(request(MIN_WAITING + 1))
    world.refusals.end(request(MIN_WAITING + 1), FULL)
    assert world.rules == ["a request is refused although there is room"]


def test_a_client_is_refused_for_its_own_sequences() -> None:
    world = Counter(max_requests_per_client=2)
    world.ask(request(0, num_sequences=2), "a")
    world.ask(request(1), "a")
    world.refusals.end(request(1), TOO_MANY)
    assert not world.rules
    world.ask(request(2), "b")
    world.refusals.end(request(2), TOO_MANY)
    assert world.rules == ["a client is refused for what others have"]


def test_only_later_requests_without_a_token_are_displaced_and_the_newest_of_the_latest_first() -> None:
    world = Counter(max_waiting_requests=2)
    for number, priority in enumerate([1, 1, 0]):
        world.ask(request(number, priority))
        world.now += 1.0
    world.refusals.end(request(1, 1), FULL)
    assert not world.rules
    world.ask(request(3, 1))
    world.now += 1.0
    world.ask(request(4))
    world.now += 1.0
    world.refusals.end(request(0, 1), FULL)
    world.refusals.end(request(4), FULL)
    assert world.rules == ["a request is displaced before a later one", "a request is displaced by an equal one"]


def test_a_stream_that_has_begun_is_not_displaced() -> None:
    world = Counter(max_waiting_requests=1)
    world.ask(request(0, 1))
    world.refusals.on_token(request(0, 1), 0)
    world.now = 1.0
    world.ask(request(1))
    world.refusals.end(request(0, 1), FULL)
    assert world.rules == ["a stream that has begun is displaced"]


def test_a_prompt_waits_for_a_worker() -> None:
    world = Counter()
    for number, waited_s in enumerate([60.0, 1.0]):
        world.ask(request(number))
        world.now += waited_s
        world.refusals.end(request(number), NoWorkerReady("none"))
    assert world.rules == ["a prompt does not wait for a worker"]


def test_a_request_has_as_long_as_the_shorter_time_limit() -> None:
    world = Counter()
    for number, timeout_s in enumerate([5.0, 600.0]):
        world.ask(replace(request(number), timeout_s=timeout_s))
    world.now = 6.0
    assert (world.refusals.late(600.0), world.refusals.late(5.5)) == ([0], [0, 1])


# ---- admission


def test_what_is_admitted_beyond_a_limit_or_in_place_of_a_stream_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world, limits = World(), AdmissionSettings(2, max_requests_per_client=3)
    admission = CheckedAdmission(world.report, limits, lambda: world.now)
    admission.admit("a", [1, 1], 1).on_first_token(0)
    admission.admit("b", [1])
    assert not world.rules
    monkeypatch.setattr(Ticket, "can_be_displaced", True)
    admission.admit("b", [1])
    monkeypatch.setattr(CheckedAdmission, "_to_displace", lambda *_: [])
    admission.admit("a", [1, 1])
    assert world.rules == [
        "a request that streams is displaced", "a client has more in flight than it may", "more requests wait than may"
    ]  # fmt: skip
