"""LoRA adapters and embeddings on a real cluster: equal to merged weights and hidden states of transformers."""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cluster import MODEL, Cluster
from tests.support.greedy import continuation, load_reference
from tests.support.lora import make_adapter, merge_adapter
from tests.support.sse import events_of

NUM_NEW_TOKENS = 24
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [random.Random(seed).choices(range(4, 2000), k=length) for seed, length in ((1, 150), (2, 70))]


@pytest.fixture(scope="module")
def folders(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = AutoModelForCausalLM.from_pretrained(noise_model, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    return {
        "first": make_adapter(root / "first", base, TARGETS, seed=1),
        "second": make_adapter(root / "second", base, ("q_proj", "v_proj"), seed=2, rank=8, use_rslora=True),
    }


@pytest.fixture(scope="module")
def cluster(noise_model: Path, folders: dict[str, Path]) -> Iterator[Cluster]:
    adapter = ("--lora", f"first={folders['first']}")
    with Cluster("--dtype", "float32", "--decode", "2", "--proxies", "2", *adapter) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(noise_model: Path, folders: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for name in (MODEL, *folders):
        model = load_reference(noise_model)
        if name != MODEL:
            merge_adapter(model, folders[name])
        for number, prompt in enumerate(PROMPTS):
            found[name, number] = continuation(model, prompt, NUM_NEW_TOKENS)
    assert len({tuple(ids) for ids in found.values()}) == len(found), "each adapter changes the output"
    return found


def body_of(model: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": prompt, "max_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


def complete(cluster: Cluster, model: str, prompt: list[int]) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/completions", json=body_of(model, prompt), timeout=120)


def load(cluster: Cluster, **body: Any) -> httpx.Response:
    return httpx.post(f"{cluster.admin_url}/v1/load_lora_adapter", json=body, timeout=60)


def unload(cluster: Cluster, name: str) -> httpx.Response:
    return httpx.post(f"{cluster.admin_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)


def test_adapters_in_one_batch_equal_merged_weights(
    cluster: Cluster, folders: dict[str, Path], expected: dict[tuple[str, int], list[int]]
) -> None:
    assert complete(cluster, "second", PROMPTS[0]).status_code == 404
    answer = load(cluster, lora_name="second", lora_path=str(folders["second"]))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    for _ in range(2):  # the second time from the prefix cache
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda key: complete(cluster, key[0], PROMPTS[key[1]]), expected))
        for key, answer in zip(expected, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == key[0]
            assert answer.json()["choices"][0]["token_ids"] == expected[key]
    cards = httpx.get(f"{cluster.url}/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("first", MODEL), ("second", MODEL)]
    assert cards[1]["root"] == "first" and str(folders["first"]) not in str(cards), "clients see no folders"
    assert httpx.get(f"{cluster.url}/v1/models/second").json()["parent"] == MODEL
    cluster.wait_for(cluster.all_blocks_free)


def test_wrong_adapters_are_refused(cluster: Cluster, folders: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(folders["first"], tmp_path / "other")
    other_model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(24, 48)})
    make_adapter(other, other_model, ["q_proj"], seed=3)
    for body, says in (
        ({"lora_name": "x", "lora_path": str(tmp_path / "missing")}, "There is no folder"),
        ({"lora_name": "x", "lora_path": str(other)}, "another base model"),
        ({"lora_name": "x", "lora_path": str(tmp_path)}, "adapter_config.json"),
        ({"lora_name": "first", "lora_path": str(folders["second"])}, "in use"),
        ({"lora_name": MODEL, "lora_path": str(folders["second"])}, "served model's name"),
        ({"lora_name": "", "lora_path": str(folders["second"])}, "lora_name"),
        ({"lora_path": str(folders["second"])}, "lora_name"),
    ):
        answer = load(cluster, **body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert unload(cluster, "nobody").status_code == 404
    answer = complete(cluster, "nobody", PROMPTS[0])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    outside = httpx.post(f"{cluster.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/"})
    assert outside.status_code == 404, "clients cannot load adapters"


def test_migration_keeps_the_adapter_and_unloading_lets_streams_finish(
    cluster: Cluster, expected: dict[tuple[str, int], list[int]]
) -> None:
    pids = {report.worker.worker_id: report.worker.pid for report in cluster.status().workers}
    body = body_of("first", PROMPTS[1], stream=True, max_tokens=NUM_NEW_TOKENS)
    token_ids: list[int] = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as answer:
        for chunk in events_of(answer.iter_lines()):
            assert chunk["model"] == "first"
            for choice in chunk["choices"]:
                token_ids += choice["token_ids"]
            if len(pids) == 3 and len(token_ids) >= 3:
                assert unload(cluster, "first").status_code == 200
                running = [r.worker for r in cluster.status().workers if r.load.num_decoding]
                os.kill(running[0].pid if running else pids["decode-0"], signal.SIGKILL)
                pids = {}
    assert token_ids == expected["first", 1]
    assert complete(cluster, "first", PROMPTS[1]).status_code == 404


@torch.inference_mode()
def test_embeddings_equal_hidden_states(cluster: Cluster, noise_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(noise_model, dtype=torch.float32)
    wanted = [
        torch.nn.functional.normalize(model.model(torch.tensor([prompt])).last_hidden_state[0, -1], dim=0).numpy()
        for prompt in PROMPTS
    ]
    answer = httpx.post(f"{cluster.url}/v1/embeddings", json={"model": MODEL, "input": PROMPTS}, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [each["index"] for each in found["data"]] == [0, 1]
    for each, vector in zip(found["data"], wanted, strict=True):
        np.testing.assert_allclose(each["embedding"], vector, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == sum(map(len, PROMPTS))
    body = {"input": PROMPTS[0], "encoding_format": "base64"}
    packed = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), wanted[0], atol=1e-5)
    raw = httpx.post(f"{cluster.url}/v1/embeddings", json={"input": "a word", "normalize": False}, timeout=60)
    assert np.linalg.norm(raw.json()["data"][0]["embedding"]) > 1.5
    for wrong, param in (
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [10**6]}, "input"),
        ({"input": [5] * 100_000}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ):
        answer = httpx.post(f"{cluster.url}/v1/embeddings", json=wrong, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    cluster.wait_for(cluster.all_blocks_free)
