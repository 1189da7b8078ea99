"""Two prefill workers of one host share embeddings, so each image is encoded once."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.media_cache.media_client import MediaCacheClient
from tests.support.cluster import Cluster
from tests.support.media_proxy import ask_cache
from tests.support.served_vision_models import Part, body_of, generated_by_transformers, save_served_model
from tests.support.vision_model import clip, picture

NUM_NEW = 12
TIMEOUT_S = 240.0


@pytest.mark.timeout(400)
def test_an_image_encoded_by_one_worker_is_not_encoded_by_the_other(tmp_path: Path) -> None:
    model = save_served_model("llava_onevision", tmp_path)
    one, two, video = picture(60, 40, seed=1), picture(30, 50, seed=2), clip(6)
    first: list[Part] = ["What is ", one, two, "that?", video]
    second: list[Part] = ["And now ", two, video, "or", one, "?"]
    expected = generated_by_transformers(model, [first, second], NUM_NEW)
    options = ("--dtype", "float32", "--kv-cache-gib", "0.05", "--block-size", "16", "--threads-per-worker", "1")
    with Cluster("--model", str(model), "--served-model-name", "m", "--prefill", "2", *options) as cluster:

        def tokens(prompt: list[Part]) -> list[int]:
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body_of(prompt, NUM_NEW), timeout=TIMEOUT_S)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        def counted() -> dict[str, tuple[int, int]]:
            """Returns (encoded here, found in the cache) of each prefill worker."""
            reports = [report for report in cluster.status().workers if report.worker.role == "prefill"]
            return {r.worker.worker_id: (r.load.num_media_encoded, r.load.num_media_found) for r in reports}

        def num_items() -> int:
            endpoint = f"ipc://{runtime_dir(cluster.port)}/media-cache.sock"
            return ask_cache(endpoint, MediaCacheClient.status).num_items

        assert tokens(first) == expected[0]
        Cluster.wait_for(lambda: sorted(counted().values()) == [(0, 0), (3, 0)], TIMEOUT_S)
        Cluster.wait_for(lambda: num_items() == 6, TIMEOUT_S)  # three processor outputs, three embeddings
        [encoder] = [worker_id for worker_id, counts in counted().items() if counts == (3, 0)]
        [other] = counted().keys() - {encoder}
        drained = cluster.run("drain", encoder)
        assert drained.returncode == 0, drained.stderr
        Cluster.wait_for(lambda: counted() == {other: (0, 0)}, TIMEOUT_S)
        assert tokens(second) == expected[1]
        Cluster.wait_for(lambda: counted() == {other: (0, 3)}, TIMEOUT_S)
        address = cluster.worker(other).worker.metrics_address
        assert "tandem_worker_media_found_total 3.0" in httpx.get(f"http://{address}/metrics", timeout=TIMEOUT_S).text
        Cluster.wait_for(cluster.all_blocks_free, TIMEOUT_S)
