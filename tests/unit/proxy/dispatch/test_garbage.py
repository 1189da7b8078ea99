"""What a request leaves behind goes with its last reference: a full collection of garbage would stop the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.runtime.errors import DeadlineExceeded, InvalidRequest, KVTransferFailed
from tests.support.garbage import kept_garbage
from tests.support.proxy_cluster import DECODE, PROMPT, Cluster, collect, play, turn


async def completed(cluster: Cluster) -> None:
    number = len(cluster.pool.sent)
    reader = asyncio.create_task(collect(cluster.generate()))
    await turn()
    attempt_id = cluster.pool.sent[number][1].attempt_ids[0]
    cluster.first(attempt_id, 5)
    cluster.token(attempt_id, 6, "length")
    assert await reader == ([5, 6], "length")


async def given_up(cluster: Cluster) -> None:
    stream = cluster.generate()
    async with aclosing(stream):
        waiting = asyncio.create_task(anext(stream))
        await turn()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def begun_again(cluster: Cluster) -> None:
    number = len(cluster.pool.sent)
    reader = asyncio.create_task(collect(cluster.generate()))
    await turn()
    cluster.failed(DECODE, cluster.pool.sent[number][1].attempt_ids[0], KVTransferFailed("lost"))
    await turn()
    attempt_id = cluster.pool.sent[-1][1].attempt_ids[0]
    cluster.first(attempt_id, 5)
    cluster.token(attempt_id, 6, "length")
    assert await reader == ([5, 6], "length")


async def several_of_one_prompt(cluster: Cluster) -> None:
    samplings = [SamplingParams(), SamplingParams(seed=1)]
    sequences = cluster.dispatcher.start(PROMPT, samplings, StopConditions(4), 60)
    for attempt_id in cluster.pool.sent[-1][1].attempt_ids:
        cluster.first(attempt_id, 5, "stop")
    for sequence in sequences:
        assert (await cluster.dispatcher.next_tokens(sequence)).finish_reason == "stop"
        cluster.dispatcher.drop(sequence)


async def failed(cluster: Cluster) -> None:
    [sequence] = cluster.dispatcher.start(PROMPT, [SamplingParams()], StopConditions(4), 60)
    cluster.failed(DECODE, cluster.pool.sent[-1][1].attempt_ids[0], InvalidRequest("no"))
    await ends_with(InvalidRequest, cluster, sequence)


async def late(cluster: Cluster) -> None:
    [sequence] = cluster.dispatcher.start(PROMPT, [SamplingParams()], StopConditions(4), 0.001)
    await ends_with(DeadlineExceeded, cluster, sequence)


async def ends_with(error: type[Exception], cluster: Cluster, sequence: DispatchedSequence) -> None:
    try:
        with pytest.raises(error):
            await cluster.dispatcher.next_tokens(sequence)
    finally:
        cluster.dispatcher.drop(sequence)


@pytest.mark.parametrize(
    "request_life",
    [
        completed,
        given_up,
        begun_again,
        several_of_one_prompt,
        failed,
        late,
    ],
)
def test_nothing_refers_to_itself(request_life: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def test(cluster: Cluster) -> None:
        await request_life(cluster)  # whatever is made once
        with kept_garbage() as garbage:
            await request_life(cluster)
            await turn()
        names = [f"{type(each).__module__}.{type(each).__qualname__}" for each in garbage]
        assert not [name for name in names if name.startswith(("proxy.", "protocol.")) or name.endswith("Task")], names

    play(test)
