"""Files of a model's folder are read as Python's json writes and reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.proxy.text.model_files import takes_media
from tandem.proxy.text.model_text import ChatTemplates, EmbeddingDefaults, SamplingDefaults
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.lora_files import InvalidAdapter, read_adapter
from tandem.runtime.files.model_json import read_model_json

NUMBERS: dict[str, Any] = {"time_step_limit": [0.0, math.inf], "clamp": -math.inf, "scale": math.nan}


def written(folder: Path, name: str, content: Any) -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def test_what_python_writes_is_read(tmp_path: Path) -> None:
    read = read_model_json(written(tmp_path, "a.json", NUMBERS), dict[str, Any])
    assert read is not None and math.isnan(read.pop("scale"))
    assert read == {"time_step_limit": [0.0, math.inf], "clamp": -math.inf}
    for content in (
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": 2, "a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1, "b": "\\ud800"}',
    ):
        assert (read_model_json(written(tmp_path, "a.json", content), dict[str, Any]) or {})["a"] == 1
    assert read_model_json(tmp_path / "none.json", dict[str, Any]) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b"{'a': 1}", b"1" * 5000], ids=repr)
def test_a_file_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/a\.json: "):
        read_model_json(written(tmp_path, "a.json", content), dict[str, Any])


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_model_json(tmp_path, dict[str, Any])


def test_all_files_of_a_model_may_have_such_numbers(tmp_path: Path) -> None:
    written(tmp_path, "config.json", NUMBERS | {"hidden_size": 64, "is_matryoshka": True, "vision_config": NUMBERS})
    written(tmp_path, "preprocessor_config.json", NUMBERS)
    written(tmp_path, "tokenizer_config.json", NUMBERS | {"chat_template": "hi"})
    written(tmp_path, "generation_config.json", NUMBERS | {"temperature": 0.5})
    written(tmp_path, "modules.json", [NUMBERS | {"type": "Pooling"}])
    written(tmp_path, "1_Pooling/config.json", NUMBERS | {"pooling_mode_mean_tokens": True})
    assert takes_media(str(tmp_path))
    assert ChatTemplates.read(tmp_path).by_name == {"default": "hi"}
    assert SamplingDefaults.read(tmp_path).temperature == 0.5
    embeddings = EmbeddingDefaults.read(tmp_path)
    assert (embeddings.size, embeddings.pooling, embeddings.is_matryoshka) == (64, "mean", True)
    written(tmp_path, "adapter_config.json", NUMBERS | {"peft_type": "LORA", "r": 0})
    written(tmp_path, "adapter_model.safetensors", b"")
    with pytest.raises(InvalidAdapter, match="r is 0"):  # the next check after the JSON
        read_adapter(tmp_path)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_default_of_sampling_is_a_finite_number(value: float, tmp_path: Path) -> None:
    written(tmp_path, "generation_config.json", {"temperature": value})
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*(temperature|>= 0)"):
        SamplingDefaults.read(tmp_path)
