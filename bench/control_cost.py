"""CPU time of a worker's report and of the proxies' answers to it, by the size of the cluster.

    python -m bench.control_cost [--quick] [--json FILE]

The control socket of one proxy and the registration of one worker, with encoding and decoding, and without sockets.
Each figure is the least of 30 measurements of the thread's CPU time; those of registrations are means, without the
encoding of their announcements.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from bench.support.report import Report, add_common_options, finish
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PrefixUpdate,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.refusals import Refusals
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.control import Control
from tandem.proxy.proxy_config import ProxyConfig
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.worker.registration import Registration

SIZES = ((8, 1), (64, 4), (256, 8), (1000, 32))
"""Numbers of workers and of proxies."""


class _Socket:
    """A router or dealer that encodes what is sent, as the network's do, and keeps it."""

    def __init__(self, endpoint: str, codec: Codec[Any], on_message: Callable[..., None], *_: Any, **__: Any) -> None:
        self.endpoint, self.codec, self.on_message = endpoint, codec, on_message
        self.sent: list[bytes] = []
        self.is_recording = False

    def send(self, *message: Any) -> bool:
        """Takes a message, of a router behind the identity of its receiver."""
        if self.is_recording:
            self.sent.append(self.codec.encode(message[-1]))
        return True

    def close(self, **_: Any) -> None:
        pass


def _info(number: int) -> WorkerInfo:
    name = f"decode-{number}"
    return WorkerInfo(
        name, f"{number:016x}", "decode", f"tcp://10.0.{number // 250}.{number % 250}:50123", 1000 + number
    )


async def message_costs(num_workers: int, num_proxies: int) -> dict[str, float]:
    """Returns microseconds of CPU time for one report, in one proxy and in one worker of a cluster of this size.

    The control socket of one proxy and the registration of one worker without their sockets. The report has no pairs.
    """
    nothing: Any = SimpleNamespace(
        open=lambda *_: None,
        send=lambda *_: True,
        close=lambda *_, **__: None,
        on_message=None,
        on_worker_lost=lambda *_: None,
        on_cluster_changed=lambda: None,
    )
    sockets: list[_Socket] = []

    def new_socket(*arguments: Any, **options: Any) -> _Socket:
        sockets.append(_Socket(*arguments, **options))
        return sockets[-1]

    network: Any = SimpleNamespace(refusals=Refusals(None), router=new_socket, dealer=new_socket)
    state: Any = SimpleNamespace(
        worker_table=WorkerTable(1e9), dispatcher=nothing, metrics=ProxyMetrics(), readiness=nothing
    )  # fmt: skip
    control = Control(network, ProxyConfig("proxy-0", "ipc://proxy", "m", "m"), "proxy-0", state, nothing)
    [proxy] = sockets
    registers = [
        RegisterWorker(PROTOCOL_VERSION, _info(number), 4096, 50_000, "m", 64) for number in range(num_workers)
    ]
    registering_s = 0.0
    for register in registers:
        if register is registers[-1]:
            await asyncio.sleep(1.0)  # what has changed is announced
            proxy.is_recording = True
        started = time.thread_time()
        proxy.on_message(register.worker.worker_id.encode(), register)
        registering_s += time.thread_time() - started
        await asyncio.sleep(0)
    await asyncio.sleep(1.0)
    if len(state.worker_table.workers()) != num_workers:
        raise SystemExit("error: the proxy does not know all workers")
    views = [proxy.sent[0], proxy.sent[-1]]

    info = registers[-1].worker
    load = WorkerLoad(num_running=3, num_blocks=1000, num_free_blocks=500, waiting_tokens=[(0, 900)], step_time_s=0.02)
    status = WorkerStatus(info.worker_id, info.epoch, info.role, load, prefixes=PrefixUpdate(1, True, b"", b""))
    encoded, proxy.sent = proxy.codec.encode(status), []
    report_us = _us(lambda: proxy.on_message(b"worker", proxy.codec.decode(encoded)))
    answer = proxy.sent[-1]

    sockets.clear()
    registration = Registration(
        network, [f"ipc://proxy-{number}" for number in range(num_proxies)], registers[-1], lambda: status,
        lambda view: None, lambda proxy_id: None, lambda: None, lambda: None, lambda role: None,
        lambda: None,
    )  # fmt: skip
    for _ in range(2):
        for number, socket in enumerate(sockets):
            for view in [*views, answer]:
                message = socket.codec.decode(view)
                socket.on_message(msgspec.structs.replace(message, proxy_id=f"proxy-{number}"))
            socket.is_recording = True
        await asyncio.sleep(2.1)  # until the proxies count as settled
    answers = [socket.codec.encode(msgspec.structs.replace(socket.codec.decode(answer), proxy_id=f"proxy-{number}"))
               for number, socket in enumerate(sockets)]  # fmt: skip

    def take_answers() -> None:
        for socket, each in zip(sockets, answers, strict=True):
            socket.on_message(socket.codec.decode(each))

    costs = {
        "workers": num_workers,
        "proxies": num_proxies,
        "proxy_us_per_report": report_us,
        "worker_us_per_report": _us(lambda: registration.send_to_all(status)),
        "worker_us_per_answers_of_all_proxies": _us(take_answers),
        "answer_bytes": len(answer),
        "proxy_us_per_registration": round(1e6 * registering_s / num_workers, 1),
    }
    registration.close()
    control.close()
    return costs


def _us(call: Callable[[], object], num_calls: int = 30) -> float:
    """Returns the least CPU time of a call in microseconds."""
    times = []
    for _ in range(num_calls):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return round(1e6 * min(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.control_cost", description=__doc__)
    add_common_options(parser)
    arguments = parser.parse_args()
    rows = []
    for num_workers, num_proxies in SIZES[:2] if arguments.quick else SIZES:
        rows.append(asyncio.run(message_costs(num_workers, num_proxies)))
        print(json.dumps(rows[-1]), flush=True)
    finish(Report.of("control_cost", {"rows": rows}), arguments.json)


if __name__ == "__main__":
    main()
