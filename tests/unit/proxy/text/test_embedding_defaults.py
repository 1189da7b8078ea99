"""How embeddings are made is read from the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.proxy.text.model_text import EmbeddingDefaults
from tandem.runtime.errors import InvalidRequest


def write(folder: Path, pooling: dict[str, Any] | None, *, normalize: bool = True, **config: Any) -> EmbeddingDefaults:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64} | config))
    if pooling is not None:
        modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
        if normalize:
            modules.append({"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"})
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return EmbeddingDefaults.read(folder)


def test_pooling_and_normalize(tmp_path: Path) -> None:
    plain = write(tmp_path, None)
    assert (plain.pooling, plain.normalize) == ("last", True)
    mean = write(tmp_path, {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, normalize=False)
    assert (mean.pooling, mean.normalize) == ("mean", False)
    assert write(tmp_path, {"pooling_mode_lasttoken": True, "include_prompt": True}).pooling == "last"
    with pytest.raises(InvalidRequest, match="cls_token pooling"):
        write(tmp_path, {"pooling_mode_cls_token": True}).check()


def test_dimensions(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="dimensions is 8, but this model's embeddings cannot be shortened"):
        write(tmp_path, None).check_dimensions(8)
    write(tmp_path, None).check_dimensions(64)
    write(tmp_path, None, matryoshka_dimensions=[16, 32]).check_dimensions(64)
    write(tmp_path, None, hidden_size=None, text_config={"hidden_size": 32}).check_dimensions(32)
    write(tmp_path, None, hidden_size=None, n_embd=16).check_dimensions(16)
    write(tmp_path, None, hidden_size=float("inf"), n_embd=float("nan"), d_model=16).check_dimensions(16)
    any_size = write(tmp_path, None, is_matryoshka=True)
    any_size.check_dimensions(64)
    with pytest.raises(InvalidRequest, match="dimensions is 65, but must be at most 64"):
        any_size.check_dimensions(65)
    with pytest.raises(InvalidRequest, match="one of 16, 32"):
        write(tmp_path, None, matryoshka_dimensions=[16, 32]).check_dimensions(8)
