"""Media items on the wire: validation, and their effect on the hashes of cached blocks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.media import MediaItem, MediaTensor, check_media, check_segment
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, media_spans
from tandem.runtime.errors import InvalidRequest

BLOCK_SIZE = 4
PIXELS = MediaTensor("pixel_values", "float32", (6, 4), 8, 96)
CAT, DOG = b"c" * 32, b"d" * 32


def an_item(*spans: tuple[int, int], digest: bytes = CAT, **changes: object) -> MediaItem:
    item = MediaItem(digest, "image", spans or ((2, 6),), "/dev/shm/media-1", (PIXELS,))
    return msgspec.structs.replace(item, **changes)


def hashes(*media: MediaItem, num_tokens: int = 20) -> list[bytes]:
    return BlockHasher(BLOCK_SIZE, "model", "", media).prompt_hashes(pack_token_ids([7] * num_tokens))


def test_a_valid_item_passes() -> None:
    check_media([an_item((2, 6)), an_item((8, 1), (10, 2), kind="video")], num_prompt_tokens=12)
    check_segment(an_item(), 104)
    assert an_item((8, 1), (10, 2)).num_tokens == 3


@pytest.mark.parametrize(
    "item, reason",
    [
        (an_item(digest=b"short"), "digest has 5 bytes"),
        (an_item(spans=()), "no placeholder tokens"),
        (an_item((2, 0)), "empty or out of order"),
        (an_item((-1, 3)), "empty or out of order"),
        (an_item((4, 4), (6, 1)), "empty or out of order"),
        (an_item((8, 5)), "end at token 13 of a prompt of 12"),
        (an_item(segment="/etc/passwd"), "no file in /dev/shm"),
        (an_item(segment="/dev/shm/../../etc/passwd"), "no file in /dev/shm"),
        (an_item(tensors=(PIXELS, PIXELS)), "one name"),
        (an_item(tensors=(msgspec.structs.replace(PIXELS, dtype="object"),)), "the type 'object'"),
        (an_item(tensors=(msgspec.structs.replace(PIXELS, num_bytes=95),)), r"shape \[6, 4\] has 95 bytes"),
        (an_item(tensors=(msgspec.structs.replace(PIXELS, offset=-8),)), "negative size or offset"),
        (an_item(tensors=(msgspec.structs.replace(PIXELS, offset=6),)), "multiple of 4 bytes"),
        (an_item(tensors=(msgspec.structs.replace(PIXELS, shape=(-6, -4)),)), "negative size or offset"),
    ],
)
def test_an_invalid_item_is_named_by_its_number(item: MediaItem, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^media item 1: .*{reason}"):
        check_media([an_item((0, 1)), item], num_prompt_tokens=12)


def test_items_must_not_overlap() -> None:
    with pytest.raises(InvalidRequest, match="media items 1 and 0 overlap at token 5"):
        check_media([an_item((5, 3)), an_item((2, 4))], num_prompt_tokens=12)


def test_tensors_must_lie_inside_their_segment() -> None:
    with pytest.raises(InvalidRequest, match="pixel_values ends at byte 104 of a segment of 103 bytes"):
        check_segment(an_item(), 103)


def test_different_images_share_only_the_blocks_before_them() -> None:
    """The image covers tokens 5 to 9: blocks 1 and 2, and through the chain all later ones."""
    cat, dog, none = hashes(an_item((5, 5))), hashes(an_item((5, 5), digest=DOG)), hashes()
    assert cat == hashes(an_item((5, 5)))
    assert cat[0] == dog[0] == none[0]
    assert not set(cat[1:]) & set(dog[1:]) and not set(cat[1:]) & set(none[1:]) and not set(dog[1:]) & set(none[1:])


def test_the_second_of_two_images_may_differ() -> None:
    one, other = hashes(an_item((1, 2)), an_item((13, 2))), hashes(an_item((1, 2)), an_item((13, 2), digest=DOG))
    assert one[:3] == other[:3] and one[3] != other[3]


def test_frames_of_a_video_have_different_hashes() -> None:
    """Two frames at one place have the same tokens and item but different pixels."""
    first = media_spans([an_item((5, 3), (9, 3), kind="video")])
    assert [(span.start, span.num_tokens, span.offset) for span in first] == [(5, 3, 0), (9, 3, 3)]
    assert hashes(an_item((5, 3)))[1] != hashes(an_item((0, 3), (5, 3)))[1]


@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6),
    changed=st.integers(0, 5),
    num_tokens=st.integers(0, 60),
)
def test_exactly_the_blocks_from_an_item_on_depend_on_it(
    spans: list[tuple[int, int]], changed: int, num_tokens: int
) -> None:
    """Draws gap and length of each item; items that do not fit the prompt are left out."""
    items, start = [], 0
    for gap, length in spans:
        start += gap
        if start + length <= num_tokens:
            items.append(an_item((start, length)))
        start += length
    others = [msgspec.structs.replace(item, digest=DOG) if i == changed else item for i, item in enumerate(items)]
    one, other = hashes(*items, num_tokens=num_tokens), hashes(*others, num_tokens=num_tokens)
    num_shared = items[changed].spans[0][0] // BLOCK_SIZE if changed < len(items) else len(one)
    assert [a == b for a, b in zip(one, other, strict=True)] == [i < num_shared for i in range(len(one))]


def test_the_order_of_items_in_a_message_does_not_matter() -> None:
    one, other = an_item((1, 4)), an_item((9, 4), digest=DOG)
    assert hashes(one, other) == hashes(other, one)
