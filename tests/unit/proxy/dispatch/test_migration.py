"""Requests outlive their workers: generated tokens are kept, and generation continues on other workers."""

from __future__ import annotations

import asyncio
import json

import pytest

from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    AttemptPreempted,
    PrepareDecode,
    StartPrefill,
)
from tandem.protocol.messages.membership import LeaveCause, WorkerInfo
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.dispatch import sequence
from tandem.proxy.dispatch.dispatcher import WorkerReadiness
from tandem.runtime.errors import DeadlineExceeded, KVTransferFailed, TandemError, WorkerLost
from tests.support.clocked_loop import run_in_no_time
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, collect, play, turn, whole
from tests.unit.proxy.dispatch.test_generation import generation, prefills

OTHER_DECODE = WorkerInfo("decode-1", "d2", "decode", "ipc://d2", 4)
OTHER_PREFILL = WorkerInfo("prefill-1", "p2", "prefill", "ipc://p2", 3)


def attempt(cluster: Cluster, number: int) -> tuple[str, PrepareDecode, StartPrefill]:
    """Returns the attempt id and the commands of one dispatch."""
    prepare, start = cluster.pool.of(PrepareDecode)[number][1], cluster.pool.of(StartPrefill)[number][1]
    assert prepare.transfer_id == start.transfer_id and prepare.attempt_ids == start.attempt_ids
    return start.attempt_ids[0], prepare, start


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
@pytest.mark.parametrize("when", ["queued", "first token held"])
def test_a_prompt_migrates_to_another_worker(lost: WorkerInfo, when: str) -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        old, _, first = attempt(cluster, 0)
        if when != "queued":
            cluster.first(old, 5)
        await turn()
        cluster.lose(lost)
        other = OTHER_PREFILL if lost is PREFILL else OTHER_DECODE
        await turn()
        assert len(cluster.pool.of(StartPrefill)) == 1 and not reader.done(), "the request waits for a worker"
        cluster.join(other)
        await turn()
        new, prepare, start = attempt(cluster, 1)
        assert start.transfer_id != first.transfer_id and start.num_generated == 0
        prefill, decode = (other, DECODE) if lost is PREFILL else (PREFILL, other)
        assert (start.decode_epoch, prepare.prefill_epoch) == (decode.epoch, prefill.epoch)
        cluster.first(old, 98)
        cluster.token(old, 99)
        cluster.first(new, 5, worker=prefill)
        cluster.token(new, 6, "length", worker=decode)
        assert await reader == ([5, 6], "length")

    play(test, worker_wait_s=60)


@pytest.mark.parametrize("first_comes", [True, False])
def test_a_sequence_that_decode_preempted_survives_the_loss_of_prefill(first_comes: bool) -> None:
    """Its first token may be lost with prefill. Found by `tandem simulate`."""

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        old, _, _ = attempt(cluster, 0)
        cluster.join(OTHER_PREFILL)
        cluster.token(old, 6)
        cluster.dispatcher.on_message(DECODE, AttemptPreempted(old))
        await turn()
        assert len(cluster.pool.of(StartPrefill)) == 1, "the first token is on its way"
        if first_comes:
            cluster.first(old, 5)
        cluster.lose(PREFILL)
        await turn()
        new, _, start = attempt(cluster, 1)
        assert unpack_token_ids(start.token_ids) == ([1, 2, 3, 5, 6] if first_comes else [1, 2, 3])
        tokens = [7] if first_comes else [5, 6, 7]
        cluster.first(new, tokens[0], worker=OTHER_PREFILL)
        for token_id in tokens[1:]:
            cluster.token(new, token_id)
        cluster.token(new, 8, "length")
        assert await reader == ([5, 6, 7, 8], "length")

    play(test)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_waits_on_decode_outlives_a_prefill_worker_that_ends_in_order(is_whole: bool) -> None:
    """It would lose its place, and its prompt would be computed again. Decode says so if blocks are missing."""

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        old, _, _ = attempt(cluster, 0)
        cluster.first(old, 5)
        cluster.reserved(old)
        cluster.join(OTHER_PREFILL)
        [gone] = cluster.worker_table.on_left(PREFILL.epoch).lost
        cluster.dispatcher.on_worker_lost(gone.worker, gone.reason, has_left=gone.has_left, in_order=gone.in_order)
        await turn()
        assert len(cluster.pool.of(StartPrefill)) == 1 and not cluster.aborted()
        if not is_whole:
            cluster.failed(DECODE, old, KVTransferFailed("x"))
            await turn()
            old, prepare, _ = attempt(cluster, 1)
            assert prepare.prefill_epoch == OTHER_PREFILL.epoch
            cluster.first(old, 6, worker=OTHER_PREFILL)
        cluster.token(old, 7, "length")
        assert await reader == ([5, 7] if is_whole else [5, 6, 7], "length")

    play(test)


@pytest.mark.parametrize("cause", ["silence", "failure"])
def test_what_waits_on_decode_starts_over_when_prefill_may_have_aborted_its_transfer(cause: LeaveCause) -> None:
    """Decode does not report transfers that are aborted. Found by `tandem simulate`."""

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        old, _, _ = attempt(cluster, 0)
        cluster.first(old, 5)
        cluster.reserved(old)
        cluster.join(OTHER_PREFILL)
        [gone] = cluster.worker_table.on_left(PREFILL.epoch, cause).lost
        cluster.dispatcher.on_worker_lost(gone.worker, gone.reason, has_left=gone.has_left, in_order=gone.in_order)
        await turn()
        new, _, _ = attempt(cluster, 1)
        cluster.first(new, 6, worker=OTHER_PREFILL)
        cluster.token(new, 7, "length")
        assert await reader == ([5, 6, 7], "length")

    play(test)


@pytest.mark.parametrize("first_comes", [True, False])
def test_decode_gets_an_abort_when_prefill_preempts(first_comes: bool) -> None:
    """Prefill tells it too, but may not reach it. Found by `tandem simulate`."""

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        old, _, _ = attempt(cluster, 0)
        if first_comes:
            cluster.first(old, 5)
        cluster.dispatcher.on_message(PREFILL, AttemptPreempted(old))
        await turn()
        assert cluster.aborted() == [DECODE.worker_id]
        new, _, _ = attempt(cluster, 1)
        cluster.first(new, 6 if first_comes else 5)
        cluster.token(new, 7, "length")
        assert await reader == ([5, 6, 7] if first_comes else [5, 7], "length")

    play(test)


def test_a_stream_continues_after_its_last_token() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.join(OTHER_DECODE)
        stream = cluster.generate()
        reader = asyncio.create_task(collect(stream))
        await turn()
        old, _, start = attempt(cluster, 0)
        decode, other = (DECODE, OTHER_DECODE) if start.decode_epoch == DECODE.epoch else (OTHER_DECODE, DECODE)
        cluster.first(old, 5)
        for token_id in (6, 7):
            cluster.token(old, token_id, worker=decode)
        cluster.lose(decode)
        cluster.token(old, 8, worker=decode)  # the worker was only frozen, and its message is late
        await turn()
        new, prepare, start = attempt(cluster, 1)
        for message in (prepare, start):
            assert unpack_token_ids(message.token_ids) == [1, 2, 3, 5, 6, 7] and message.num_generated == 3
        assert start.decode_epoch == other.epoch and prepare.seeds == start.seeds
        cluster.token(old, 9, worker=decode)
        cluster.first(new, 8)
        cluster.token(new, 9, "length", worker=other)
        assert await reader == ([5, 6, 7, 8, 9], "length")
        assert cluster.metrics.migrated._value.get() == 1

    play(test)


def test_a_lost_worker_is_told_to_end_everything() -> None:
    """Also attempts whose abort was lost with the connection. Found by `tandem simulate`."""

    async def test(cluster: Cluster) -> None:
        cluster.dispatcher.on_worker_lost(DECODE, "a connection to it broke")
        assert cluster.pool.sent == [(DECODE.worker_id, AbortAllAttempts("proxy"))], "although no attempt runs there"

    play(test)


def test_after_a_reported_loss_the_suspect_is_avoided() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.join(OTHER_PREFILL)
        for error in (WorkerLost("the prefill worker was lost"), KVTransferFailed("x")):
            del cluster.pool.sent[:]
            reader = asyncio.create_task(collect(cluster.generate()))
            await turn()
            old, prepare, _ = attempt(cluster, 0)
            suspect = PREFILL if prepare.prefill_epoch == PREFILL.epoch else OTHER_PREFILL
            cluster.failed(DECODE, old, error)
            await turn()
            assert [(worker_id, m.attempt_id) for worker_id, m in cluster.pool.of(AbortAttempt)] == [
                (suspect.worker_id, old)
            ]
            new, prepare, _ = attempt(cluster, 1)
            assert prepare.prefill_epoch != suspect.epoch
            cluster.first(new, 5, worker=OTHER_PREFILL if suspect is PREFILL else PREFILL)
            cluster.token(new, 6, "length")
            assert await reader == ([5, 6], "length")

    play(test)


def test_a_prompt_that_loses_its_prefill_worker_stays_with_its_decode_worker() -> None:
    """That worker has kept the arrived blocks, although no report shows it yet."""

    async def test(cluster: Cluster) -> None:
        cluster.join(OTHER_PREFILL, OTHER_DECODE)
        for is_reported_by_decode in (True, False) * 8:
            del cluster.pool.sent[:]
            reader = asyncio.create_task(collect(cluster.generate()))
            await turn()
            old, prepare, start = attempt(cluster, 0)
            prefill = PREFILL if prepare.prefill_epoch == PREFILL.epoch else OTHER_PREFILL
            decode = DECODE if start.decode_epoch == DECODE.epoch else OTHER_DECODE
            if is_reported_by_decode:
                cluster.failed(decode, old, WorkerLost("the prefill worker was lost"))
            else:
                cluster.lose(prefill)
            await turn()
            new, prepare, start = attempt(cluster, 1)
            assert start.decode_epoch == decode.epoch and prepare.prefill_epoch != prefill.epoch
            cluster.first(new, 5, worker=OTHER_PREFILL if prefill is PREFILL else PREFILL)
            cluster.token(new, 6, "length", worker=decode)
            assert await reader == ([5, 6], "length")
            if not is_reported_by_decode:
                cluster.join(prefill)

    play(test)


def test_a_request_fails_after_too_many_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_LOST_ATTEMPTS", 3)
    monkeypatch.setattr(sequence, "_FIRST_DELAY_S", 0.001)

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        for number in range(3):
            attempt_id = (await prefills(cluster, number + 1))[number]
            cluster.failed(DECODE, attempt_id, KVTransferFailed("the transfer broke"))
        with pytest.raises(KVTransferFailed, match=r"the transfer broke \(the last of 3 attempts\)"):
            await reader

    play(test)


def test_workers_that_leave_in_order_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the proxy learns of it at once, or after a connection broke. Found by `tandem simulate`."""
    monkeypatch.setattr(sequence, "MAX_LOST_ATTEMPTS", 2)
    monkeypatch.setattr(sequence, "_FIRST_DELAY_S", 0.001)

    async def test(cluster: Cluster) -> None:
        lose = cluster.dispatcher.on_worker_lost
        reader = asyncio.create_task(collect(cluster.generate()))
        num_attempts = 0

        async def next_attempt() -> str:
            nonlocal num_attempts
            num_attempts += 1
            return (await prefills(cluster, num_attempts))[-1]

        for _ in range(3):
            await next_attempt()
            lose(PREFILL, "it has left", has_left=True)
            await next_attempt()
            lose(PREFILL, "a connection to it broke")
            cluster.failed(DECODE, await next_attempt(), WorkerLost("the prefill worker was lost"))
            lose(PREFILL, "its process 1 has ended", has_left=True)
        for _ in range(2):
            await next_attempt()
            lose(PREFILL, "it has been silent")
        with pytest.raises(WorkerLost, match=r"it has been silent \(the last of 2 attempts\)"):
            await reader

    play(test)


def test_sequences_of_one_prompt_stay_together_until_it_is_computed() -> None:
    async def test(cluster: Cluster) -> None:
        samplings = [SamplingParams(seed=seed) for seed in (7, 8, 9)]
        sequences = cluster.start(samplings, 3, 60)
        readers = [asyncio.create_task(cluster.next_tokens(each)) for each in sequences]
        await turn()
        cluster.dispatcher.drop(sequences[1])
        readers[1].cancel()
        cluster.lose(PREFILL)
        cluster.join(OTHER_PREFILL)
        await turn()
        _, _, start = attempt(cluster, 1)
        assert start.seeds == [7, 9]
        for number, attempt_id in enumerate(start.attempt_ids):
            cluster.first(attempt_id, 10 + number, worker=OTHER_PREFILL)
            cluster.reserved(attempt_id)
        assert [(await readers[i]).tokens for i in (0, 2)] == [[SampledToken(10)], [SampledToken(11)]]
        # From here on each sequence has its own tokens, and is dispatched by itself.
        readers = [asyncio.create_task(cluster.next_tokens(sequences[i])) for i in (0, 2)]
        await turn()
        cluster.lose(DECODE, has_crashed=False)
        cluster.join(OTHER_DECODE)
        await prefills(cluster, 7)
        again = [message for _, message in cluster.pool.of(StartPrefill)[2:]]
        assert [(m.seeds, unpack_token_ids(m.token_ids)[3:]) for m in again] == [([7], [10]), ([9], [11])]
        for reader in readers:
            reader.cancel()
        for each in sequences:
            cluster.dispatcher.drop(each)
        lost = [[times.lost_at is not None for times in each.times] for each in sequences]
        assert lost == [[True, True, False], [False], [True, True, False]], "ended before their sequences did"

    play(test)


def test_text_and_stop_strings_continue_across_workers() -> None:
    async def test(cluster: Cluster) -> None:
        _, answers = generation(cluster, stop=["END"], max_tokens=20)
        task = asyncio.create_task(whole(answers))
        [old] = await prefills(cluster, 1)
        ids = cluster.text.ids("né ENDx")
        cut = ids.index(cluster.text.ids("N")[0])  # in the middle of the stop string
        cluster.first(old, ids[0])
        for token_id in ids[1:cut]:
            cluster.token(old, token_id)
        cluster.lose(DECODE)
        cluster.join(OTHER_DECODE)
        new = (await prefills(cluster, 2))[1]
        assert unpack_token_ids(attempt(cluster, 1)[2].token_ids)[3:] == ids[:cut]
        cluster.first(new, ids[cut])
        for token_id in ids[cut + 1 :]:
            cluster.token(new, token_id, worker=OTHER_DECODE)
        body = json.loads(await task)
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("né ", "stop")
        assert body["usage"]["completion_tokens"] == len(ids) - 1

    play(test)


def test_a_stop_string_does_not_end_an_answer_before_min_tokens() -> None:
    """The tokens of the workers before a migration count."""

    async def test(cluster: Cluster) -> None:
        ids = cluster.text.ids("END END END")
        _, answers = generation(cluster, stop=["END"], min_tokens=5, max_tokens=20)
        task = asyncio.create_task(whole(answers))
        [old] = await prefills(cluster, 1)
        cluster.first(old, ids[0])
        for token_id in ids[1:4]:
            cluster.token(old, token_id)
        cluster.lose(DECODE)
        cluster.join(OTHER_DECODE)
        new = (await prefills(cluster, 2))[1]
        cluster.first(new, ids[4])
        for token_id in ids[5:]:
            cluster.token(new, token_id, worker=OTHER_DECODE)
        body = json.loads(await task)
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("END ", "stop")
        assert body["usage"]["completion_tokens"] == 7

    play(test)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_waiting_for_a_worker_has_a_limit(role: str) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.lose(PREFILL if role == "prefill" else DECODE)
        with pytest.raises(NoWorkerReady, match=f"no {role} worker is ready") as raised:
            await collect(cluster.generate())
        assert raised.value.retry_after_s == 5 and not cluster.pool.of(StartPrefill)

    play(test, worker_wait_s=0.01)


def test_retries_do_not_renew_the_wait_for_a_worker() -> None:
    async def test() -> None:
        cluster, loop = Cluster(worker_wait_s=2.0), asyncio.get_running_loop()
        cluster.lose(DECODE)
        began = loop.time()
        with pytest.raises(NoWorkerReady):
            await collect(cluster.generate())
        assert 2.0 <= loop.time() - began < 3.0

    run_in_no_time(test())


@pytest.mark.parametrize("end", ["deadline", "client", "shutdown"])
def test_a_request_that_waits_for_a_worker_may_end(end: str) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.lose(DECODE)
        reader = asyncio.create_task(collect(cluster.generate(deadline_s=0.01 if end == "deadline" else 60)))
        await turn()
        if end == "client":
            reader.cancel()
        elif end == "shutdown":
            cluster.dispatcher.fail_all(TandemError("the server stops"))
        errors: dict[str, type[BaseException]] = {"deadline": DeadlineExceeded, "shutdown": TandemError}
        with pytest.raises(errors.get(end, asyncio.CancelledError)):
            await reader
        cluster.join(OTHER_DECODE)
        await turn()
        assert not cluster.pool.of(StartPrefill)

    play(test, worker_wait_s=60)


def test_a_new_proxy_waits_for_its_first_worker() -> None:
    async def test(cluster: Cluster) -> None:
        bare = Cluster(worker_wait_s=60, workers=())
        readiness = WorkerReadiness(bare.worker_table, 8, 60)
        waiting = asyncio.create_task(readiness.limits())
        await turn()
        assert not waiting.done()
        bare.join(PREFILL, DECODE)
        readiness.on_cluster_changed()
        assert (await waiting).max_model_len == 100

    play(test)
