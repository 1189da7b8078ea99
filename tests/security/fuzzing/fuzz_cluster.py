"""Fuzzes a real cluster: the ZeroMQ sockets of all its processes, with every message type, and the HTTP endpoint.

    python -m tests.security.fuzzing.fuzz_cluster [--inputs 100000] [--seed N] [--quick] [--json FILE]

After each round a real request must get the same response as before. At the end every process must still run, and no
block, request, descriptor or memory may have leaked. The seed determines the inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import uvloop
import zmq

from bench.support.report import Aim, Report, finish, new_parser
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.protocol.messages.dispatch import ToProxy, ToWorker
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    FromProxyControl,
    RegisterWorker,
    StatusReport,
    ToProxyControl,
    WorkerExited,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.operations import FromLauncher, GetPlan, ListProcesses, RestartProcess
from tandem.protocol.messages.transfer import ToDecodePeer, ToPrefillPeer
from tests.security.fuzzing.fuzz_cache import fuzz_cache
from tests.security.fuzzing.fuzz_connection import ConnectionFuzzer
from tests.security.fuzzing.fuzz_http import HttpFuzzer
from tests.security.fuzzing.fuzz_messages import MessageFuzzer, sender
from tests.security.fuzzing.fuzz_replay import ReplayingProxy
from tests.support.cluster import Cluster
from tests.support.processes import num_descriptors, process_memory
from tests.support.waiting import comes_true

MODEL = "tandem-demo"
_ROUND = 2000
_SETTLE_TIMEOUT_S = 120.0
_MAX_KEPT = 40
"""Descriptors that a process may have more than at the start: a worker has a socket for each of 32 cached grammars."""
MAX_PROXY_GROWTH_MIB = 64
MAX_WORKER_GROWTH_MIB = 1024
"""oneDNN keeps what it has compiled for each length of a prompt: about 1 MiB each, 800 MiB in all."""
_ALL = tuple(
    kind
    for union in (
        ToWorker,
        ToProxy,
        ToDecodePeer,
        ToPrefillPeer,
        ToProxyControl,
        FromProxyControl,
        FromLauncher,
    )
    for kind in get_args(union)
)
_NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


class Fuzz:
    """Sends invalid input to the cluster on `port`, which has one proxy, one prefill and one decode worker."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._folder = runtime_dir(port)
        self.inputs: Counter[str] = Counter()
        self.replay_outcomes: Counter[str] = Counter()
        self.http = HttpFuzzer(self._rng, port, MODEL)
        self._fuzzers = {
            "proxy-0": self._fuzzer(ToProxyControl),
            "prefill-0": self._fuzzer(ToWorker | ToDecodePeer),
            "decode-0": self._fuzzer(ToWorker | ToDecodePeer),
            # Without commands that the launcher would execute, such as a valid new number of workers.
            "launcher": self._fuzzer(GetPlan | ListProcesses | RestartProcess),
        }
        self._as_worker = self._fuzzer(ToProxy)
        self._as_decode = self._fuzzer(ToPrefillPeer)
        self._reference = self.ask()

    def _fuzzer(self, expected: Any) -> MessageFuzzer:
        types = get_args(expected)
        return MessageFuzzer(self._rng, types, tuple(kind for kind in _ALL if kind not in types))

    def ask(self) -> str:
        """Sends a valid greedy request and returns its text, which never changes."""
        body = {"model": MODEL, "prompt": "one two three", "max_tokens": 6, "temperature": 0}
        response = httpx.post(f"http://127.0.0.1:{self._port}/v1/completions", json=body, timeout=60)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])

    def status(self) -> StatusReport:
        return asyncio.run(ClusterClient(self._port).status())[0]

    def pids(self) -> dict[str, int]:
        """Returns the process ids of the workers and the proxy by name."""
        pids = {report.worker.worker_id: report.worker.pid for report in self.status().workers}
        launcher = int((self._folder / "launcher.pid").read_text())
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if b"proxy-0.json" in Path(f"/proc/{child}/cmdline").read_bytes():
                pids["proxy-0"] = int(child)
        return pids

    def settle(self) -> None:
        """Waits until only real workers are registered, nothing runs and all blocks are free; sends a request."""

        def is_quiet() -> bool:
            report = self.status()
            return (
                {each.worker.worker_id for each in report.workers} == {"prefill-0", "decode-0"}
                and report.ready
                and report.num_requests == 0
                and all(
                    each.load.num_free_blocks == each.load.num_blocks
                    and not each.load.num_running + each.load.num_waiting
                    for each in report.workers
                )
            )

        _wait_until(is_quiet)
        assert self.ask() == self._reference, "the response to a valid request has changed"

    def run(self, num_inputs: int) -> None:
        while self.inputs.total() < num_inputs:
            size = min(_ROUND, num_inputs - self.inputs.total())
            for name in self._fuzzers:
                self._to_router(name, size * (1 if name == "launcher" else 3) // 20)
            self._as_member(size * 3 // 20)
            self._replay(size // 20)
            self._bytes_to_sockets(max(1, size // 20))
            for _ in range(size if size < _ROUND // 10 else size // 4):  # a small last round is HTTP only
                self.http.send_one()
                self.inputs["http"] += 1
            self.settle()

    def _to_router(self, name: str, count: int) -> None:
        """Sends messages from one sender; 5 % have extra frames."""
        with sender(f"ipc://{self._folder}/{name}.sock") as send:
            for _ in range(count):
                kind, data = self._fuzzers[name].next()
                send([data] if self._rng.random() < 0.95 else [data, b"", data[:5]])
                self.inputs[f"{name} {kind}"] += 1

    def _as_member(self, count: int) -> None:
        """Registers as a decode worker and sends invalid messages to the proxy and the prefill worker that connect."""
        report = self.status()
        prompt_limits = (256, 300)
        with tempfile.TemporaryDirectory(prefix="fz") as folder:
            context = zmq.Context()
            router, control = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            for each in (router, control):
                each.setsockopt(zmq.LINGER, 2000)
            endpoint = f"ipc://{folder}/w.sock"
            router.bind(endpoint)
            control.connect(f"ipc://{self._folder}/proxy-0.sock")
            worker = WorkerInfo("fuzz-decode", os.urandom(4).hex(), "decode", endpoint, os.getpid())
            status = msgspec.msgpack.encode(WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad()))
            control.send(msgspec.msgpack.encode(RegisterWorker(PROTOCOL_VERSION, worker, *prompt_limits, "fuzz", 64)))
            proxy, prefill = f"{report.proxy_id}:0".encode(), b""
            sent, deadline, beat_at = 0, time.monotonic() + _SETTLE_TIMEOUT_S, 0.0
            while sent < count and time.monotonic() < deadline:
                if time.monotonic() > beat_at:
                    beat_at = time.monotonic() + 0.25
                    control.send(status)
                with contextlib.suppress(zmq.Again):
                    prefill = router.recv_multipart(zmq.NOBLOCK)[0]
                with contextlib.suppress(zmq.Again):
                    control.recv(zmq.NOBLOCK)
                to_prefill = self._rng.random() < 0.5
                kind, data = (self._as_decode if to_prefill else self._as_worker).next()
                try:
                    router.send_multipart([prefill if to_prefill else proxy, data], zmq.NOBLOCK)
                except zmq.ZMQError:  # not connected yet, or the peer has closed the pair
                    time.sleep(0.001)
                    continue
                sent += 1
                self.inputs[f"{'prefill-0 from its peer' if to_prefill else 'proxy-0 from a worker'} {kind}"] += 1
            assert sent == count, "no proxy or prefill worker connected to the registered worker"
            control.send(msgspec.msgpack.encode(WorkerExited(worker.worker_id, worker.pid)))
            router.close()
            control.close()
            context.term()

    def _replay(self, count: int) -> None:
        workers = {report.worker.role: report.worker for report in self.status().workers}
        proxy = ReplayingProxy(self._rng, workers["prefill"], workers["decode"])
        self.inputs["valid, replayed"] += proxy.run(count)
        self.replay_outcomes.update(proxy.outcomes)

    def _bytes_to_sockets(self, count: int) -> None:
        """Sends bytes that are not ZMTP, or stop in the middle of its handshake."""
        for _ in range(count):
            name = self._rng.choice(list(self._fuzzers))
            data = self._rng.randbytes(self._rng.randrange(1, 300))
            if self._rng.random() < 0.5:
                data = _NULL_GREETING[: self._rng.randrange(1, len(_NULL_GREETING) + 1)] + data[:50]
            with (
                socket.socket(socket.AF_UNIX) as connection,
                contextlib.suppress(BrokenPipeError, ConnectionResetError),
            ):
                connection.connect(f"{self._folder}/{name}.sock")
                connection.sendall(data)
            self.inputs[f"{name} bytes"] += 1


def refusals(urls: dict[str, str]) -> dict[str, int]:
    """Returns the refusal counters by process and labels. urls: of the metrics, by process."""
    found = {}
    for process, url in urls.items():
        text = httpx.get(url, headers={"Cache-Control": "no-cache"}, timeout=30).text
        for line in text.splitlines():
            if "refusals_total" in line and not line.startswith("#"):
                label, _, count = line.rpartition(" ")
                found[f"{process} {label}"] = int(float(count))
    return found


def _wait_until(condition: Callable[[], bool]) -> None:
    if not comes_true(condition, _SETTLE_TIMEOUT_S):
        raise SystemExit("the cluster did not become idle: resources are leaked or a worker is lost")


def run(port: int, admin_url: str, num_inputs: int, seed: int) -> dict[str, Any]:
    """Fuzzes a running cluster. Returns figures of inputs, refusals, descriptors and memory."""
    fuzz = Fuzz(port, seed)
    pids = fuzz.pids()
    fuzz.run(min(_ROUND, num_inputs) // 4)  # lets caches and buffers reach their size
    before = {name: (num_descriptors(pid), process_memory(pid).own_mib) for name, pid in pids.items()}
    started = time.monotonic()
    cache = fuzz_cache(random.Random(seed), num_inputs // 10)
    connections = ConnectionFuzzer(seed, port, MODEL, waits=False)
    uvloop.run(connections.run(0, num_inputs // 10))
    fuzz.run(num_inputs)
    took_s = time.monotonic() - started
    assert fuzz.pids() == pids, "a process ended and was restarted"
    # ZeroMQ keeps the connection of an incomplete handshake open for five seconds.
    _wait_until(lambda: all(num_descriptors(pid) <= before[name][0] + _MAX_KEPT for name, pid in pids.items()))
    return {
        "num_inputs": fuzz.inputs.total() + sum(cache["inputs"].values()) + connections.outcomes.total(),
        "media_cache": cache,
        "inputs": dict(sorted(fuzz.inputs.items())),
        "http_outcomes": dict(sorted(fuzz.http.outcomes.items())),
        "connection_outcomes": dict(sorted(connections.outcomes.items())),
        "replay_outcomes": dict(sorted(fuzz.replay_outcomes.items())),
        "internal_errors": fuzz.http.internal_errors,
        "refusals": refusals(
            {each.worker.worker_id: f"http://{each.worker.metrics_address}/metrics" for each in fuzz.status().workers}
            | {"proxy-0": f"{admin_url}/metrics"}
        ),
        "descriptors": {name: num_descriptors(pid) for name, pid in pids.items()},
        "memory_growth_mib": {
            name: round(process_memory(pid).own_mib - before[name][1], 1) for name, pid in pids.items()
        },
        "seconds": round(took_s, 1),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="number of inputs (default: 100000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    options = parser.parse_args()
    num_inputs = 2000 if options.quick else options.inputs
    with Cluster("--kv-cache-gib", "0.05", "--device", "cpu") as cluster:
        figures = run(cluster.port, cluster.admin_url, num_inputs, options.seed)
    growth = figures["memory_growth_mib"]
    of_workers = max(growth[name] for name in growth if name != "proxy-0")
    aims = [
        Aim.of("internal errors", len(figures["internal_errors"]), 0, "lower"),
        Aim.of("memory growth of the proxy, MiB", growth["proxy-0"], MAX_PROXY_GROWTH_MIB, "lower"),
        Aim.of("memory growth of a worker, MiB", of_workers, MAX_WORKER_GROWTH_MIB, "lower"),
    ]
    for name in ("http_outcomes", "replay_outcomes", "refusals", "memory_growth_mib"):
        print(name, figures[name])
    finish(Report.of("fuzz_cluster", figures, aims), options.json)


if __name__ == "__main__":
    main()
