"""The answers of the tiers of several ranks, which are merged into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.ranks.remote_rank import RemoteRank
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

    def order(self, name: str, *args: Any, on_done: Callable[[Any], None]) -> None:
        self.done = on_done


def tiers_of(num_ranks: int) -> tuple[WorkerTiers, list[Rank]]:
    ranks = [Rank() for _ in range(num_ranks)]
    return WorkerTiers({"disk": cast(TierThread, ranks[0])}, cast(list[RemoteRank], ranks[1:])), ranks


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
