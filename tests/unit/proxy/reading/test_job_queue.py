"""Clients take turns at processes, and none keeps another one waiting."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.reading.job_queue import JobQueue, JobTurn

A, B, C, D = map(JobTurn, "abcd")
A_CALL = JobTurn("a", is_transform=True)


def test_clients_take_turns() -> None:
    queue: JobQueue[str] = JobQueue(8, 4)
    for turn, job in ((A, "a1"), (A, "a2"), (A, "a3"), (B, "b1"), (A, "a4"), (C, "c1")):
        queue.put(turn, job)
    assert queue.num_waiting("a") == 4
    assert queue.discard(A, "a3") and not queue.discard(A, "a3") and not queue.discard(D, "d1")
    assert queue.take() == "a1"
    queue.put_back(A, "a1")
    queue.release(A)
    assert [queue.take() for _ in range(6)] == ["a1", "b1", "c1", "a2", "a4", None]
    assert queue.num_waiting("a") == 0


def test_the_client_that_holds_the_fewest_is_next() -> None:
    queue: JobQueue[str] = JobQueue(8, 4)
    for number in range(4):
        queue.put(A, f"a{number}")
    assert [queue.take(), queue.take()] == ["a0", "a1"]
    queue.put(B, "b")
    assert [queue.take(), queue.take()] == ["b", "a2"]


def test_no_client_holds_the_last_process() -> None:
    queue: JobQueue[str] = JobQueue(2, 1)
    queue.put(A, "a1")
    queue.put(A_CALL, "a2")
    assert [queue.take(), queue.take()] == ["a1", None]
    queue.put(B, "b")
    assert [queue.take(), queue.take()] == ["b", None]
    queue.release(A)
    assert queue.take() == "a2"


def test_calls_without_a_worker_have_a_share_of_their_clients_processes() -> None:
    queue: JobQueue[str] = JobQueue(3, 1)
    for number in range(3):
        queue.put(A_CALL, f"call{number}")
    queue.put(A, "a")
    assert [queue.take(), queue.take(), queue.take()] == ["call0", "a", None]
    queue.release(A_CALL)
    assert queue.take() == "call1"


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(["put", "put", "take", "release"]))),
)
def test_every_job_is_taken_once_and_some_client_can_always_go_on(
    num_processes: int, steps: list[tuple[str, bool, str]]
) -> None:
    queue: JobQueue[tuple[JobTurn, int]] = JobQueue(num_processes, 1)
    waiting: list[tuple[JobTurn, int]] = []
    running: list[JobTurn] = []
    for number, (client, is_transform, step) in enumerate(steps):
        turn = JobTurn(client, is_transform)
        if step == "put":
            queue.put(turn, (turn, number))
            waiting.append((turn, number))
        elif step == "take" and len(running) < num_processes:
            held = Counter(each.client for each in running)
            if (job := queue.take()) is None:
                assert all(held[each.client] == num_processes - 1 or each in running for each, _ in waiting)
                continue
            waiting.remove(job)
            assert held[job[0].client] < num_processes - 1
            running.append(job[0])
        elif step == "release" and running:
            queue.release(running.pop(0))
    for each in "abc":
        assert queue.num_waiting(each) == sum(turn.client == each for turn, _ in waiting)
