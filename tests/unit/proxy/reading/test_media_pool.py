"""Requests with images wait for the media process, and every lease is released."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.media import MediaItem, MediaKind
from tandem.protocol.messages.media_cache import MediaPart
from tandem.protocol.sockets import new_context
from tandem.proxy.admission.budgets import DescriptorBudget
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.media_lease import HeldSources, MadeMedia, SourceBytes
from tandem.proxy.media.source import FoundMedia, MediaSource, SentMedia
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.media_messages import (
    TO_PROCESS,
    CancelMediaJob,
    MediaJob,
    MediaJobDone,
    MediaJobFailed,
    MediaRemade,
    RemakeMedia,
)
from tandem.proxy.reading.media_pool import MediaPool
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.prompt import CachedMedia, MediaPlaceholder, Prompt, RenderedPrompts
from tandem.runtime.errors import ClientShareExceeded, InternalError, InvalidRequest, Overloaded, WorkerLost
from tandem.runtime.processes.forked_process import ForkedProcess
from tests.support.settings import proxy_config
from tests.support.waiting import until

LIMITS = ModelLimits(4096, 320, "m", 64)
CONFIG = proxy_config(max_waiting_media=8)


class FakeProcess:
    """Receives messages and never answers."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[MediaJob | CancelMediaJob] = asyncio.Queue()
        self._bytes = b""

    def write(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= 4 and len(self._bytes) >= 4 + (size := int.from_bytes(self._bytes[:4])):
            self.messages.put_nowait(TO_PROCESS.decode(self._bytes[4 : 4 + size]))  # type: ignore[arg-type]
            self._bytes = self._bytes[4 + size :]


class Cache(MediaCacheClient):
    """A client of a cache that never answers; records released leases."""

    released: list[str]

    def release(self, lease_ids: list[str], part: MediaPart | None = None) -> None:
        self.released += [f"{lease_id} {part}" if part is not None else lease_id for lease_id in lease_ids]


SOURCE = MediaSource(0, "image", "", "messages")
PLACEHOLDERS: dict[MediaKind, MediaPlaceholder] = {"image": MediaPlaceholder("<image>", 7)}


class Readers(ReaderPool):
    """Finds one image in each body, and answers with `request` at the end."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), CONFIG, 2)
        self.found = FoundMedia([SentMedia(SOURCE, 0, 3)], "")
        self.read_with: list[CachedMedia] = []
        self.error: Exception | None = None
        self.blocked: str | None = None
        """Name of the method that does not end."""
        self.paths: list[str] = []

    async def run(self, method: Any, data: Any, *arguments: Any, client: str = "") -> Any:
        if method.__name__ == self.blocked:
            await asyncio.Event().wait()
        if method is BodyReader.find_media:
            path = arguments[-1]
            Path(path).write_bytes(b"gif")
            self.paths.append(path)
            return self.found
        assert method is BodyReader.read_with_media and arguments[-1] == PLACEHOLDERS
        self.read_with = arguments[-2]
        if self.error is not None:
            raise self.error
        return request_with(Path(self.read_with[0].segment))

    async def read(self, *arguments: Any, **named: Any) -> GenerationRequest:
        return request_with(Path("/dev/null"))


class Pool(MediaPool):
    def __init__(self, cache: Cache, ttft_slo_s: float | None = None) -> None:
        self.readers = Readers()
        super().__init__(CONFIG, cache, self.readers, ttft_slo_s)
        self.cache = cache
        self.process = FakeProcess()

    @property
    def num_waiting(self) -> int:
        assert len(self._jobs) <= self._places.num_held
        return self._places.num_held

    async def start(self) -> None:
        self._writer = self.process  # type: ignore[assignment]

    async def job(self) -> MediaJob:
        """Returns the next message, which must be a job."""
        job = await self.process.messages.get()
        assert isinstance(job, MediaJob)
        return job

    def begin(self) -> asyncio.Task[GenerationRequest]:
        return asyncio.create_task(self.read("chat", b"{}", LIMITS))

    def answer(self, job: MediaJob, answer: Path | Exception, sources: HeldSources | None = None) -> None:
        """answer: file of the item's segment, or an error. sources: an empty file beside it unless given."""
        if isinstance(answer, Path):
            if sources is None:
                (beside := answer.with_name("sources of an item")).touch()
                sources = HeldSources(str(beside), [])
            media = [CachedMedia("image", b"d" * 32, str(answer), (), 1, "<image>")]
            self._on_answer(MediaJobDone(job.lease_id, media, PLACEHOLDERS, sources))
        else:
            self._on_answer(MediaJobFailed.of(job.lease_id, answer))  # type: ignore[arg-type]


def request_with(segment: Path) -> GenerationRequest:
    request = BodyDecoder("m").chat(b'{"messages": [{"role": "user", "content": "hi"}]}')
    item = MediaItem(b"d" * 32, "image", ((0, 1),), str(segment), ())
    return GenerationRequest(
        **{name: getattr(request, name) for name in request.__struct_fields__}
        | {"prompt": RenderedPrompts([Prompt(b"\0" * 4, 1, media=(item,))])}
    )


def run(test: Callable[[Cache], Awaitable[Any]], folder: Path) -> None:
    async def with_cache() -> None:
        context = new_context()
        cache = Cache(context, f"ipc://{folder}/nobody.sock")
        cache.released = []
        try:
            await asyncio.wait_for(test(cache), 30)
        finally:
            cache.close()
            context.destroy(linger=0)

    asyncio.run(with_cache())


def num_open(segment: Path) -> int:
    return sum(link.resolve() == segment for link in Path("/proc/self/fd").iterdir())


def test_the_request_owns_its_lease(tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        reading = pool.begin()
        job = await pool.job()
        pool.answer(job, segment)
        request = await reading
        assert num_open(segment) == 1 and not cache.released and not pool.num_waiting
        assert request.media_lease is not None
        for _ in range(2):
            request.media_lease.release()
        assert num_open(segment) == 0 and cache.released == [job.lease_id]

    run(test, tmp_path)


def test_pixels_are_released_before_the_request_ends_and_made_again_for_another_attempt(tmp_path: Path) -> None:
    pixels, sources, again = tmp_path / "pixels", tmp_path / "sources", tmp_path / "again"
    for file in (pixels, sources, again):
        file.touch()
    held = HeldSources(str(sources), [SourceBytes("image", b"d" * 32, 64, 3)])

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        reading = asyncio.create_task(pool.read("chat", b"{}", LIMITS, "a"))
        job = await pool.job()
        pool.answer(job, pixels, held)
        request = await reading
        lease = request.media_lease
        assert lease is not None and isinstance(request.prompt, RenderedPrompts)
        [prompt] = request.prompt.prompts
        assert pool._descriptors.num_held == 2 and await lease.with_pixels(prompt.media) == prompt.media
        for _ in range(2):
            request.release_pixels()
        assert cache.released == [f"{job.lease_id} input"] and not lease.has_first_pixels and num_open(pixels) == 0

        async def remake(answer: MadeMedia | Exception) -> RemakeMedia:
            remaking = await pool.process.messages.get()
            assert isinstance(remaking, RemakeMedia) and remaking.client == "a"
            assert Path(remaking.sources.segment).resolve() == sources and remaking.sources.items == held.items
            if isinstance(answer, Exception):
                pool._on_answer(MediaJobFailed.of(remaking.lease_id, answer))  # type: ignore[arg-type]
            else:
                pool._on_answer(MediaRemade(remaking.lease_id, [answer]))
            return remaking

        migrating = asyncio.create_task(lease.with_pixels(prompt.media))
        await remake(ClientShareExceeded("your share is used up"))
        with pytest.raises(Overloaded, match="used up"):
            await migrating
        assert not lease.has_first_pixels
        both = [asyncio.create_task(lease.with_pixels(prompt.media)) for _ in range(2)]
        remade = await remake(MadeMedia(b"d" * 32, str(again), ()))
        for items in await asyncio.gather(*both):
            assert Path(items[0].segment).resolve() == again and items[0].spans == prompt.media[0].spans
        assert pool.process.messages.empty(), "made once for all"
        assert not lease.has_first_pixels, "other sequences of the prompt have the paths of the first ones"
        cache.released.clear()
        request.release_pixels()
        assert cache.released == [remade.lease_id] and num_open(again) == 0
        migrating = asyncio.create_task(lease.with_pixels(prompt.media))
        remade = await remake(MadeMedia(b"d" * 32, str(again), ()))
        await migrating
        cache.released.clear()
        request.release_media()
        assert cache.released == [job.lease_id, remade.lease_id]
        assert num_open(again) == num_open(sources) == pool._descriptors.num_held == 0

    run(test, tmp_path)


def test_pixels_that_are_made_after_the_request_has_ended_are_released(tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        reading = pool.begin()
        job = await pool.job()
        pool.answer(job, segment)
        lease = (await reading).media_lease
        assert lease is not None
        lease.release_pixels()
        migrating = asyncio.create_task(lease.with_pixels([]))
        remaking = await pool.process.messages.get()
        lease.release()
        pool._on_answer(MediaRemade(remaking.lease_id, [MadeMedia(b"d" * 32, str(segment), ())]))
        with pytest.raises(InternalError, match="has ended"):
            await migrating
        assert remaking.lease_id in cache.released and num_open(segment) == 0

    run(test, tmp_path)


def test_open_media_count_as_descriptors_of_their_client(tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        pool._descriptors = DescriptorBudget(256, 100, 20)
        with pool._descriptors.hold("a", int(pool._descriptors.room * 0.75)):
            with pytest.raises(ClientShareExceeded, match="descriptors"):
                await pool.read("chat", b"{}", LIMITS, "a")
            reading = asyncio.create_task(pool.read("chat", b"{}", LIMITS, "b"))
            pool.answer(await pool.job(), segment)
            (await reading).release_media()
        with pool._descriptors.hold("a", int(pool._descriptors.room * 0.75) - 1):
            reading = asyncio.create_task(pool.read("chat", b"{}", LIMITS, "a"))
            pool.answer(job := await pool.job(), segment)
            with pytest.raises(ClientShareExceeded, match="descriptors"):
                await reading
            assert cache.released[-1] == job.lease_id
        assert pool._descriptors.num_held == 0

    run(test, tmp_path)


@pytest.mark.parametrize("error", [InvalidRequest("no picture"), InternalError("the process was lost")], ids=str)
def test_an_error_releases_the_lease(error: Exception, tmp_path: Path) -> None:
    async def test(cache: Cache) -> None:
        pool = Pool(cache, 60.0)
        reading = pool.begin()
        job = await pool.job()
        pool.answer(job, error)
        with pytest.raises(type(error)):
            await reading
        assert cache.released == [job.lease_id] and not pool.num_waiting

    run(test, tmp_path)


def test_a_request_is_read_again_if_its_media_cannot_be_opened(tmp_path: Path) -> None:
    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        reading = pool.begin()
        first = await pool.job()
        pool.answer(first, tmp_path / "gone")
        second = await pool.job()
        pool.answer(second, WorkerLost("gone again"))
        with pytest.raises(WorkerLost):
            await reading
        assert cache.released == [first.lease_id, second.lease_id]

    run(test, tmp_path)


def test_a_late_request_is_refused_and_its_job_cancelled(tmp_path: Path) -> None:
    async def test(cache: Cache) -> None:
        pool = Pool(cache, 0.001)
        reading = pool.begin()
        job = await pool.job()
        with pytest.raises(SLOUnreachable) as late:
            await reading
        assert not late.value.is_lasting, "the process may have been starting, so trying again may help"
        assert pool.process.messages.get_nowait() == CancelMediaJob(job.lease_id)
        assert pool.num_waiting == 1, "the lease is held until the process has answered"
        reading = pool.begin()
        beside = await pool.job()
        with pytest.raises(SLOUnreachable):
            await reading
        pool.answer(beside, InvalidRequest("cancelled"))
        cache.released.clear()
        pool.answer(job, InvalidRequest("cancelled"))
        assert not pool.num_waiting and cache.released == [job.lease_id]

    run(test, tmp_path)


@pytest.mark.parametrize("is_answered_first", [False, True])
def test_a_cancelled_request_releases_its_lease(is_answered_first: bool, tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        reading = pool.begin()
        job = await pool.job()
        if is_answered_first:
            pool.answer(job, segment)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if not is_answered_first:
            assert pool.process.messages.get_nowait() == CancelMediaJob(job.lease_id)
            pool.answer(job, segment)
        assert reading.cancelled() and cache.released == [job.lease_id] and num_open(segment) == 0

    run(test, tmp_path)


def test_items_are_readable_until_the_process_has_answered(tmp_path: Path) -> None:
    """Its descriptor must not become another request's while a cancelled job may still read it."""

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        reading = pool.begin()
        job = await pool.job()
        assert job.path == pool.readers.paths[0] and job.items == [SentMedia(SOURCE, 0, 3)]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert Path(job.path).read_bytes() == b"gif" and pool.num_waiting == 1
        pool.answer(job, InternalError("cancelled"))
        assert not Path(job.path).exists() and not pool.num_waiting

    run(test, tmp_path)


def test_a_body_that_only_mentions_media_is_read_like_any_other(tmp_path: Path) -> None:
    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        pool.readers.found = FoundMedia([], "")
        assert (await pool.begin()).media_lease is None
        assert not pool.num_waiting and pool.process.messages.empty() and not cache.released

    run(test, tmp_path)


@pytest.mark.parametrize("ends", ["by an error", "by its client", "late"])
def test_a_request_that_ends_while_it_is_rendered_releases_its_lease(ends: str, tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()

    async def test(cache: Cache) -> None:
        pool = Pool(cache, 0.2 if ends == "late" else None)
        if ends == "by an error":
            pool.readers.error = InvalidRequest("no such grammar")
        else:
            pool.readers.blocked = "read_with_media"
        reading = pool.begin()
        job = await pool.job()
        pool.answer(job, segment)
        await until(lambda: not pool.num_waiting)
        await asyncio.sleep(0.01)
        if ends == "by its client":
            reading.cancel()
        error = {"by an error": InvalidRequest, "by its client": asyncio.CancelledError, "late": SLOUnreachable}[ends]
        with pytest.raises(error):
            await reading
        assert cache.released == [job.lease_id] and not pool.num_waiting

    run(test, tmp_path)


def test_a_request_that_ends_while_its_media_are_looked_for_holds_nothing(tmp_path: Path) -> None:
    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        pool.readers.blocked = "find_media"
        reading = pool.begin()
        await until(lambda: pool.num_waiting == 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not pool.num_waiting and not cache.released

    run(test, tmp_path)


def sleeping(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> list[ForkedProcess]:
    """Lets the pool start processes that keep their end of the socket and say nothing. Returns those that it starts."""
    started: list[ForkedProcess] = []

    async def spawn(fd: int) -> ForkedProcess:
        os.set_inheritable(fd, True)
        started.append(ForkedProcess(os.posix_spawn("/bin/sleep", ["sleep", "100"], {})))  # noqa: ASYNC221
        return started[-1]

    monkeypatch.setattr(pool, "_spawn", spawn)
    return started


@pytest.mark.parametrize("closes", [True, False])
def test_only_a_process_that_ends_by_itself_is_an_error(
    closes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was reading is read again by two more processes, and is refused then."""

    async def test(cache: Cache) -> None:
        pool = MediaPool(CONFIG, cache, Readers())
        started = sleeping(pool, monkeypatch)
        reading = asyncio.create_task(pool.read("chat", b"{}", LIMITS))
        for number in range(1, 2 if closes else 4):
            await until(lambda: len(started) == number and bool(pool._jobs))  # noqa: B023
            if closes:
                pool.close()
            else:
                started[-1].kill()
        with pytest.raises(InternalError if closes else Overloaded, match="is stopping" if closes else "was lost"):
            await reading
        assert [each.returncode for each in started] == [-signal.SIGKILL] * (1 if closes else 3)
        assert not pool._places.num_held
        pool.close()

    run(test, tmp_path)
    assert ("the media process ended" in caplog.text) == (not closes)
    assert bool([each for each in caplog.records if each.levelname == "ERROR"]) == (not closes)


def test_requests_of_a_process_that_was_lost_are_read_again(tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        both = [pool.begin() for _ in range(2)]
        for _ in range(3):
            jobs = [await pool.job() for _ in both]
            if len(cache.released) < 4:
                pool._on_lost()
        for job in jobs:
            pool.answer(job, segment)
        for reading in both:
            (await reading).release_media()
        assert not pool.num_waiting and not pool._bytes.num_held and not pool._descriptors.num_held

    run(test, tmp_path)


def test_pixels_that_were_lost_with_a_process_may_be_made_again_later(tmp_path: Path) -> None:
    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        await pool.start()
        making = asyncio.create_task(pool._make_again(HeldSources("", []), "a"))
        await pool.process.messages.get()
        pool._on_lost()
        with pytest.raises(Overloaded, match="was lost; try again"):
            await making
        assert not pool._jobs

    run(test, tmp_path)


def test_images_that_wait_to_be_read_are_counted_by_client(tmp_path: Path) -> None:
    """Also those that a stored response has, which no body brings."""

    async def test(cache: Cache) -> None:
        pool = Pool(cache)
        pool.readers.found = FoundMedia([SentMedia(SOURCE, 0, 400 << 20)], "")
        reading = [asyncio.create_task(pool.read("chat", b"{}", LIMITS, "a"))]
        first = await pool.job()
        with pytest.raises(ClientShareExceeded):
            await pool.read("chat", b"{}", LIMITS, "a")
        reading.append(asyncio.create_task(pool.read("chat", b"{}", LIMITS, "b")))
        for job in (first, await pool.job()):
            pool.answer(job, InvalidRequest("no picture"))
        await asyncio.gather(*reading, return_exceptions=True)
        assert not pool._bytes.num_held

    run(test, tmp_path)


def test_a_closed_pool_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cache: Cache) -> None:
        pool = MediaPool(CONFIG, cache, Readers())
        started = sleeping(pool, monkeypatch)
        pool.close()
        with pytest.raises(InternalError, match="is stopping"):
            await pool.read("chat", b"{}", LIMITS)
        assert not started

    run(test, tmp_path)


def test_a_process_that_starts_while_the_pool_is_closed_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cache: Cache) -> None:
        pool, may_start = MediaPool(CONFIG, cache, Readers()), asyncio.Event()
        started = sleeping(pool, monkeypatch)
        spawn = pool._spawn

        async def spawn_late(fd: int) -> ForkedProcess:
            await may_start.wait()
            return await spawn(fd)

        monkeypatch.setattr(pool, "_spawn", spawn_late)
        reading = asyncio.create_task(pool.read("chat", b"{}", LIMITS))
        await until(lambda: pool._starting.locked())
        pool.close()
        may_start.set()
        with pytest.raises(InternalError, match="is stopping"):
            await reading
        [process] = started
        assert process.returncode == -signal.SIGKILL

    run(test, tmp_path)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
