"""The media process reads requests with images and video like transformers' processor, and refuses invalid ones.

The process's loop and threads run here, beside a real media cache.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoProcessor

from tandem.proxy.reading.media_messages import (
    CancelMediaJob,
    MediaJobDone,
    MediaJobFailed,
    MediaRemade,
    RemakeMedia,
)
from tandem.runtime.errors import InvalidRequest, RequestAborted
from tests.support.media_proxy import data_url, image_part, video_part
from tests.support.media_reader import MediaProcessOnLoop, tensors_of
from tests.support.vision_model import clip, encoded, picture, save_processor


@contextmanager
def num_memfds_unchanged() -> Iterator[None]:
    def count() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        # Those the cache keeps ready are empty.
        return sum("memfd:media" in str(link.readlink()) and link.stat().st_size > 0 for link in links)

    before = count()
    yield
    assert count() == before, "shared memory was left behind"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProcessOnLoop]:
    running = MediaProcessOnLoop(save_processor(tmp_path_factory.mktemp("media")))
    yield running
    running.close()


@pytest.fixture(scope="module")
def processor(reader: MediaProcessOnLoop) -> Any:
    return AutoProcessor.from_pretrained(str(reader.folder))


def expected_inputs(processor: Any, parts: list[dict[str, Any]], images: list[Any], video: bytes) -> Any:
    """Returns the inputs computed by transformers alone."""
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    with av.open(io.BytesIO(video)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return processor(text=[text], images=images, videos=[frames], return_tensors="np")


def test_prompts_equal_those_of_transformers(reader: MediaProcessOnLoop, processor: Any) -> None:
    first, second, video = picture(100, 80, seed=1), picture(150, 60, seed=2), clip(6)
    token_ids, media, tensors = reader.prompt(
        "look: ",
        image_part(data_url(encoded(first))),
        video_part(data_url(video, "video/mp4")),
        image_part(data_url(encoded(second))),
        "what is that?",
    )
    parts = [
        {"type": "text", "text": "look: "},
        {"type": "image"},
        {"type": "video"},
        {"type": "image"},
        {"type": "text", "text": "what is that?"},
    ]
    expected = expected_inputs(processor, parts, [first, second], video)
    assert token_ids == list(expected["input_ids"][0])
    assert [item.kind for item in media] == ["image", "video", "image"]
    for name in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(np.concatenate([tensors[0][name], tensors[2][name]]), expected[name])
    for name in ("pixel_values_videos", "video_grid_thw"):
        np.testing.assert_array_equal(tensors[1][name], expected[name])
    placeholders = {"image": processor.image_token_id, "video": processor.video_token_id}
    for item in media:
        [(start, length)] = item.spans
        assert token_ids[start : start + length] == [placeholders[item.kind]] * length
        assert token_ids[start - 1] != token_ids[start] != token_ids[start + length]


def test_cached_items_are_not_processed_again(reader: MediaProcessOnLoop) -> None:
    part = image_part(data_url(encoded(picture(seed=7))))
    before = reader.status()
    _, [one, same], _ = reader.prompt(part, "one", part)
    assert one.digest == same.digest and one.segment == same.segment and one.spans != same.spans
    between = reader.status()
    assert (between.num_misses - before.num_misses, between.num_items - before.num_items) == (1, 1)
    _, [again], _ = reader.prompt("two", part)
    assert (again.digest, again.segment, again.tensors) == (one.digest, one.segment, one.tensors)
    after = reader.status()
    assert (after.num_misses - between.num_misses, after.num_hits - between.num_hits) == (0, 1)
    _, [other], _ = reader.prompt("two", image_part(data_url(encoded(picture(seed=8)))))
    assert other.digest != again.digest


def test_pixels_are_made_again_from_the_kept_sources(reader: MediaProcessOnLoop) -> None:
    """Also when the cache has forgotten everything but what the running request holds."""
    one, two, video = (encoded(picture(80, 70, seed=40)), encoded(picture(60, 90, seed=41)), clip(6))
    parts = [image_part(data_url(one)), video_part(data_url(video, "video/mp4")), image_part(data_url(two))]
    job = reader.job(*parts, parts[0])
    [done] = reader.read_all([job])
    assert isinstance(done, MediaJobDone)
    _, media, expected = reader.prompt_of(done)
    assert [item.kind for item in done.sources.items] == ["image", "video", "image"]
    reader.client.release([job.lease_id], "input")
    reader.run(reader.client.clear())
    assert (status := reader.status()).num_items == 1 and status.pinned_bytes < 40_000
    assert status.pinned_bytes >= len(one) + len(two) + len(video)

    [made] = reader.read_all([RemakeMedia(reader.client.new_id(), done.sources, "a")])
    assert isinstance(made, MediaRemade)
    by_digest = {each.digest: each for each in made.items}
    again = [
        msgspec.structs.replace(i, segment=by_digest[i.digest].segment, tensors=by_digest[i.digest].tensors)
        for i in media
    ]
    for item, wanted in zip(again, expected, strict=True):
        found = tensors_of(item)
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    reader.client.release([made.lease_id, job.lease_id])
    assert reader.status().num_leases == 0


def test_concurrent_requests_share_no_state(reader: MediaProcessOnLoop) -> None:
    """Two threads, images of different sizes, some of them in several requests."""
    parts = [image_part(data_url(encoded(picture(60 + 20 * i, 70, seed=30 + i)))) for i in range(6)]
    jobs = [reader.job(parts[i % 6], "and", parts[(i + 1) % 6]) for i in range(12)]
    prompts = [reader.prompt_of(done) for done in reader.read_all(jobs)]
    reader.client.release([job.lease_id for job in jobs])
    alone = [reader.prompt(parts[i % 6], "and", parts[(i + 1) % 6]) for i in range(6)]
    for i, (token_ids, media, tensors) in enumerate(prompts):
        assert token_ids == alone[i % 6][0]
        assert [item.digest for item in media] == [item.digest for item in alone[i % 6][1]]
        for found, wanted in zip(tensors, alone[i % 6][2], strict=True):
            np.testing.assert_array_equal(found["pixel_values"], wanted["pixel_values"])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_image_formats(reader: MediaProcessOnLoop, kind: str) -> None:
    _, [item], [tensors] = reader.prompt(image_part(data_url(encoded(picture(), kind), f"image/{kind.lower()}")))
    assert item.kind == "image" and tensors["pixel_values"].shape[1] == 1176


def test_files_webm_url_strings_and_many_frames(reader: MediaProcessOnLoop) -> None:
    file = reader.folder / "files" / "clip.webm"
    file.write_bytes(clip(40, kind="webm"))
    _, [item], [tensors] = reader.prompt({"type": "video_url", "video_url": file.as_uri()})
    assert item.kind == "video"
    assert tensors["video_grid_thw"][0][0] == reader.limits.max_video_frames // 2, "frames are sampled"


def test_invalid_items_are_refused_with_index_and_reason(reader: MediaProcessOnLoop) -> None:
    good = image_part(data_url(encoded(picture(seed=20))))
    png, jpeg, video = encoded(picture(400, 300)), encoded(picture(400, 300), "JPEG"), clip(30)
    secret = reader.folder / "config.json"
    (reader.folder / "files" / "way-out").symlink_to(secret)
    os.mkfifo(reader.folder / "files" / "pipe")
    cases = [
        ("it is damaged or cut short", image_part(data_url(png[: len(png) // 2]))),
        ("it is damaged or cut short", image_part(data_url(jpeg[: len(jpeg) // 2], "image/jpeg"))),
        ("not an image of a supported type", image_part(data_url(b"hello"))),
        ("it is empty", image_part("data:image/png;base64,")),
        ("not valid base64", image_part("data:image/png;base64,@@@@")),
        ("has no comma", image_part("data:image/png;base64")),
        ("of type text/html, not image", image_part(data_url(png, "text/html"))),
        ("1200 x 1200 pixels; the limit is 1000000", image_part(data_url(encoded(picture(1200, 1200))))),
        ("more than 4194304 bytes", image_part(data_url(bytes(4_200_000)))),
        ("must begin with data:", image_part("ftp://example.com/a.png")),
        ("is not in the folder", image_part(secret.as_uri())),
        ("is not in the folder", image_part((reader.folder / "files" / "way-out").as_uri())),
        ("is not in the folder", image_part((reader.folder / "files" / "missing.png").as_uri())),
        ("not a regular file", image_part((reader.folder / "files" / "pipe").as_uri())),
        ("127.0.0.1 is not a public one", image_part("http://127.0.0.1/a.png")),
        ("::1 is not a public one", image_part("http://[::1]/a.png")),
        ("169.254.169.254 is link-local", image_part("http://169.254.169.254/latest/meta-data")),
        ("has no image_url", {"type": "image_url"}),
        ("it is not an MP4 or WebM", video_part(data_url(png, "video/mp4"))),
        ("it is not an MP4 or WebM", video_part(data_url(video[: len(video) // 2], "video/mp4"))),
        ("it has no video stream", video_part(data_url(sound(), "video/mp4"))),
        ("processor cannot process it", image_part(data_url(encoded(picture(2000, 4))))),
    ]
    reader.run(reader.client.clear())
    with num_memfds_unchanged():
        for reason, part in cases:
            message = reader.refusal(good, part)
            assert reason in message and "messages[0].content[1]" in message, (reason, message)
        assert "this one has 5" in reader.refusal(*[good] * 5)
        assert "supports parts of type" in reader.refusal(good, {"type": "input_audio"})
        assert "1 image placeholders" in reader.refusal("<|image_pad|>", video_part(data_url(clip(4), "video/mp4")))
        assert "cannot be truncated" in reader.refusal(good, truncate_prompt_tokens=5)
        status = reader.status()
        assert (status.pinned_bytes, status.num_leases) == (0, 0), "a refused request holds something"
        reader.run(reader.client.clear())


def test_images_that_cannot_fit_the_model_are_refused_before_they_are_processed(reader: MediaProcessOnLoop) -> None:
    parts = [image_part(data_url(encoded(picture(400, 400, seed=60 + i)))) for i in range(2)]
    job = reader.job(*parts)
    before = reader.status()
    [done] = reader.read_all([msgspec.structs.replace(job, max_model_len=64)])
    assert isinstance(done, MediaJobFailed) and isinstance(done.error, InvalidRequest)
    assert "The images alone have" in done.error.message
    assert reader.status().num_misses == before.num_misses


def test_a_cancelled_job_is_answered(reader: MediaProcessOnLoop) -> None:
    async def cancel() -> MediaJobDone | MediaRemade | MediaJobFailed:
        job = reader.job(video_part(data_url(clip(20), "video/mp4")))
        reader.process.on_message(job)
        reader.process.on_message(CancelMediaJob(job.lease_id))
        done = await reader.done.get()
        reader.client.release([done.lease_id])
        return done

    answer = reader.run(cancel())
    assert isinstance(answer, MediaJobFailed) and isinstance(answer.error, RequestAborted)
    assert reader.status().num_leases == 0


def test_an_answer_that_is_too_large_to_be_sent_is_an_error(
    reader: MediaProcessOnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = image_part(data_url(encoded(picture(400, 400))))
    assert reader.prompt(part), "it is cached"
    with monkeypatch.context() as patched:
        patched.setattr("tandem.protocol.codec.MAX_MESSAGE_BYTES", 1200)
        assert "MediaJobDone) of" in reader.refusal(part)
    assert reader.prompt(part), "the process goes on"


def test_the_clients_own_template_and_what_it_makes_of_images(tmp_path_factory: pytest.TempPathFactory) -> None:
    reader = MediaProcessOnLoop(save_processor(tmp_path_factory.mktemp("own")), trusts_templates=True)
    try:
        part = image_part(data_url(encoded(picture())))
        with_image = "{% for p in messages[0].content %}{% if p.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}"
        _, [item], _ = reader.prompt(part, "hi", chat_template=with_image)
        assert item.spans
        assert "0 image placeholders" in reader.refusal(part, "hi", chat_template="none")
        assert "2 image placeholders" in reader.refusal(part, chat_template="<|image_pad|> <|image_pad|>")
    finally:
        reader.close()


def test_an_url_is_limited(reader: MediaProcessOnLoop) -> None:
    assert "more than 8192 characters" in reader.refusal(image_part("https://example.com/" + "a" * 8200))


def sound() -> bytes:
    """An MP4 without a picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def test_a_tokenizer_file_that_cuts_and_fills_texts_does_not_change_images(
    reader: MediaProcessOnLoop, tmp_path: Path
) -> None:
    folder = save_processor(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=200, pad_token="</s>")
    tokenizer.save(str(folder / "tokenizer.json"))
    cutting = MediaProcessOnLoop(folder)
    try:
        part = image_part(data_url(encoded(picture(100, 80, seed=1))))
        assert cutting.prompt("look: ", part)[0] == reader.prompt("look: ", part)[0]
    finally:
        cutting.close()
