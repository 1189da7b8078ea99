"""No process of a cluster makes garbage that only the collector finds, whatever its requests are and however they end.

Such garbage waits for a full collection, which is seldom, and stops a proxy's loop; with it wait images, descriptors,
and blocks of memory that count as in use.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.faults.streams import descendants
from tests.support.cluster import Cluster
from tests.support.media_proxy import data_url, image_part, video_part
from tests.support.vision_model import encoded, picture, save_model

REPOSITORY = Path(__file__).parents[2]
PROBE = REPOSITORY / "tests" / "garbage_probe"
TIMEOUT_S = 240.0
OPTIONS = (
    "--served-model-name", "m", "--prefill", "2", "--decode", "2", "--dtype", "float32", "--threads-per-worker", "1",
    "--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--block-size", "16", "--kv-cache-gib", "0.02",
    "--media-cache-mib", "64", "--decode-prefill-threshold", "40",
)  # fmt: skip


class Requests:
    """Of many kinds; all prompts and images are new."""

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

    def streamed(self, num_events: int, **fields: Any) -> None:
        """Its client goes after so many events."""
        body = {"prompt": self.tokens(100), "max_tokens": 500, "ignore_eos": True, "stream": True, **fields}
        with httpx.stream("POST", f"{self._cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == num_events:
                    return

    def abandoned(self, timeout_s: float) -> None:
        """Its client goes while its images are read, or computed."""
        messages = [{"role": "user", "content": [self.image(), self.image()]}]
        body = {"messages": messages, "max_tokens": 1500, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{self._cluster.url}/v1/chat/completions", json=body, timeout=timeout_s)

    def at_once(self, *calls: Callable[[], object]) -> None:
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    # ---- kinds

    def served(self) -> None:
        assert self.completion(self.tokens(100)) == 200
        assert self.completion(self.tokens(10)) == 200
        assert self.completion("hello", n=3, logprobs=3) == 200
        assert self.completion(self.tokens(50), echo=True, logprobs=2) == 200
        assert self.chat("hello", response_format={"type": "json_object"}) == 200
        assert self.chat([self.image(), {"type": "text", "text": "what"}]) == 200
        for path in ("/health", "/v1/models", "/version"):
            assert self._http.get(path).status_code == 200
        assert self._http.post("/tokenize", json={"prompt": "hello"}).status_code == 200

    def refused(self) -> None:
        assert self.completion(self.tokens(100_000)) == 400
        assert self.completion("x", temperature=-1) == 400
        assert self.completion({}) == 400
        assert self._http.get("/nothing").status_code == 404
        assert self._http.post("/v1/completions", content=b"{").status_code == 400
        schema = {"name": "x", "schema": {"type": "nonsense"}}
        assert self.chat("x", response_format={"type": "json_schema", "json_schema": schema}) == 400
        assert self.chat([self.image(cut_by=400)]) == 400
        assert self.chat([self.image(cut_by=400), self.image(cut_by=400)]) == 400
        assert self.chat([image_part("http://127.0.0.1:1/x")]) == 400
        assert self.chat([video_part(data_url(b"no", "video/mp4"))]) == 400

    def late(self) -> None:
        assert self.completion(self.tokens(200), timeout=0.001) == 504
        assert self.completion(self.tokens(200), timeout=0.3, max_tokens=1500, ignore_eos=True) == 504
        assert self.chat([self.image(), self.image()], timeout=0.01) == 504
        assert self.chat([self.image(), self.image()], timeout=0.3, max_tokens=1500, ignore_eos=True) == 504

    def given_up(self) -> None:
        for num_events in (0, 4):
            self.streamed(num_events)
            self.streamed(num_events, n=2)
        for timeout_s in (0.03, 0.15):
            self.abandoned(timeout_s)

    def preempted(self) -> None:
        """More than there are blocks for."""
        self.at_once(
            *(lambda: self.completion(self.tokens(200), max_tokens=300, ignore_eos=True) for _ in range(10)),
        )

    def struck(self, name: str) -> None:
        """Who is killed while requests are under way, which go on with others."""
        told: list[int] = []

        def kill() -> None:
            time.sleep(0.25)
            os.kill(pid_of(self._cluster, name), signal.SIGKILL)

        def ask() -> None:
            told.append(self.completion(self.tokens(150), max_tokens=300, ignore_eos=True))

        def show() -> None:
            told.append(self.chat([self.image(), self.image()], max_tokens=300, ignore_eos=True))

        before = pid_of(self._cluster, name)
        self.at_once(ask, show, ask, show, kill)
        assert told == [200] * 4
        self._cluster.wait_for(lambda: pid_of(self._cluster, name) not in (0, before), TIMEOUT_S)
        self._cluster.wait_for(lambda: len(self._cluster.ready_pairs()) == 4, TIMEOUT_S)


def pid_of(cluster: Cluster, name: str) -> int:
    """0 while it has none."""
    try:
        return int((runtime_dir(cluster.port) / f"{name}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return 0


class Probe:
    """Of all processes of the cluster that have Python, and were there at the beginning."""

    def __init__(self, cluster: Cluster, reports: Path) -> None:
        self._reports = reports
        launcher = pid_of(cluster, "launcher")
        self._pids = [pid for pid in descendants(launcher) if _listens(pid)]
        for pid in self._pids:
            os.kill(pid, signal.SIGUSR1)

    def found(self) -> Iterator[tuple[str, list[str]]]:
        """(command, what it would have left to the collector) of each that is still there."""
        alive = [pid for pid in self._pids if _listens(pid)]
        for pid in alive:
            os.kill(pid, signal.SIGUSR2)
        for pid in alive:
            file = self._reports / f"{pid}.json"
            Cluster.wait_for(file.exists, TIMEOUT_S)
            report = json.loads(file.read_bytes())
            yield " ".join(report["argv"][:2]), [" ".join(each) for each in report["found"]]


def _listens(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("connector", ["auto", "gloo"])
def test_requests_leave_no_garbage(connector: str, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    env = {"GARBAGE_REPORTS": str(reports), "PYTHONPATH": os.pathsep.join([str(PROBE), str(REPOSITORY)])}
    options = ("--model", str(save_model(tmp_path, 4)), "--kv-connector", connector, *OPTIONS)
    with Cluster(*options, env=env) as cluster, httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S) as http:
        requests = Requests(cluster, http)
        kinds = [requests.served, requests.refused, requests.late, requests.given_up, requests.preempted]
        for kind in kinds:  # whatever is made once
            kind()
        cluster.wait_for(cluster.all_blocks_free, TIMEOUT_S)
        probe = Probe(cluster, reports)
        for kind in kinds:
            kind()
        for name in ("decode-0", "prefill-0", "media-cache"):
            requests.struck(name)
        cluster.wait_for(cluster.all_blocks_free, TIMEOUT_S)
        found = list(probe.found())
    assert len(found) >= 4, f"of a proxy, its media process and two workers there are {found}"
    assert not [(command, garbage) for command, garbage in found if garbage]
