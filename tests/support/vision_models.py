"""Tiny random models that take images and video, and prompts in the form that their processors make."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import pad
from transformers import (
    AutoModelForImageTextToText,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tandem.protocol.messages.media import MediaItem, MediaTensor
from tandem.protocol.messages.media_cache import HEADER_BYTES

VISION_START, IMAGE, VIDEO = 310, 311, 312  # tokens
_NUM_WORDS = 300

_TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_START + 3,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
_INTERLEAVED = {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_interleaved": True}}
_GRID = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "initializer_range": 0.2}
_QWEN3_VISION = _GRID | {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 128,
    "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}

MODELS: dict[str, Any] = {
    "qwen2_vl": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=_TEXT | _MROPE,
            vision_config=_GRID | {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 128},
            **_TOKENS,
        )
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=_TEXT | _MROPE,
            vision_config=_GRID
            | {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 128,
                "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2,
            },
            **_TOKENS,
        )
    ),
    "qwen3_vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=_TEXT | _INTERLEAVED | {"head_dim": 32}, vision_config=_QWEN3_VISION, **_TOKENS)
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            text_config=_TEXT | _INTERLEAVED | _MOE | {"head_dim": 32}, vision_config=_QWEN3_VISION, **_TOKENS
        )
    ),
    "llava_onevision": lambda: LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            text_config=_TEXT | {"model_type": "qwen2"},
            vision_config={
                "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False,
            },
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_feature_select_strategy="full",
        )
    ),
}  # fmt: skip


def make_model(family: str, folder: Path, seed: int = 1) -> None:
    torch.manual_seed(seed)
    MODELS[family]().save_pretrained(folder)


@dataclass(frozen=True)
class Medium:
    """num_tokens: of each of its spans."""

    kind: Literal["image", "video"]
    tensors: dict[str, torch.Tensor]
    num_tokens: list[int]


def make_medium(
    family: str, kind: Literal["image", "video"], height: int, width: int, frames: int, seed: int
) -> Medium:
    """height, width: in tokens, for LLaVA in pixels; frames: of the video, after joining them in time."""
    noise = torch.Generator().manual_seed(seed)
    if family == "llava_onevision":
        if kind == "video":
            return Medium(
                kind, {"pixel_values_videos": torch.randn(1, frames, 3, 16, 16, generator=noise)}, [4 * frames + 1]
            )
        sizes = torch.tensor([[height, width]])
        grid = (-(-height // 16), -(-width // 16))
        pixels = torch.randn(1, 1 + grid[0] * grid[1], 3, 16, 16, generator=noise)
        # Whole tiles: the base image, and a row of patches and a line's end for each row.
        return Medium(kind, {"pixel_values": pixels, "image_sizes": sizes}, [16 + 4 * grid[0] * (4 * grid[1] + 1)])
    frames = frames if kind == "video" else 1
    grid_thw = torch.tensor([[frames, 2 * height, 2 * width]])
    pixels = torch.randn(int(grid_thw.prod()), 3 * 2 * 4 * 4, generator=noise)
    if kind == "image":
        return Medium(kind, {"pixel_values": pixels, "image_grid_thw": grid_thw}, [height * width])
    tensors = {"pixel_values_videos": pixels, "video_grid_thw": grid_thw}
    if family == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([1.5])
    # Qwen3-VL writes the time before each frame.
    spans = [height * width] * frames if family.startswith("qwen3") else [frames * height * width]
    return Medium(kind, tensors, spans)


@dataclass
class VisionPrompt:
    """A prompt as a processor makes it. spans: of each medium."""

    token_ids: list[int] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)
    spans: list[list[tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[int | Medium], seed: int) -> VisionPrompt:
        """parts: media, and numbers of random words."""
        prompt, rng = cls(), random.Random(seed)
        for part in parts:
            if isinstance(part, int):
                prompt.token_ids += [rng.randrange(3, _NUM_WORDS) for _ in range(part)]
                continue
            spans = []
            for num_tokens in part.num_tokens:
                prompt.token_ids += [rng.randrange(3, _NUM_WORDS), VISION_START]
                spans.append((len(prompt.token_ids), num_tokens))
                prompt.token_ids += [IMAGE if part.kind == "image" else VIDEO] * num_tokens
            prompt.media.append(part)
            prompt.spans.append(spans)
        return prompt

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Returns the inputs of transformers' `generate`."""
        ids = torch.tensor([self.token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for medium in self.media:
            for name, tensor in medium.tensors.items():
                inputs[name] = torch.cat(_padded(inputs[name], tensor)) if name in inputs else tensor
        if any(name.endswith("_grid_thw") for name in inputs):
            inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        return inputs

    def items(self) -> tuple[MediaItem, ...]:
        """Returns the media items, in shared memory that lasts as long as this process."""
        return tuple(make_item(m, spans) for m, spans in zip(self.media, self.spans, strict=True))


def _padded(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads to this number of tiles, as LLaVA's processor does; the model skips the padding."""
    if one.ndim < 5:
        return one, other
    most = max(one.shape[1], other.shape[1])
    return pad(one, [0] * 6 + [0, most - one.shape[1]]), pad(other, [0] * 6 + [0, most - other.shape[1]])


def make_item(medium: Medium, spans: Sequence[tuple[int, int]]) -> MediaItem:
    digest = blake2b(digest_size=32)
    fd = os.memfd_create("tandem-test-media", os.MFD_CLOEXEC)
    tensors, offset = [], HEADER_BYTES
    for name, tensor in medium.tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        digest.update(name.encode() + data)
        os.pwrite(fd, data, offset)
        tensors.append(
            MediaTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, len(data))
        )
        offset += -(-len(data) // 64) * 64
    os.ftruncate(fd, offset)
    os.pwrite(fd, digest.digest(), 0)
    segment = f"/proc/{os.getpid()}/fd/{fd}"
    return MediaItem(digest.digest(), medium.kind, tuple(spans), segment, tuple(tensors))


Generated = tuple[list[int], list[float]]
"""Token ids and the log-probability of each."""


def reference(folder: Path, prompts: Sequence[VisionPrompt], num_new: int) -> list[Generated]:
    """Returns what transformers' `generate` gives greedily, one prompt at a time."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        out = model.generate(
            **prompt.model_inputs(), max_new_tokens=num_new, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        token_ids = out.sequences[0, len(prompt.token_ids) :].tolist()
        logprobs = [float(row[0].log_softmax(-1)[i]) for row, i in zip(out.logits, token_ids, strict=True)]
        outputs.append((token_ids, logprobs))
    return outputs
