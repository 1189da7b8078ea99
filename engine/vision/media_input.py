"""Builds the decoder's inputs for steps with images or video: embeddings in place of token ids."""

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
    """decoder: provides the token embeddings that are mixed with those of the vision tower."""

    def __init__(self, vision: VisionTower, decoder: Any) -> None:
        self._vision = vision
        self._decoder = decoder
        self._device = next(decoder.parameters()).device

    def prepare(self, batch: Batch) -> None:
        """Runs the step's encodes and computes positions. Errors are stored in the media that caused them."""
        for encode in batch.encodes:
            # Another prompt in the same step may have had the same item.
            if not encode.media.is_encoded(encode.unit):
                try:
                    self._vision.encode(encode.unit, encode.media)
                except TandemError as error:
                    _fail(encode.media, error)
        for item in batch.items:
            if item.media is not None and item.media.error is None:
                try:
                    self._vision.place(item.media)
                except TandemError as error:
                    _fail(item.media, error)

    def inputs(self, items: list[BatchItem], token_ids: torch.Tensor) -> dict[str, Any]:
        """Returns the model's inputs for the step's tokens, [1, num_tokens, ...]. token_ids: int64 [1, num_tokens]."""
        hidden = self._decoder.get_input_embeddings()(token_ids)[0]  # [num_tokens, hidden_size]
        rows: list[int] = []  # rows of placeholder tokens
        visual: list[torch.Tensor] = []  # each [1 + num_deepstack, num_rows, hidden_size]
        first_row = 0
        for item in items:
            for first, offset, number, embedding in _placeholders(item):
                rows += range(first_row + first, first_row + first + number)
                visual.append(embedding[:, offset : offset + number])
            first_row += len(item.token_ids)
        inputs: dict[str, Any] = {"position_ids": self._positions(items)}
        if visual:
            index = torch.tensor(rows, device=self._device)
            layers = torch.cat([embedding.to(self._device) for embedding in visual], 1)
            hidden = hidden.index_copy(0, index, layers[0].to(hidden.dtype))
            if len(layers) > 1:  # DeepStack (Meng et al., 2024): vision features added in several decoder layers
                is_visual = torch.zeros(1, len(hidden), dtype=torch.bool, device=self._device)
                is_visual[0, index] = True
                # The model expects these rows in ascending order, which they are.
                inputs |= {"visual_pos_masks": is_visual, "deepstack_visual_embeds": list(layers[1:])}
        return inputs | {"inputs_embeds": hidden[None]}

    def _positions(self, items: list[BatchItem]) -> torch.Tensor:
        """Returns [1, num_tokens], or [3, 1, num_tokens] (time, height, width) for models with M-RoPE."""
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


def _fail(media: PromptMedia, error: TandemError) -> None:
    """Records an error of one prompt's media, which must not fail the rest of the step."""
    log.warning("refused the media of a prompt: %s", error)
    media.error = ErrorInfo.of(error)


def positions_of(items: list[BatchItem]) -> list[int]:
    """Returns the one-dimensional positions of the step's tokens."""
    starts = [(item.start + item.position_offset, len(item.token_ids)) for item in items]
    return [position for start, num in starts for position in range(start, start + num)]


def _placeholders(item: BatchItem) -> list[tuple[int, int, int, torch.Tensor]]:
    """Returns (row within the item, offset in the medium, count, embedding) in ascending order of rows."""
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
