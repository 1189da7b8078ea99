"""A proxy, a prefill and a decode worker on three hosts (namespaces): `auto` takes the connector for it.

The hosts share neither a network nor memory nor process ids.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.protocol.network_keys import make_keys
from tests.support.cluster import MODEL, Cluster, joined
from tests.support.faulty_network import FaultyNetwork, unavailable_reason
from tests.support.faulty_switch import Fault
from tests.support.nixl import nixl_environment
from tests.support.noise_model import ensure_noise_model
from tests.support.steady_load import TIMEOUT_S, SteadyLoad

PROXY, PREFILL, DECODE = range(3)
CONTROL_PORT = 7777
FLAGS = (
    "--model", str(ensure_noise_model()), "--served-model-name", MODEL, "--kv-cache-gib", "0.02", "--dtype", "float32",
    "--device", "cpu", "--threads-per-worker", "1", "--max-num-batched-tokens", "64", "--worker-wait-s", "80",
)  # fmt: skip
_SKIP_REASON = unavailable_reason()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("connector", [pytest.param("tcp", marks=pytest.mark.exhaustive), "nixl"])
def test_auto_takes_it_and_recovers_from_a_cut_link(connector: str, tmp_path: Path) -> None:
    """`tcp` encrypts, so a cluster with keys takes it; `nixl` is preferred where it is installed and there are none."""
    if _SKIP_REASON:
        pytest.skip(_SKIP_REASON)
    network_flags: tuple[str, ...] = ("--insecure-network",)
    env = {"TANDEM_KV_CHECKSUMS": "1"} | (nixl_environment() if connector == "nixl" else {})
    if connector == "tcp":
        make_keys(tmp_path / "keys")
        network_flags = ("--network-keys", str(tmp_path / "keys"))
    flags = (*FLAGS, *network_flags)
    with ExitStack() as stack:
        network = stack.enter_context(FaultyNetwork(3))
        for host, role in ((PREFILL, "prefill"), (DECODE, "decode")):
            join = ("--join", f"tcp://{network.address(PROXY)}:{CONTROL_PORT}", "--cluster-host", network.address(host))
            arguments = (role, *join, "--name", f"{os.getpid()}-{host}", *flags)
            stack.enter_context(joined(arguments, env, within=network.command_apart(host, [])))
        here = ("--cluster-host", network.address(PROXY), "--cluster-port", str(CONTROL_PORT))
        cluster = Cluster("--prefill", "0", "--decode", "0", *here, *flags, env=env)
        stack.enter_context(network.on_host(PROXY))
        stack.enter_context(cluster)

        def states() -> list[tuple[str, str]]:
            return [(p.connector, p.state) for report in cluster.status().workers for p in report.pairs]

        def is_ready() -> bool:
            return states() == [(connector, "ready")]

        cluster.wait_for(is_ready, 120)
        load = SteadyLoad(cluster)
        with load.running():
            load.serve(4)
            network.set_faults(Fault(PREFILL, DECODE, loss=1))
            cluster.wait_for(lambda: not is_ready(), TIMEOUT_S)
            network.set_faults()
            cluster.wait_for(is_ready, TIMEOUT_S)
            load.serve(8)
        cluster.wait_for(cluster.all_blocks_free, TIMEOUT_S)
        loads = [report.load for report in cluster.status().workers]
        assert sum(each.num_compared_blocks for each in loads) > 0
        assert not any(each.num_corrupt_blocks for each in loads)
