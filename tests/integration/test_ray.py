"""`tandem up --ray` as a job on a real Ray cluster of three nodes on this host: serving, loss of a node, scaling.

Its model takes images. Traffic between its processes is protected by keys, which only the job reads from files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.protocol.messages.membership import StatusReport
from tandem.protocol.network_keys import make_keys
from tandem.runtime.errors import TandemError
from tests.support.cluster import Cluster, is_alive, run_tandem, tandem
from tests.support.media_proxy import data_url, image_part
from tests.support.ports import free_port
from tests.support.vision_model import encoded, picture, save_model

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("default"),
]

LIMIT_S = 240.0
CONFIG = Path(__file__).parents[2] / "deploy/ray/cluster.toml"
HEAD = "127.0.0.4"
"""Not 127.0.0.1, which Ray treats as local."""
NODES = ("127.0.0.2", "127.0.0.3")
"""A loopback address for each node, which its workers report."""


def ray_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for limit, value in (("raylet_start_wait_time_s", "300"), ("agent_register_timeout_ms", "300000")):
        monkeypatch.setenv(f"RAY_{limit}", value)  # Ray's default is too short for a busy machine


def node_options() -> dict[str, Any]:
    """Options of a small node. Fixed agent ports avoid a start-up time-out of raylets on a busy machine."""
    ports = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
    return {"object_store_memory": 80 << 20, **{name: free_port() for name in ports}}


@contextmanager
def ray_cluster() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the job address, and a function that removes a worker node by its address. Proxies run on the head."""
    cluster = pytest.importorskip(
        "ray.cluster_utils"
    ).Cluster()  # imported here, because it reads the environment on import
    try:
        where = {"include_dashboard": True, "dashboard_host": HEAD, "dashboard_port": free_port()}
        cluster.add_node(num_cpus=1, resources={"tandem_proxy": 1}, node_ip_address=HEAD, **where, **node_options())
        nodes = {
            host: cluster.add_node(num_cpus=3, node_ip_address=host, include_dashboard=False, **node_options())
            for host in NODES
        }
        yield (
            f"http://{HEAD}:{where['dashboard_port']}",
            {host: partial(cluster.remove_node, node, False) for host, node in nodes.items()},
        )
    finally:
        cluster.shutdown()


def job(dashboard: str, command: str, *arguments: str) -> str:
    """Returns the output of `ray job COMMAND`."""
    ray = str(Path(sys.executable).with_name("ray"))
    done = subprocess.run(
        [ray, "job", command, "--address", dashboard, *arguments], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(port: int) -> StatusReport | None:
    try:
        return asyncio.run(ClusterClient(port).status())[0]
    except TandemError:
        return None


def workers(port: int) -> dict[str, tuple[str, int]]:
    """Returns the (address, pid) of each worker; empty until all pairs are ready."""
    report = status(port)
    if report is None or not all(pair.state == "ready" for worker in report.workers for pair in worker.pairs):
        return {}
    found = {w.worker.worker_id: (w.worker.endpoint, w.worker.pid) for w in report.workers}
    return found if report.ready else {}


def is_elsewhere(found: dict[str, tuple[str, int]], host: str) -> bool:
    """Returns whether both workers serve and neither runs on this node."""
    return set(found) == {"prefill-0", "decode-0"} and not any(host in endpoint for endpoint, _ in found.values())


def answers(url: str, image: bytes) -> list[list[int]]:
    """Returns the token ids of a text prompt and of a prompt with the image."""
    fields = {"model": "m", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    parts = [image_part(data_url(image)), {"type": "text", "text": "what is it?"}]
    outputs = []
    for path, body in (
        ("completions", {"prompt": "Once upon a time"}),
        ("chat/completions", {"messages": [{"role": "user", "content": parts}]}),
    ):
        answer = httpx.post(f"{url}/v1/{path}", json=fields | body, headers=header("first"), timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        outputs.append(answer.json()["choices"][0]["token_ids"])
    return outputs


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def media_caches() -> list[int]:
    """Returns the media cache processes, whose configuration is not a file."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"tandem.media_cache" in words and words[-2].startswith(b"/proc/"):
            found.append(int(cmdline.parent.name))
    return found


def test_a_ray_cluster_serves_survives_a_lost_node_and_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray_environment(monkeypatch)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    keys = tmp_path / "keys"
    make_keys(keys)
    api_keys = tmp_path / "api-keys"
    api_keys.write_text("first\n")
    model = save_model(tmp_path / "vision")
    image = encoded(picture(seed=1))
    options = {
        "model": model, "served-model-name": "m", "dtype": "float32", "port": port, "network-keys": keys,
        "threads-per-worker": 1, "kv-cache-gib": 0.05, "decode-prefill-threshold": 0, "api-keys-file": api_keys,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()]
    with ray_cluster() as (dashboard, remove):
        up = tandem("up", "--ray", "auto", "--config", str(CONFIG), "--no-insecure-network", *flags)
        job(dashboard, "submit", "--no-wait", "--submission-id", "serve", "--", *up)
        try:
            Cluster.wait_for(lambda: set(workers(port)) == {"prefill-0", "decode-0"}, LIMIT_S)
            first = answers(url, image)
            for secret in keys.glob("*.key_secret"):
                if secret.stem != "operator":
                    secret.unlink()  # from here on, nodes cannot read the files
            [media_cache] = media_caches()
            os.kill(media_cache, signal.SIGKILL)
            assert answers(url, encoded(picture(seed=2))) != first  # processed for the next cache
            before = workers(port)
            endpoint, pid = before["decode-0"]
            host = endpoint.removeprefix("tcp://").rpartition(":")[0]
            assert host in NODES, "the worker reports its own node's address"

            remove[host]()
            Cluster.wait_for(lambda: is_elsewhere(workers(port), host), LIMIT_S)
            assert not is_alive(pid)
            assert answers(url, image) == first

            moved = run_tandem("restart", "--port", str(port), "--timeout-s", str(LIMIT_S), "prefill-0")
            assert moved.returncode == 0, moved.stderr
            assert answers(url, image) == first

            scaled = run_tandem("scale", "--port", str(port), "--timeout-s", str(LIMIT_S), "decode=2")
            assert (scaled.returncode, scaled.stdout) == (0, "prefill=1 decode=2\n"), scaled.stderr
            pids = [pid for _, pid in workers(port).values()] + media_caches()
            assert len(pids) == 4

            api_keys.write_text("second\n")  # the launcher copies it to the proxy's node
            models = partial(httpx.get, f"{url}/v1/models")
            Cluster.wait_for(lambda: models(headers=header("second")).status_code == 200, 30)
            assert models(headers=header("first")).status_code == 401

            job(dashboard, "stop", "serve")
            Cluster.wait_for(lambda: not any(is_alive(pid) for pid in pids), 30)
            Cluster.wait_for(lambda: not runtime_dir(port).exists(), 30)
            assert "Stopped." in job(dashboard, "logs", "serve"), "the job was stopped within its grace period"
        except BaseException:
            print(job(dashboard, "logs", "serve"))
            raise
