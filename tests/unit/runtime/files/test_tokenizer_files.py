"""Published tokenizer.json files tell tokenisers to cut or to fill texts; a loaded one does neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.engine.sampling.grammars import read_tokenizer
from tandem.proxy.text.model_text import ModelText
from tandem.runtime.files.tokenizer_files import load_tokenizer
from tests.support.tokenizers import SPECIAL, byte_level

TEXT = "forty-two characters of text, give or take"
TRUNCATIONS: list[dict[str, Any] | None] = [
    None,
    {"max_length": 16},
    {"max_length": 16, "strategy": "only_first", "stride": 2, "direction": "left"},
]
PADDINGS: list[dict[str, Any] | None] = [
    None,
    {"length": 64, "pad_id": 0, "pad_token": SPECIAL},
    {"length": 64, "direction": "left", "pad_id": 0, "pad_token": SPECIAL},
    {"pad_to_multiple_of": 32, "pad_id": 0, "pad_token": SPECIAL},
]


@pytest.mark.parametrize(
    "config", [{}, {"model_max_length": 16, "truncation_side": "left", "padding_side": "left"}], ids=str
)
@pytest.mark.parametrize("padding", PADDINGS, ids=str)
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_texts_are_neither_cut_nor_filled(
    truncation: dict[str, Any] | None, padding: dict[str, Any] | None, config: dict[str, Any], tmp_path: Path
) -> None:
    written = Tokenizer.from_str(byte_level().to_str())
    expected = written.encode(TEXT).ids
    if truncation:
        written.enable_truncation(**truncation)
    if padding:
        written.enable_padding(**padding)
    written.save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text("{}")

    backend = load_tokenizer(str(tmp_path))
    grammars = Tokenizer.from_str(read_tokenizer(str(tmp_path), 500).tokenizer_json.decode())
    for tokenizer in (backend.backend_tokenizer, ModelText(str(tmp_path)).tokenizer, grammars):
        assert tokenizer.encode(TEXT).ids == tokenizer.encode_batch_fast([TEXT, "a"])[0].ids == expected
        assert tokenizer.truncation is None and tokenizer.padding is None
    assert backend(TEXT)["input_ids"] == expected
    assert backend.backend_tokenizer.encode(TEXT).ids == expected, "a call changes nothing for later ones"
