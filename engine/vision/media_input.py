"""What a decoder gets for a step in which some prompts have images or video: embeddings in place of token ids."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tandem.engine.batch import Batch, BatchItem
from tandem.engine.vision.models import VisionTower
from tandem.engine.vision.prompt_media import PromptMedia, placed
from tandem.runtime.errors import ErrorInfo, TandemError

log = logging.getLogger(__name__)


class MediaInput:
    """decoder: whose token embeddings are mixed with those of the vision tower."""

    def __init__(self, vision: VisionTower, decoder: Any) -> None:
        self._vision = vision
        self._decoder = decoder
        self._device = next(decoder.parameters()).device

    def prepare(self, batch: Batch) -> None:
        """Encode what the step asks for. An error is left with the media that it is about."""
        for encode in batch.encodes:
            # Another prompt of this very step may have had the same item.
            if not encode.media.is_encoded(encode.unit):
                try:
                    self._vision.encode(encode.unit, encode.media)
                except TandemError as error:
                    _blame(encode.media, error)
        for item in batch.items:
            if item.media is not None and item.media.error is None:
                try:
                    self._vision.place(item.media)
                except TandemError as error:
                    _blame(item.media, error)

    def inputs(self, items: list[BatchItem]) -> dict[str, Any]:
        """The step's tokens [1, num_tokens] as the model takes them."""
        token_ids = torch.tensor([[token_id for item in items for token_id in item.token_ids]], device=self._device)
        hidden = self._decoder.get_input_embeddings()(token_ids)[0]  # [num_tokens, hidden_size]
        rows: list[int] = []  # of placeholders
        visual: list[torch.Tensor] = []  # each [1 + num_deepstack, some of them, hidden_size]
        first_row = 0
        for item in items:
            for first, offset, number, embedding in _placeholders(item):
                rows += range(first_row + first, first_row + first + number)
                visual.append(embedding[:, offset : offset + number])
            first_row += len(item.token_ids)
        inputs: dict[str, Any] = {"position_ids": self._positions(items)}
        if visual:
            places = torch.tensor(rows, device=self._device)
            layers = torch.cat([part.to(self._device) for part in visual], 1)
            hidden = hidden.index_copy(0, places, layers[0].to(hidden.dtype))
            if len(layers) > 1:  # DeepStack (Meng et al., 2024): features of the tower's layers, added in the decoder's
                is_visual = torch.zeros(1, len(hidden), dtype=torch.bool, device=self._device)
                is_visual[0, places] = True
                # Rows come in ascending order, as the model takes them.
                inputs |= {"visual_pos_masks": is_visual, "deepstack_visual_embeds": list(layers[1:])}
        return inputs | {"inputs_embeds": hidden[None]}

    def _positions(self, items: list[BatchItem]) -> torch.Tensor:
        """[1, num_tokens], or [3, 1, num_tokens] in time, height and width where the model counts so."""
        if all(item.media is None or item.media.positions is None for item in items):
            return torch.tensor([positions_of(items)], device=self._device)
        parts = []
        for item in items:
            positions = item.media.positions if item.media is not None else None
            if positions is None:
                parts.append(torch.tensor(positions_of([item])).expand(3, -1))
            else:
                parts.append(positions[:, item.start : item.start + len(item.token_ids)])
        return torch.cat(parts, 1)[:, None].to(self._device)


def _blame(media: PromptMedia, error: TandemError) -> None:
    """What is wrong with one prompt's media must not fail the others of a step."""
    log.warning("a prompt's media were refused: %s", error)
    media.error = ErrorInfo.of(error)


def positions_of(items: list[BatchItem]) -> list[int]:
    """Where all three are the same."""
    starts = [(item.start + item.position_offset, len(item.token_ids)) for item in items]
    return [position for start, num in starts for position in range(start, start + num)]


def _placeholders(item: BatchItem) -> list[tuple[int, int, int, torch.Tensor]]:
    """(row within the item, offset in the medium, how many, embedding), ascending."""
    found = []
    media = item.media
    if media is None:
        return []
    end = item.start + len(item.token_ids)
    for index, medium in enumerate(media.items):
        for start, offset, number in placed(medium, item.start, end):
            embedding = media.find(index)
            if embedding is None:
                embedding = media.partial[index]
            found.append((start - item.start, offset, number, embedding))
    return sorted(found, key=lambda place: place[0])
