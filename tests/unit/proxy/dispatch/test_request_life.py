"""The life of a request with fake workers: every order of messages, every early end.

After each test nothing is left over: no running sequence, no load counted by the router, no waiting request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.dispatch import (
    DecodeBegan,
    FirstToken,
    NewToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.membership import Role, WorkerInfo
from tandem.protocol.messages.sampling import SampledToken, SamplingParams
from tandem.proxy.dispatch import sequence
from tandem.runtime.errors import DeadlineExceeded, InternalError, KVTransferFailed, Overloaded, WorkerLost
from tests.support.proxy_cluster import DECODE, EOS, PREFILL, Cluster, collect, play, turn


def test_both_workers_get_their_commands_at_once() -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        [(decode_id, prepare)] = cluster.pool.of(PrepareDecode)
        [(prefill_id, start)] = cluster.pool.of(StartPrefill)
        assert (prefill_id, decode_id) == ("prefill-0", "decode-0")
        assert prepare.transfer_id == start.transfer_id and prepare.attempt_ids == start.attempt_ids
        assert (start.decode_worker_id, start.decode_epoch) == ("decode-0", "d1")
        assert (prepare.prefill_worker_id, prepare.prefill_epoch) == ("prefill-0", "p1")
        cluster.first(start.attempt_ids[0], 5)
        await turn()
        assert not reader.done()
        cluster.reserved(start.attempt_ids[0])
        cluster.token(start.attempt_ids[0], 6, "length")
        assert await reader == ([5, 6], "length")
        assert cluster.aborted() == [], "a worker that reported the end gets no abort"

    play(test)


def test_the_first_token_waits_for_blocks_on_decode() -> None:
    async def test(cluster: Cluster) -> None:
        stream = cluster.generate()
        async with aclosing(stream):
            waiting = asyncio.create_task(anext(stream))
            await turn()
            cluster.first(cluster.started(), 5)
            await turn()
            assert not waiting.done()
            cluster.reserved(cluster.started())
            assert (await waiting).tokens == [SampledToken(5)]

    play(test)


def test_one_token_involves_prefill_alone() -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate(max_tokens=1)))
        await turn()
        [(_, start)] = cluster.pool.of(StartPrefill)
        assert (start.decode_worker_id, start.decode_epoch) == (None, None)
        assert cluster.pool.of(PrepareDecode) == []
        cluster.first(start.attempt_ids[0], 5, "length")
        assert await reader == ([5], "length")
        assert cluster.aborted() == []

    play(test)


def test_a_first_token_that_is_the_last_releases_decode() -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        cluster.first(cluster.started(), EOS, "stop")
        assert await reader == ([EOS], "stop")
        assert cluster.aborted() == ["decode-0"]

    play(test)


@pytest.mark.parametrize("num_cached_tokens", [-5, 10**9])
def test_figures_that_cannot_be_true_fail_no_request(num_cached_tokens: int) -> None:
    async def test(cluster: Cluster) -> None:
        [sequence] = cluster.start([SamplingParams()], 2, 60)
        attempt_id, nan = cluster.started(), float("nan")
        first = FirstToken(attempt_id, SampledToken(5), None, nan, -1e300, num_cached_tokens=num_cached_tokens)
        cluster.dispatcher.on_message(PREFILL, first)
        last = NewToken(attempt_id, SampledToken(6), "length")
        cluster.dispatcher.on_message(DECODE, TokenBatch([last], [DecodeBegan(attempt_id, nan, float("inf"), -1)]))
        delta = cluster.dispatcher.take(sequence)
        assert delta is not None and 0 <= delta.num_cached_tokens <= sequence.prompt.num_tokens
        [times] = sequence.times
        assert times.queue_s == times.prefill_s == times.decode_wait_s == times.step_s == times.num_kv_bytes == 0
        cluster.dispatcher.drop(sequence)

    play(test)


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_every_interleaving_gives_the_same_tokens(prefill_turns: list[bool], reader_turns: list[bool]) -> None:
    """The messages of one worker keep their order. The order between the workers and the reader is arbitrary."""

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        attempt_id = cluster.started()
        from_prefill = [lambda: cluster.first(attempt_id, 10)]
        from_decode: list[Callable[[], None]] = [lambda: cluster.reserved(attempt_id)]
        for token_id in (11, 12, 13):
            from_decode.append(lambda token_id=token_id: cluster.token(attempt_id, token_id))
        from_decode.append(lambda: cluster.token(attempt_id, 14, "length"))
        for prefill_first, reader_runs in zip(prefill_turns, reader_turns, strict=True):
            source = from_prefill if (prefill_first and from_prefill) or not from_decode else from_decode
            if source:
                source.pop(0)()
            if reader_runs:
                await turn()
        for event in from_prefill + from_decode:
            event()
        assert await reader == ([10, 11, 12, 13, 14], "length")
        assert cluster.aborted() == []

    play(test)


@pytest.mark.parametrize(("worker", "other"), [(PREFILL, "decode-0"), (DECODE, "prefill-0")])
@pytest.mark.parametrize("when", ["queued", "first token held", "streaming"])
def test_a_failure_on_one_worker_aborts_on_the_other(worker: WorkerInfo, other: str, when: str) -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        attempt_id = cluster.started()
        if when != "queued":
            cluster.first(attempt_id, 5)
        if when == "streaming":
            cluster.reserved(attempt_id)
        await turn()
        cluster.failed(worker, attempt_id, InternalError("the peer is gone"))
        with pytest.raises(InternalError, match="the peer is gone"):
            await reader
        assert cluster.aborted() == [other]
        cluster.token(attempt_id, 6, "length")  # too late, so ignored
        cluster.first(attempt_id, 6)

    play(test)


def test_tokens_before_a_failure_are_delivered() -> None:
    async def test(cluster: Cluster) -> None:
        stream = cluster.generate()
        reader = asyncio.create_task(anext(stream))
        await turn()
        cluster.first(cluster.started(), 5)
        cluster.reserved(cluster.started())
        cluster.failed(DECODE, cluster.started(), InternalError("x"))
        assert (await reader).tokens == [SampledToken(5)]
        with pytest.raises(InternalError):
            await anext(stream)

    play(test)


def test_losing_prefill_is_harmless_once_decode_runs() -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        cluster.first(cluster.started(), 5)
        cluster.token(cluster.started(), 6)
        cluster.dispatcher.on_worker_lost(PREFILL, "its process 1 has ended")
        cluster.token(cluster.started(), 7, "length")
        assert await reader == ([5, 6, 7], "length")

    play(test)


@pytest.mark.parametrize(
    ("worker_id", "role"), [("decode-9", "decode"), ("decode-0", "decode"), ("prefill-0", "prefill")]
)
def test_messages_and_losses_of_another_process_are_ignored(worker_id: str, role: Role) -> None:
    """It may have the name of a worker that computes the request: that worker's predecessor had it."""

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        stranger = WorkerInfo(worker_id, "e9", role, f"ipc://{worker_id}", 9)
        cluster.failed(stranger, cluster.started(), KVTransferFailed("x"))
        for has_crashed in (True, False):
            cluster.dispatcher.on_worker_lost(stranger, "its process 9 has ended", has_crashed, not has_crashed)
        [held] = cluster.dispatcher._sequences
        assert held.attempt is not None and not held.attempt.is_excused and not held.num_deaths
        cluster.first(cluster.started(), 5, "length")
        assert await reader == ([5], "length")

    play(test)


@pytest.mark.parametrize("phase", ["queued", "streaming"])
def test_closing_the_stream_aborts_on_both(phase: str) -> None:
    async def test(cluster: Cluster) -> None:
        stream = cluster.generate()
        reader = asyncio.create_task(anext(stream))
        await turn()
        if phase == "streaming":
            cluster.first(cluster.started(), 5)
            cluster.reserved(cluster.started())
            await reader
            await stream.aclose()
        else:
            reader.cancel()
            await turn()
        assert cluster.aborted() == ["decode-0", "prefill-0"]

    play(test)


def test_the_deadline_ends_a_request_without_an_answer() -> None:
    async def test(cluster: Cluster) -> None:
        with pytest.raises(DeadlineExceeded, match="not finished within"):
            await collect(cluster.generate(deadline_s=0.001))
        assert cluster.aborted() == ["decode-0", "prefill-0"]

    play(test)


def test_a_worker_that_does_not_read_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_LOST_ATTEMPTS", 2)

    async def test(cluster: Cluster) -> None:
        cluster.pool.accepts = False
        with pytest.raises(WorkerLost, match="does not read"):
            await collect(cluster.generate())

    play(test)


def test_a_request_without_a_pair_is_refused_before_dispatch() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.worker_table.on_exited("decode-0", 2, "crash")
        with pytest.raises(Overloaded, match="no decode worker is ready"):
            await collect(cluster.generate())
        assert cluster.pool.sent == []

    play(test)


def test_decode_alone_computes_a_short_prompt() -> None:
    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(collect(cluster.generate()))
        await turn()
        assert cluster.pool.of(PrepareDecode) == []
        [(worker_id, start)] = cluster.pool.of(StartPrefill)
        assert (worker_id, start.decode_worker_id) == ("decode-0", "decode-0")
        [attempt_id] = start.attempt_ids
        cluster.first(attempt_id, 5)  # prefill does not take part, so its loss has no effect
        cluster.dispatcher.on_message(DECODE, FirstToken(attempt_id, SampledToken(4), None, 0.1, 0.2))
        await turn()
        assert not reader.done()
        cluster.token(attempt_id, 6, "length")
        assert await reader == ([4, 6], "length")
        assert cluster.aborted() == []

    play(test, threshold=3)


def test_a_short_prompt_may_end_at_its_first_token_or_lose_its_worker() -> None:
    async def test(cluster: Cluster) -> None:
        ended = asyncio.create_task(collect(cluster.generate()))
        lost = asyncio.create_task(collect(cluster.generate()))
        dropped = asyncio.create_task(collect(cluster.generate()))
        await turn()
        ids = [start.attempt_ids[0] for _, start in cluster.pool.of(StartPrefill)]
        cluster.dispatcher.on_message(DECODE, FirstToken(ids[0], SampledToken(EOS), "stop", 0.1, 0.2))
        assert await ended == ([EOS], "stop")
        assert cluster.aborted() == [], "the worker reported the end itself"
        dropped.cancel()
        await turn()
        assert cluster.aborted() == ["decode-0"]
        cluster.dispatcher.on_worker_lost(PREFILL, "gone")  # these requests do not use it
        await turn()
        assert not lost.done()
        cluster.lose(DECODE)
        with pytest.raises(Overloaded, match="no decode worker"):
            await lost

    play(test, threshold=3)


def test_prompts_are_served_without_prefill_workers() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.worker_table.on_exited(PREFILL.worker_id, PREFILL.pid, "crash")
        reader = asyncio.create_task(collect(cluster.generate(max_tokens=1)))
        await turn()
        [(_, start)] = cluster.pool.of(StartPrefill)
        cluster.dispatcher.on_message(DECODE, FirstToken(start.attempt_ids[0], SampledToken(4), "length", 0.1, 0.2))
        assert await reader == ([4], "length")

    play(test, threshold=1)
