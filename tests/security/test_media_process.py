"""Limits of the media process for a whole request and for a client, and what one client learns of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.processor import MediaProcessor
from tandem.proxy.media.source import MediaSource
from tandem.proxy.reading.media_messages import MediaJob, MediaJobDone, MediaJobFailed
from tandem.proxy.reading.media_reader import MediaReader
from tandem.runtime.errors import InternalError, Overloaded
from tests.support.media_proxy import data_url, image_part, video_part
from tests.support.media_reader import MediaProcessOnLoop
from tests.support.vision_model import clip, encoded, picture, save_processor
from tests.unit.proxy.reading.test_media_pool import Cache, Pool, run

MAX_PIXELS = 60_000
NUM_SLOW = 4
PHOTO = image_part(data_url(encoded(picture(200, 150, seed=1))))
VIDEO = video_part(data_url(clip(5, 96, 64), "video/mp4"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProcessOnLoop]:
    running = MediaProcessOnLoop(save_processor(tmp_path_factory.mktemp("media")), max_pixels_per_item=MAX_PIXELS // 32)
    yield running
    running.close()


def test_the_pixels_of_a_request_are_limited_before_any_item_is_decoded(reader: MediaProcessOnLoop) -> None:
    """One image has 30,000 pixels, the frames of the video 30,720 together. Equal items are decoded once."""
    other = image_part(data_url(encoded(picture(200, 150, seed=2))))
    third = image_part(data_url(encoded(picture(1, 150, seed=3))))
    before = reader.status().num_misses
    for parts in ((PHOTO, VIDEO), (PHOTO, other, third)):
        message = reader.refusal(*parts)
        assert f"the limit is {MAX_PIXELS}. Send fewer or smaller ones." in message
    assert reader.status().num_misses == before
    reader.prompt(PHOTO, other, PHOTO)


def test_cached_items_are_shared_within_one_salt_only(reader: MediaProcessOnLoop) -> None:
    """Otherwise the time to the first token would tell whether another API key has sent the same image."""
    image = image_part(data_url(encoded(picture(120, 90, seed=5))))

    def digest_of(salt: str | None) -> tuple[bytes, int]:
        before = reader.status().num_misses
        [done] = reader.read_all([reader.job(image, **({} if salt is None else {"cache_salt": salt}))])
        _, [item], _ = reader.prompt_of(done)
        reader.client.release([done.lease_id])
        return item.digest, reader.status().num_misses - before

    (plain, a, b) = (digest_of(salt) for salt in (None, "key a", "key b"))
    assert len({plain[0], a[0], b[0]}) == 3
    assert [plain[1], a[1], b[1]] == [1, 1, 1]
    for salt, first in ((None, plain), ("key a", a), ("key b", b)):
        assert digest_of(salt) == (first[0], 0), "the same client's image was processed again"


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_request_for_which_memory_does_not_suffice_may_be_sent_again(
    error: Exception, reader: MediaProcessOnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails alone, and not as an invalid request: others may have used the memory."""

    def fail(*_arguments: object, **_media: object) -> None:
        raise error

    reader.run(reader.client.clear())
    image = image_part(data_url(encoded(picture(80, 80, seed=9))))
    with monkeypatch.context() as patched:
        patched.setattr(MediaProcessor, "_call", fail)
        [done] = reader.read_all([reader.job(image)])
        reader.client.release([done.lease_id])
    assert isinstance(done, MediaJobFailed)
    assert type(done.error) is Overloaded and "memory" in done.error.message
    reader.prompt(image)


def test_one_client_leaves_waiting_places_to_others(tmp_path: Path) -> None:
    """Of 8 places, one client may have 6."""

    async def test(cache: Cache) -> None:
        pool = Pool(cache)

        def begin(client: str) -> asyncio.Task[GenerationRequest]:
            return asyncio.create_task(pool.read("chat", b"{}", ModelLimits(4096, 320, "m", 64), client))

        reading = [begin("attacker") for _ in range(6)]
        jobs = [await pool.job() for _ in reading]
        assert {job.client for job in jobs} == {"attacker"}
        with pytest.raises(ClientLimitExceeded, match="6 of your requests"):
            await begin("attacker")
        reading.append(begin("another"))
        jobs.append(await pool.job())
        assert jobs[-1].client == "another"
        pool.answer(jobs[0], InternalError("done"))
        reading.append(begin("attacker"))
        jobs.append(await pool.job())
        for job in jobs[1:]:
            pool.answer(job, InternalError("done"))
        await asyncio.gather(*reading, return_exceptions=True)

    run(test, tmp_path)


@pytest.mark.parametrize("step", ["inspect", "write"])
def test_slow_items_of_one_client_never_hold_the_last_thread(
    step: str, reader: MediaProcessOnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client sends 12 images, each of which holds a thread until the end. Another's image waits for none."""
    original, begun, gate = getattr(MediaReader, step), list[int](), threading.Event()

    def slow(self: MediaReader, item: Any, *arguments: Any) -> Any:
        if item.source.number < NUM_SLOW:
            begun.append(item.source.number)
            assert gate.wait(60)
        return original(self, item, *arguments)

    reader.run(reader.client.clear())
    monkeypatch.setattr(MediaReader, step, slow)
    large = [image_part(data_url(encoded(picture(100, 80 + number, seed=number)))) for number in range(12)]
    small = image_part(data_url(encoded(picture(20, 20, seed=50))))
    attacks = [reader.job(*large[i : i + NUM_SLOW], client="attacker") for i in range(0, 12, NUM_SLOW)]
    first, second = (reader.job(small, client="tenant", cache_salt=str(number)) for number in range(2))
    tenant = [
        msgspec.structs.replace(job, items=[msgspec.structs.replace(job.items[0], source=last_of(job))])
        for job in (first, second)
    ]

    async def test() -> None:
        for job in attacks:
            reader.process.on_message(job)
        async with asyncio.timeout(20):
            while len(begun) < 2:  # noqa: ASYNC110  # all threads but one
                await asyncio.sleep(0.01)
        for job in tenant:
            reader.process.on_message(job)
            done = await asyncio.wait_for(reader.done.get(), 20)
            assert isinstance(done, MediaJobDone) and done.lease_id == job.lease_id
        assert len(begun) == 2
        gate.set()
        reader.client.release([job.lease_id for job in tenant])
        for _ in attacks:
            reader.client.release([(await reader.done.get()).lease_id])

    reader.run(test())


def last_of(job: MediaJob) -> MediaSource:
    """Returns the job's source with a number that no slow one has."""
    return msgspec.structs.replace(job.items[0].source, number=NUM_SLOW)
