"""Model folders as they are published: some have settings that servers must not follow, others lack tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.support.cluster import Cluster, refused_start
from tests.support.noise_model import ensure_noise_model

CPU = ("--device", "cpu", "--dtype", "float32", "--threads-per-worker", "1", "--served-model-name", "m")


def copied_model(folder: Path) -> Path:
    return Path(shutil.copytree(ensure_noise_model(), folder / "model"))


def change_tensors(model: Path, rename: dict[str, str | None]) -> None:
    """rename: parts of names and what replaces them; None removes tensors with such names."""
    file = model / "model.safetensors"
    changed = {}
    for name, tensor in load_file(file).items():
        new: str | None = name
        for part, replacement in rename.items():
            if new is not None and part in new:
                new = None if replacement is None else new.replace(part, replacement, 1)
        if new is not None:
            changed[new] = tensor
    save_file(changed, file, {"format": "pt"})


def change_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_model_that_lacks_tensors_ends_the_start_in_one_line(tmp_path: Path) -> None:
    model = copied_model(tmp_path)
    change_tensors(model, {"layers.1.": None})
    error = refused_start(*CPU, "--model", str(model))
    [line] = [line for line in error.splitlines() if "cannot be served" in line]
    assert "its files lack 9 of the model's" in line and "model.layers.1.self_attn.q_proj.weight" in line
    assert "LOAD REPORT" not in error


def test_a_published_folder_is_served_in_full(tmp_path: Path) -> None:
    """A tokeniser that cuts texts, names under a wrapper, an infinite number, and a context that YaRN extends."""
    model = copied_model(tmp_path)
    change_tensors(model, {"model.": "module.model.", "lm_head": "module.lm_head"})
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = "a text of more than sixteen tokens, which nobody has asked the server to cut anywhere"
    num_tokens = len(tokenizer.encode(prompt).ids)
    assert 16 < num_tokens < 64
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(model / "tokenizer.json"))
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = {"max_position_embeddings": 128, "rope_parameters": scaling, "time_step_limit": [0.0, float("inf")]}
    change_json(model / "config.json", **config)
    with Cluster(*CPU, "--model", str(model)) as cluster:
        fields = {"model": "m", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields | {"prompt": prompt}, timeout=60)
        assert answer.json()["usage"]["prompt_tokens"] == num_tokens
        [card] = httpx.get(f"{cluster.url}/v1/models").json()["data"]
        assert card["max_model_len"] == 512
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields | {"prompt": [5] * 508}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields | {"prompt": [5] * 509}, timeout=60)
        assert answer.status_code == 400 and "context length is 512 tokens" in answer.text


def test_a_base_model_without_a_head_serves_embeddings_only(tmp_path: Path) -> None:
    model = copied_model(tmp_path)
    change_tensors(model, {"lm_head": None, "model.": ""})
    change_json(model / "config.json", architectures=["LlamaModel"], tie_word_embeddings=False)
    with Cluster(*CPU, "--model", str(model)) as cluster:
        answer = httpx.post(f"{cluster.url}/v1/embeddings", json={"model": "m", "input": "some words"}, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["data"][0]["embedding"]) > 0
        fields = {"model": "m", "prompt": "some words", "max_tokens": 4}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields, timeout=60)
        assert answer.status_code == 400 and "no output head" in answer.text
