"""The images and videos of one prompt, as its chunks need them: what must be encoded before which token. No torch.

    here -> ready (its tensors are, and others were asked for embeddings) -> its units encoded -> its tokens computed

A unit is what the vision tower takes at once: an image, or some frames of a video, which do not see each other there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tandem.protocol.messages.media import MediaItem
from tandem.runtime.errors import ErrorInfo

if TYPE_CHECKING:
    import torch

    from tandem.engine.vision.embedding_cache import EmbeddingCache


class EncodeUnit(msgspec.Struct, frozen=True):
    """Frames `first_frame` to `first_frame + num_frames` of a video, or (num_frames 0) all of an item.

    number: the item's, in the prompt. start, end: the prompt's tokens from the unit's first placeholder to its last.
    offset: the item's placeholders before it; num_tokens: its own.
    """

    number: int
    start: int
    end: int
    offset: int
    num_tokens: int
    first_frame: int = 0
    num_frames: int = 0


class PromptMedia:
    """Made when a prompt arrives. While a step that encodes for it or computes it runs, the step owns it.

    token_ids: the prompt's. unit_tokens: how many tokens a unit of video should have at most. embeddings: of each item,
    [1 + num_deepstack, num_tokens, hidden_size]. positions: [3, num_prompt_tokens] where the model lays them in three
    dimensions. position_offset: what the positions of later tokens have over their numbers. is_ready: its tensors are
    here, and others were asked for what they have encoded. error: why the prompt cannot be computed; no
    exception, whose traceback would lead back to the media.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        items: Sequence[MediaItem],
        unit_tokens: int,
        cache: EmbeddingCache,
    ) -> None:
        self.token_ids = token_ids
        self.items = items
        self.tensors: Sequence[Mapping[str, torch.Tensor]] = ()
        self._unit_tokens = unit_tokens
        self._cache = cache
        self.is_ready = False
        self.embeddings: list[torch.Tensor | None] = [None] * len(items)
        self.partial: dict[int, torch.Tensor] = {}  # of items of which some units are encoded
        self._done: set[EncodeUnit] = set()
        self.positions: torch.Tensor | None = None
        self.position_offset = 0
        self.error: ErrorInfo | None = None
        self._units: list[EncodeUnit] = []
        self._on_release: list[Callable[[], object]] = []

    def set_tensors(self, tensors: Sequence[Mapping[str, torch.Tensor]], num_frames: Sequence[int]) -> None:
        """Once. tensors: of each item, by name; what only encoding needs may be left out where there is an embedding.

        num_frames: of each item, 1 for what is encoded whole.
        """
        self.tensors = tensors
        units = [u for i, item in enumerate(self.items) for u in _units(i, item, num_frames[i], self._unit_tokens)]
        self._units = sorted(units, key=lambda unit: unit.start)

    def on_release(self, callback: Callable[[], object]) -> None:
        """Has `release` call this once."""
        self._on_release.append(callback)

    def release(self) -> None:
        """Drops all tensors, and with them mapped memory. No step may use the prompt any more. Idempotent."""
        self.tensors, self.positions = (), None
        self.embeddings = [None] * len(self.items)
        self.partial.clear()
        callbacks, self._on_release = self._on_release, []
        for callback in callbacks:
            callback()

    def afford(
        self, start: int, end: int, budget: int, planned: Collection[EncodeUnit] = (), may_exceed: bool = False
    ) -> tuple[int, list[EncodeUnit], int]:
        """How far the tokens from `start` on can be computed, at most to `end`, with `budget` tokens' worth of work.

        Encoding a placeholder counts as much as computing a token. planned: units that the step encodes already.
        may_exceed: one unit may cost more than there is.
        Returns the end that can be reached, the units to be encoded first, and what these cost.
        """
        units: list[EncodeUnit] = []
        cost = 0
        for unit in self._units:
            if unit.end <= start or unit in planned or self.is_encoded(unit):
                continue
            if unit.start >= min(end, start + budget - cost):
                break
            num_before = max(0, unit.start - start)
            if num_before + cost + unit.num_tokens > budget and not (may_exceed and not units and not num_before):
                end = max(start, unit.start)
                break
            units.append(unit)
            cost += unit.num_tokens
        return max(start, min(end, start + budget - cost)), units, cost

    def is_encoded(self, unit: EncodeUnit) -> bool:
        return unit in self._done or self.find(unit.number) is not None

    def find(self, number: int) -> torch.Tensor | None:
        """The item's embedding, if there is one."""
        if self.embeddings[number] is None:
            cached = self._cache.get(self.items[number].digest)
            if cached is not None and cached.shape[1] == self.items[number].num_tokens:
                self.embeddings[number] = cached
        return self.embeddings[number]

    def on_encoded(self, unit: EncodeUnit) -> None:
        """It is in `partial`. An item that is whole now goes to the cache."""
        self._done.add(unit)
        if all(other in self._done for other in self._units if other.number == unit.number):
            embedding = self.embeddings[unit.number] = self.partial.pop(unit.number)
            self._cache.put_encoded(self.items[unit.number].digest, embedding)

    def forget_before(self, num_computed_tokens: int) -> None:
        """Let go of what no later chunk needs; tokens that are computed are not computed again."""
        for number, item in enumerate(self.items):
            if item.spans[-1][0] + item.spans[-1][1] <= num_computed_tokens:
                self.embeddings[number] = None
                self.partial.pop(number, None)


def _units(number: int, item: MediaItem, num_frames: int, unit_tokens: int) -> list[EncodeUnit]:
    """Frames have equally many tokens; a count that does not divide is left whole, for the tower to judge."""
    if num_frames < 2 or item.num_tokens % num_frames:
        return [_unit(number, item, 0, item.num_tokens)]
    frame_tokens = item.num_tokens // num_frames
    step = max(1, unit_tokens // frame_tokens)
    units = []
    for first in range(0, num_frames, step):
        num = min(step, num_frames - first)
        unit = _unit(number, item, first * frame_tokens, num * frame_tokens)
        units.append(msgspec.structs.replace(unit, first_frame=first, num_frames=num))
    return units


def _unit(number: int, item: MediaItem, offset: int, num_tokens: int) -> EncodeUnit:
    return EncodeUnit(number, _place(item, offset), _place(item, offset + num_tokens - 1) + 1, offset, num_tokens)


def _place(item: MediaItem, offset: int) -> int:
    """The token of the prompt that is the item's placeholder number `offset`."""
    for start, length in item.spans:
        if offset < length:
            return start + offset
        offset -= length
    raise AssertionError("past the item's last placeholder")


def placed(item: MediaItem, start: int, end: int) -> list[tuple[int, int, int]]:
    """The item's placeholders among the prompt's tokens from `start` to `end`, as (token, offset in item, number)."""
    found = []
    offset = 0
    for span_start, length in item.spans:
        first, last = max(start, span_start), min(end, span_start + length)
        if first < last:
            found.append((first, offset + first - span_start, last - first))
        offset += length
    return found
