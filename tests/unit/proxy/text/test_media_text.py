"""Placeholders in a rendered chat become as many as their items have tokens."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.media import MediaKind
from tandem.proxy.text.prompt import CachedMedia, MediaPlaceholder
from tandem.proxy.text.rendering import media_prompt
from tandem.runtime.errors import InvalidRequest

PLACEHOLDERS: dict[MediaKind, MediaPlaceholder] = {
    "image": MediaPlaceholder("<i.>", 7),
    "video": MediaPlaceholder("<v>", 8),
}


def item(kind: MediaKind, replacement: str) -> CachedMedia:
    return CachedMedia(kind, b"d", "segment", (), 1, replacement)


def test_each_kind_is_replaced_in_its_order() -> None:
    media = [item("image", "<i.><i.>"), item("video", "0 s<v>"), item("image", "\\1<i.>")]
    prompt = media_prompt("a<i.>b<v><i.>c<ix>", media, PLACEHOLDERS, True)
    assert prompt.text == "a<i.><i.>b0 s<v>\\1<i.>c<ix>"
    assert prompt.media == media and prompt.placeholder_ids == {"image": 7, "video": 8} and prompt.add_special_tokens


@pytest.mark.parametrize("text", ["no place", "<i.><i.>", "<i.><v>"])
def test_other_numbers_of_placeholders_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"placeholders \(<.*write no placeholders into the text"):
        media_prompt(text, [item("image", "<i.>")], PLACEHOLDERS, False)
