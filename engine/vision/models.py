"""Vision-language models: a decoder that the engine can run, and a vision tower.

All model code is from transformers. A model's own `forward` expects whole prompts and keeps positions between calls.
The engine runs chunks of many sequences, so it calls the model's submodules itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tandem.engine.row_products import RowProducts, computes_rows_alike
from tandem.engine.vision.media_tensors import check_grid, misfit, numbered
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.protocol.messages.media import MediaItem
from tandem.runtime.errors import InvalidRequest, client_reason

FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types that were compared with transformers; unlike for text models, a probe cannot tell."""

_TOKEN_TYPES = {"image": 1, "video": 2}
"""Values of transformers' `mm_token_type_ids`."""


def takes_media(model_config: Any) -> bool:
    return getattr(model_config, "model_type", None) in FAMILIES


class Decoder(nn.Module):
    """The language model with its head; has the interface of transformers' causal language models."""

    base_model_prefix = "model"

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model = whole.model.language_model
        self.lm_head = whole.lm_head
        self.config = self.model.config

    @property
    def base_model(self) -> Any:
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

    def forward(self, logits_to_keep: torch.Tensor | int = 0, **inputs: Any) -> CausalLMOutputWithPast:
        """Runs the decoder. logits_to_keep: row indices, or the last n rows; 0 for all."""
        hidden = self.model(**inputs).last_hidden_state
        rows = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else slice(-logits_to_keep or None, None)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, rows]))


class VisionTower:
    """Encodes images and videos and computes token positions. Holds the whole model.

    `encode` and `place` belong to the engine thread. config: of the vision tower.
    """

    def __init__(self, whole: Any, is_exact: bool = False) -> None:
        """is_exact: see `LoadedModel`."""
        self.config = whole.config.vision_config
        self._features = {"image": whole.model.get_image_features, "video": whole.model.get_video_features}
        self._arguments = {kind: _arguments(features) for kind, features in self._features.items()}
        self._rope_index = getattr(whole.model, "get_rope_index", None)
        self._rope_arguments = _arguments(self._rope_index) if self._rope_index is not None else set()
        flatten_patch_embedding(whole.model.visual if hasattr(whole.model, "visual") else None)
        parameter = next(whole.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        computes_alike = self._device.type == "cpu" and computes_rows_alike(self._dtype, is_exact)
        self._products: Callable[[], AbstractContextManager[Any]] = RowProducts if computes_alike else nullcontext

    def check(self, item: MediaItem, tensors: Mapping[str, torch.Tensor]) -> None:
        """Validates an item without running the tower. Raises InvalidRequest."""
        known = self._arguments[item.kind] | self._rope_arguments
        unknown = [tensor.name for tensor in item.tensors if tensor.name not in known]
        if unknown:
            raise InvalidRequest(f"this model does not accept {unknown[0]}; the item is from another model's processor")
        if f"{item.kind}_grid_thw" in known:
            check_grid(item, tensors, self.config.spatial_merge_size)

    def needed(self, item: MediaItem, is_encoded: bool) -> list[str]:
        """Returns the names of the tensors needed to compute a prompt; no pixels if the item is already encoded."""
        return [t.name for t in item.tensors if not is_encoded or t.name in self._rope_arguments]

    def num_frames(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Returns how many frames can be encoded separately: towers with grids attend within frames only."""
        grid = tensors.get("video_grid_thw") if kind == "video" else None
        return 1 if grid is None else int(grid[0, 0])

    @torch.inference_mode()
    def encode(self, unit: EncodeUnit, media: PromptMedia) -> None:
        """Encodes a unit into `media`. Raises InvalidRequest if the result does not fit the placeholders."""
        item = media.items[unit.number]
        tensors = _frames(unit, media.tensors[unit.number])
        arguments = {
            name: tensor.to(self._device) for name, tensor in tensors.items() if name in self._arguments[item.kind]
        }
        try:
            with self._products():  # the frames of a video are encoded in units of any size
                features = self._features[item.kind](**arguments, return_dict=True)
        except Exception as error:
            # The tensors come from the request; only the model's code can validate them.
            reason = f"{type(error).__name__}: {client_reason(error)}"
            raise InvalidRequest(
                f"media item {unit.number}: the model cannot encode this {item.kind}: {reason}"
            ) from error
        layers = [_flat(features.pooler_output), *map(_flat, getattr(features, "deepstack_features", None) or [])]
        if len(layers[0]) != unit.num_tokens:
            raise numbered(unit.number, misfit(item, len(layers[0])))
        embedding = torch.stack(layers).to(self._dtype)
        if unit.num_tokens == item.num_tokens:
            media.partial[unit.number] = embedding
        else:
            if unit.number not in media.partial:
                shape = (len(layers), item.num_tokens, embedding.shape[2])
                media.partial[unit.number] = torch.empty(shape, dtype=self._dtype, device=self._device)
            media.partial[unit.number][:, unit.offset : unit.offset + unit.num_tokens] = embedding
        media.on_encoded(unit)

    def place(self, media: PromptMedia) -> None:
        """Computes the positions of a prompt's tokens with transformers' `get_rope_index`. Raises InvalidRequest."""
        if self._rope_index is None or media.positions is not None:
            return
        kinds = torch.zeros(1, len(media.token_ids), dtype=torch.int32)
        for item in media.items:
            for start, length in item.spans:
                kinds[0, start : start + length] = _TOKEN_TYPES[item.kind]
        order = sorted(range(len(media.items)), key=lambda number: media.items[number].spans[0][0])
        arguments = {}
        for name in self._rope_arguments:
            parts = [media.tensors[number][name] for number in order if name in media.tensors[number]]
            if parts:
                arguments[name] = torch.cat(parts)
        try:
            positions, deltas = self._rope_index(torch.tensor([media.token_ids]), kinds, **arguments)
        except Exception as error:
            reason = client_reason(error)
            raise InvalidRequest(f"the media's sizes do not fit their placeholders in the prompt: {reason}") from error
        media.positions = positions[:, 0]
        media.position_offset = int(deltas[0, 0])


class PatchProjection(nn.Module):
    """A convolution whose stride equals its kernel, as a matrix product, which is several times as fast on CPU.

    Maps [num_patches, *patch] to [num_patches, num_channels].
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = nn.Parameter(convolution.weight.detach().flatten(1), requires_grad=False)
        self.bias = convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(patches.flatten(1), self.weight, self.bias)


def flatten_patch_embedding(tower: nn.Module | None) -> None:
    """Replaces the patch convolution of towers that take images as patches (Qwen-VL)."""
    embedding = getattr(tower, "patch_embed", None)
    projection = getattr(embedding, "proj", None)
    if embedding is not None and isinstance(projection, nn.Conv3d) and projection.stride == projection.kernel_size:
        embedding.proj = PatchProjection(projection)


def _arguments(function: Any) -> set[str]:
    """Returns the names of the tensors that one of the model's functions accepts."""
    return set(inspect.signature(function).parameters) - {"input_ids", "mm_token_type_ids", "attention_mask", "kwargs"}


def _frames(unit: EncodeUnit, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the unit's share of a video's tensors. Raises InvalidRequest."""
    if not unit.num_frames:
        return dict(tensors)
    grid, pixels = tensors["video_grid_thw"], tensors.get("pixel_values_videos")
    num_patches = int(grid[0, 1]) * int(grid[0, 2])
    if pixels is None or len(pixels) != num_patches * int(grid[0, 0]):
        raise InvalidRequest(f"media item {unit.number}: its pixel_values_videos do not fit its video_grid_thw")
    unit_grid = grid.clone()
    unit_grid[0, 0] = unit.num_frames
    end = unit.first_frame + unit.num_frames
    return {
        "pixel_values_videos": pixels[unit.first_frame * num_patches : end * num_patches],
        "video_grid_thw": unit_grid,
    }


def _flat(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one item's features as [num_tokens, hidden_size]; given as a list or a batch of one."""
    joined = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return joined.flatten(0, -2)
