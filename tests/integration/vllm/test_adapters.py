"""LoRA adapters on a worker with vLLM: of a large rank, too large, overwritten and deleted. None ends the engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
[PROMPT] = random_prompts([40], seed=3)


def adapter(folder: Path, model: Any, seed: int, rank: int) -> Path:
    return make_adapter(folder, model, ("q_proj", "v_proj", "down_proj"), seed, rank)


@pytest.fixture(scope="module")
def folders(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, root = load_reference(noise_model), tmp_path_factory.mktemp("adapters")
    ranks = {"wide": RANK, "wider": LARGER_RANK, "gone": 4, "changed": 4, "kept": 4}
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
def cluster(folders: dict[str, Path], expected: dict[str, list[int]]) -> Iterator[Cluster]:
    given = ("--workers", "1", "--kv-cache-gib", "0.1", "--lora", f"wide={folders['wide']}")
    with Cluster(*cluster_arguments(), *given, start_timeout_s=START_TIMEOUT_S) as running:
        [before] = running.status().workers
        yield running
        [after] = running.status().workers
        assert after.worker.epoch == before.worker.epoch, "the engine has not ended"


def load(cluster: Cluster, name: str, folder: Path) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder)}
    return httpx.post(f"{cluster.admin_url}/v1/load_lora_adapter", json=body, timeout=60)


def complete(cluster: Cluster, model: str, cache_salt: str = "salt") -> httpx.Response:
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "cache_salt": cache_salt,
    }  # fmt: skip
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)


def tokens(cluster: Cluster, model: str, **fields: str) -> list[int]:
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
    for name, reason in (("gone", "There is no folder"), ("changed", "differ from those of the adapter")):
        refused = complete(cluster, name)
        assert refused.status_code == 400
        assert reason in refused.text
    assert tokens(cluster, MODEL) == expected[MODEL]


def test_a_loaded_adapter_needs_its_folder_no_more(
    cluster: Cluster, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    """vLLM computes with one adapter at a time, and takes them in turns here."""
    assert load(cluster, "kept", folders["kept"]).status_code == 200
    assert [tokens(cluster, name) for name in ("wide", "kept")] == [expected["wide"], expected["kept"]]
    for name in ("wide", "kept"):
        shutil.rmtree(folders[name])
    # With another salt, no block of the prompt is cached.
    again = [tokens(cluster, name, cache_salt="other") for name in ("wide", "kept")]
    assert again == [expected["wide"], expected["kept"]]
