"""What a sequence does when an attempt is lost: how long it waits, whom it avoids, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem.protocol.messages.dispatch import FirstToken, NewToken
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.proxy.dispatch.sequence import MAX_LOST_ATTEMPTS, Attempt, DispatchedSequence, PromptTask
from tandem.runtime.errors import InternalError, KVTransferFailed, TandemError, WorkerLost
from tests.support.proxy_cluster import DECODE, PREFILL, PROMPT, Cluster, play


def in_flight(test: Callable[[DispatchedSequence, Callable[[], Attempt]], None]) -> None:
    """Calls the test with a sequence, and a function that begins its next attempt."""

    async def run(cluster: Cluster) -> None:
        [sequence] = cluster.start([SamplingParams()], 20, 60.0)
        [first] = [sequence.attempt]
        assert first is not None

        def again() -> Attempt:
            sequence.end_attempt()
            attempt = Attempt("again", first.prefill, sequence.notify)
            sequence.begin(attempt)
            return attempt

        test(sequence, again)
        sequence.attempt = first  # the dispatcher knows no other
        cluster.dispatcher.drop(sequence)
        await asyncio.sleep(0)

    play(run)


def lost(sequence: DispatchedSequence) -> float | None:
    """Ends the attempt that has failed, as the dispatcher does."""
    attempt = sequence.end_attempt()
    assert attempt is not None
    return sequence.on_lost(attempt)


def decode(attempt: Attempt) -> None:
    attempt.on_first_token(FirstToken(attempt.attempt_id, SampledToken(5), None, 0.1, 0.2))
    attempt.on_new_token(NewToken(attempt.attempt_id, SampledToken(6), None))


@pytest.mark.parametrize("error", [WorkerLost("gone"), KVTransferFailed("broken")])
def test_retries_wait_longer_each_time_and_end(error: TandemError) -> None:
    def test(sequence: DispatchedSequence, again: Callable[[], Attempt]) -> None:
        delays: list[float | None] = []
        for _ in range(MAX_LOST_ATTEMPTS):
            attempt = again()
            attempt.fail(error)
            delays.append(lost(sequence))
        assert delays == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, None])
        assert type(sequence.error) is type(error)
        assert str(sequence.error) == f"{error.message} (the last of 8 attempts)"

    in_flight(test)


def test_an_error_of_the_request_is_not_retried() -> None:
    def test(sequence: DispatchedSequence, again: Callable[[], Attempt]) -> None:
        attempt = again()
        attempt.fail(error := InternalError("the model failed on this prompt"))
        assert lost(sequence) is None and sequence.error is error

    in_flight(test)


def test_a_stream_that_loses_its_worker_goes_on_at_once() -> None:
    def test(sequence: DispatchedSequence, again: Callable[[], Attempt]) -> None:
        for number in range(1, 4):
            attempt = again()
            decode(attempt)
            attempt.on_worker_lost(DECODE, WorkerLost("gone"), in_order=False)
            assert lost(sequence) == 0.0 and sequence.num_lost == number

    in_flight(test)


def test_attempts_that_end_because_a_worker_leaves_do_not_count() -> None:
    def test(sequence: DispatchedSequence, again: Callable[[], Attempt]) -> None:
        for _ in range(2 * MAX_LOST_ATTEMPTS):
            attempt = again()
            sequence.on_worker_left(PREFILL)
            attempt.on_worker_lost(PREFILL, WorkerLost("it has left"), in_order=True)
            assert lost(sequence) == 0.0
        assert sequence.num_lost == 0
        attempt = again()
        attempt.on_worker_lost(PREFILL, WorkerLost("gone"), in_order=False)
        assert lost(sequence) == 0.0 and sequence.num_lost == 1
        sequence.end_attempt()
        for _ in range(2):  # it is heard of later, and twice
            sequence.on_worker_left(PREFILL)
        assert sequence.num_lost == 0

    in_flight(test)


@pytest.mark.parametrize(
    ("fail", "avoided", "near"),
    [
        (lambda attempt: attempt.on_worker_lost(PREFILL, WorkerLost("gone"), in_order=False), PREFILL, DECODE.epoch),
        (lambda attempt: attempt.on_worker_lost(DECODE, WorkerLost("gone"), in_order=False), DECODE, ""),
        (lambda attempt: attempt.on_failed(PREFILL, KVTransferFailed("broken")), DECODE, ""),
        (lambda attempt: attempt.on_failed(DECODE, KVTransferFailed("broken")), PREFILL, DECODE.epoch),
    ],
    ids=["prefill is lost", "decode is lost", "prefill reports", "decode reports"],
)
def test_the_suspect_is_avoided_and_the_blocks_are_near(fail: Any, avoided: Any, near: str) -> None:
    def test(sequence: DispatchedSequence, again: Callable[[], Attempt]) -> None:
        attempt = again()
        fail(attempt)
        lost(sequence)
        assert sequence.avoid == {avoided.epoch} and sequence.near == near

    in_flight(test)


def test_deaths_count_until_a_token_is_decoded() -> None:
    def test(sequence: DispatchedSequence, again: Callable[[], Attempt]) -> None:
        for number in (1, 2):
            attempt = again()
            attempt.on_worker_lost(PREFILL, WorkerLost("gone"), in_order=False)
            lost(sequence)
            for _ in range(2):  # a host that fails with both workers counts once
                sequence.on_worker_died(PREFILL)
                sequence.on_worker_died(DECODE)
            assert (sequence.num_deaths, sequence.is_suspect) == (number, number == 2)
        decode(again())
        delta = sequence.take()
        assert delta is not None and [token.token_id for token in delta.tokens] == [5, 6] and delta.is_first
        assert sequence.num_deaths == 0 and not sequence.on_worker_died(DECODE) and sequence.num_deaths == 0

    in_flight(test)


def test_a_death_that_is_reported_twice_counts_once() -> None:
    """A worker names the step that ended it; that its process has crashed says nothing new of the others."""

    async def run(cluster: Cluster) -> None:
        [named], [beside] = (cluster.start([SamplingParams()], 20, 60.0) for _ in range(2))
        assert named.attempt is not None
        attempt_ids = frozenset({named.attempt.attempt_id})
        cluster.dispatcher.on_worker_lost(PREFILL, "it has failed", has_crashed=True, attempt_ids=attempt_ids)
        assert (named.num_failed_steps, named.num_deaths, beside.num_deaths) == (1, 2, 0)
        cluster.dispatcher.on_worker_lost(PREFILL, "its process has crashed", has_crashed=True)
        assert (named.num_failed_steps, named.num_deaths, beside.num_deaths) == (1, 2, 0)
        for sequence in (named, beside):
            cluster.dispatcher.drop(sequence)

    play(run)


def test_the_sequence_fails_at_its_deadline() -> None:
    async def run(cluster: Cluster) -> None:
        failed = asyncio.Event()
        task = PromptTask(PROMPT, StopConditions(9), 0.01)
        [sequence] = cluster.dispatcher.start(task, [SamplingParams()], lambda sequence: failed.set())
        await asyncio.wait_for(failed.wait(), 5)
        assert str(sequence.error) == "the request was not finished within its 0.01 s"
        cluster.dispatcher.drop(sequence)

    play(run)
