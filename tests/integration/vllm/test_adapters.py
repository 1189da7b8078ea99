"""LoRA adapters on a worker with vLLM: of a large rank, too large, overwritten, deleted, and many.

None ends the engine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster
from tests.support.greedy import continuation, load_reference, random_prompts
from tests.support.lora import make_adapter, merge_adapter
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 12
RANK, MAX_RANK, LARGER_RANK = 24, 32, 33
"""Of the adapter that is given at the start, what vLLM is set to for it, and one more."""
NUM_OTHERS = 8
"""Adapters of a client that has a stream with each: twice as many as a step of vLLM has."""
STREAM_TOKENS = 400
KEYS = {"attacker": "key-of-the-attacker", "tenant": "key-of-the-tenant"}
[PROMPT] = random_prompts([40], seed=3)


def adapter(folder: Path, model: Any, seed: int, rank: int) -> Path:
    return make_adapter(folder, model, ("q_proj", "v_proj", "down_proj"), seed, rank)


@pytest.fixture(scope="module")
def folders(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, root = load_reference(noise_model), tmp_path_factory.mktemp("adapters")
    others = {f"other{number}": 4 for number in range(NUM_OTHERS)}
    ranks = others | {"wide": RANK, "wider": LARGER_RANK, "gone": 4, "changed": 4, "kept": 4}
    return {name: adapter(root / name, model, seed, rank) for seed, (name, rank) in enumerate(ranks.items())}


@pytest.fixture(scope="module")
def expected(noise_model: Path, folders: dict[str, Path]) -> dict[str, list[int]]:
    found = {MODEL: continuation(load_reference(noise_model), PROMPT, NUM_TOKENS)}
    for name in ("wide", "kept"):
        model = load_reference(noise_model)
        merge_adapter(model, folders[name])
        found[name] = continuation(model, PROMPT, NUM_TOKENS)
    assert len(set(map(tuple, found.values()))) == 3, "each adapter changes the output"
    return found


@pytest.fixture(scope="module")
def cluster(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{key} {name}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    given = (
        "--workers",
        "1",
        "--kv-cache-gib",
        "0.1",
        "--lora",
        f"wide={folders['wide']}",
        "--api-keys-file",
        str(keys),
    )
    with Cluster(*cluster_arguments(), *given, start_timeout_s=START_TIMEOUT_S) as running:
        [before] = running.status().workers
        yield running
        [after] = running.status().workers
        assert after.worker.epoch == before.worker.epoch, "the engine has not ended"


def load(cluster: Cluster, name: str, folder: Path) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder)}
    return httpx.post(f"{cluster.admin_url}/v1/load_lora_adapter", json=body, timeout=60)


def complete(
    cluster: Cluster, model: str, cache_salt: str = "salt", client: str = "tenant", max_tokens: int = NUM_TOKENS
) -> httpx.Response:
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "cache_salt": cache_salt,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {KEYS[client]}"}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120, headers=headers)


def tokens(cluster: Cluster, model: str, **fields: Any) -> list[int]:
    answer = complete(cluster, model, **fields)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def test_the_rank_is_that_of_the_adapters_given_at_the_start(
    cluster: Cluster, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    assert tokens(cluster, "wide") == expected["wide"]
    refused = load(cluster, "wider", folders["wider"])
    assert refused.status_code == 400
    assert f"rank is {LARGER_RANK}, but these workers take {MAX_RANK} at most" in refused.text


def test_a_deleted_or_overwritten_adapter_fails_its_requests_only(
    cluster: Cluster, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    for name in ("gone", "changed"):
        assert load(cluster, name, folders[name]).status_code == 200
    shutil.rmtree(folders["gone"])
    shutil.copytree(folders["kept"], folders["changed"], dirs_exist_ok=True)
    for name in ("gone", "changed"):
        refused = complete(cluster, name)
        assert refused.status_code == 400
        assert "cannot load this LoRA adapter; its log says why" in refused.text
        assert str(folders[name].parent) not in refused.text and "/" not in refused.json()["error"]["message"]
    assert tokens(cluster, MODEL) == expected[MODEL]


def test_a_loaded_adapter_needs_its_folder_no_more(
    cluster: Cluster, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    assert load(cluster, "kept", folders["kept"]).status_code == 200
    assert [tokens(cluster, name) for name in ("wide", "kept")] == [expected["wide"], expected["kept"]]
    for name in ("wide", "kept"):
        shutil.rmtree(folders[name])
    # With another salt, no block of the prompt is cached.
    again = [tokens(cluster, name, cache_salt="other") for name in ("wide", "kept")]
    assert again == [expected["wide"], expected["kept"]]


def test_streams_with_many_adapters_do_not_keep_another_client_waiting(
    cluster: Cluster, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    others = [f"other{number}" for number in range(NUM_OTHERS)]
    for name in others:
        assert load(cluster, name, folders[name]).status_code == 200
    ended: dict[str, float] = {}

    def stream(name: str) -> list[int]:
        answer = complete(cluster, name, client="attacker", max_tokens=STREAM_TOKENS)
        ended[name] = time.monotonic()
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(NUM_OTHERS) as threads:
        streams = [threads.submit(stream, name) for name in others]
        cluster.wait_for(lambda: sum(each.load.num_running for each in cluster.status().workers) >= NUM_OTHERS)
        assert tokens(cluster, "wide", cache_salt="beside") == expected["wide"]
        served_at = time.monotonic()
        answers = [each.result() for each in streams]
    assert all(len(each) == STREAM_TOKENS for each in answers)
    assert len(set(map(tuple, answers))) == NUM_OTHERS, "each adapter changes the output"
    assert served_at < min(ended.values())
