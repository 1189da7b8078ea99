"""Suspects are tried one at a time, on workers that run nothing unproven, for a limited time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.dispatch.sequence import ABORT_S, CLOSING_S, MAX_DEATHS, MAX_SHARED_DEATHS, TRIAL_S, Trials

WORKERS = {name: WorkerInfo(name, name, "any", f"ipc://{name}", 1) for name in "abc"}


class _FakeAttempt:
    """unproven_on: the workers that it may crash."""

    def __init__(self, *workers: str, unproven_on: str = "", refused_at: dict[str, int] | None = None) -> None:
        self.busy_workers = [WORKERS[name] for name in workers]
        self.refused_at = refused_at or {}
        self.is_proven = self.is_over = False
        self._unproven_on = unproven_on

    def may_be_computed_by(self, worker: WorkerInfo) -> bool:
        return worker.epoch in self._unproven_on


def attempt_on(*workers: str, unproven_on: str = "", refused_at: dict[str, int] | None = None) -> Any:
    return _FakeAttempt(*workers, unproven_on=unproven_on, refused_at=refused_at)


def route(*workers: str) -> Any:
    return SimpleNamespace(workers=[WORKERS[name] for name in workers])


def picks(*routes: Any) -> Any:
    """Returns a function that picks the first of these routes that uses no excluded worker."""

    def pick(exclude: frozenset[str]) -> Any:
        for each in routes:
            if not any(worker.epoch in exclude for worker in each.workers):
                return each
        raise NoWorkerReady("none")

    return pick


def suspect(attempt: Any, num_trials: int = 0) -> Any:
    return SimpleNamespace(attempt=attempt, num_trials=num_trials)


def test_a_suspect_goes_where_nothing_runs_or_else_where_only_streams_run() -> None:
    trials = Trials()
    streaming, unproven = attempt_on("a"), attempt_on("b", unproven_on="b")
    idle = trials.place(0.0, [streaming, unproven], picks(route("a"), route("b"), route("c")))
    assert idle[0] is not None
    assert (idle[0].workers, idle[1]) == ([WORKERS["c"]], {"c": MAX_DEATHS})
    beside = trials.place(0.0, [streaming, unproven], picks(route("b"), route("a")))
    assert beside[0] is not None
    assert (beside[0].workers, beside[1]) == ([WORKERS["a"]], {"a": MAX_SHARED_DEATHS})
    both = trials.place(0.0, [streaming], picks(route("a", "c")))
    assert both[1] == {"a": MAX_SHARED_DEATHS, "c": MAX_DEATHS}


def test_a_suspect_waits_for_workers_that_are_closed_to_others() -> None:
    trials, unproven, only = Trials(), attempt_on("b", unproven_on="b"), picks(route("b"))
    assert trials.place(10.0, [unproven], only) == (None, {})
    trials.close(10.0, route("b"))
    trials.close(11.0, route("c"))  # they are closed already, and for no longer
    assert trials.closed(10.0) == trials.closed(10.0 + CLOSING_S - 0.1) == {"b"} and not trials.is_running
    assert trials.place(10.0 + CLOSING_S - 0.1, [unproven], only) == (None, {})
    assert trials.closed(10.0 + CLOSING_S) == frozenset()
    placed, refused_at = trials.place(10.0 + CLOSING_S, [unproven], only)
    assert placed is not None and refused_at == {}, "beside others, which proves nothing"
    with pytest.raises(NoWorkerReady):
        trials.place(10.0 + CLOSING_S, [unproven], picks())


@pytest.mark.parametrize(("num_trials", "duration_s"), [(0, TRIAL_S), (1, 2 * TRIAL_S), (3, 8 * TRIAL_S)])
def test_a_trial_closes_its_workers_for_longer_each_time(num_trials: int, duration_s: float) -> None:
    trials, attempt = Trials(), attempt_on("a", refused_at={"a": 3})
    sequence = suspect(attempt, num_trials)
    trials.begin(5.0, [sequence], route("a"))
    assert trials.is_running and sequence.num_trials == num_trials + 1
    assert trials.closed(5.0 + duration_s - 0.1) == {"a"} and not trials.end(5.0 + duration_s - 0.1)
    assert trials.closed(5.0 + duration_s) == frozenset()
    assert trials.end(5.0 + duration_s) and not trials.is_running and not trials.end(5.0 + duration_s)
    assert attempt.refused_at == {}, "others are computed beside it from now on"


@pytest.mark.parametrize("how", ["is_proven", "is_over"])
def test_a_trial_ends_with_the_last_of_its_attempts(how: str) -> None:
    trials = Trials()
    attempts = [attempt_on("a", refused_at={"a": 3}) for _ in range(2)]
    trials.begin(0.0, [suspect(each) for each in attempts], route("a"))
    setattr(attempts[0], how, True)
    assert trials.closed(1.0) == {"a"} and not trials.end(1.0)
    setattr(attempts[1], how, True)
    assert trials.closed(1.0) == frozenset() and trials.end(1.0)
    assert attempts[0].refused_at == ({} if how == "is_proven" else {"a": 3})


def test_a_suspect_beside_others_is_no_trial() -> None:
    trials = Trials()
    sequence = suspect(attempt_on("a"))
    trials.close(0.0, route("a"))
    trials.begin(0.0, [sequence], route("a"))
    assert not trials.is_running and sequence.num_trials == 0 and trials.closed(0.0) == frozenset()


def test_workers_are_open_again_when_the_suspect_is_gone() -> None:
    trials = Trials()
    trials.close(0.0, route("a"))
    trials.give_up()
    assert trials.closed(0.0) == frozenset()
    trials.begin(0.0, [suspect(attempt_on("a", refused_at={"a": 3}))], route("a"))
    trials.give_up()  # of another one that waits
    assert trials.is_running and trials.closed(0.0) == {"a"}


def test_a_worker_may_compute_for_a_moment_what_was_aborted() -> None:
    trials = Trials()
    trials.on_aborted(0.0, attempt_on("a", "b", unproven_on="b"))
    assert trials.place(ABORT_S - 0.1, [], picks(route("b"))) == (None, {})
    assert trials.place(ABORT_S - 0.1, [], picks(route("a")))[1] == {"a": MAX_DEATHS}
    assert trials.place(ABORT_S, [], picks(route("b")))[1] == {"b": MAX_DEATHS}
