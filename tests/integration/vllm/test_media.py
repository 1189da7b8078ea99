"""Images and videos on workers that run vLLM: greedy answers are those of transformers' `generate`."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.protocol.network_keys import make_keys
from tandem.runtime.host import host_id
from tests.faults.streams import Stream
from tests.integration.test_media_across_hosts import UNSHARE, joined_from_elsewhere
from tests.support.cluster import MODEL, Cluster
from tests.support.ports import free_port
from tests.support.served_vision_models import Part, body_of, generated_by_transformers, save_served_model
from tests.support.vision_model import clip, picture
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, run_with_vllm

pytestmark = pytest.mark.timeout(900)

NUM_NEW = 12
NUM_STREAMED = 900
"""Many, so that streams still run when a worker is killed, also on a fast machine."""
ONE, OTHER = picture(60, 40, seed=1), picture(60, 40, seed=2)
"""Of one size, so that only their pixels tell their prompts apart."""
PROMPTS: list[list[Part]] = [
    ["look: ", ONE, " what?"],
    ["look: ", OTHER, " what?"],
    ["two ", ONE, " and ", picture(100, 80, seed=3), "."],
    ["a video ", clip(4, 64, 48), "!"],
    [clip(4, 64, 48), " and ", OTHER, "?"],
    ["No image at all."],
]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model("qwen3_vl", tmp_path_factory.mktemp("qwen3"))


def ask(cluster: Cluster, prompt: list[Part]) -> dict[str, Any]:
    body = {**body_of(prompt, NUM_NEW), "model": MODEL}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_answers(cluster: Cluster, expected: list[list[int]]) -> None:
    answers = [ask(cluster, prompt) for prompt in PROMPTS]
    assert [each["choices"][0]["token_ids"] for each in answers] == expected


def one_that_decodes(cluster: Cluster) -> int:
    """Waits for a decode worker that says that it decodes. Returns its process id."""
    found: list[int] = []

    def is_found() -> bool:
        workers = [each for each in cluster.status().workers if each.worker.role == "decode"]
        found[:] = [each.worker.pid for each in workers if each.load.num_decoding]
        return bool(found)

    cluster.wait_for(is_found)
    return found[0]


def of_model(model: Path) -> tuple[str, ...]:
    return (*cluster_arguments(), "--model", str(model), "--served-model-name", MODEL, "--kv-cache-gib", "0.1")


def test_prefill_and_decode_apart_and_a_decode_worker_that_dies(qwen3: Path) -> None:
    expected = generated_by_transformers(qwen3, PROMPTS, NUM_NEW)
    assert expected[0] != expected[1]
    with Cluster(*of_model(qwen3), "--prefill", "1", "--decode", "2", start_timeout_s=START_TIMEOUT_S) as cluster:
        check_answers(cluster, expected)
        cached = [ask(cluster, prompt) for prompt in PROMPTS]
        assert [each["choices"][0]["token_ids"] for each in cached] == expected
        assert cached[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 30, "blocks with the image"
        cluster.wait_for(lambda: cluster.worker("prefill-0").load.num_media_encoded >= 4)
        decodes = [each for each in cluster.status().workers if each.worker.role == "decode"]
        assert sum(each.load.num_received for each in decodes) >= 6
        assert not sum(each.load.num_media_encoded for each in decodes)

        body = {**body_of(PROMPTS[2], NUM_STREAMED), "model": MODEL}
        stream = Stream(cluster, body)
        assert stream.wait(200)
        whole, before = stream.token_ids, cluster.num_migrations()
        assert len(whole) == NUM_STREAMED
        streams = [Stream(cluster, {**body, "cache_salt": str(number)}) for number in range(3)]
        cluster.wait_for(lambda: all(len(each.token_ids) > 8 for each in streams))
        os.kill(one_that_decodes(cluster), signal.SIGKILL)
        assert all(each.wait(200) for each in streams)
        assert [each.token_ids for each in streams] == [whole] * 3
        assert cluster.num_migrations() > before
        cluster.wait_for(cluster.all_blocks_free)


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.exhaustive)])
def test_one_worker(tmp_path: Path, family: str) -> None:
    model = save_served_model(family, tmp_path)
    expected = generated_by_transformers(model, PROMPTS, NUM_NEW)
    with Cluster(*of_model(model), "--workers", "1", start_timeout_s=START_TIMEOUT_S) as cluster:
        check_answers(cluster, expected)


def test_workers_on_another_host_fetch_the_media(qwen3: Path, tmp_path: Path) -> None:
    """Both sides of the hand-over need them: one to compute, the other for positions and to name its blocks."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace may be made here")
    expected = generated_by_transformers(qwen3, PROMPTS, NUM_NEW)
    keys, port = tmp_path / "keys", free_port(2)
    make_keys(keys)
    served = (*of_model(qwen3), "--cluster-host", "127.0.0.1", "--network-keys", str(keys))
    join = ("--join", f"tcp://127.0.0.1:{port}", "--name", "elsewhere")
    here = ("--prefill", "0", "--decode", "1", "--cluster-port", str(port))
    with (
        joined_from_elsewhere(*served, *join),
        Cluster(*served, *here, start_timeout_s=START_TIMEOUT_S) as cluster,
    ):
        assert cluster.worker("prefill-0-elsewhere").worker.host_id not in ("", host_id())
        check_answers(cluster, expected)
        cluster.wait_for(lambda: cluster.worker("prefill-0-elsewhere").load.num_media_fetched_bytes > 50_000)
        cluster.wait_for(cluster.all_blocks_free)


@pytest.fixture(scope="module")
def found(qwen3: Path) -> dict[str, Any]:
    answer: dict[str, Any] = run_with_vllm(Path(__file__).with_name("media_checks.py"), str(qwen3))
    return answer


def test_blocks_with_media_are_named_as_proxies_name_them(found: dict[str, Any]) -> None:
    one, other = found["prefixes"]["one"], found["prefixes"]["other"]
    assert one["tokens"] != other["tokens"]
    assert len(one["expected"]) >= 3
    assert set(one["expected"]) <= set(one["added"])
    assert set(other["expected"][1:]) <= set(other["added"])
    assert one["expected"][0] == other["expected"][0], "words only"
    assert not set(one["expected"][1:]) & set(other["expected"])


def test_media_that_would_end_the_engine_are_refused(found: dict[str, Any]) -> None:
    refusals = found["refusals"]
    assert "must have one image_grid_thw" in refusals["no grid"]
    assert "its pixels are not [80, 96] numbers" in refusals["no pixels"]
    assert "has 19 placeholder tokens in the prompt, but the model encodes it to 20" in refusals["misfit"]
    assert "not in one place" in refusals["split"]
    assert "placeholders end at token" in refusals["outside"]
    assert "--max-num-batched-tokens" in refusals["too long"]
    assert "not between the model's vision tokens" in refusals["no vision tokens"]
    assert "its pixels are not [80, 96] numbers" in refusals["another model's"]
    assert refusals["fits"] == ""
    assert all("media item 0" in refusal for name, refusal in refusals.items() if name != "fits")


def test_media_of_other_hosts_are_awaited(found: dict[str, Any]) -> None:
    late = found["late"]
    assert late["waited"]
    assert late["tokens"] == late["expected"]
    assert late["num_added"] == 3, "all but the aborted one"
    assert "did not send it" in late["failed"]
    assert "must have one image_grid_thw" in late["wrong"]
    assert late["num_released"] == 4
    assert late["all_free"]
