"""An exact answer that has begun continues on workers that compute alike, or waits for one; without --exact on any."""

from __future__ import annotations

import asyncio

import pytest

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.proxy.cluster.router import NoWorkerReady
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, collect, play, turn, whole
from tests.unit.proxy.dispatch.test_beam_search import answers, step
from tests.unit.proxy.dispatch.test_migration import OTHER_DECODE, OTHER_PREFILL, attempt

NEWER, OLDER = Numerics(instruction_set="avx512"), Numerics(instruction_set="avx2")
THIRD_PREFILL = WorkerInfo("prefill-2", "p3", "prefill", "ipc://p3", 5)


async def begin(cluster: Cluster) -> asyncio.Task[tuple[list[int], str | None]]:
    """Starts an answer on PREFILL and DECODE, whose first two tokens arrive."""
    reader = asyncio.create_task(collect(cluster.generate()))
    await turn()
    attempt_id, _, _ = attempt(cluster, 0)
    cluster.reserved(attempt_id)
    cluster.first(attempt_id, 5)
    cluster.token(attempt_id, 6)
    await turn()
    return reader


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_an_exact_answer_waits_for_a_worker_of_its_numerics(lost: WorkerInfo) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.join(PREFILL, DECODE, numerics=NEWER)
        reader = await begin(cluster)
        cluster.join(OTHER_PREFILL, OTHER_DECODE, numerics=OLDER)
        cluster.lose(lost)
        await turn()
        if lost is PREFILL:  # it has done its part
            cluster.token(attempt(cluster, 0)[0], 7, "length")
            assert await reader == ([5, 6, 7], "length")
            return
        assert len(cluster.pool.of(StartPrefill)) == 1 and not reader.done(), "all ready workers compute differently"
        again = WorkerInfo(DECODE.worker_id, "d3", "decode", "ipc://d3", 6)
        cluster.join(again, numerics=NEWER)
        await turn()
        attempt_id, prepare, start = attempt(cluster, 1)
        assert (start.decode_epoch, prepare.prefill_epoch) == (again.epoch, PREFILL.epoch)
        assert unpack_token_ids(start.token_ids)[-2:] == [5, 6] and start.num_generated == 2
        cluster.first(attempt_id, 7, "length")
        assert await reader == ([5, 6, 7], "length")

    play(test, worker_wait_s=60, workers=())


def test_an_exact_answer_of_which_nothing_was_sent_begins_again_anywhere() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.join(PREFILL, DECODE, numerics=NEWER)
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        cluster.lose(DECODE)
        cluster.lose(PREFILL)
        cluster.join(OTHER_PREFILL, OTHER_DECODE, numerics=OLDER)
        await turn()
        attempt_id, _, _ = attempt(cluster, 1)
        cluster.reserved(attempt_id, OTHER_DECODE)
        cluster.first(attempt_id, 5, worker=OTHER_PREFILL)
        cluster.token(attempt_id, 6, worker=OTHER_DECODE)
        await turn()
        cluster.join(PREFILL, DECODE, numerics=NEWER)
        cluster.lose(OTHER_DECODE)
        await turn()
        assert len(cluster.pool.of(StartPrefill)) == 2, "it has begun on the second kind of workers"
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    play(test, worker_wait_s=60, workers=())


def test_the_wait_for_an_equal_worker_ends_with_an_error_that_says_what_is_missing() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.join(PREFILL, DECODE, numerics=NEWER)
        reader = await begin(cluster)
        cluster.join(OTHER_PREFILL, OTHER_DECODE, numerics=OLDER)
        cluster.lose(DECODE)
        with pytest.raises(NoWorkerReady, match=f"numerics {NEWER.digest}"):
            await reader

    play(test, worker_wait_s=0.01, workers=())


def test_an_answer_continues_on_unequal_workers_without_the_flag() -> None:
    async def test(cluster: Cluster) -> None:
        reader = await begin(cluster)
        cluster.join(OTHER_PREFILL, OTHER_DECODE, numerics=OLDER)
        cluster.lose(DECODE)
        await turn()
        attempt_id, _, _ = attempt(cluster, 1)
        for worker in (PREFILL, OTHER_PREFILL):
            cluster.first(attempt_id, 7, "length", worker)
        assert await reader == ([5, 6, 7], "length")

    play(test, worker_wait_s=60)


def test_all_steps_of_an_exact_beam_search_are_computed_alike() -> None:
    async def test(cluster: Cluster) -> None:
        x, y = cluster.text.ids("xy")
        cluster.join(PREFILL, DECODE, numerics=NEWER)
        _, completion = answers(cluster)
        task = asyncio.create_task(whole(completion))
        await step(cluster, 0, [[(x, -0.5), (y, -1.0)]])
        await turn()
        cluster.join(OTHER_PREFILL, THIRD_PREFILL, OTHER_DECODE, numerics=OLDER)
        await step(cluster, 1, [[(x, -0.1), (y, -3.0)], [(y, -0.2), (x, -4.0)]])
        await step(cluster, 3, [[(x, -0.1), (y, -5.0)], [(x, -9.0), (y, -9.5)]])
        await task
        assert {worker_id for worker_id, _ in cluster.pool.of(StartPrefill)} == {PREFILL.worker_id}

    play(test, workers=())
