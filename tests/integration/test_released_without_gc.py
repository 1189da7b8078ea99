"""Processes release descriptors, shared memory, leases and blocks explicitly, however a request ends.

The cluster's processes run with Python's garbage collector disabled, so nothing depends on when it would have run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.media_cache.media_client import MediaCacheClient
from tests.faults.leaks import Footprint, shared_memory
from tests.support.cluster import Cluster
from tests.support.media_proxy import ask_cache, data_url, image_part, video_part
from tests.support.processes import descendants
from tests.support.vision_model import encoded, picture, save_model

REPOSITORY = Path(__file__).parents[2]
WITHOUT_GC = REPOSITORY / "tests" / "without_gc"
TIMEOUT_S = 240.0
OPTIONS = (
    "--served-model-name", "m", "--prefill", "1", "--decode", "1", "--dtype", "float32", "--threads-per-worker", "1",
    "--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--block-size", "16", "--kv-cache-gib", "0.02",
    "--media-cache-mib", "64", "--decode-prefill-threshold", "40",
)  # fmt: skip


class OpenRequests:
    """Sends requests of all kinds, with new prompts and images each time."""

    def __init__(self, cluster: Cluster, http: httpx.Client) -> None:
        self._cluster = cluster
        self._http = http
        self._rng = random.Random(0)

    def tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(number)]

    def image(self, cut_by: int = 0) -> dict[str, Any]:
        data = encoded(picture(200, 200, seed=self._rng.randrange(1 << 30)))
        return image_part(data_url(data[: len(data) - cut_by]))

    def completion(self, prompt: Any, **fields: Any) -> int:
        return self._http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, **fields}).status_code

    def chat(self, content: Any, **fields: Any) -> int:
        messages = [{"role": "user", "content": content}]
        answer = self._http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 5, **fields})
        return answer.status_code

    def served(self) -> None:
        assert self.completion(self.tokens(100)) == 200
        assert self.completion("hello", n=3, logprobs=3) == 200
        assert self.chat([self.image(), {"type": "text", "text": "what"}]) == 200

    def refused(self) -> None:
        assert self.completion(self.tokens(100_000)) == 400
        assert self.chat([self.image(cut_by=400)]) == 400
        assert self.chat([self.image(), self.image(cut_by=400)]) == 400
        assert self.chat([image_part("http://127.0.0.1:1/x")]) == 400
        assert self.chat([video_part(data_url(b"no", "video/mp4"))]) == 400

    def timed_out(self) -> None:
        assert self.completion(self.tokens(200), timeout=0.3, max_tokens=1500, ignore_eos=True) == 504
        assert self.chat([self.image(), self.image()], timeout=0.01) in (503, 504)  # 503: predicted to be late
        assert self.chat([self.image(), self.image()], timeout=0.3, max_tokens=1500, ignore_eos=True) in (503, 504)

    def aborted(self) -> None:
        """The client disconnects while images are read, computed or answered."""
        for timeout_s in (0.03, 0.15, 0.6):
            messages = [{"role": "user", "content": [self.image(), self.image()]}]
            body = {"messages": messages, "max_tokens": 1500, "ignore_eos": True}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{self._cluster.url}/v1/chat/completions", json=body, timeout=timeout_s)

    def with_a_killed_media_cache(self) -> None:
        """Requests in flight may fail. Later ones are served by the next media cache."""
        before = pid_of(self._cluster, "media-cache")
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(self.chat([self.image(), self.image()], max_tokens=200)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.15)
        os.kill(before, signal.SIGKILL)
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(answers) == 3 and set(answers) <= {200, 502, 503}, answers
        self._cluster.wait_for(lambda: pid_of(self._cluster, "media-cache") not in (0, before), TIMEOUT_S)
        self._cluster.wait_for(lambda: self.chat([self.image()]) == 200, TIMEOUT_S)

    def all(self) -> Iterator[Callable[[], None]]:
        yield from (self.served, self.refused, self.timed_out, self.aborted, self.with_a_killed_media_cache)


def pid_of(cluster: Cluster, name: str) -> int:
    """Returns 0 while the process is not running."""
    try:
        return int((runtime_dir(cluster.port) / f"{name}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def media_mappings(cluster: Cluster) -> Counter[int]:
    """Returns the number of media segments that each process has mapped. Mappings keep a deleted memfd alive."""
    counts: Counter[int] = Counter()
    for pid in descendants(pid_of(cluster, "launcher")):
        try:
            counts[pid] = Path(f"/proc/{pid}/maps").read_text().count("memfd:media")
        except OSError:
            continue
    return +counts


@pytest.mark.timeout(600)
def test_requests_of_all_kinds_leave_no_resources(tmp_path: Path) -> None:
    shared_before = shared_memory()
    env = {"PYTHONPATH": os.pathsep.join([str(WITHOUT_GC), os.environ.get("PYTHONPATH", ""), str(REPOSITORY)])}
    options = ("--model", str(save_model(tmp_path, 4)), *OPTIONS)
    with Cluster(*options, env=env) as cluster, httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S) as http:
        endpoint = f"ipc://{runtime_dir(cluster.port)}/media-cache.sock"

        def is_quiet() -> bool:
            status = ask_cache(endpoint, MediaCacheClient.status)
            return status.num_leases == 0 and status.pinned_bytes == 0 and cluster.all_blocks_free()

        def run() -> None:
            for kind in OpenRequests(cluster, http).all():
                kind()
            cluster.wait_for(is_quiet, TIMEOUT_S)
            ask_cache(endpoint, MediaCacheClient.clear)

        def leaks() -> list[str]:
            mapped = [f"process {pid} maps {count} media segments" for pid, count in media_mappings(cluster).items()]
            return mapped + Footprint.of(cluster, shared_before).leaked_since(before)

        run()  # opens everything that stays open: connections, threads, libraries
        before = Footprint.of(cluster, shared_before)
        run()
        deadline = time.monotonic() + 30.0
        while (left := leaks()) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not left
