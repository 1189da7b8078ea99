"""An authenticated cluster over five hosts (network namespaces), whose network delays, drops and cuts packets.

Clients send requests throughout; every answer must equal that of an undisturbed network. After each fault every pair
must be ready and every block free. The control path is ZeroMQ, the data path `tcp`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from tandem.protocol.messages.membership import WorkerReport
from tandem.protocol.network_keys import make_keys
from tests.support.cluster import MODEL, Cluster, joined, tandem
from tests.support.faulty_network import FaultyNetwork, unavailable_reason
from tests.support.faulty_switch import Fault
from tests.support.noise_model import ensure_noise_model
from tests.support.steady_load import TIMEOUT_S, SteadyLoad

PROXY, PREFILL_A, PREFILL_B, DECODE_A, DECODE_B = range(5)
ROLES = {PREFILL_A: "prefill", PREFILL_B: "prefill", DECODE_A: "decode", DECODE_B: "decode"}
CONTROL_PORT = 7777
MODEL_FLAGS = ("--model", str(ensure_noise_model()), "--served-model-name", MODEL)
SMALL = ("--kv-cache-gib", "0.02", "--dtype", "float32", "--device", "cpu", "--threads-per-worker", "1")
PATHS = ("--kv-connector", "tcp", "--max-num-batched-tokens", "64", "--worker-wait-s", "80")
_SKIP_REASON = unavailable_reason()


class Site:
    """The cluster, its network and its load."""

    def __init__(self, cluster: Cluster, network: FaultyNetwork, keys: Sequence[str]) -> None:
        self.cluster, self.network, self.keys = cluster, network, keys
        self.load = SteadyLoad(cluster)
        workers = cluster.status().workers
        ports = [int(report.worker.endpoint.rpartition(":")[2]) for report in workers]
        self.control_ports = [CONTROL_PORT, *ports]

    def worker(self, host: int) -> WorkerReport | None:
        address = f"tcp://{self.network.address(host)}:"
        found = [r for r in self.cluster.status().workers if r.worker.endpoint.startswith(address)]
        return found[0] if found else None

    def pair_state(self, prefill: int, decode: int) -> str:
        report, peer = self.worker(prefill), self.worker(decode)
        states = [p.state for p in report.pairs if p.decode_epoch == peer.worker.epoch] if report and peer else []
        return states[0] if states else ""

    def has_all_pairs(self) -> bool:
        report = self.cluster.status()
        num_pairs = sum(pair.state == "ready" for worker in report.workers for pair in worker.pairs)
        return len(report.workers) == 4 and num_pairs == 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if _SKIP_REASON:
        pytest.skip(_SKIP_REASON)
    folder = tmp_path_factory.mktemp("network")
    make_keys(folder / "keys")
    keys = ("--network-keys", str(folder / "keys"))
    with ExitStack() as stack:
        network = stack.enter_context(FaultyNetwork(5))
        for host, role in ROLES.items():
            arguments = joining(network, role, network.address(host), host, *keys)
            stack.enter_context(joined(arguments, within=network.command(host, [])))
        here = ("--cluster-host", network.address(PROXY), "--cluster-port", str(CONTROL_PORT), *keys)
        cluster = Cluster(*MODEL_FLAGS, "--prefill", "0", "--decode", "0", *here, *SMALL, *PATHS)
        stack.enter_context(network.on_host(PROXY))
        stack.enter_context(cluster)
        cluster.wait_for(lambda: sum(len(report.pairs) for report in cluster.status().workers) == 4, 240)
        site = Site(cluster, network, keys)
        cluster.wait_for(site.has_all_pairs, 60)
        yield site


def joining(network: FaultyNetwork, role: str, address: str, name: object, *flags: str) -> tuple[str, ...]:
    """Returns the arguments of `tandem worker`. address: that the worker gives for itself."""
    join = ("--join", f"tcp://{network.address(PROXY)}:{CONTROL_PORT}", "--cluster-host", address)
    return (role, *MODEL_FLAGS, *join, "--name", f"{os.getpid()}-{name}", *flags, *SMALL, *PATHS)


@pytest.fixture(autouse=True)
def recovers(site: Site) -> Iterator[None]:
    yield
    site.network.set_faults()
    site.cluster.wait_for(lambda: site.has_all_pairs() and site.cluster.all_blocks_free(), TIMEOUT_S)


@pytest.mark.timeout(400)
def test_loss_only_slows_requests_down(site: Site) -> None:
    """Every link is bad. No worker and no pair is given up."""
    epochs = {report.worker.epoch for report in site.cluster.status().workers}
    with site.load.running():
        site.network.set_faults(*(Fault(host, loss=0.05) for host in ROLES))
        site.load.serve(16)
        assert site.network.set_faults() > 0
    assert {report.worker.epoch for report in site.cluster.status().workers} == epochs


@pytest.mark.timeout(400)
def test_worker_rejoins_after_its_host_was_cut_off(site: Site) -> None:
    """Its requests migrate to the other worker of its role; it is the same process when it rejoins."""
    host = DECODE_A
    before = site.worker(host)
    assert before is not None
    with site.load.running():
        site.load.serve(4)
        site.network.set_faults(Fault(host, loss=1))
        site.cluster.wait_for(lambda: site.worker(host) is None, TIMEOUT_S)
        site.load.serve(12)
        site.network.set_faults()
        site.cluster.wait_for(lambda: site.worker(host) is not None, TIMEOUT_S)
        site.cluster.wait_for(site.has_all_pairs, TIMEOUT_S)
        site.load.serve(8)
    after = site.worker(host)
    assert after is not None and after.worker == before.worker


@pytest.mark.timeout(400)
def test_a_worker_that_proxies_cannot_reach_gets_no_requests(site: Site) -> None:
    """It gives an address that leads nowhere on the proxy's host. Its reports arrive, and it has pairs."""
    command = tandem("worker", *joining(site.network, "prefill", "127.0.0.1", "unreached", *site.keys))
    seen: list[WorkerReport] = []
    with site.load.running():
        process = subprocess.Popen(
            site.network.command(PREFILL_B, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

        def has_ended() -> bool:
            workers = site.cluster.status().workers
            seen.extend(each for each in workers if each.worker.worker_id == f"prefill-0-{os.getpid()}-unreached")
            return process.poll() is not None

        try:
            site.cluster.wait_for(has_ended, 2 * TIMEOUT_S)
        finally:
            process.terminate()
            output, _ = process.communicate(timeout=60)
        site.load.serve(4)
    assert process.returncode == 2 and "no answer from it at tcp://127.0.0.1:" in output, output
    assert any(sum(pair.state == "ready" for pair in each.pairs) == 2 for each in seen)
    for each in seen:
        assert each.unanswered_s is not None and not each.num_ready_pairs and not each.load.num_prompt_tokens


@pytest.mark.timeout(400)
def test_pair_is_lost_while_its_data_path_is_cut(site: Site) -> None:
    """The pair is used again when the link is back. All workers and the other pairs stay."""
    epochs = {report.worker.epoch for report in site.cluster.status().workers}
    with site.load.running():
        site.load.serve(4)
        site.network.set_faults(Fault(PREFILL_A, DECODE_A, loss=1, other_ports=site.control_ports))
        site.cluster.wait_for(lambda: site.pair_state(PREFILL_A, DECODE_A) != "ready", TIMEOUT_S)
        for prefill, decode in ((PREFILL_A, DECODE_B), (PREFILL_B, DECODE_A), (PREFILL_B, DECODE_B)):
            assert site.pair_state(prefill, decode) == "ready"
        site.load.serve(8)
        site.network.set_faults()
        site.cluster.wait_for(site.has_all_pairs, TIMEOUT_S)
        site.load.serve(8)
    assert {report.worker.epoch for report in site.cluster.status().workers} == epochs
