"""What the control socket does with messages, without the socket."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    ClusterView,
    FromProxyControl,
    PairStatus,
    PrefixUpdate,
    RegisterWorker,
    StatusReport,
    ToProxyControl,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.refusals import Refusals
from tandem.proxy.cluster.router import PromptShape
from tandem.proxy.config import ProxyConfig
from tandem.proxy.control import Control
from tests.support.clocked_loop import ClockedLoop
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster

TO_PROXY: Codec[ToProxyControl] = Codec(ToProxyControl)
FROM_PROXY: Codec[FromProxyControl] = Codec(FromProxyControl)


class FakeSocket:
    """Keeps what is sent, as the receiver decodes it."""

    endpoint = "ipc://control"

    def __init__(self, *_: Any) -> None:
        self.sent: list[FromProxyControl] = []

    def send(self, _: bytes, message: msgspec.Struct) -> bool:
        self.sent.append(FROM_PROXY.decode(FROM_PROXY.encode(message)))
        return True

    def close(self) -> None:
        pass


class Proxy:
    """The control socket of a proxy that knows one prefill and one decode worker."""

    def __init__(self) -> None:
        self.cluster = cluster = Cluster()
        self.refused: list[str] = []
        state: Any = SimpleNamespace(
            worker_table=cluster.worker_table,
            dispatcher=cluster.dispatcher,
            metrics=cluster.metrics,
            readiness=SimpleNamespace(on_cluster_changed=lambda: None),
        )
        network: Any = SimpleNamespace(refusals=Refusals(self.refused.append), router=FakeSocket)
        self.control = Control(network, ProxyConfig("proxy-0", "", "m", "m"), "proxy", state, cluster.pool)
        self.socket: Any = self.control._socket

    def receive(self, message: msgspec.Struct) -> FromProxyControl | None:
        """Returns the answer to a message that arrives as bytes."""
        self.socket.sent.clear()
        self.control._on_message(b"worker", TO_PROXY.decode(TO_PROXY.encode(message)))
        return self.socket.sent[-1] if self.socket.sent else None


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Returns any value of the type that fits into a message."""
    if kind is int:
        return st.integers(-(2**63), 2**64 - 1) | st.just(0)
    if kind is float:
        return st.floats() | st.sampled_from([0.0, -3e-18, 5e-324, 1e-9, 1e15, 1e308])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{field.name: anything(field.type) for field in msgspec.structs.fields(kind)})
    arguments = getattr(kind, "__args__", ())
    if getattr(kind, "__origin__", None) is list:
        return st.lists(anything(arguments[0]), max_size=3)
    if getattr(kind, "__origin__", None) is tuple:
        return st.tuples(*map(anything, arguments))
    return st.from_type(kind)


WORKERS = st.sampled_from([PREFILL, DECODE])
STATUSES = st.builds(
    lambda worker, load, pairs, prefixes, tier_prefixes: WorkerStatus(
        worker.worker_id, worker.epoch, worker.role, load, pairs, prefixes, tier_prefixes=tier_prefixes
    ),
    WORKERS,
    anything(WorkerLoad),
    st.lists(anything(PairStatus), max_size=2)
    | st.just([PairStatus(DECODE.worker_id, DECODE.epoch, "ready")] * 2)
    | st.just([PairStatus("d", "e", "failed")] * 5000),
    st.none() | anything(PrefixUpdate),
    st.none() | anything(PrefixUpdate),
)


@settings(max_examples=60)
@given(st.lists(STATUSES, min_size=1, max_size=3))
def test_no_report_of_a_worker_makes_the_proxy_lose_it(reports: list[WorkerStatus]) -> None:
    loop = ClockedLoop()

    async def run() -> None:
        proxy = Proxy()
        table = proxy.cluster.worker_table
        for number in range(12):  # three seconds of reports
            loop.now += 0.25
            for worker in (PREFILL, DECODE):
                mine = [report for report in reports if report.worker_id == worker.worker_id]
                plain = WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad(), [])
                answer = proxy.receive(mine[number % len(mine)] if mine else plain)
                assert isinstance(answer, ClusterView) and answer.known
            proxy.control._check()
            assert table.workers() == [PREFILL, DECODE] and all(each.silence_s == 0 for each in table.report(loop.now))
        answer = StatusReport("proxy", "m", True, 0, table.report(loop.now))
        assert FROM_PROXY.decode(FROM_PROXY.encode(answer)) == answer
        if table.prefill_workers and table.paired_prefill_workers:
            route = proxy.cluster.router.pick(PromptShape(50))
            assert route.ttft_s >= 0 and route.itl_s >= 0
            proxy.cluster.router.prefill_ended(route)
            proxy.cluster.router.sequence_ended(route)
        proxy.control.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_rounding_error_in_a_report_does_not_silence_the_worker() -> None:
    async def run() -> None:
        proxy = Proxy()
        for load, refused in (
            (WorkerLoad(fixed_step_s=-3e-18), []),
            (WorkerLoad(fixed_step_s=-3.0), ["implausible_figure"]),
        ):
            answer = proxy.receive(WorkerStatus(DECODE.worker_id, DECODE.epoch, DECODE.role, load, []))
            assert isinstance(answer, ClusterView) and answer.known
            assert proxy.refused == refused
        proxy.control.close()

    asyncio.run(run())


def test_a_worker_whose_quantisation_has_a_long_name_may_register() -> None:
    async def run() -> None:
        proxy = Proxy()
        known = DECODE.epoch
        register = RegisterWorker(
            PROTOCOL_VERSION, msgspec.structs.replace(DECODE, endpoint="ipc:///run/w.sock"), 100, 500, "m", 64
        )
        answer = proxy.receive(msgspec.structs.replace(register, quantization="x" * 5000))
        assert isinstance(answer, ClusterView) and known in {worker.epoch for worker in answer.workers}
        proxy.control.close()

    asyncio.run(run())
