"""Tiny vision models of each family with the family's own processors, for clusters to serve."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.video_utils import load_video

from tests.support.media_proxy import data_url, image_part, video_part
from tests.support.vision_model import TEMPLATE, encoded
from tests.support.vision_models import IMAGE, VIDEO, VISION_START, make_model

_NUM_BYTES = 256
_SEED = 5
"""Seed of the weights with which no family repeats one token soon."""
_LLAVA_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>"
)
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
_SIZE = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 64}
_VIDEO_SIZE = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 12}
"""Limits of a frame in pixels. Those of Qwen3-VL are for all frames together."""
_SQUARE = {"height": 16, "width": 16}


def save_served_model(family: str, folder: Path) -> Path:
    """Saves random weights, the family's image and video processors, and a byte tokeniser."""
    make_model(family, folder, _SEED)
    is_llava = family == "llava_onevision"
    names = {IMAGE: "<image>", VIDEO: "<video>"} if is_llava else {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
    tokenizer = _tokenizer(names | {VISION_START: "<|vision_start|>", VISION_START + 3: "<|vision_end|>"})
    _processor(family, tokenizer).save_pretrained(folder)
    return folder


def _tokenizer(special: dict[int, str]) -> PreTrainedTokenizerFast:
    """A byte tokeniser with these special tokens, by token id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    named = special | {_NUM_BYTES: "<|im_start|>", _NUM_BYTES + 1: "<|im_end|>"}
    tokens = [named.get(number, f"<|unused {number}|>") for number in range(_NUM_BYTES, max(named) + 1)]
    bytes_alone.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    assert all(bytes_alone.token_to_id(token) == number for number, token in special.items())
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone)


def _processor(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    if family == "llava_onevision":
        pinpoints = [[16, 16], [16, 32], [32, 16], [32, 32]]
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=pinpoints),
            tokenizer=tokenizer,
            video_processor=LlavaOnevisionVideoProcessor(size=_SQUARE),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            chat_template=_LLAVA_TEMPLATE,
        )
    images = Qwen2VLImageProcessor(size=_SIZE, **_PATCHES)
    videos: Any = Qwen2VLVideoProcessor(size=_VIDEO_SIZE, **_PATCHES)
    if family.startswith("qwen3"):
        videos = Qwen3VLVideoProcessor(size={"shortest_edge": 8 * 8 * 16, "longest_edge": 8 * 8 * 48}, **_PATCHES)
    kinds: dict[str, Any] = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
    return kinds.get(family, Qwen3VLProcessor)(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=TEMPLATE
    )


Part = str | Image.Image | bytes
"""Part of the only chat message: text, an image, or a video as MP4 bytes."""


def body_of(prompt: Sequence[Part], num_new: int) -> dict[str, Any]:
    """Request body of a chat with one message, answered greedily with `num_new` tokens."""
    return {
        "messages": [{"role": "user", "content": parts_of(prompt)}],
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def parts_of(prompt: Sequence[Part]) -> list[dict[str, Any]]:
    return [_body_part(part) for part in prompt]


def _body_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        return image_part(data_url(encoded(part)))
    return video_part(data_url(part, "video/mp4"))


def generated_by_transformers(folder: Path, prompts: Sequence[Sequence[Part]], num_new: int) -> list[list[int]]:
    """Greedy token ids for each prompt, computed by transformers alone (decoding, sampling, processing, generation)."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        for prompt in prompts:
            content: list[dict[str, Any]] = []
            videos: list[Any] = []
            for part in prompt:
                if isinstance(part, bytes):
                    file = Path(scratch) / f"{len(videos)}.mp4"
                    file.write_bytes(part)
                    videos.append(load_video(str(file), backend="pyav"))
                content.append(_template_part(part))
            rendered = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            inputs = processor(
                text=[rendered],
                images=[part for part in prompt if isinstance(part, Image.Image)] or None,
                videos=[frames for frames, _ in videos] or None,
                video_metadata=[metadata for _, metadata in videos] or None,
                return_tensors="pt",
            )
            output = model.generate(
                **inputs, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, eos_token_id=None
            )
            answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def _template_part(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, Image.Image) else "video"}
