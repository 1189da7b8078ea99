"""Pixels of a request are released when they are encoded, and made again when it must migrate afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.dispatch import AttemptPreempted, FirstToken, StartPrefill
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.dispatch import dispatcher
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.runtime.errors import InternalError, Overloaded, WorkerLost
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, played, turn, whole
from tests.unit.proxy.dispatch.test_generation import OTHER_DECODE, prefills

ITEM = MediaItem(b"d" * 32, "image", ((0, 1),), "/proc/1/fd/1", ())


class Lease:
    """A lease whose pixels fail to be made again with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.has_pixels = self.has_first_pixels = True
        self.is_released, self.num_made = False, 0

    def release_pixels(self) -> None:
        self.has_pixels = self.has_first_pixels = False

    def release(self) -> None:
        self.is_released = True

    async def with_pixels(self, media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
        await turn()
        if self.errors:
            raise self.errors.pop(0)
        self.has_pixels, self.num_made = True, self.num_made + (not self.has_pixels)
        return tuple(msgspec.structs.replace(item, segment="/proc/2/fd/2") for item in media)


def begin(cluster: Cluster, lease: Lease, **fields: Any) -> asyncio.Task[bytes]:
    """Starts a request with a picture."""
    body = json.dumps({"prompt": "abc", "max_tokens": 4, "ignore_eos": True, **fields}).encode()
    request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
    assert isinstance(request.prompt, RenderedPrompts)
    prompts = [replace(prompt, media=(ITEM,)) for prompt in request.prompt.prompts]
    request = msgspec.structs.replace(request, prompt=RenderedPrompts(prompts), media_lease=lease)
    made = Generation(cluster.services, request, RequestRecord("r", "completion"))
    return asyncio.create_task(whole(CompletionAnswers(made, "m")))


def starts(cluster: Cluster) -> list[StartPrefill]:
    return [message for _, message in cluster.pool.of(StartPrefill)]


@played()
async def test_pixels_are_released_with_the_last_first_token(cluster: Cluster) -> None:
    lease = Lease()
    task = begin(cluster, lease, n=2)
    one, other = await prefills(cluster, 2)
    for attempt_id, is_last in ((one, False), (other, True)):
        assert lease.has_pixels
        cluster.first(attempt_id, 5)
        cluster.reserved(attempt_id)
        await turn()
        assert lease.has_pixels is not is_last
    for attempt_id in (one, other):
        for token_id in (6, 7):
            cluster.token(attempt_id, token_id)
        cluster.token(attempt_id, 8, "length")
    await task
    assert lease.is_released and not lease.num_made


@played()
async def test_pixels_that_a_worker_keeps_mapped_are_held_to_the_end(cluster: Cluster) -> None:
    lease = Lease()
    task = begin(cluster, lease)
    [attempt_id] = await prefills(cluster, 1)
    first = FirstToken(attempt_id, SampledToken(5), None, 0.1, 0.2, keeps_media=True)
    cluster.dispatcher.on_message(PREFILL, first)
    cluster.token(attempt_id, 6)
    await turn()
    assert lease.has_pixels
    cluster.token(attempt_id, 7, "length")
    await task
    assert lease.is_released


@pytest.mark.parametrize("errors", [[], [Overloaded("full")] * 9, [InternalError("lost"), WorkerLost("lost")]])
@played()
async def test_a_migrated_sequence_gets_its_pixels_again(
    cluster: Cluster, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_PIXELS_RETRY_S", 0.001)
    lease = Lease(*errors)
    task = begin(cluster, lease)
    [old] = await prefills(cluster, 1)
    assert starts(cluster)[0].media == (ITEM,)
    cluster.first(old, 5)
    cluster.token(old, 6)
    await turn()
    assert not lease.has_pixels
    cluster.join(OTHER_DECODE)
    cluster.lose(DECODE)
    _, new = await prefills(cluster, 2)
    again = starts(cluster)[1]
    assert [item.segment for item in again.media] == ["/proc/2/fd/2"] and again.media[0].spans == ITEM.spans
    assert unpack_token_ids(again.token_ids)[-2:] == [5, 6] and lease.num_made == 1
    assert lease.has_pixels
    cluster.first(new, 7)
    cluster.reserved(new, OTHER_DECODE)
    await turn()
    assert not lease.has_pixels, "they are encoded again"
    cluster.token(new, 8, "length", worker=OTHER_DECODE)
    answer = json.loads(await task)
    assert answer["usage"]["completion_tokens"] == 4 and lease.is_released


@played()
async def test_each_of_several_sequences_gets_the_pixels_that_were_made_again(cluster: Cluster) -> None:
    """Also one that migrates later than another: the paths that it began with lead to closed descriptors."""
    lease = Lease()
    task = begin(cluster, lease, n=2)
    old = await prefills(cluster, 2)
    for attempt_id in old:
        cluster.first(attempt_id, 5)
        cluster.token(attempt_id, 6)
    await turn()
    assert not lease.has_pixels
    new = []
    for number, attempt_id in enumerate(old):
        cluster.dispatcher.on_message(DECODE, AttemptPreempted(attempt_id))
        new.append((await prefills(cluster, 3 + number))[-1])
        [item] = starts(cluster)[1 + number].media
        assert item.segment == "/proc/2/fd/2"
    assert lease.num_made == 1
    for number, attempt_id in enumerate(new):
        assert lease.has_pixels
        cluster.first(attempt_id, 7)
        cluster.reserved(attempt_id)
        await turn()
        assert lease.has_pixels is (number == 0)
    for attempt_id in new:
        cluster.token(attempt_id, 8, "length")
    await task


@played()
async def test_pixels_that_cannot_be_made_again_fail_the_sequence(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_PIXELS_RETRY_S", 0.001)
    lease = Lease(*[InternalError("it is broken")] * 9)
    task = begin(cluster, lease)
    [old] = await prefills(cluster, 1)
    cluster.first(old, 5)
    cluster.reserved(old)
    await turn()
    cluster.join(OTHER_DECODE)
    cluster.lose(DECODE)
    with pytest.raises(InternalError, match="it is broken"):
        await task
    assert lease.is_released and len(lease.errors) == 5
