"""A process that ends is restarted: at once if it had run for a while, else with growing delay."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tandem.deploy.processes.supervisor import MAX_RESTART_DELAY_S, RESTART_DELAY_S, STABLE_AFTER_S, Supervised
from tests.support.clocked_loop import run_in_no_time


class Crashing(Supervised):
    """Crashes after each of these lifetimes in turn. delays_s: between a crash and the next start."""

    def __init__(self, *lifetimes_s: float) -> None:
        super().__init__("decode-0", Path("/nowhere"), lambda *_: True)
        self._lifetimes_s = iter(lifetimes_s)
        self._ended_at = 0.0
        self.delays_s: list[float] = []
        self.signals: list[signal.Signals] = []

    async def run_once(self) -> int | None:
        loop = asyncio.get_running_loop()
        self.delays_s.append(round(loop.time() - self._ended_at, 3))
        if (lifetime_s := next(self._lifetimes_s, None)) is None:
            self._stopping.set()
            return None
        await asyncio.sleep(lifetime_s)
        self._ended_at = loop.time()
        return 1

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def log_tail(self) -> str:
        return ""


def delays_s(*lifetimes_s: float) -> list[float]:
    process = Crashing(*lifetimes_s)
    run_in_no_time(process.run())
    return process.delays_s[1:]


def test_a_process_that_ran_for_a_while_is_restarted_at_once() -> None:
    stable_s = STABLE_AFTER_S + 1
    assert delays_s(stable_s, stable_s) == [0, 0]
    first, second = RESTART_DELAY_S, 2 * RESTART_DELAY_S
    assert delays_s(1, 1, stable_s, 1, 1) == [first, second, 0, first, second]


def test_the_delay_of_a_process_that_crashes_again_and_again_is_bounded() -> None:
    delays = delays_s(*[0] * 12)
    assert delays == sorted(delays) and delays[0] == RESTART_DELAY_S and delays[-1] == MAX_RESTART_DELAY_S


def test_each_process_is_told_to_drain_once_and_again_if_it_did_not_run_yet() -> None:
    process = Crashing()
    process.num_starts, process.last_pid = 1, 10
    for restarts in (1, 2):
        process.restart()
        assert process.signals == [signal.SIGTERM], f"{restarts} restarts: a second signal would end its requests"
    process.num_starts = 2  # the next one is being made
    process.restart()
    process.last_pid = 11
    process.restart()
    process.terminate()
    assert process.signals == [signal.SIGTERM] * 3
