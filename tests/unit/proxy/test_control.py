"""What the control socket does with messages, without the socket."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import AbortAllAttempts, Ping, Pong
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    ChangeRole,
    ClusterView,
    FromProxyControl,
    GetStatus,
    PairChanges,
    PairStatus,
    PrefixUpdate,
    RegisterWorker,
    SetWorkerRole,
    StatusDetail,
    StatusReport,
    ToProxyControl,
    WorkerInfo,
    WorkerLeft,
    WorkerLoad,
    WorkerOrdered,
    WorkerStatus,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.refusals import Refusals
from tandem.proxy.cluster.router import PromptShape
from tandem.proxy.cluster.worker_table import PONG_TIMEOUT_S
from tandem.proxy.control import UNUSED_S, Control
from tandem.proxy.proxy_config import ProxyConfig
from tests.support.async_tests import in_loop
from tests.support.clocked_loop import ClockedLoop
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster

TO_PROXY: Codec[ToProxyControl] = Codec(ToProxyControl)
FROM_PROXY: Codec[FromProxyControl] = Codec(FromProxyControl)


class FakeSocket:
    """Keeps what is sent, as the receiver decodes it."""

    endpoint = "ipc://control"

    def __init__(self, *_: Any) -> None:
        self.sent: list[FromProxyControl] = []
        self.receivers: list[bytes] = []

    def send(self, identity: bytes, message: msgspec.Struct | bytes) -> bool:
        self.receivers.append(identity)
        self.sent.append(FROM_PROXY.decode(FROM_PROXY.encode(message)))
        return True

    def close(self) -> None:
        pass


class FakeConnections:
    """Keeps what is sent to each worker on its last connection, and the callbacks of that connection."""

    def __init__(self) -> None:
        self.sent: dict[str, list[msgspec.Struct]] = {}
        self.callbacks: dict[str, tuple[Any, Any]] = {}
        self.num_opened = 0

    def open(self, worker: WorkerInfo, on_message: Any, on_broken: Any) -> None:
        self.num_opened += 1
        self.sent[worker.epoch] = []
        self.callbacks[worker.epoch] = on_message, on_broken

    def send(self, worker: WorkerInfo, message: msgspec.Struct) -> bool:
        self.sent.setdefault(worker.epoch, []).append(message)
        return True

    def close(self, worker: WorkerInfo, *, is_gone: bool = False) -> None:
        self.sent.pop(worker.epoch, None)


class Proxy:
    """The control socket of a proxy that knows one prefill and one decode worker, or those of `cluster`."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.cluster = cluster = cluster or Cluster()
        self.refused: list[str] = []
        state: Any = SimpleNamespace(
            worker_table=cluster.worker_table,
            dispatcher=cluster.dispatcher,
            metrics=cluster.metrics,
            readiness=SimpleNamespace(on_cluster_changed=lambda: None),
            admission=SimpleNamespace(num_waiting=0),
            text=SimpleNamespace(sampling_defaults=SimpleNamespace(known=dict)),
        )
        network: Any = SimpleNamespace(refusals=Refusals(self.refused.append), router=FakeSocket)
        self.connections = FakeConnections()
        self.control = Control(
            network, ProxyConfig("proxy-0", "", "m", "m"), "proxy", state, cast(Any, self.connections)
        )
        self.socket: Any = self.control._socket

    def receive(self, message: msgspec.Struct, identity: bytes = b"worker") -> FromProxyControl | None:
        """Returns the answer to a message that arrives as bytes."""
        self.socket.sent.clear()
        self.socket.receivers.clear()
        self.control._on_message(identity, TO_PROXY.decode(TO_PROXY.encode(message)))
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
    anything(PairChanges)
    | st.just(PairChanges(0, [PairStatus(DECODE.worker_id, DECODE.epoch, "ready")] * 2))
    | st.just(PairChanges(0, [PairStatus("d", "e", "failed")] * 5000)),
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
                plain = WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad())
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


@in_loop
async def test_a_rounding_error_in_a_report_does_not_silence_the_worker() -> None:
    proxy = Proxy()
    for load, refused in (
        (WorkerLoad(fixed_step_s=-3e-18), []),
        (WorkerLoad(fixed_step_s=-3.0), ["implausible_figure"]),
    ):
        answer = proxy.receive(WorkerStatus(DECODE.worker_id, DECODE.epoch, DECODE.role, load))
        assert isinstance(answer, ClusterView) and answer.known
        assert proxy.refused == refused
    proxy.control.close()


@in_loop
async def test_a_worker_whose_quantisation_has_a_long_name_may_register() -> None:
    proxy = Proxy()
    known = DECODE.epoch
    register = RegisterWorker(
        PROTOCOL_VERSION, msgspec.structs.replace(DECODE, endpoint="ipc:///run/w.sock"), 100, 500, "m", 64
    )
    answer = proxy.receive(msgspec.structs.replace(register, quantization="x" * 5000))
    assert isinstance(answer, ClusterView) and known in {worker.epoch for worker in answer.workers}
    proxy.control.close()


def register(name: str) -> RegisterWorker:
    info = msgspec.structs.replace(DECODE, worker_id=name, epoch=f"{name}/1", endpoint=f"ipc:///run/{name}")
    return RegisterWorker(PROTOCOL_VERSION, info, 100, 500, "m", 64)


def test_workers_learn_of_changes_alone_and_each_announcement_costs_the_same_in_any_cluster() -> None:
    """A report's answer that lists all workers makes the work of a proxy quadratic in their number."""
    loop = ClockedLoop()

    async def run() -> None:
        proxy = Proxy()
        loop.now = 1.0
        first, second = register("decode-1"), register("decode-2")
        proxy.receive(first, b"1")
        whole, change = proxy.socket.sent
        assert whole == ClusterView("proxy", True, 1, 0, [PREFILL, DECODE])
        assert change == ClusterView("proxy", True, 2, 1, [first.worker])
        assert proxy.receive(WorkerStatus("decode-1", "decode-1/1", "decode", WorkerLoad())) == ClusterView(
            "proxy", True, 2, 2
        )
        loop.now += 1.0
        proxy.receive(second, b"2")
        whole, *changes = proxy.socket.sent
        assert whole == ClusterView("proxy", True, 2, 0, [PREFILL, DECODE, first.worker])
        assert changes == [ClusterView("proxy", True, 3, 2, [second.worker])] * 2
        assert proxy.socket.receivers == [b"2", b"1", b"2"]
        loop.now += 1.0
        assert proxy.receive(WorkerLeft("decode-1", "decode-1/1")) == ClusterView(
            "proxy", True, 4, 3, [], ["decode-1/1"]
        )
        loop.now += 1.0
        proxy.receive(SetWorkerRole("decode-2", "any"), b"operator")
        elastic = msgspec.structs.replace(second.worker, role="any")
        assert ClusterView("proxy", True, 5, 4, [elastic]) in proxy.socket.sent
        proxy.control.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("proxy_id", "until_s", "is_taken"),
    [
        ("", None, True),  # `tandem role`
        ("proxy", 5.0, True),
        ("proxy", 4.99, False),  # it has waited while this process was frozen
        ("proxy", float("nan"), False),
        ("proxy-of-before", 9.0, False),  # it has waited while this process was started
        ("proxy-of-before", None, False),
    ],
)
def test_an_order_that_its_sender_has_given_up_changes_nothing(
    proxy_id: str, until_s: float | None, is_taken: bool
) -> None:
    loop = ClockedLoop()

    async def run() -> None:
        proxy = Proxy()
        loop.now = 1.0
        proxy.receive(register("decode-1"), b"1")
        loop.now = 5.0
        report = proxy.receive(GetStatus("proxy"), b"launcher")
        assert isinstance(report, StatusReport) and report.clock_s == 5.0
        proxy.receive(SetWorkerRole("decode-1", "any", 7, proxy_id, until_s), b"launcher")
        answers = [WorkerOrdered("decode-1", "", 7)] if is_taken else []
        assert [each for each in proxy.socket.sent if isinstance(each, WorkerOrdered)] == answers
        assert (ChangeRole("any") in proxy.socket.sent) is is_taken
        roles = {worker.worker_id: worker.role for worker in proxy.cluster.worker_table.workers()}
        assert roles["decode-1"] == ("any" if is_taken else "decode")
        proxy.control.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


@in_loop
async def test_a_worker_gets_prompts_once_it_has_answered_and_again_after_its_connection_broke() -> None:
    proxy = Proxy()
    table, metrics = proxy.cluster.worker_table, proxy.cluster.metrics
    info = register("decode-1").worker
    proxy.receive(register("decode-1"))
    on_message, on_broken = proxy.connections.callbacks[info.epoch]
    assert proxy.connections.sent[info.epoch] == [AbortAllAttempts("proxy"), Ping(1)]

    def takes_prompts() -> bool:
        found = info in [record.worker for record in table.decode_workers]
        assert metrics.unanswered._value.get() == (not found)
        return found

    assert not takes_prompts()
    on_message(info, Pong(info.epoch, 1))
    assert takes_prompts()
    on_broken(info)
    assert not takes_prompts()
    on_message(info, Pong(info.epoch, 1))
    assert not takes_prompts(), "it was sent before the connection broke"
    assert Ping(2) in proxy.connections.sent[info.epoch]
    on_message(info, Pong(info.epoch, 2))
    assert takes_prompts()
    proxy.control.close()


def test_a_worker_that_does_not_answer_is_connected_to_again_and_the_log_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = ClockedLoop()

    async def run() -> None:
        proxy = Proxy()
        table = proxy.cluster.worker_table
        info = register("decode-1").worker
        proxy.receive(register("decode-1"))
        for _ in range(int(2.5 * PONG_TIMEOUT_S / 0.25)):
            loop.now += 0.25
            for worker in (PREFILL, DECODE, info):
                proxy.receive(WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad()))
            proxy.control._check()
        [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "decode-1 reports to this proxy, but does not answer it at ipc:///run/decode-1" in line
        assert proxy.connections.num_opened == 3
        assert proxy.connections.sent[info.epoch] == [AbortAllAttempts("proxy"), Ping(3)], "nothing piles up"
        proxy.connections.callbacks[info.epoch][0](info, Pong(info.epoch, 3))
        assert info in [record.worker for record in table.decode_workers]
        proxy.control.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_changes_in_quick_succession_are_announced_together() -> None:
    loop = ClockedLoop()

    async def run() -> None:
        proxy = Proxy()
        loop.now = 1.0
        workers = [register(f"decode-{number}") for number in range(1, 4)]
        for worker in workers:
            proxy.receive(worker, worker.worker.worker_id.encode())
        assert [type(message) for message in proxy.socket.sent] == [ClusterView], "its own answer, with all"
        proxy.socket.sent.clear()
        loop.now += 0.01
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert proxy.socket.sent == [ClusterView("proxy", True, 3, 2, [each.worker for each in workers[1:]])] * 3
        proxy.control.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


@in_loop
async def test_a_proxy_that_has_missed_pairs_asks_for_them() -> None:
    proxy = Proxy()
    table = proxy.cluster.worker_table
    pairs = PairChanges(0, [PairStatus(DECODE.worker_id, DECODE.epoch, "ready")])
    status = WorkerStatus(PREFILL.worker_id, PREFILL.epoch, PREFILL.role, WorkerLoad(), pairs, num_pair_changes=3)
    for message, is_missing in (
        (status, False),
        (msgspec.structs.replace(status, pairs=None), False),
        (msgspec.structs.replace(status, pairs=None, num_pair_changes=4), True),
        (msgspec.structs.replace(status, pairs=None, num_pair_changes=4), True),
        (msgspec.structs.replace(status, pairs=PairChanges(0, []), num_pair_changes=5), False),
    ):
        answer = proxy.receive(message)
        assert isinstance(answer, ClusterView) and answer.restart == is_missing
        assert bool(table.paired_prefill_workers) == (message.num_pair_changes < 5)
    proxy.control.close()


@in_loop
async def test_a_worker_that_the_proxy_has_lost_is_told_so() -> None:
    proxy = Proxy()
    report = WorkerStatus(DECODE.worker_id, DECODE.epoch, DECODE.role, WorkerLoad())
    answers = [proxy.receive(report)]
    proxy.receive(WorkerLeft(DECODE.worker_id, DECODE.epoch))
    answers.append(proxy.receive(report))
    assert [isinstance(each, ClusterView) and each.known for each in answers] == [True, False]
    proxy.control.close()


@in_loop
async def test_a_report_has_as_much_as_is_asked_for() -> None:
    proxy = Proxy()
    ready, failed = PairStatus(DECODE.worker_id, DECODE.epoch, "ready"), PairStatus("d", "e", "failed")
    others = [msgspec.structs.replace(failed, decode_epoch=f"e{number}") for number in range(1000)]
    pairs = PairChanges(0, [ready, *others])
    proxy.receive(WorkerStatus(PREFILL.worker_id, PREFILL.epoch, PREFILL.role, WorkerLoad(), pairs, None))
    found: dict[str, StatusReport] = {}
    for detail in get_args(StatusDetail):
        answer = proxy.receive(GetStatus(detail))
        assert isinstance(answer, StatusReport)
        found[detail] = answer
    sizes = {detail: len(FROM_PROXY.encode(report)) for detail, report in found.items()}
    assert 10 * sizes["workers"] < sizes["pairs"]
    assert [len(report.workers) for report in found.values()] == [0, 2, 2]
    assert found["workers"].num_ready_pairs == found["pairs"].num_ready_pairs == 1
    proxy.control.close()


def test_the_log_says_once_which_workers_get_no_work_because_they_compute_differently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = ClockedLoop()

    async def run() -> None:
        cluster = Cluster(workers=())
        cluster.join(PREFILL, DECODE, numerics=Numerics(device="new"))
        proxy = Proxy(cluster)
        old = msgspec.structs.replace(register("decode-9"), numerics=Numerics(device="old"), exact=True)

        def pass_time(seconds: float) -> list[str]:
            for _ in range(int(seconds / 0.25)):
                loop.now += 0.25
                for worker in cluster.worker_table.workers():
                    proxy.receive(WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad()))
                proxy.control._check()
            return [each.getMessage() for each in caplog.records if "which --exact requires" in each.getMessage()]

        proxy.receive(old)
        assert not pass_time(UNUSED_S - 1.0), "others of its kind may be starting"
        [line] = pass_time(3 * UNUSED_S)
        assert line.startswith("decode-9 gets no work: no prefill worker computes alike")
        other = msgspec.structs.replace(register("worker-9"), numerics=Numerics(device="old"), exact=True)
        proxy.receive(msgspec.structs.replace(other, worker=msgspec.structs.replace(other.worker, role="any")))
        assert len(pass_time(2 * UNUSED_S)) == 1
        report = proxy.receive(GetStatus("workers"), b"launcher")
        assert isinstance(report, StatusReport) and "no work" not in report.exactness
        proxy.receive(WorkerLeft("worker-9", "worker-9/1"))
        assert len(pass_time(2 * UNUSED_S)) == 2
        proxy.control.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
