"""Requests with images that wait for the media process: what ends their wait, and that nothing of them stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.sockets import new_context
from tandem.proxy.answers.event_stream import unless_disconnected
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.media.source import MediaLimits
from tandem.proxy.reading.media_jobs import TO_PROCESS, CancelJob, JobFailed, MediaJob, MediaSetup
from tandem.proxy.reading.media_pool import MediaPool
from tandem.runtime.errors import InternalError, InvalidRequest
from tests.support.garbage import kept_garbage

LIMITS = ModelLimits(4096, 320, "m", 64)


class Process:
    """Takes jobs, and does nothing by itself."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[MediaJob | CancelJob] = asyncio.Queue()
        self._bytes = b""

    def write(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= 4 and len(self._bytes) >= 4 + (size := int.from_bytes(self._bytes[:4], "little")):
            self.messages.put_nowait(TO_PROCESS.decode(self._bytes[4 : 4 + size]))  # type: ignore[arg-type]
            self._bytes = self._bytes[4 + size :]


class Pool(MediaPool):
    def __init__(self, cache: MediaCacheClient, ttft_slo_s: float | None) -> None:
        super().__init__(
            MediaSetup("media", "info", "m", "m", False, "hermes", False, "", MediaLimits(), 1), cache, 8, ttft_slo_s
        )
        self.process = Process()

    async def start(self) -> None:
        self._writer = self.process  # type: ignore[assignment]

    async def asked(self) -> MediaJob:
        """The next message is a job."""
        job = await self.process.messages.get()
        assert isinstance(job, MediaJob)
        return job


@contextmanager
def a_cache(folder: Path) -> Iterator[MediaCacheClient]:
    """One that never answers."""
    context = new_context()
    client = MediaCacheClient(context, f"ipc://{folder}/nobody.sock")
    try:
        yield client
    finally:
        client.close()
        context.destroy(linger=0)


async def never() -> Any:
    await asyncio.Event().wait()


async def end_of(reading: asyncio.Task[Any]) -> str:
    """The error's class; raised here, it would refer to its task."""
    [error] = await asyncio.gather(reading, return_exceptions=True)
    return type(error).__name__


async def refused(cache: MediaCacheClient) -> None:
    pool = Pool(cache, None)
    reading = asyncio.create_task(unless_disconnected(never, pool.read("chat", b"{}", LIMITS)))
    job = await pool.asked()
    pool._on_done(JobFailed.of(job.lease_id, InvalidRequest("no picture")))
    assert await end_of(reading) == "InvalidRequest"
    assert not pool.num_waiting


async def lost(cache: MediaCacheClient) -> None:
    pool = Pool(cache, 60.0)
    reading = asyncio.create_task(unless_disconnected(never, pool.read("chat", b"{}", LIMITS)))
    job = await pool.asked()
    pool._on_done(JobFailed.of(job.lease_id, InternalError("the process was lost")))
    assert await end_of(reading) == "InternalError"


async def late(cache: MediaCacheClient) -> None:
    pool = Pool(cache, 0.001)
    reading = asyncio.create_task(unless_disconnected(never, pool.read("chat", b"{}", LIMITS)))
    job = await pool.asked()
    assert await end_of(reading) == "SLOUnreachable"
    assert pool.process.messages.get_nowait() == CancelJob(job.lease_id), (
        "the process is told that nobody waits any more"
    )
    pool._on_done(JobFailed.of(job.lease_id, InvalidRequest("nobody waits")))
    assert not pool.num_waiting


async def given_up(cache: MediaCacheClient) -> None:
    pool = Pool(cache, None)
    reading = asyncio.create_task(unless_disconnected(never, pool.read("chat", b"{}", LIMITS)))
    job = await pool.asked()
    reading.cancel()
    assert await end_of(reading) == "CancelledError"
    assert pool.process.messages.get_nowait() == CancelJob(job.lease_id)
    assert pool.num_waiting == 1, "until the process has let go of it"
    pool._on_done(JobFailed.of(job.lease_id, InvalidRequest("nobody waits")))
    assert not pool.num_waiting


@pytest.mark.parametrize("life", [refused, lost, late, given_up])
def test_nothing_refers_to_itself(life: Callable[[MediaCacheClient], Awaitable[None]], tmp_path: Path) -> None:
    async def test() -> None:
        with a_cache(tmp_path) as cache:
            await life(cache)  # whatever is made once
            with kept_garbage() as garbage:
                await life(cache)
                await asyncio.sleep(0)
        assert not garbage

    asyncio.run(test())
