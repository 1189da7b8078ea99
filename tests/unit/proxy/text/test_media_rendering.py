"""Content parts with media, and the positions of their placeholders in a prompt. No processor, no torch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.packed import pack_token_ids
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.proxy.reading.spooled_body import SpooledBody, mentions_media
from tandem.proxy.text.prompt import CachedMedia, ChatPrompt, has_media
from tandem.proxy.text.rendering import place_media
from tandem.runtime.errors import InvalidRequest

IMAGE, VIDEO = 1000, 1001
URL = "data:image/png;base64,AAAA"


def body(*content: Any) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": list(content)}]})


def test_parts_become_template_parts_and_ordered_sources() -> None:
    prompt = (
        BodyDecoder("m", max_media=4)
        .chat(
            body(
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
                {"type": "video_url", "video_url": "https://x/y.mp4"},
                {"type": "text", "text": "b"},
            )
        )
        .prompt
    )
    assert isinstance(prompt, ChatPrompt) and has_media(prompt)
    assert prompt.messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "video"},
        {"type": "text", "text": "b"},
    ]
    assert prompt.media == [
        MediaSource(0, "image", URL, "messages[0].content[1]"),
        MediaSource(1, "video", "https://x/y.mp4", "messages[0].content[2]"),
    ]
    text = BodyDecoder("m", max_media=4).chat(body({"type": "text", "text": "a"}, {"type": "text", "text": "b"})).prompt
    assert isinstance(text, ChatPrompt) and not has_media(text) and text.messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("parts", "max_media", "reason"),
    [
        ([{"type": "image_url", "image_url": URL}], 0, r"image 0 \(messages\[0\]\.content\[0\]\).*takes text only"),
        ([{"type": "image_url"}], 1, r"image 0 .* has no image_url"),
        ([{"type": "video_url", "video_url": ""}], 1, "has no video_url"),
        (
            [{"type": "image_url", "image_url": URL}] * 3,
            2,
            "image 2 .*the limit is 2 images and videos per request, but this one has 3",
        ),
    ],
)
def test_invalid_parts_are_refused(parts: list[Any], max_media: int, reason: str) -> None:
    with pytest.raises(InvalidMedia, match=reason):
        BodyDecoder("m", max_media=max_media).chat(body(*parts))


def test_audio_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="has type 'input_audio'; this server supports parts of type 'text', 'image_url'"
    ):
        BodyDecoder("m", max_media=1).chat(body({"type": "input_audio"}))


def item(kind: MediaKind, num_tokens: int) -> CachedMedia:
    return CachedMedia(kind, b"d" * 32, "/proc/1/fd/2", (), num_tokens)


@given(st.lists(st.tuples(st.sampled_from(["image", "video"]), st.lists(st.integers(1, 4), min_size=1, max_size=3))))
def test_each_item_gets_its_own_placeholders(wanted: list[tuple[MediaKind, list[int]]]) -> None:
    """Items have text between their runs, as between the frames of a video, and after each item."""
    token_ids: list[int] = [7]
    expected, media = [], []
    for kind, runs in wanted:
        spans = []
        for run in runs:
            spans.append((len(token_ids), run))
            token_ids += [IMAGE if kind == "image" else VIDEO] * run + [8]
        expected.append(tuple(spans))
        media.append(item(kind, sum(runs)))
    placed = place_media(pack_token_ids(token_ids), media, {"image": IMAGE, "video": VIDEO})
    assert [each.spans for each in placed] == expected
    assert [each.kind for each in placed] == [kind for kind, _ in wanted]


def test_surplus_placeholders_are_refused() -> None:
    packed = pack_token_ids([7, IMAGE, IMAGE, IMAGE])
    with pytest.raises(InvalidRequest, match="3 placeholder tokens, but its images and videos need 2"):
        place_media(packed, [item("image", 2)], {"image": IMAGE})


@given(st.binary(max_size=40), st.lists(st.integers(1, 12), max_size=12))
def test_media_fields_are_found_in_bodies_split_anywhere(before: bytes, sizes: list[int]) -> None:
    spooled = SpooledBody()
    try:
        data = before + b'"image_url": "x"'
        for size in sizes:
            spooled.write(data[:size])
            data = data[size:]
        spooled.write(data)
        assert mentions_media(spooled)
    finally:
        spooled.close()
    assert mentions_media(b'{"video_url" : 1}') and not mentions_media(b"say image_url")
