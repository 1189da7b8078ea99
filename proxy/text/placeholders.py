"""Finds the placeholder tokens of images and videos in a tokenised prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from tandem.protocol.messages.media import MediaItem, MediaKind
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.proxy.text.prompt import CachedMedia
from tandem.runtime.errors import InvalidRequest

Spans = tuple[tuple[int, int], ...]
"""(start, length) of runs of placeholder tokens, ascending."""


def place_media(
    packed_token_ids: bytes, media: Sequence[CachedMedia], placeholder_ids: dict[MediaKind, int]
) -> tuple[MediaItem, ...]:
    """Returns the items with the positions of their placeholders.

    Raises InvalidRequest if the prompt has more or fewer placeholders than the items need.
    """
    token_ids = unpack_token_ids(packed_token_ids)
    spans: dict[MediaKind, Iterator[Spans]] = {}
    for kind, placeholder_id in placeholder_ids.items():
        lengths = [item.num_tokens for item in media if item.kind == kind]
        spans[kind] = iter(_spans(token_ids, placeholder_id, lengths))
    return tuple(MediaItem(i.digest, i.kind, next(spans[i.kind]), i.segment, i.tensors) for i in media)


def _spans(token_ids: list[int], placeholder_id: int, lengths: list[int]) -> list[Spans]:
    """Assigns the placeholders to items of these numbers of tokens, in order."""
    positions = [position for position, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(positions) != sum(lengths):
        raise InvalidRequest(
            f"The prompt has {len(positions)} placeholder tokens, but its images and videos need {sum(lengths)}; "
            "remove placeholder tokens from the text.",
            "messages",
        )
    rest, spans = iter(positions), []
    for length in lengths:
        runs: list[tuple[int, int]] = []
        for position in islice(rest, length):
            if runs and sum(runs[-1]) == position:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((position, 1))
        spans.append(tuple(runs))
    return spans
