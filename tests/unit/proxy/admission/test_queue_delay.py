"""Bursts wait. A standing queue is limited, so that first tokens meet the SLO."""

from __future__ import annotations

import pytest

from tandem.proxy.admission.admission import MIN_WAITING, Admission, QueueDelayController, QueueFull, Ticket
from tandem.proxy.proxy_settings import AdmissionSettings
from tests.unit.proxy.admission.test_admission import Clock


class SimulatedQueue:
    """Requests arrive and are served at fixed rates, first come, first served. Pure."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self.admission, self.clock = admission, clock
        self.waiting: list[tuple[float, Ticket]] = []
        self.waits_s: list[float] = []
        self.num_refused = 0

    def arrive(self, count: int = 1) -> None:
        for _ in range(count):
            try:
                self.waiting.append((self.clock.now, self.admission.admit("a", [100])))
            except QueueFull:
                self.num_refused += 1

    def serve(self) -> None:
        if self.waiting:
            arrived_at, ticket = self.waiting.pop(0)
            ticket.on_first_token(0)
            ticket.close()
            self.waits_s.append(self.clock.now - arrived_at)

    def run(self, seconds: float, arriving_per_s: float, served_per_s: float) -> None:
        end = self.clock.now + seconds
        self.waits_s, self.num_refused = [], 0
        next_arrival, next_service = self.clock.now, self.clock.now
        while min(next_arrival, next_service) < end:
            self.clock.now = min(next_arrival, next_service)
            if next_service <= next_arrival:
                self.serve()
                next_service += 1 / served_per_s
            else:
                self.arrive()
                next_arrival += 1 / arriving_per_s
        self.clock.now = end


SLO_S = 2.0


def load_with(ttft_slo_s: float | None = SLO_S) -> SimulatedQueue:
    clock = Clock()
    controller = QueueDelayController(clock, ttft_slo_s) if ttft_slo_s is not None else None
    return SimulatedQueue(Admission(AdmissionSettings(1024), clock, queue_delay=controller), clock)


@pytest.mark.parametrize("served_per_s", [5.0, 14.0, 100.0])
@pytest.mark.parametrize("overload", [1.2, 3.0])
def test_past_capacity_first_tokens_meet_the_slo(served_per_s: float, overload: float) -> None:
    load = load_with()
    load.run(120, overload * served_per_s, served_per_s)  # until the initial queue is served
    load.run(60, overload * served_per_s, served_per_s)
    longest_s = max(SLO_S / 2, MIN_WAITING / served_per_s)
    assert 0.7 * longest_s < min(load.waits_s) <= max(load.waits_s) < 1.2 * longest_s
    assert len(load.waits_s) == pytest.approx(60 * served_per_s, abs=2), "the workers are never idle"
    assert load.num_refused == pytest.approx((overload - 1) * 60 * served_per_s, rel=0.1)


def test_after_an_overload_nothing_is_refused() -> None:
    load = load_with()
    load.run(60, 42, 14)
    load.run(60, 7, 14)
    load.run(10, 12.6, 14)
    assert not load.num_refused and max(load.waits_s) < 1


@pytest.mark.parametrize("slo_s", [0.3, 2.0, 3.0])
def test_the_queue_stops_standing_with_the_first_token_that_comes_soon_enough(slo_s: float) -> None:
    """At half of the target. The target itself is where the limit holds the queue."""
    clock = Clock()
    controller = QueueDelayController(clock, slo_s)
    target_s = slo_s / 2

    def after(waited_s: float) -> int | None:
        clock.now += target_s / 10.5
        controller.on_first_token(waited_s)
        return controller.max_waiting(100)

    assert [after(1.01 * target_s) for _ in range(12)] == [None] * 11 + [11]
    assert after(target_s) is not None and after(target_s / 2) is not None
    assert after(0.49 * target_s) is None
    assert [after(1.01 * target_s) for _ in range(12)] == [None] * 11 + [11], "late for a whole target again"


def test_a_standing_queue_may_hold_what_was_served_lately_and_some_at_least() -> None:
    for per_target, expected in ((2, MIN_WAITING), (8, MIN_WAITING), (40, 40)):
        clock = Clock()
        controller = QueueDelayController(clock, SLO_S)
        for _ in range(3 * per_target):
            clock.now += SLO_S / 2 / per_target
            controller.on_first_token(SLO_S)
        assert controller.max_waiting(5) == pytest.approx(expected, abs=1)


def test_an_idle_cluster_has_no_standing_queue() -> None:
    """Otherwise a request with more sequences than the limit would be refused forever."""
    load = load_with()
    load.run(60, 42, 14)
    assert load.num_refused
    while load.waiting:
        load.waiting.pop()[1].close()  # their clients disconnect
    load.clock.now += SLO_S
    load.admission.admit("a", [100] * 64)


def test_a_queue_that_decode_drains_in_batches_is_standing() -> None:
    """The queue is empty for a moment after each batch."""
    load = load_with()
    for number in range(6000):  # 200 arrive in a second and 64 are served
        load.clock.now += 0.005
        load.arrive()
        if number % 100 == 0:
            for _ in range(32):
                load.serve()
        if number == 3000:
            load.waits_s.clear()
    assert max(load.waits_s) < SLO_S


def test_a_burst_waits() -> None:
    load = load_with()
    load.arrive(1000)
    load.run(SLO_S / 2, 10, 400)
    assert not load.num_refused
    load.run(10, 1e-9, 400)
    assert not load.waiting and not load.num_refused


@pytest.mark.parametrize(("num_clients", "served_per_s"), [(MIN_WAITING, 10), (60, 60)])
def test_closed_loop_clients_are_no_overload(num_clients: int, served_per_s: int) -> None:
    """Each client has one request in flight; together they are as many as are served in half of the SLO."""
    load = load_with()
    load.arrive(num_clients)
    for _ in range(3000):
        load.clock.now += 1 / served_per_s
        load.serve()
        load.arrive()
    assert not load.num_refused and max(load.waits_s) == pytest.approx(num_clients / served_per_s)


def test_without_an_slo_only_the_fixed_limits_hold() -> None:
    load = load_with(ttft_slo_s=None)
    load.run(60, 30, 14)
    assert not load.num_refused and load.admission.num_waiting > 900
