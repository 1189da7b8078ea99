"""What encryption adds to TTFT between two hosts: a cluster with keys beside one without, on one simulated network.

    python -m bench.encrypted_network [--quick] [--json FILE]

A proxy and a decode worker are on one host, a prefill worker on the other, joined by a link of 10 Gbit/s (network
namespaces, veth, token buckets: see `tests.support.linked_hosts`; needs root). So prompts, first tokens and KV caches
cross the network: over CURVE and TLS, or in the clear (--insecure-network). Both clusters run at once and get the same
prompts in turn, one at a time. The time to the second token includes the transfer of the KV cache, 32 KiB per token.
The clusters and the link share the cores, so on few cores encryption weighs more than between real hosts.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.disaggregation import StreamClient, make_model
from bench.support.report import Aim, Report, add_common_options, finish
from bench.support.servers import MODEL, STOP_TIMEOUT_S, server, tandem
from tandem.protocol.network_keys import make_keys
from tests.support.linked_hosts import LinkedHosts
from tests.support.ports import free_port

RATE = "10gbit"
NUM_PROMPT_TOKENS = 1000
NUM_WARM_UP = 10
"""Requests that use every block of the pools once: the first use of a memory page costs more than the copy into it."""
NUM_ROUNDS = 60
MAX_RATIO = 1.05
CLUSTERS = ("encrypted", "clear")
FLAGS = (
    "--load-format", "dummy", "--dtype", "float32", "--kv-cache-gib", "0.1", "--kv-connector", "tcp",
    "--device", "cpu", "--threads-per-worker", "1",
)  # fmt: skip


@contextmanager
def prefill_worker(hosts: LinkedHosts, model: Path, name: str, port: int, security: tuple[str, ...]) -> Iterator[None]:
    """A worker on host 1, which joins the cluster on host 0 when that has started."""
    join = ("--join", f"tcp://{hosts.address(0)}:{port}", "--cluster-host", hosts.address(1), "--name", name)
    command = [sys.executable, "-m", "tandem.deploy.cli", "worker", "prefill", "--model", str(model), *join]
    command += ["--served-model-name", MODEL, *FLAGS, *security]
    process = subprocess.Popen(hosts.command(1, command), start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def cluster(hosts: LinkedHosts, model: Path, name: str, security: tuple[str, ...]) -> Iterator[StreamClient]:
    """Must be entered on host 0."""
    port, cluster_port = free_port(), free_port()
    flags = ("--prefill", "0", "--decode", "1", "--decode-prefill-threshold", "0", *FLAGS, *security)
    here = ("--cluster-host", hosts.address(0), "--cluster-port", str(cluster_port))
    with (
        prefill_worker(hosts, model, f"{name}-{os.getpid()}", cluster_port, security),
        server(tandem(model, port, *flags, *here), port),
    ):
        yield StreamClient(f"http://127.0.0.1:{port}")


def measure(hosts: LinkedHosts, folder: Path, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns, for each cluster, the seconds to the first and to the second token of each request."""
    make_model(folder / "model")
    make_keys(folder / "keys")
    security = {"encrypted": ("--network-keys", str(folder / "keys")), "clear": ("--insecure-network",)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CLUSTERS}
    with ExitStack() as stack:
        stack.enter_context(hosts.on_host(0))
        clients = {
            name: stack.enter_context(cluster(hosts, folder / "model", name, security[name])) for name in CLUSTERS
        }
        for client in clients.values():
            for _ in range(NUM_WARM_UP):
                client.stream(NUM_PROMPT_TOKENS, 2)
        for index in range(num_rounds):
            for name in CLUSTERS if index % 2 else reversed(CLUSTERS):
                first, second = clients[name].stream(NUM_PROMPT_TOKENS, 2)
                times[name].append((first, second))
    return times


def summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Returns milliseconds and ratios by figure: mean and p50 of TTFT and of the time to the second token."""
    figures: dict[str, dict[str, float]] = {}
    for position, token in enumerate(("TTFT", "second token")):
        for kind, average in (("mean", statistics.fmean), ("p50", statistics.median)):
            ms = {name: 1000 * average(each[position] for each in times[name]) for name in CLUSTERS}
            figures[f"{token}, {kind}"] = ms | {"ratio": ms["encrypted"] / ms["clear"]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.encrypted_network", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_common_options(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the clusters
    with LinkedHosts(RATE) as hosts, tempfile.TemporaryDirectory() as folder:
        gbit_per_s = hosts.gbit_per_s(1 << 30)
        times = measure(hosts, Path(folder), 5 if options.quick else NUM_ROUNDS)
    figures = summary(times)
    table = Table("prompt of 1,000 tokens", "encrypted ms", "clear ms", "ratio")
    for name, of in figures.items():
        table.add_row(name, f"{of['encrypted']:.1f}", f"{of['clear']:.1f}", f"{of['ratio']:.3f}")
    Console().print(table)
    print(f"one plain socket: {gbit_per_s:.1f} Gbit/s of {RATE}")
    aims = [
        Aim.of(f"{name}: encrypted / clear", of["ratio"], MAX_RATIO, "lower")
        for name, of in figures.items()
        if name.startswith("TTFT")
    ]
    finish(Report.of("encrypted_network", {"latency": figures, "socket_gbit_per_s": gbit_per_s}, aims), options.json)


if __name__ == "__main__":
    main()
