"""Workers of a second launcher join over TCP with keys; KV caches move by `tcp` with TLS."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import httpx
import pytest

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.protocol.messages.membership import StatusReport
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import make_keys
from tandem.runtime.errors import Overloaded
from tests.support.cluster import NOW, Cluster, children_of, command_line, is_copy, joined
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port

SMALL = ("--kv-cache-gib", "0.05", "--kv-connector", "tcp", "--device", "cpu")
QUESTION = {"model": "tandem-demo", "prompt": "one two three four", "max_tokens": 8, "temperature": 0}


def fetch(endpoint: str, network: NetworkConfig) -> StatusReport:
    return asyncio.run(ClusterClient(0, [endpoint], network).status())[0]


def sockets_and_pipes(pid: int) -> set[str]:
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    found = {link for link in links if link.startswith(("socket:", "pipe:"))}
    assert found
    return found


def test_a_decode_worker_joins_with_keys(tmp_path: Path) -> None:
    """The cluster has no decode worker of its own, so every answer comes from the joined one."""
    keys = tmp_path / "keys"
    make_keys(keys)
    for_worker = tmp_path / "of-the-other-host"
    for_worker.mkdir(mode=0o700)
    for name in ("proxy.key", "worker.key", "operator.key", "worker.key_secret"):
        (for_worker / name).write_bytes((keys / name).read_bytes())
        (for_worker / name).chmod(0o600)
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    cluster_flags = ("--cluster-host", "127.0.0.1", "--cluster-port", str(port), "--network-keys", str(keys))
    join_flags = ("--cluster-host", "127.0.0.1", "--network-keys", str(for_worker), "--name", tmp_path.name)
    arguments = ("decode", "--model", str(ensure_noise_model()), "--join", endpoint, *join_flags, *SMALL)
    with joined(arguments) as launcher, Cluster("--decode", "0", *cluster_flags, *SMALL) as cluster:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=QUESTION, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        report = fetch(endpoint, NetworkConfig(str(keys)))
        (pair,) = [pair for worker in report.workers for pair in worker.pairs]
        assert (pair.state, pair.connector) == ("ready", "tcp")
        assert all(each.worker.endpoint.startswith("tcp://127.0.0.1:") for each in report.workers)
        assert {each.worker.worker_id for each in report.workers} == {"prefill-0", f"decode-0-{tmp_path.name}"}
        worker = next(each.worker.pid for each in report.workers if each.worker.role == "decode")
        assert worker in children_of(launcher)
        (preloaded,) = [pid for pid in children_of(launcher) if "tandem.worker.preload" in command_line(pid)]
        assert is_copy(worker, preloaded), "the worker is forked"
        assert not sockets_and_pipes(worker) & (sockets_and_pipes(launcher) | sockets_and_pipes(preloaded))
        soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        assert soft == hard, "the worker takes all descriptors that it may have"
        assert resource.prlimit(worker, resource.RLIMIT_CORE) == resource.prlimit(launcher, resource.RLIMIT_CORE)
        with pytest.raises(Overloaded, match="did not answer"):
            fetch(endpoint, NetworkConfig(insecure=True))
        metrics = httpx.get(f"{cluster.admin_url}/metrics", headers=NOW).text
        assert 'tandem_refusals_total{reason="bad_handshake"} ' in metrics
