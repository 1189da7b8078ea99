"""The answers of the tiers of several ranks, which are merged into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.kv_transfer.tiers.tier import OnAnswer, TierAnswer
from tandem.kv_transfer.tiers.tier_thread import TierThread
from tandem.runtime.errors import KVTransferFailed


class Rank:
    """Rank 0's tier and a follower in one: keeps the callback of its last job."""

    def __init__(self) -> None:
        self.done: Callable[[Any], None] = lambda answer: None

    def store(self, block_ids: list[int], hashes: list[bytes], on_answer: OnAnswer) -> None:
        self.done = on_answer

    load = store

    def refresh(self, on_answer: OnAnswer) -> None:
        self.done = on_answer

    clear = refresh

    def order(self, name: str, *args: Any, on_done: Callable[[Any], None] = lambda result: None) -> None:
        self.done = on_done


def tiers_of(num_ranks: int) -> tuple[WorkerTiers, list[Rank]]:
    ranks = [Rank() for _ in range(num_ranks)]
    return WorkerTiers({"disk": cast(TierThread, ranks[0])}, ranks[1:]), ranks


@given(st.data())
@pytest.mark.parametrize("job", ["store", "load", "refresh", "clear"])
def test_a_job_has_done_what_all_ranks_have_done(job: str, data: st.DataObject) -> None:
    answers = data.draw(
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, "full", "gone"])), min_size=1, max_size=4)
    )
    tiers, ranks = tiers_of(len(answers))
    merged: list[TierAnswer] = []
    jobs = ([0] * 5, [b""] * 5) if job in ("store", "load") else ()
    getattr(tiers, job)("disk", *jobs, merged.append)
    for number in data.draw(st.permutations(range(len(answers)))):
        assert not merged, "a rank has not answered"
        num_blocks, error = answers[number]
        if number == 0:
            ranks[0].done(TierAnswer(num_blocks, error, num_bytes=7, max_bytes=9))
        elif error == "gone":  # the whole rank has failed
            ranks[number].done(KVTransferFailed(error))
        else:
            ranks[number].done([num_blocks, error])
    [answer] = merged
    done = [0 if number and error == "gone" else num_blocks for number, (num_blocks, error) in enumerate(answers)]
    assert answer.num_blocks == min(done)
    assert answer.error == next((error for _, error in answers if error is not None), None)
    assert (answer.num_bytes, answer.max_bytes) == (7, 9), "rank 0's figures"


@given(st.data())
def test_answers_come_in_the_order_of_the_questions(data: st.DataObject) -> None:
    """Each answer has what has changed since the last one, so a later one that comes first would be undone."""
    num_ranks = data.draw(st.integers(1, 3))
    ranks = [RankOfManyJobs() for _ in range(num_ranks)]
    tiers = WorkerTiers({"disk": cast(TierThread, ranks[0])}, ranks[1:])
    answered: list[int] = []
    questions = data.draw(st.lists(st.sampled_from(["store", "load", "find", "refresh", "clear"]), max_size=6))
    for number, job in enumerate(questions):
        jobs = {"store": ([0], [b""]), "load": ([0], [b""]), "find": ([b""],)}.get(job, ())
        getattr(tiers, job)("disk", *jobs, lambda answer, number=number: answered.append(number))
    while waiting := [rank for rank in ranks if rank.waiting]:
        rank = data.draw(st.sampled_from(waiting))
        # A follower that is gone answers on another thread than before, so in any order.
        done = rank.waiting.pop(0 if rank is ranks[0] else data.draw(st.integers(0, len(rank.waiting) - 1)))
        done(TierAnswer() if rank is ranks[0] else [0, None])
        assert answered == sorted(answered)
    assert answered == list(range(len(questions)))


class RankOfManyJobs:
    """Rank 0's tier and a follower in one: keeps the callbacks of all its jobs."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[Any], None]] = []
        self.store = self.load = self.find = self.refresh = self.clear = lambda *args: self.waiting.append(args[-1])

    def order(self, name: str, *args: Any, on_done: Callable[[Any], None] = lambda result: None) -> None:
        self.waiting.append(on_done)


def test_a_callback_may_ask_again_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    rank = RankOfManyJobs()
    answered: list[str] = []
    tiers = WorkerTiers({"disk": cast(TierThread, rank)})

    def ask_again(answer: TierAnswer) -> None:
        answered.append("refreshed")
        tiers.find("disk", [b""], lambda answer: answered.append("found"))
        rank.waiting.pop()(TierAnswer())
        raise ValueError("broken")

    tiers.refresh("disk", ask_again)
    tiers.clear("disk", lambda answer: answered.append("cleared"))
    refreshed, cleared = rank.waiting
    rank.waiting.clear()
    cleared(TierAnswer())
    assert not answered
    refreshed(TierAnswer())
    assert answered == ["refreshed", "cleared", "found"] and "could not be handled" in caplog.text
