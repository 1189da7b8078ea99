"""The loop pauses in the midst of work while it loses its core now and then, and at no other time."""

from __future__ import annotations

import threading
import time

from tandem.proxy.dispatch.pauses import CONTENDED_FOR_S, RUN_S, Pauses, Usage, own_usage


class Thread:
    """One whose time passes as the test says."""

    def __init__(self) -> None:
        self.now, self.ran, self.slept = 100.0, 5.0, 7
        self.pauses: list[float] = []
        self.of_loop = Pauses(lambda: self.now, lambda: Usage(self.ran, self.slept), self.pause)

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.ran += seconds
        self.of_loop.pause_if_due()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1

    def lose_core(self, seconds: float) -> None:
        self.now += seconds

    def pause(self, seconds: float) -> None:
        self.pauses.append(self.now)
        self.sleep(seconds)


def test_none_where_the_core_is_never_lost() -> None:
    thread = Thread()
    for _ in range(1000):
        thread.run(RUN_S / 4)
    assert not thread.pauses


def test_one_after_each_piece_of_work_once_the_core_was_lost() -> None:
    thread = Thread()
    thread.lose_core(0.004)
    thread.run(0.0001)
    begun = thread.now
    assert not thread.pauses  # it has just lost the core: its next slice has begun
    for _ in range(40):
        thread.run(RUN_S / 4)
    assert len(thread.pauses) in (8, 9, 10)
    gaps = [after - before for before, after in zip([begun, *thread.pauses], thread.pauses, strict=False)]
    assert all(RUN_S <= gap < 1.3 * RUN_S for gap in gaps)


def test_none_for_a_loop_that_sleeps_by_itself() -> None:
    thread = Thread()
    thread.lose_core(0.004)
    for _ in range(100):
        thread.run(RUN_S)
        thread.sleep(0.001)
    assert not thread.pauses


def test_sleeping_is_not_taken_for_a_lost_core() -> None:
    thread = Thread()
    for _ in range(20):
        thread.sleep(0.05)
        thread.run(RUN_S / 2)
        thread.run(RUN_S)
    assert not thread.pauses


def test_a_long_call_is_not_taken_for_one() -> None:
    """Interrupts and the kernel's own threads take some of any second."""
    thread = Thread()
    thread.lose_core(0.01)
    thread.run(0.2)
    for _ in range(100):
        thread.run(RUN_S)
    assert not thread.pauses
    thread.lose_core(0.1)
    thread.run(0.2)
    for _ in range(100):
        thread.run(RUN_S)
    assert thread.pauses


def test_they_end_when_nobody_competes_any_more() -> None:
    thread = Thread()
    thread.lose_core(0.004)
    thread.run(0.0001)
    while thread.now < 100 + CONTENDED_FOR_S + 1:
        thread.run(RUN_S)
    assert thread.pauses
    assert thread.pauses[-1] < 100.1 + CONTENDED_FOR_S
    thread.lose_core(0.004)
    thread.run(0.0001)
    num_before = len(thread.pauses)
    thread.run(RUN_S)
    assert len(thread.pauses) == num_before + 1


def test_what_the_system_tells_of_a_thread() -> None:
    told: list[Usage] = []

    def work() -> None:
        told.append(own_usage())
        time.sleep(0.001)
        begun = time.thread_time()
        while time.thread_time() - begun < 0.02:
            pass
        told.append(own_usage())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before, after = told
    assert after.times_slept > before.times_slept
    assert after.ran_s - before.ran_s >= 0.019


def test_its_time_is_of_now_and_not_of_the_last_tick() -> None:
    """As `getrusage`'s is: none for most of these windows, and 4 ms, of those before, for one in which a tick falls."""
    lost_s: list[float] = []

    def work() -> None:
        for _ in range(50):
            begun, before = time.monotonic(), own_usage()
            while time.monotonic() - begun < 0.001:
                pass
            ran_s = own_usage().ran_s - before.ran_s
            lost_s.append((time.monotonic() - begun) - ran_s)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert min(lost_s) > -0.0005, "more than there was"
