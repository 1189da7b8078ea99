"""The images and videos of one prompt: what must be encoded before which token. Does not import torch.

    received -> ready (tensors mapped, cached embeddings looked up) -> units encoded -> tokens computed

A unit is one run of the vision tower: an image, or some frames of a video, which are independent of other frames.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from tandem.protocol.messages.media import MediaItem
from tandem.runtime.errors import ErrorInfo

if TYPE_CHECKING:
    import torch


class EncodeUnit(msgspec.Struct, frozen=True):
    """Frames `first_frame` to `first_frame + num_frames` of a video, or a whole item if num_frames is 0."""

    number: int
    """Index of the item in the prompt."""
    start: int
    """First prompt token that is a placeholder of the unit."""
    end: int
    """End of the unit's placeholders in the prompt."""
    offset: int
    """Placeholders of the item before the unit."""
    num_tokens: int
    """Placeholders of the unit."""
    first_frame: int = 0
    num_frames: int = 0


class PromptMedia:
    """Created when a prompt arrives. A running step that encodes or computes the prompt owns it exclusively.

    token_ids: of the prompt. unit_tokens: target size of a unit of video. embeddings: of each item,
    [1 + num_deepstack, num_tokens, hidden_size]. positions: [3, num_prompt_tokens] for M-RoPE, else None.
    position_offset: difference between a later token's position and its index. is_ready: tensors are mapped, and other
    workers were asked for embeddings. error: why the prompt cannot be computed.
    """

    def __init__(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], unit_tokens: int, cache: EmbeddingCache
    ) -> None:
        self.token_ids = token_ids
        self.items = items
        self.tensors: Sequence[Mapping[str, torch.Tensor]] = ()
        self._unit_tokens = unit_tokens
        self._cache = cache
        self.is_ready = False
        self.embeddings: list[torch.Tensor | None] = [None] * len(items)
        self.partial: dict[int, torch.Tensor] = {}  # embeddings of items that are partly encoded
        self._done: set[EncodeUnit] = set()
        self.positions: torch.Tensor | None = None
        self.position_offset = 0
        self.error: ErrorInfo | None = None
        self._units: list[EncodeUnit] = []
        self._on_release = ExitStack()

    def set_tensors(self, tensors: Sequence[Mapping[str, torch.Tensor]], num_frames: Sequence[int]) -> None:
        """Sets each item's tensors by name, once. Pixels may be missing if the item's embedding is cached.

        num_frames: of each item; 1 if it is encoded as a whole.
        """
        self.tensors = tensors
        units = [u for i, item in enumerate(self.items) for u in _units(i, item, num_frames[i], self._unit_tokens)]
        self._units = sorted(units, key=lambda unit: unit.start)

    def on_release(self, callback: Callable[[], object]) -> None:
        """Has `release` call this once."""
        self._on_release.callback(callback)

    def release(self) -> None:
        """Drops all tensors, and with them mapped memory. No step may use the prompt any more. Idempotent."""
        self.tensors, self.positions = (), None
        self.embeddings = [None] * len(self.items)
        self.partial.clear()
        self._on_release.close()

    def afford(
        self, start: int, end: int, budget: int, planned: Collection[EncodeUnit] = (), may_exceed: bool = False
    ) -> tuple[int, list[EncodeUnit], int]:
        """Plans the chunk from `start` to at most `end` within `budget` tokens of work.

        Encoding a placeholder costs as much as computing a token. planned: units that the step already encodes.
        may_exceed: a single unit may exceed the budget.
        Returns the reachable end, the units to encode first, and their cost.
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
        """Returns the item's embedding, or None."""
        if self.embeddings[number] is None:
            cached = self._cache.get(self.items[number].digest)
            if cached is not None and cached.shape[1] == self.items[number].num_tokens:
                self.embeddings[number] = cached
        return self.embeddings[number]

    def on_encoded(self, unit: EncodeUnit) -> None:
        """Records a unit that was stored in `partial`. A complete item moves to the cache."""
        self._done.add(unit)
        if all(other in self._done for other in self._units if other.number == unit.number):
            embedding = self.embeddings[unit.number] = self.partial.pop(unit.number)
            self._cache.put_encoded(self.items[unit.number].digest, embedding)

    def forget_before(self, num_computed_tokens: int) -> None:
        """Drops the embeddings that no later chunk needs."""
        for number, item in enumerate(self.items):
            if item.spans[-1][0] + item.spans[-1][1] <= num_computed_tokens:
                self.embeddings[number] = None
                self.partial.pop(number, None)


def _units(number: int, item: MediaItem, num_frames: int, unit_tokens: int) -> list[EncodeUnit]:
    """Splits an item into units of whole frames. An uneven token count gives one unit, which the tower validates."""
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
    """Returns the index in the prompt of the item's placeholder number `offset`."""
    for start, length in item.spans:
        if offset < length:
            return start + offset
        offset -= length
    raise AssertionError("past the item's last placeholder")


def placed(item: MediaItem, start: int, end: int) -> list[tuple[int, int, int]]:
    """Returns the item's placeholders in the prompt's tokens `start` to `end` as (token, offset in item, count)."""
    found = []
    offset = 0
    for span_start, length in item.spans:
        first, last = max(start, span_start), min(end, span_start + length)
        if first < last:
            found.append((first, offset + first - span_start, last - first))
        offset += length
    return found


class EmbeddingCache:
    """LRU cache of at most `capacity_bytes`; larger items are not stored. Thread-safe.

    An embedding is [1 + num_deepstack, num_tokens, hidden_size]. Users of an embedding may keep it after its eviction.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._embeddings: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._encoded: dict[bytes, torch.Tensor] = {}
        self.num_bytes = 0
        self.num_encoded = 0

    def get(self, digest: bytes) -> torch.Tensor | None:
        with self._lock:
            if digest in self._embeddings:
                self._embeddings.move_to_end(digest)
            return self._embeddings.get(digest)

    def put(self, embeddings: Mapping[bytes, torch.Tensor]) -> None:
        """Stores embeddings from other workers."""
        with self._lock:
            for digest, embedding in embeddings.items():
                self._put(digest, embedding)

    def put_encoded(self, digest: bytes, embedding: torch.Tensor) -> None:
        """Stores an embedding that this worker has computed; `take_encoded` returns it for publication."""
        with self._lock:
            self.num_encoded += 1
            self._encoded[digest] = embedding
            self._put(digest, embedding)

    def take_encoded(self) -> dict[bytes, torch.Tensor]:
        """Returns the embeddings computed here since the last call."""
        with self._lock:
            encoded, self._encoded = self._encoded, {}
        return encoded

    def _put(self, digest: bytes, embedding: torch.Tensor) -> None:
        if digest in self._embeddings or embedding.nbytes > self._capacity_bytes:
            return
        self._embeddings[digest] = embedding
        self.num_bytes += embedding.nbytes
        while self.num_bytes > self._capacity_bytes:
            _, evicted = self._embeddings.popitem(last=False)
            self.num_bytes -= evicted.nbytes
