"""Finds the served model's files other than weights, and reads from them whether it takes images or video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tandem.runtime.errors import ConfigError, first_line
from tandem.runtime.files.model_json import read_model_json
from tandem.runtime.files.user_paths import expanded, is_readable_folder

_TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "1_Pooling/config.json",
]
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def find_model(model: str) -> Path:
    """Returns the model's folder; downloads the files listed here if it is a hub id. Raises ConfigError."""
    folder = expanded(model)
    if is_readable_folder(folder):
        return folder
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model:
        raise ConfigError(f"there is no model folder {model!r}: give an existing folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download  # slow import, not needed for a folder

    try:
        return Path(snapshot_download(model, allow_patterns=_TEXT_FILES))
    except Exception as error:
        raise ConfigError(
            f"there is no folder {model!r}, and it cannot be downloaded from the hub: {first_line(error)}"
        ) from error


class _MediaConfig(msgspec.Struct):
    vision_config: dict[str, Any] | None = None
    image_token_id: int | None = None
    image_token_index: int | None = None
    video_token_id: int | None = None


def takes_media(model: str) -> bool:
    """Returns whether the model takes images or video. Raises ConfigError."""
    folder = find_model(model)
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return False
    config = read_model_json(folder / "config.json", _MediaConfig)
    if config is None:
        raise ConfigError(f"{folder} has no config.json; give a folder in Hugging Face format")
    return any(getattr(config, field) is not None for field in config.__struct_fields__)
