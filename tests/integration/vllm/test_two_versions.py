"""Workers with two versions of vLLM in one cluster: they take each other's blocks, and one replaces the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from tandem.vllm_worker.versions import DEFAULT_VERSION, SUPPORTED_VERSIONS
from tests.support.cluster import Cluster, joined
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port
from tests.support.steady_load import SteadyLoad
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments
from tests.support.vllm_python import older_vllm_python, vllm_python

pytestmark = pytest.mark.timeout(600)

JOINED = "decode-0-new"
SIZE = ("--kv-cache-gib", "0.1")


@pytest.fixture(scope="module")
def port() -> int:
    """Port at which workers join."""
    return free_port()


@pytest.fixture(scope="module")
def cluster(port: int) -> Iterator[Cluster]:
    vllm_python()
    hosts = ("--cluster-host", "127.0.0.1", "--cluster-port", str(port), "--insecure-network")
    arguments = (*cluster_arguments(older_vllm_python()), "--prefill", "1", "--decode", "1", *SIZE, *hosts)
    with Cluster(*arguments, start_timeout_s=START_TIMEOUT_S) as running:
        yield running


def new_worker(port: int) -> AbstractContextManager[int]:
    """A launcher of another host, whose worker has the default version."""
    hosts = ("--join", f"tcp://127.0.0.1:{port}", "--cluster-host", "127.0.0.1", "--insecure-network")
    model = ("--model", str(ensure_noise_model()), "--name", "new")
    return joined(("decode", *model, *hosts, *SIZE, *cluster_arguments(vllm_python())))


def engines(cluster: Cluster) -> dict[str, str]:
    return {each.worker.worker_id: each.engine for each in cluster.status().workers}


def num_sent_bytes(cluster: Cluster, prefill: str, decode: str) -> int:
    return sum(each.num_bytes for each in cluster.worker(prefill).load.traffic if each.decode_worker_id == decode)


def drain(cluster: Cluster, worker_id: str) -> None:
    drained = cluster.run("drain", worker_id)
    assert f"{worker_id} has left" in drained.stdout, drained


def test_a_version_replaces_another_under_load(cluster: Cluster, port: int) -> None:
    """No request fails, and none has another token, whichever version computes its prompt and its answer."""
    load = SteadyLoad(cluster)
    old, new = f"vllm {SUPPORTED_VERSIONS[0]}", f"vllm {DEFAULT_VERSION}"
    with new_worker(port), load.running():
        cluster.wait_for(lambda: JOINED in engines(cluster), START_TIMEOUT_S)
        assert engines(cluster) == {"prefill-0": old, "decode-0": old, JOINED: new}
        assert not cluster.give_role("decode-0", "prefill")
        load.serve(6)
        cluster.wait_for(lambda: num_sent_bytes(cluster, "prefill-0", JOINED) > 0)

        assert not cluster.give_role("decode-0", "decode")
        assert not cluster.give_role(JOINED, "prefill")
        drain(cluster, "prefill-0")
        load.serve(6)
        cluster.wait_for(lambda: num_sent_bytes(cluster, JOINED, "decode-0") > 0)

        assert not cluster.give_role(JOINED, "any")
        drain(cluster, "decode-0")
        load.serve(6)
        assert engines(cluster) == {JOINED: new} and not load.num_reconnected
