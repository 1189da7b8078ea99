"""Limits of the media process for a whole request and for a client, and what one client learns of another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.processor import MediaProcessor
from tandem.proxy.reading.media_messages import MediaJobFailed
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


def test_each_item_is_a_job_of_its_client(reader: MediaProcessOnLoop) -> None:
    """So slow items of one client never hold the last sandbox (`tests/unit/proxy/reading/test_reader_pool.py`)."""
    reader.run(reader.client.clear())
    large = [image_part(data_url(encoded(picture(100, 80 + number, seed=number)))) for number in range(4)]
    reader.sandboxes.clients.clear()
    jobs = [reader.job(*large, client="attacker"), reader.job(PHOTO, client="tenant", cache_salt="1")]
    reader.read_all(jobs)
    reader.client.release([job.lease_id for job in jobs])
    assert sorted(reader.sandboxes.clients) == ["attacker"] * 8 + ["tenant"] * 2, "headers, then pixels"
