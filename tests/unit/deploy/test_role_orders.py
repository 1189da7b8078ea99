"""Orders to change a role: one proxy at a time may act on an order, and none after the launcher has given it up."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.deploy.launch.worker_roles import MAX_AGE_S, MAX_WAIT_S, ORDER_S, VALID_S, RoleOrders
from tandem.protocol.messages.membership import (
    Role,
    SetWorkerRole,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerOrdered,
    WorkerReport,
)

CLOCK_S = 1000.0
"""What a proxy's clock shows when the launcher's shows 0."""


def report(now: float, proxy_id: str, *workers: str, silence_s: float = 0.1) -> StatusReport:
    known = [
        WorkerReport(WorkerInfo(name, f"{name}/1", "decode", "", 1), WorkerLoad(), [], silence_s) for name in workers
    ]
    return StatusReport(proxy_id, "m", True, 0, known, clock_s=CLOCK_S + now)


def heard(now: float, **proxies: tuple[str, ...]) -> RoleOrders:
    """Orders of a launcher that has just heard from these processes, which know these workers."""
    orders = RoleOrders()
    for name, workers in proxies.items():
        orders.on_report(now, name, report(now, f"{name}-1", *workers))
    return orders


def sent(orders: RoleOrders, now: float) -> dict[str, SetWorkerRole]:
    return dict(orders.due(now))


def test_an_order_names_the_process_that_may_act_on_it_and_until_when_by_its_clock() -> None:
    orders = heard(0.0, a=("w",))
    orders.give(0.5, "w", "prefill")
    assert sent(orders, 0.5) == {"a": SetWorkerRole("w", "prefill", 1, "a-1", CLOCK_S + 0.5 + VALID_S)}
    assert sent(orders, 0.6) == {}, "it is on its way"
    assert orders.on_answer(0.7, "a", WorkerOrdered("w", "", 1)) == ("prefill", "")
    assert "w" not in orders and sent(orders, 9.0) == {}


def test_another_proxy_is_asked_once_the_first_can_no_longer_act() -> None:
    orders = heard(0.0, a=("w",), b=("w",))
    orders.on_report(0.1, "a", report(0.1, "a-1", "w"))
    orders.give(0.2, "w", "prefill")
    assert sent(orders, 0.2).keys() == {"a"}, "the one that was heard last"
    orders.on_exit("a")
    assert sent(orders, 0.2 + VALID_S - 0.01) == {}, "what is sent to it may still be read, if only its host is lost"
    assert sent(orders, 0.2 + VALID_S).keys() == {"b"}
    assert orders.on_answer(2.0, "b", WorkerOrdered("w", "", 1)) == ("prefill", "")


def test_an_order_waits_for_the_only_proxy_that_is_restarted() -> None:
    orders = heard(0.0, a=("w",))
    orders.on_exit("a")
    orders.give(0.1, "w", "prefill")
    assert sent(orders, 0.1) == {}, "nothing waits in a queue"
    orders.on_report(5.0, "a", report(5.0, "a-2"))
    assert sent(orders, 5.0) == {}, "it does not know the worker yet"
    orders.on_report(6.0, "a", report(6.0, "a-2", "w"))
    orders.on_report(6.5, "a", report(6.5, "a-2"))  # it was asked for its own figures only
    assert sent(orders, 6.5)["a"].proxy_id == "a-2"


def test_a_proxy_that_has_not_reported_lately_is_not_asked() -> None:
    orders = heard(0.0, a=("w",))
    orders.give(MAX_AGE_S, "w", "prefill")
    assert sent(orders, MAX_AGE_S) == {}


def test_an_order_is_refused_when_all_proxies_have_refused_it() -> None:
    orders = heard(0.0, a=("w",), b=("w",), c=())
    orders.give(0.0, "w", "prefill")
    [first] = sent(orders, 0.0)
    assert orders.on_answer(0.1, first, WorkerOrdered("w", "no worker w", 1)) == (None, "")
    [second] = sent(orders, 0.1)
    assert {first, second} == {"a", "b"}
    assert orders.on_answer(0.2, second, WorkerOrdered("w", "it drains", 1)) == ("prefill", "it drains")
    assert "w" not in orders


def test_answers_to_earlier_orders_decide_nothing() -> None:
    orders = heard(0.0, a=("w",))
    orders.give(0.0, "w", "prefill")
    assert sent(orders, 0.0)["a"].number == 1
    orders.give(0.1, "w", "any")
    assert sent(orders, 0.1) == {}, "the earlier one may still be acted on"
    for error in ("", "it drains"):
        assert orders.on_answer(0.2, "a", WorkerOrdered("w", error, 1)) == (None, "")
    assert orders.on_answer(0.2, "a", WorkerOrdered("other", "", 2)) == (None, "")
    assert sent(orders, VALID_S)["a"] == SetWorkerRole("w", "any", 2, "a-1", CLOCK_S + 2 * VALID_S)
    assert orders.on_answer(2.0, "a", WorkerOrdered("w", "", 2)) == ("any", "")


def test_an_order_that_no_proxy_takes_is_given_up_when_it_is_void() -> None:
    orders = heard(0.0, a=("w",))
    orders.give(0.0, "w", "prefill")
    now = 0.0
    while now <= MAX_WAIT_S:
        orders.on_report(now, "a", report(now, "a-1", "w"))
        sent(orders, now)
        assert orders.given_up(now) == {}
        now += 1.0
    while not (given_up := orders.given_up(now)):
        now += 0.1
    assert MAX_WAIT_S < now < MAX_WAIT_S + 2 * VALID_S
    assert given_up == {"w": "no proxy has taken the order within 30 s"} and orders.given_up(now) == {}


def test_reports_show_no_role_of_a_worker_with_an_order_or_without_a_sign_of_life() -> None:
    orders = heard(0.0, a=("w", "x"))
    orders.give(0.0, "w", "prefill")
    shown = [worker.worker_id for worker in orders.settled(report(0.1, "a-1", "w", "x"))]
    assert shown == ["x"]
    orders.cancel("w")
    assert len(list(orders.settled(report(0.1, "a-1", "w", "x")))) == 2
    assert list(orders.settled(report(0.1, "a-1", "x", silence_s=ORDER_S))) == []


class LateOrders(RuleBasedStateMachine):
    """Proxies that are restarted and frozen, clocks that differ, and messages that take any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10.0
        self.orders = RoleOrders()
        self.processes = dict.fromkeys("ab", 1)
        self.queues: list[tuple[str, SetWorkerRole]] = []
        self.answers: list[tuple[str, WorkerOrdered]] = []
        self.is_wanted = False
        for proxy in "ab":
            self.hear(proxy, 0.0, True)

    def clock_s(self, proxy: str) -> float:
        return self.now + {"a": 1e6, "b": -7.0}[proxy]

    def proxy_id(self, proxy: str) -> str:
        return f"{proxy}-{self.processes[proxy]}"

    def can_act(self) -> list[SetWorkerRole]:
        """Orders on which a proxy that reads them now would act, as `Control._is_void` decides."""
        return [
            order
            for proxy, order in self.queues
            if order.proxy_id == self.proxy_id(proxy) and self.clock_s(proxy) <= (order.until_s or 0.0)
        ]

    def send(self) -> None:
        for sent_to in self.orders.due(self.now):
            assert not self.can_act(), "two proxies could act"
            self.queues.append(sent_to)
        if self.orders.given_up(self.now):
            self.is_wanted = False

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, VALID_S, 5.0, MAX_WAIT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.send()

    @rule(proxy=st.sampled_from("ab"), latency_s=st.sampled_from([0.0, 0.1, 1.0, 5.0]), knows=st.booleans())
    def hear(self, proxy: str, latency_s: float, knows: bool) -> None:
        made = report(0.0, self.proxy_id(proxy), *(["w"] if knows else []))
        made = msgspec.structs.replace(made, clock_s=self.clock_s(proxy) - latency_s)
        self.orders.on_report(self.now, proxy, made)
        self.send()

    @rule(proxy=st.sampled_from("ab"), is_noticed=st.booleans())
    def restart(self, proxy: str, is_noticed: bool) -> None:
        self.processes[proxy] += 1
        if is_noticed:
            self.orders.on_exit(proxy)

    @rule(role=st.sampled_from(["prefill", "decode", "any"]))
    def give(self, role: Role) -> None:
        self.orders.give(self.now, "w", role)
        self.is_wanted = True
        self.send()

    @precondition(lambda self: self.queues)
    @rule(newest=st.booleans(), error=st.sampled_from(["", "it drains"]))
    def read(self, newest: bool, error: str) -> None:
        acted = self.queues[-1 if newest else 0][1] in self.can_act()
        proxy, order = self.queues.pop(-1 if newest else 0)
        if acted:
            self.answers.append((proxy, WorkerOrdered("w", error, order.number)))

    @precondition(lambda self: self.answers)
    @rule()
    def answer(self) -> None:
        role, refusal = self.orders.on_answer(self.now, *self.answers.pop(0))
        if role is not None and refusal:
            self.is_wanted = False
        self.send()

    @invariant()
    def what_is_given_up_is_void(self) -> None:
        assert self.is_wanted or not self.can_act()


LateOrders.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestLateOrders = LateOrders.TestCase
