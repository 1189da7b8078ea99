"""A request that is cancelled or refused, or whose client leaves, at any moment, leaves no lease and no record."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.admission import Admission, QueueFull
from tandem.proxy.admission.budgets import HeldAnswer
from tandem.proxy.answers.http_answers import ClientDisconnected, unless_disconnected
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.http.bodies import MAX_UNSPOOLED_BYTES, RequestBodies
from tandem.proxy.http.routes import generation_routes
from tandem.proxy.http.routes.generation_routes import _generate
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import InvalidRequest
from tests.support.async_tests import in_loop
from tests.support.proxy_cluster import Cluster, play, played

CONFIG = ProxyConfig("proxy-0", "", "m", "m")
NUM_MOMENTS = 40
"""Turns of the loop until the request waits for its first token; a test shows that they suffice."""


class Lease:
    is_released = False

    def release(self) -> None:
        self.is_released = True


class Media:
    """Reads requests with images, in some turns of the loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.leases: list[Lease] = []

    async def read(self, kind: Any, body: Any, limits: Any, *_arguments: object) -> GenerationRequest:
        for _ in range(3):
            await asyncio.sleep(0)
        text = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
        request = self._cluster.reader.read(text, "chat", limits)
        self.leases.append(Lease())
        return msgspec.structs.replace(request, media_lease=self.leases[-1])


def begin(
    cluster: Cluster, media: Media, num_bytes: int, gone: asyncio.Event, headers: dict[bytes, bytes] | None = None
) -> asyncio.Task[Response]:
    """Sends a request with images. gone: whether its client has left."""
    limits = cluster.worker_table.limits()

    async def limits_now() -> Any:
        return limits

    services = {name: getattr(cluster.services, name) for name in dir(type(cluster.services)) if name[0] != "_"}
    state: Any = SimpleNamespace(
        **services,
        bodies=RequestBodies(1_000_000, 30.0),
        readiness=SimpleNamespace(limits=limits_now),
        media=media,
        responses=None,
        signing_key=b"",
    )
    body = b'{"image_url": 0}'.ljust(num_bytes)
    given: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "method": "POST", "path": "/", "headers": list((headers or {}).items()), "state": {},
        "client": ("127.0.0.1", 0),
    }  # fmt: skip
    return asyncio.create_task(_generate(state, CONFIG, "chat", Request(scope, receive)))


async def end_at(cluster: Cluster, moment: int, num_bytes: int, by_client: bool) -> bool:
    """Ends a request after so many turns of the loop. Returns whether it had begun to generate."""
    media, gone = Media(cluster), asyncio.Event()
    task = begin(cluster, media, num_bytes, gone)
    for _ in range(moment):
        await asyncio.sleep(0)
    num_started = len(cluster.pool.sent)
    if by_client:
        gone.set()
    else:
        task.cancel()
    with pytest.raises((ClientDisconnected, asyncio.CancelledError)):
        await task
    assert all(lease.is_released for lease in media.leases)
    assert all(record.ended_at is not None for record in cluster.services.requests._records.values())
    return num_started > 0


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.parametrize("num_bytes", [100, MAX_UNSPOOLED_BYTES + 100])
def test_a_request_with_images_leaves_no_lease(num_bytes: int, by_client: bool) -> None:
    has_begun = []
    for moment in range(NUM_MOMENTS):

        async def test(cluster: Cluster, moment: int = moment) -> None:
            has_begun.append(await end_at(cluster, moment, num_bytes, by_client))

        play(test)
    assert not has_begun[0] and has_begun[-1]


@pytest.mark.parametrize("by", ["the queue", "its vocabulary", "the answer"])
@played()
async def test_a_refused_request_with_images_leaves_no_lease(
    cluster: Cluster, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused when its images are in the cache already."""
    error = {"the queue": QueueFull("full", 1), "its vocabulary": InvalidRequest("no"), "the answer": QueueFull("", 1)}
    place = {
        "the queue": (Admission, "admit"),
        "its vocabulary": (GenerationRequest, "check_vocabulary"),
        "the answer": (HeldAnswer, "reserve"),
    }

    def refuse(*_: object, **__: object) -> None:
        raise error[by]

    monkeypatch.setattr(*place[by], refuse)
    media = Media(cluster)
    with pytest.raises(type(error[by])):
        await begin(cluster, media, 100, asyncio.Event())
    assert [lease.is_released for lease in media.leases] == [True]
    assert all(record.ended_at is not None for record in cluster.services.requests._records.values())
    assert not cluster.pool.sent


@played()
async def test_a_request_that_cannot_be_recorded_leaves_no_lease(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: GenerationRequest) -> None:
        raise InvalidRequest("a request with images is not recorded")

    monkeypatch.setattr(generation_routes, "wants_record", lambda *_: True)
    monkeypatch.setattr(generation_routes, "check_recorded", refuse)
    media = Media(cluster)
    with pytest.raises(InvalidRequest):
        await begin(cluster, media, 100, asyncio.Event())
    assert [lease.is_released for lease in media.leases] == [True]


@in_loop
async def test_work_that_is_done_when_it_is_cancelled_ends_by_itself() -> None:
    """Its result is never between two tasks, where nobody would release what it holds."""
    for num_turns in range(8):
        held: list[str] = []

        async def work(held: list[str] = held) -> str:
            held.append("lease")
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
            except BaseException:
                held.clear()
                raise
            return "lease"

        async def stays() -> Any:
            await asyncio.sleep(60)

        async def owner(held: list[str] = held, work: Any = work, stays: Any = stays) -> None:
            await unless_disconnected(stays, work())
            held.clear()

        task = asyncio.create_task(owner())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not held
