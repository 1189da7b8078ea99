"""The model's generation_config.json fills the sampling fields that a request leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.proxy.api.validation import BodyDecoder, ModelFormats
from tandem.proxy.text.model_text import SamplingDefaults
from tandem.runtime.errors import ConfigError


def decoder(folder: Path, **values: object) -> BodyDecoder:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "do_sample": True, **values}))
    return BodyDecoder("tiny", formats=ModelFormats(sampling=SamplingDefaults.read(folder)))


def body(**fields: object) -> bytes:
    return msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields})


def test_the_models_defaults_fill_missing_fields(tmp_path: Path) -> None:
    reader = decoder(tmp_path, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    sampling = reader.chat(body(top_p=None)).base_sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.05, 0.0)
    assert reader.completion(msgspec.json.encode({"model": "tiny", "prompt": "hi"})).base_sampling.top_k == 20


def test_fields_of_the_request_override_defaults(tmp_path: Path) -> None:
    reader = decoder(tmp_path, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    sampling = reader.chat(body(temperature=0, top_p=1, top_k=-1, repetition_penalty=1)).base_sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0, 1, 0, 1)


def test_the_file_and_its_fields_are_optional(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    assert decoder(tmp_path).chat(body()).base_sampling.temperature == 1.0


def test_invalid_defaults_are_refused_with_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        decoder(tmp_path, top_p=7)


def test_the_source_of_defaults(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, temperature in ((model, 0.1), (other, 0.2)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature, "max_new_tokens": 9}))
    assert SamplingDefaults.read(model, "auto").known() == {"temperature": 0.1, "max_new_tokens": 9}
    assert SamplingDefaults.read(model, "vllm").known() == {}
    for source in (other, other / "generation_config.json"):
        assert SamplingDefaults.read(model, str(source)).temperature == 0.2
    with pytest.raises(ConfigError, match=r"--generation-config: there is no file .*missing"):
        SamplingDefaults.read(model, str(tmp_path / "missing"))


def test_the_demo_model_has_defaults() -> None:
    assert SamplingDefaults.read(DEMO_MODEL) == SamplingDefaults(temperature=0.5, top_p=0.9)


def test_integers_may_be_written_with_a_point(tmp_path: Path) -> None:
    reader = decoder(tmp_path, top_k=50.0, max_new_tokens=9.0, temperature=1)
    request = reader.chat(body())
    assert (request.base_sampling.top_k, request.default_max_tokens) == (50, 9)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        decoder(tmp_path, top_k=50.5)
