"""Turns the images and videos of prompts into vLLM's features.

The proxy has processed them: their tensors are those of the model's Hugging Face processor, which are what vLLM's own
processor would make, and the prompt has their placeholders. So vLLM's processor does not run. What does not fit is
refused here, because vLLM's engine ends when it finds that embeddings and placeholders differ in number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems, PlaceholderRange

from tandem.engine.vision.media_tensors import check_grid, numbered, open_tensors
from tandem.protocol.messages.dispatch import PromptMessage
from tandem.protocol.messages.media import MediaItem, check_media
from tandem.protocol.prefix_hash import client_of
from tandem.runtime.errors import InternalError, InvalidRequest, TandemError, client_reason
from tandem.runtime.tasks import start_job
from tandem.vllm_worker.scheduler.engine_orders import AddRequest
from tandem.vllm_worker.scheduler.request_media import RequestMedia
from tandem.worker.remote_media import RemoteMedia

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose media vLLM's workers take. Their grids tell how many placeholders an item must have."""


class VllmMedia:
    """Opens the media of arriving prompts, and holds the orders of prompts whose media are on their way.

    max_item_tokens: the longest item that vLLM's engine can encode. remote: media of other hosts. add: gives an order
    to the engine.
    """

    def __init__(
        self, vllm_config: VllmConfig, max_item_tokens: int, remote: RemoteMedia, add: Callable[[AddRequest], None]
    ) -> None:
        self._config = vllm_config.model_config.hf_config
        takes_media = self._config.model_type in FAMILIES and vllm_config.model_config.is_multimodal_model
        self._processor = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config) if takes_media else None
        self._max_item_tokens = max_item_tokens
        self._remote = remote
        self._add = add
        self._held: dict[str, AddRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_fetched_bytes(self) -> int:
        return self._remote.num_fetched_bytes

    def open(self, message: PromptMessage) -> RequestMedia | None:
        """Returns the prompt's media, or None for a prompt of text only. Those of other hosts become ready later.

        Raises InvalidRequest, which names the item, and like `open_tensors`.
        """
        if not message.media:
            return None
        if self._processor is None:
            raise InvalidRequest(
                f"this worker runs vLLM, which gets images and videos here for {', '.join(FAMILIES)} and not for "
                f"{self._config.model_type}; send text only, or use a worker of Tandem's engine"
            )
        token_ids = memoryview(message.token_ids).cast("i")  # without copying up to a million numbers
        check_media(message.media, len(token_ids) - message.num_generated)
        for number, item in enumerate(message.media):
            if item.num_tokens > self._max_item_tokens:
                raise InvalidRequest(
                    f"media item {number} has {item.num_tokens} tokens, and vLLM's engine encodes at most "
                    f"{self._max_item_tokens} at once; send a smaller one, or start the cluster with a larger "
                    "--max-num-batched-tokens"
                )
        media = RequestMedia()
        if message.media_cache:
            failed = InternalError("the media could not be fetched; see the worker's log")
            fetching = start_job(
                self._fetch(media, message, token_ids), "fetching media", partial(self._end, media, failed)
            )
            self._tasks.add(fetching)
            fetching.add_done_callback(self._tasks.discard)
            media.on_release(fetching.cancel)
        else:
            tensors = [_numbered(number, partial(open_tensors, item)) for number, item in enumerate(message.media)]
            media.features = self._features(message.media, token_ids, tensors)
            media.is_ready = True
        return media

    async def _fetch(self, media: RequestMedia, message: PromptMessage, token_ids: Sequence[int]) -> None:
        endpoint, client = message.media_cache, client_of(message.cache_salt)
        fetched = (
            self._remote.fetch(endpoint, item, [tensor.name for tensor in item.tensors], media.on_release, client)
            for item in message.media
        )
        error: TandemError | None = None
        try:
            media.features = self._features(message.media, token_ids, await asyncio.gather(*fetched))
        except TandemError as refused:
            error = refused
        self._end(media, error)

    def _end(self, media: RequestMedia, error: TandemError | None) -> None:
        media.error, media.is_ready = error, True
        for order in [each for each in self._held.values() if each.media is media]:
            del self._held[order.engine_id]
            self._add(order)

    def add(self, order: AddRequest) -> None:
        """Gives the order to the engine, now or when its media are ready."""
        if order.media is None or order.media.is_ready:
            self._add(order)
        else:
            self._held[order.engine_id] = order

    def forget(self, engine_ids: Sequence[str]) -> None:
        """Drops the orders of these requests that are held."""
        for engine_id in engine_ids:
            self._held.pop(engine_id, None)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._remote.close()

    # ---- features

    def _features(
        self, items: Sequence[MediaItem], token_ids: Sequence[int], tensors: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[MultiModalFeatureSpec]:
        """tensors: of each item by name. Raises InvalidRequest."""
        found = [
            _numbered(number, partial(self._feature, item, token_ids, each))
            for number, (item, each) in enumerate(zip(items, tensors, strict=True))
        ]
        found.sort(key=lambda feature: feature.mm_position.offset)
        for one, other in pairwise(found):
            if one.mm_position.offset + one.mm_position.length > other.mm_position.offset:
                raise InvalidRequest("two media items overlap in the prompt")
        return found

    def _feature(
        self, item: MediaItem, token_ids: Sequence[int], tensors: Mapping[str, torch.Tensor]
    ) -> MultiModalFeatureSpec:
        assert self._processor is not None
        vision = self._config.vision_config
        check_grid(item, tensors, vision.spatial_merge_size)
        pixels = tensors.get("pixel_values" if item.kind == "image" else "pixel_values_videos")
        num_patches = int(tensors[f"{item.kind}_grid_thw"].prod())
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if pixels is None or pixels.shape != (num_patches, size) or not pixels.dtype.is_floating_point:
            raise InvalidRequest(f"its pixels are not [{num_patches}, {size}] numbers, as its grid and this model need")
        inputs = BatchFeature(dict(tensors))
        try:
            fields = self._processor._get_mm_fields_config(inputs, {})
            [data] = MultiModalKwargsItems.from_hf_inputs(inputs, fields)[item.kind]
        except (KeyError, ValueError, RuntimeError) as error:
            raise InvalidRequest(f"vLLM does not take its tensors: {client_reason(error)}") from error
        name = item.digest.hex()
        return MultiModalFeatureSpec(data, item.kind, name, self._position(item, token_ids), name)

    def _position(self, item: MediaItem, token_ids: Sequence[int]) -> PlaceholderRange:
        """Qwen3-VL has the placeholders of each frame of a video between two tokens, by which vLLM finds the frames."""
        first, end = item.spans[0][0], sum(item.spans[-1])
        if self._config.model_type.startswith("qwen3") and item.kind == "video":
            around = self._config.vision_start_token_id, self._config.vision_end_token_id
            for start, length in item.spans:
                if start == 0 or (token_ids[start - 1], *token_ids[start + length :][:1]) != around:
                    raise InvalidRequest(f"its frame at token {start} is not between the model's vision tokens")
            first -= 1
        elif len(item.spans) > 1:
            raise InvalidRequest("its placeholders are not in one place, as this model has them")
        mask = torch.zeros(end - first, dtype=torch.bool)
        for start, length in item.spans:
            mask[start - first : start - first + length] = True
        return PlaceholderRange(first, end - first, None if bool(mask.all()) else mask)


def _numbered(number: int, call: Callable[[], Any]) -> Any:
    """Returns what the call returns. Its InvalidRequest gets the item's number."""
    try:
        return call()
    except InvalidRequest as error:
        raise numbered(number, error) from error
