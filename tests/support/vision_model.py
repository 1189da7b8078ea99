"""A Qwen2-VL processor (tokeniser, image and video processors) for the proxy, and a tiny model for it."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = (
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def save_processor(folder: Path) -> Path:
    """Saves tokeniser, chat template, image and video processor as `save_pretrained` does."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "image_mean": _MEAN, "image_std": _STD}
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
            **sizes,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "processor_class": "Qwen2VLProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16},
            **sizes,
        },
        "config.json": {
            "model_type": "qwen2_vl",
            "eos_token_id": tokenizer.token_to_id("</s>"),
            "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
            "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def picture(width: int = 100, height: int = 80, seed: int = 0) -> Image.Image:
    """An image of random blocks of 4 x 4 pixels."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(pixels, np.ones((4, 4, 1), np.uint8))[:height, :width])


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def clip(num_frames: int = 12, width: int = 96, height: int = 64, kind: str = "mp4") -> bytes:
    """A video whose frames differ; kind: mp4 or webm."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(num_frames):
            frame: Any = av.VideoFrame.from_image(picture(width, height, seed=number))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def save_model(folder: Path, num_layers: int = 2, **shape: int) -> Path:
    """Saves a tiny Qwen2-VL with random weights and its processor. More layers make it slower. shape: of its text."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    save_processor(folder)
    ids = {token: 256 + number for number, token in enumerate(SPECIAL_TOKENS)}
    text: dict[str, Any] = {
        "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": ids["</s>"], "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        **shape,
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 14,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "initializer_range": 0.2,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).float().save_pretrained(folder)
    return folder
