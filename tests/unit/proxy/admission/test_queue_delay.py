"""Bursts wait; a queue that stands is held to what is served, and past capacity to a part of it."""

from __future__ import annotations

import pytest

from tandem.proxy.admission.admission import Admission, QueueFull, Ticket
from tandem.proxy.admission.queue_delay import CROWD, STANDING_PART, QueueDelayController, queue_bounds
from tests.unit.proxy.admission.test_admission import Clock


class Load:
    """So many arrive in a second, at equal distances, and so many are served, first come, first served. Pure."""

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


def test_a_queue_that_is_taken_at_once_is_a_crowd_all_the_same() -> None:
    """Decode takes on what waits whenever a batch has ended: for a moment nobody waits."""
    clock = Clock()
    max_queue_s, crowd = queue_bounds(5.0, 2.0)
    load = Load(Admission(1024, clock, standing=QueueDelayController(clock, max_queue_s, crowd)), clock)
    for number in range(6000):  # 200 a second, of which 64 are served
        clock.now += 0.005
        load.arrive()
        if number % 100 == 0:
            for _ in range(32):
                load.serve()
        if number == 3000:
            load.waits_s.clear()
    assert max(load.waits_s) < 0.8


@pytest.mark.parametrize("served_per_s", [5.0, 14.0, 100.0])
def test_past_capacity_the_wait_stays_what_it_may_be(served_per_s: float) -> None:
    clock = Clock()
    load = Load(Admission(1024, clock, standing=QueueDelayController(clock, 5.0)), clock)
    load.run(60, 3 * served_per_s, served_per_s)  # until the crowd of the beginning is served
    load.run(60, 3 * served_per_s, served_per_s)
    longest_s = max(STANDING_PART * 5.0, CROWD / served_per_s)
    assert 0.9 * longest_s < min(load.waits_s) <= max(load.waits_s) < 1.1 * longest_s
    assert len(load.waits_s) == pytest.approx(60 * served_per_s, abs=2), "nobody is idle"
    assert load.num_refused == pytest.approx(2 * 60 * served_per_s, rel=0.02)
    load.run(60, 0.5 * served_per_s, served_per_s)
    load.run(10, 0.9 * served_per_s, served_per_s)
    assert not load.num_refused and max(load.waits_s) < 1


def test_with_a_limit_for_first_tokens_a_crowd_waits_no_longer() -> None:
    """However slow decode is, of which the router's prediction knows nothing."""
    clock = Clock()
    max_queue_s, crowd = queue_bounds(5.0, 2.0)
    load = Load(Admission(1024, clock, standing=QueueDelayController(clock, max_queue_s, crowd)), clock)
    load.run(60, 42, 14)
    load.run(60, 42, 14)
    assert 0.4 < min(load.waits_s) <= max(load.waits_s) < 0.7  # 8 of 14 a second; a fifth of 1.6 s would be 4
    assert len(load.waits_s) == pytest.approx(60 * 14, abs=2)
    assert queue_bounds(0.5, 2.0)[0] == 0.5 and queue_bounds(0.0, 2.0)[0] == 1.6 and queue_bounds(5.0, None)[0] == 5.0


def test_a_burst_waits_however_long_it_takes() -> None:
    clock = Clock()
    load = Load(Admission(1024, clock, standing=QueueDelayController(clock, 5.0)), clock)
    load.arrive(1000)
    load.run(4.9, 10, 10)
    assert not load.num_refused and load.admission.num_waiting > 900
    load.run(120, 1e-9, 10)
    assert not load.waiting and not load.num_refused


@pytest.mark.parametrize(("num_clients", "served_per_s"), [(CROWD, 10), (280, 60), (50, 1)])
def test_clients_that_wait_for_their_answers_are_no_overload(num_clients: int, served_per_s: int) -> None:
    """Each always has one under way, for as long as they like: 64 of them, or as many as are served in 5 s."""
    clock = Clock()
    load = Load(Admission(1024, clock, standing=QueueDelayController(clock, 5.0)), clock)
    load.arrive(num_clients)
    for _ in range(3000):
        clock.now += 1 / served_per_s
        load.serve()
        load.arrive()
    assert not load.num_refused and max(load.waits_s) == pytest.approx(num_clients / served_per_s)


def test_a_little_too_much_waits_for_as_long_as_it_may() -> None:
    clock = Clock()
    load = Load(Admission(1024, clock, standing=QueueDelayController(clock, 5.0)), clock)
    load.run(300, 66, 60)
    load.run(60, 66, 60)
    assert 4.5 < min(load.waits_s) <= max(load.waits_s) < 5.5
    assert load.num_refused == pytest.approx(6 * 60, rel=0.1)


def test_without_the_bound_a_crowd_may_wait_for_ever() -> None:
    clock = Clock()
    load = Load(Admission(1024, clock), clock)
    load.run(60, 30, 14)
    assert not load.num_refused and load.admission.num_waiting > 900
