"""Images and video from the HTTP request to the dispatch, against what transformers' own processor makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.media import MediaItem, check_media, check_segment
from protocol.media_cache import MediaKey
from protocol.media_segment import map_segment
from protocol.token_ids import unpack_token_ids
from tests.fake_workers import wait_until
from tests.media_proxy import MediaProxy, data_url, image_part, media_proxy, video_part
from tests.vision_model import clip, encoded, picture


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProxy]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "files").mkdir()
    limits = {"max_items": 4, "max_pixels": 1_000_000, "max_bytes": 4 << 20, "allowed_path": str(folder / "files")}
    with media_proxy(folder, media=limits, media_threads=2) as running:
        yield running


@pytest.fixture(scope="module")
def processor(served: MediaProxy) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(str(served.folder))


def tensors_of(item: MediaItem) -> dict[str, NDArray[Any]]:
    mapped = map_segment(item.segment, MediaKey(item.digest, "input"))
    check_segment(item, len(mapped))
    return {
        t.name: np.frombuffer(mapped, t.dtype, count=int(np.prod(t.shape)), offset=t.offset).reshape(t.shape)
        for t in item.tensors
    }


def held(served: MediaProxy, *parts: dict[str, Any] | str) -> tuple[list[int], tuple[MediaItem, ...], list[Any]]:
    """(token ids, items, tensors) of the prompt as it is dispatched."""
    answer = served.chat(*parts)
    assert answer.status_code == 200, answer.text
    start = served.dispatched()
    token_ids = unpack_token_ids(start.token_ids)
    check_media(start.media, len(token_ids))
    return token_ids, start.media, [tensors_of(item) for item in start.media]


def test_image_video_and_text_are_what_transformers_makes_of_them(served: MediaProxy, processor: Any) -> None:
    first, second = picture(100, 80, seed=1), picture(150, 60, seed=2)
    video = clip(6)
    token_ids, media, tensors = held(
        served,
        "look: ",
        image_part(data_url(encoded(first))),
        video_part(data_url(video, "video/mp4")),
        image_part(data_url(encoded(second))),
        "what is that?",
    )
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look: "},
                {"type": "image"},
                {"type": "video"},
                {"type": "image"},
                {"type": "text", "text": "what is that?"},
            ],
        }
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    import io

    import av

    with av.open(io.BytesIO(video)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    expected = processor(text=[text], images=[first, second], videos=[frames], return_tensors="np")
    assert token_ids == list(expected["input_ids"][0])
    assert [item.kind for item in media] == ["image", "video", "image"]
    images, videos = [tensors[0], tensors[2]], [tensors[1]]
    for name in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(np.concatenate([t[name] for t in images]), expected[name])
    for name in ("pixel_values_videos", "video_grid_thw"):
        np.testing.assert_array_equal(np.concatenate([t[name] for t in videos]), expected[name])
    placeholders = {"image": processor.image_token_id, "video": processor.video_token_id}
    for item in media:
        [(start, length)] = item.spans
        assert token_ids[start : start + length] == [placeholders[item.kind]] * length
        assert token_ids[start - 1] != token_ids[start] != token_ids[start + length]


def test_an_image_seen_before_is_not_processed_again(served: MediaProxy) -> None:
    part = image_part(data_url(encoded(picture(seed=7))))
    before = served.cache_status()
    _, media, _ = held(served, part, "one", part)
    assert media[0].digest == media[1].digest and media[0].segment == media[1].segment
    between = served.cache_status()
    assert (between.num_misses - before.num_misses, between.num_items - before.num_items) == (1, 1)
    _, [again], _ = held(served, "two", part)
    assert again.digest == media[0].digest and again.tensors == media[0].tensors
    after = served.cache_status()
    assert (after.num_misses - between.num_misses, after.num_hits - between.num_hits) == (0, 1)
    _, [other], _ = held(served, "two", image_part(data_url(encoded(picture(seed=8)))))
    assert other.digest != again.digest
    wait_until(lambda: served.cache_status().num_leases == 0, 60)  # let go when the request has ended


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_kinds_of_images(served: MediaProxy, kind: str) -> None:
    _, [item], [tensors] = held(served, image_part(data_url(encoded(picture(), kind), f"image/{kind.lower()}")))
    assert item.kind == "image" and tensors["pixel_values"].shape[1] == 1176


def test_webm_files_and_the_short_form(served: MediaProxy) -> None:
    (served.folder / "files" / "clip.webm").write_bytes(clip(kind="webm"))
    url = (served.folder / "files" / "clip.webm").as_uri()
    _, [item], _ = held(served, {"type": "video_url", "video_url": url})
    assert item.kind == "video"


def test_text_goes_its_own_way(served: MediaProxy) -> None:
    before = served.cache_status()
    answer = served.chat("plain")
    assert answer.status_code == 200 and served.dispatched().media == ()
    written = httpx.post(  # about media, without any
        f"{served.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": 'say "image_url"'}], "max_tokens": 1},
        timeout=300,
    )
    assert written.status_code == 200
    after = served.cache_status()
    assert (before.num_hits, before.num_misses) == (after.num_hits, after.num_misses)


def refused(served: MediaProxy, *parts: dict[str, Any] | str, **fields: Any) -> str:
    answer = served.chat(*parts, **fields)
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_bad_media_are_refused_with_index_and_reason(served: MediaProxy) -> None:
    good = image_part(data_url(encoded(picture(seed=20))))
    png, jpeg, video = encoded(picture(400, 300)), encoded(picture(400, 300), "JPEG"), clip(30)
    secret = served.folder / "config.json"
    (served.folder / "files" / "way-out").symlink_to(secret)
    cases = {
        "damaged or cut short": image_part(data_url(png[: len(png) // 2])),
        "cut short": image_part(data_url(jpeg[: len(jpeg) // 2], "image/jpeg")),
        "no image of a known type": image_part(data_url(b"hello")),
        "is empty": image_part("data:image/png;base64,"),
        "not valid base64": image_part("data:image/png;base64,@@@@"),
        "has no comma": image_part("data:image/png;base64"),
        "of type text/html": image_part(data_url(png, "text/html")),
        "1200 x 1200 pixels; the limit is 1000000": image_part(data_url(encoded(picture(1200, 1200)))),
        "more than 4194304 bytes": image_part(data_url(bytes(4_200_000))),
        "must begin with data:": image_part("ftp://example.com/a.png"),
        "is not in the folder": image_part(secret.as_uri()),
        "is not in the folder that": image_part((served.folder / "files" / "way-out").as_uri()),
        "is not in the": image_part((served.folder / "files" / "missing.png").as_uri()),
        "not a public one": image_part("http://127.0.0.1:1/a.png"),
        "not a public": image_part("http://[::1]:1/a.png"),
        "is not a public one": image_part("http://169.254.169.254/latest/meta-data"),
        "has no image_url": {"type": "image_url"},
        "video 1 (messages[0].content[1]): it is no MP4 or WebM": video_part(data_url(png, "video/mp4")),
        "it is no MP4": video_part(data_url(video[: len(video) // 2], "video/mp4")),
    }
    for reason, part in cases.items():
        message = refused(served, good, part)
        assert reason in message and "messages[0].content[1]" in message, (reason, message)
    assert "takes parts of type" in refused(served, {"type": "input_audio"})
    assert "a request may bring 4" in refused(served, *[good] * 5)
    assert "1 image placeholders" in refused(served, "<|image_pad|>", video_part(data_url(clip(4), "video/mp4")))
    assert "cannot be cut" in refused(served, good, truncate_prompt_tokens=5)
    answer = httpx.post(f"{served.url}/tokenize", json={"messages": [{"role": "user", "content": [good]}]}, timeout=300)
    assert answer.status_code == 400 and "Only text is tokenised here" in answer.text
    wait_until(lambda: served.cache_status().num_leases == 0, 60)
    status = served.cache_status()
    assert status.pinned_bytes == 0, "a refused request left something behind"
