"""A prefill worker in another PID namespace, which stands for another host, fetches media over TCP."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.media_cache import MediaCacheStatus
from tandem.protocol.messages.membership import WorkerReport
from tandem.protocol.network_keys import make_keys
from tandem.runtime.host import host_id
from tests.support.cluster import Cluster, joined
from tests.support.media_proxy import ask_cache
from tests.support.ports import free_port
from tests.support.served_vision_models import Part, body_of, generated_by_transformers, save_served_model
from tests.support.vision_model import clip, picture

NUM_NEW = 12
TIMEOUT_S = 240.0
UNSHARE = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() else []), "--pid", "--fork", "--mount-proc"]
SMALL = ("--dtype", "float32", "--kv-cache-gib", "0.05", "--block-size", "16", "--device", "cpu")


def joined_from_elsewhere(*arguments: str) -> AbstractContextManager[int]:
    """Runs `tandem worker prefill` in its own PID namespace."""
    return joined(("prefill", *arguments), within=UNSHARE)


@pytest.mark.timeout(400)
def test_media_are_fetched_from_the_proxys_host_and_answers_equal_those_of_transformers(tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace may be made here")
    model = save_served_model("qwen3_vl", tmp_path / "model")
    keys, of_the_worker, port = tmp_path / "keys", tmp_path / "of-the-worker", free_port(2)
    make_keys(keys)
    of_the_worker.mkdir(mode=0o700)
    for name in ("proxy.key", "worker.key", "operator.key", "worker.key_secret"):
        shutil.copy(keys / name, of_the_worker / name)  # including its mode
    served = ("--model", str(model), *SMALL, "--cluster-host", "127.0.0.1")
    one, two, video = picture(60, 40, seed=1), picture(30, 50, seed=2), clip(12)
    prompts: list[list[Part]] = [["What is ", one, "that?"], [video, "and", two, "here?"], ["No image at all."]]
    expected = generated_by_transformers(model, prompts, NUM_NEW)
    join = ("--join", f"tcp://127.0.0.1:{port}", "--name", "elsewhere", "--network-keys", str(of_the_worker))
    here = ("--prefill", "0", "--cluster-port", str(port), "--served-model-name", "m", "--network-keys", str(keys))
    with joined_from_elsewhere(*served, *join), Cluster(*here, *served) as cluster:

        def answers() -> list[list[int]]:
            outputs = []
            for prompt in prompts:
                answer = httpx.post(
                    f"{cluster.url}/v1/chat/completions", json=body_of(prompt, NUM_NEW), timeout=TIMEOUT_S
                )
                assert answer.status_code == 200, answer.text
                outputs.append(answer.json()["choices"][0]["token_ids"])
            return outputs

        def prefill() -> WorkerReport:
            return cluster.worker("prefill-0-elsewhere")

        def cache_status() -> MediaCacheStatus:
            return ask_cache(f"ipc://{runtime_dir(cluster.port)}/media-cache.sock", MediaCacheClient.status)

        assert prefill().worker.host_id not in ("", host_id())
        assert answers() == expected
        Cluster.wait_for(lambda: prefill().load.num_media_encoded == 3, TIMEOUT_S)
        assert cache_status().num_items == 3, "embeddings stay on the worker's host"
        num_fetched = prefill().load.num_media_fetched_bytes
        assert num_fetched > 50_000
        # Different text first, so that no cached KV is found but the embeddings are.
        prompts = [["Again: ", *prompt] for prompt in prompts[:2]]
        assert answers() == generated_by_transformers(model, prompts, NUM_NEW)
        assert prefill().load.num_media_encoded == 3
        Cluster.wait_for(lambda: prefill().load.num_media_fetched_bytes > num_fetched, TIMEOUT_S)
        assert prefill().load.num_media_fetched_bytes < num_fetched + 300, "only sizes are fetched, no pixels"
        Cluster.wait_for(lambda: cache_status().num_leases == 0, TIMEOUT_S)
        Cluster.wait_for(cluster.all_blocks_free, TIMEOUT_S)
