"""What NCCL is told, and on which threads it may block. The device and the groups are doubles: there is no GPU here.

`tests/simulation/test_stream_order.py` runs them through random schedules.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.connectors import cuda_ipc, cuda_stream, process_group
from tandem.kv_transfer.connectors.cuda_ipc import CudaIpcSender
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.process_group import ProcessGroupReceiver, ProcessGroupSender
from tandem.kv_transfer.ranks import rank_pool
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.runtime.errors import KVPathRefused, KVTransferFailed
from tandem.runtime.lifetime import end_process
from tests.support.late_device import LOOP, LateDevice, install
from tests.support.late_nccl import LateNCCL, NCCLWorld

WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_PROPAGATE_ERROR",
}  # fmt: skip
LAYOUT = KVLayout("model", "bfloat16", 2, 2, 16, 16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice(0)
    install(device, monkeypatch)
    return device


@pytest.fixture(autouse=True)
def without_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in process_group.NCCL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nccl(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> NCCLWorld:
    world = NCCLWorld(device)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", world)
    return world


def on_loop(device: LateDevice, function: Callable[[], None]) -> None:
    """Runs the function as the event loop, where nothing may block, until it ends."""
    device.start(LOOP, function, is_daemon=False)
    device.run()


class Ends:
    """The ends of a path that are opened. ready: what their `on_ready` got."""

    def __init__(self, device: LateDevice, senders: int = 1, num_blocks: int = 4, path: str = "path") -> None:
        self.ready: list[KVTransferFailed | None] = []
        self.pool = torch.zeros((num_blocks, 64), dtype=torch.uint8)
        store: Any = lambda: path  # noqa: E731
        self.receiver = ProcessGroupReceiver("take", "nccl", store, "", self.pool, self.ready.append)
        source = torch.full((num_blocks, 64), 7, dtype=torch.uint8)
        self.senders = [
            ProcessGroupSender("ship", "nccl", store, "", source, self.ready.append) for _ in range(senders)
        ]
        self.device = device

    def connect(self) -> None:
        self.device.wait_until(lambda: len(self.ready) == 2)
        assert self.ready == [None, None]


def test_the_watchdog_is_off_for_pairs_groups_and_the_environment_stays(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads the environment while another changes it may crash."""
    told: list[dict[str, str | None]] = []
    make = LateNCCL.__init__

    def look(self: LateNCCL, *arguments: Any) -> None:
        told.append({name: os.environ.get(name) for name in WATCHDOG})
        make(self, *arguments)

    changed: list[bytes] = []
    monkeypatch.setattr(LateNCCL, "__init__", look)
    for name in ("putenv", "unsetenv"):
        monkeypatch.setattr(os, name, lambda name, *value: changed.append(name))
    on_loop(device, lambda: Ends(device).connect())
    assert not [name for name in changed if b"NCCL" in name]
    assert told == [dict.fromkeys(WATCHDOG, "0")] * 2
    ours = max(process_group.CONNECT_TIMEOUT_S, process_group.TRANSFER_TIMEOUT_S)
    assert all(group.timeout > 1000 * timedelta(seconds=ours) for group in nccl.groups), "our deadlines come first"


def test_a_process_whose_watchdog_is_on_makes_no_group(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")

    def serve() -> None:
        ends = Ends(device)
        device.wait_until(lambda: len(ends.ready) == 2)
        assert all(error is not None and "watchdog is on" in error.message for error in ends.ready)

    on_loop(device, serve)
    process_group.disable_nccl_watchdog()
    assert {name: os.environ[name] for name in WATCHDOG} == dict.fromkeys(WATCHDOG, "0")


def test_a_frozen_peer_holds_up_no_other_path(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's pool has 32 streams, so with 40 paths each of them would have two users or more."""
    monkeypatch.setattr(cuda_stream, "_POLL_INTERVAL_S", 0.001)
    names = (f"path {number}" for number in range(40))

    def serve() -> None:
        paths = []
        for name in names:
            paths.append(Ends(device, path=name))
            paths[-1].connect()
        frozen, *others = paths
        late: list[KVTransferFailed | None] = []
        frozen.receiver.receive([0, 2], late.append)
        done: list[KVTransferFailed | None] = []
        for ends in others:
            ends.receiver.receive([0, 2], done.append)
            ends.senders[0].send([1, 3], [0, 2], done.append)
        device.wait_until(lambda: len(done) == 2 * len(others))
        assert done == [None] * len(done) and not late
        device.wait_until(lambda: bool(late))
        assert late[0] is not None and "no data moved" in late[0].message

    on_loop(device, serve)


def test_messages_of_32_paths_fit_on_a_gpu_at_once(device: LateDevice, nccl: NCCLWorld) -> None:
    """Messages that wait for their peers must not keep others from running. An H100 has 132 multiprocessors."""
    on_loop(device, lambda: Ends(device).connect())
    assert all(32 * group.options.config.max_ctas <= 132 for group in nccl.groups)


def test_a_path_opens_on_a_stream_that_another_has_left(device: LateDevice, nccl: NCCLWorld) -> None:
    """torch's allocator keeps memory for each stream."""

    def serve() -> None:
        nums_streams = []
        for number in range(5):
            ends = Ends(device, path=f"path {number}")
            ends.connect()
            nums_streams.append(len(device.streams))
            closed: list[bool] = []
            for end in (ends.senders[0], ends.receiver):
                end.close(lambda closed=closed: closed.append(True))
            device.wait_until(lambda closed=closed: len(closed) == 2)
        assert len(set(nums_streams)) == 1

    on_loop(device, serve)


def test_a_transfer_allocates_nothing_large_and_runs_no_kernel_for_the_first_time(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either may make the host wait for the whole device, where messages of other paths wait for their peers."""
    monkeypatch.setattr(process_group, "message_plan", lambda backend, block_bytes: (2, 1))
    moved = Moved(device, monkeypatch)
    empty = torch.Tensor.new_empty

    def serve() -> None:
        ends = Ends(device, num_blocks=16)
        ends.connect()
        opening = {name: set(queued) for name, queued in moved.queued.items()}
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *sizes: pytest.fail("a transfer allocates a buffer"))
        for queued in moved.queued.values():
            queued.clear()
        done: list[KVTransferFailed | None] = []
        ends.receiver.receive([1, 5, 3], done.append)
        ends.senders[0].send([8, 6, 4], [1, 5, 3], done.append)
        device.wait_until(lambda: len(done) == 2)
        monkeypatch.setattr(torch.Tensor, "new_empty", empty)
        assert done == [None, None]
        for name, queued in moved.queued.items():
            assert queued and set(queued) <= opening[name]

    on_loop(device, serve)


def test_closing_does_not_wait_for_the_abort(device: LateDevice, nccl: NCCLWorld) -> None:
    def serve() -> None:
        ends = Ends(device)
        ends.connect()
        closed: list[bool] = []
        ends.senders[0].close(lambda: closed.append(True))
        ends.receiver.close()  # `LateNCCL.abort` would fail here, as on any call that blocks the loop
        device.wait_until(lambda: bool(closed) and all(group.is_aborted for group in nccl.groups))

    on_loop(device, serve)


def test_a_peer_that_never_connects_is_given_up_once_and_can_be_closed(device: LateDevice, nccl: NCCLWorld) -> None:
    """The path's thread is still in NCCL's initialisation, which nothing can end."""

    def serve() -> None:
        nccl.reaches = False
        ends = Ends(device)
        device.wait_until(lambda: len(ends.ready) == 2)
        assert all(error is not None and "not connected" in error.message for error in ends.ready)
        assert device.now == 2 * process_group.CONNECT_TIMEOUT_S
        closed: list[bool] = []
        ends.senders[0].close(lambda: closed.append(True))
        ends.receiver.close()
        device.wait_until(lambda: bool(closed))
        assert len(ends.ready) == 2

    on_loop(device, serve)


def test_a_group_that_is_made_after_the_path_was_closed_is_aborted(device: LateDevice, nccl: NCCLWorld) -> None:
    def serve() -> None:
        ready: list[KVTransferFailed | None] = []
        asked: list[bool] = []
        closed: list[bool] = []

        def open_store() -> Any:
            asked.append(True)
            device.block("a store that answers late", lambda: bool(closed))
            return "path"

        receiver = ProcessGroupReceiver("take", "nccl", open_store, "", torch.zeros(4, 64), ready.append)
        device.wait_until(lambda: bool(asked))
        receiver.close(lambda: closed.append(True))
        device.wait_until(lambda: bool(ready) and bool(nccl.groups) and nccl.groups[0].is_aborted)
        assert ready[0] is not None

    on_loop(device, serve)


def written_after_an_error(seed: int, patch: pytest.MonkeyPatch) -> bool:
    """Whether messages in flight write after a path that is closed in the middle of a transfer has reported its error.

    The path's own thread does not abort the group here, so no abort has ended when it reports.
    """
    device = LateDevice(seed)
    install(device, patch)
    patch.setattr(torch.distributed, "ProcessGroupNCCL", NCCLWorld(device))
    patch.setattr(process_group, "message_plan", lambda backend, block_bytes: (1, 1))
    overwritten: list[bool] = []

    def serve() -> None:
        ends = Ends(device)
        ends.connect()
        move, num_started = ends.receiver._move_on_stream, 0

        def close_at_the_third(data: torch.Tensor) -> None:
            nonlocal num_started
            num_started += 1
            if num_started == 3:
                ends.receiver.close()
            move(data)

        ends.receiver._move_on_stream = close_at_the_third  # type: ignore[method-assign]
        done: list[KVTransferFailed | None] = []
        ends.receiver.receive([0, 1, 2], done.append)
        device.wait_until(lambda: bool(done))
        assert done[0] is not None and "closed" in done[0].message
        ends.pool.fill_(1)  # another request's
        device.wait_until(lambda: not any(stream.queue for stream in device.streams))
        overwritten.append(not ends.pool.eq(1).all())

    on_loop(device, serve)
    return overwritten[0]


def test_nothing_is_written_after_an_error_was_reported() -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert not any(written_after_an_error(seed, patch) for seed in range(30))


def test_messages_in_flight_that_are_forgotten_after_an_error_are_noticed() -> None:
    def run(self: SideStream, job: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            job()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideStream, "run", run)
        assert any(written_after_an_error(seed, patch) for seed in range(30))


def test_a_path_whose_device_has_failed_ends_the_worker(device: LateDevice) -> None:
    lost: list[str] = []

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    def no_room() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def serve() -> None:
        stream = SideStream(torch.device("cuda", 0), lost.append)
        for job in (no_room, fail):
            with pytest.raises((torch.AcceleratorError, torch.OutOfMemoryError)):
                stream.run(job)

    device.start("path", serve, is_daemon=False)
    device.run()
    assert lost == ["the device has failed; the worker ends: CUDA error: an illegal memory access was encountered"]
    assert end_process is SideStream.__init__.__defaults__[0]  # type: ignore[index]


def test_a_pool_that_cannot_be_mapped_is_refused_from_the_paths_thread(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> torch.Tensor:
        device.block("cudaIpcOpenMemHandle")
        raise KVPathRefused("cannot map the peer's KV pool: invalid device context")

    monkeypatch.setattr(cuda_ipc, "map_peer_pool", refuse)

    def serve() -> None:
        ready: list[KVTransferFailed | None] = []
        sender = CudaIpcSender("ship", torch.zeros(2, 8), ConnectorParams(), lambda pool: pool, ready.append)
        device.wait_until(lambda: bool(ready))
        assert isinstance(ready[0], KVPathRefused) and "invalid device context" in ready[0].message
        closed: list[bool] = []
        sender.close(lambda: closed.append(True))
        device.wait_until(lambda: bool(closed))

    on_loop(device, serve)


def test_a_pool_is_unmapped_on_the_paths_thread_and_stream(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch holds Python's lock while it unmaps, and waits for the current stream; the model's may be busy for long."""
    unmapped: list[tuple[str, bool]] = []

    def record() -> None:
        actor = device.actor()
        assert actor is not None
        unmapped.append((actor.name, bool(device.current_stream().queue) or actor.stream is None))

    def map_pool(params: Any, on: torch.device) -> torch.Tensor:
        mapped = torch.zeros(2, 8, dtype=torch.uint8)
        weakref.finalize(mapped, record).atexit = False
        return mapped

    monkeypatch.setattr(cuda_ipc, "map_peer_pool", map_pool)

    def serve() -> None:
        device.default.put(lambda: None, lambda: bool(unmapped))  # a step that does not end before
        done: list[KVTransferFailed | None] = []
        source = torch.zeros(2, 8, dtype=torch.uint8)
        sender = CudaIpcSender("ship", source, ConnectorParams(), lambda pool: pool, done.append)
        sender.send([0], [1], done.append)
        device.wait_until(lambda: len(done) == 2)
        closed: list[bool] = []
        sender.close(lambda: closed.append(True))
        device.wait_until(lambda: bool(closed))
        assert done == [None, None] and unmapped == [("ship", False)]

    on_loop(device, serve)


def test_a_torch_without_nccl_can_import_and_use_gloo() -> None:
    code = (
        "import torch.distributed; del torch.distributed.ProcessGroupNCCL\n"
        "from tandem.kv_transfer.registry import load_connector; load_connector('gloo')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_worker_starts_where_cuda_ipc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers are refused when they map its pool, and then use NCCL (`tests/unit/worker/test_outgoing_pairs.py`)."""

    def refuse(blocks: Any) -> None:
        raise RuntimeError("CUDA error: operation not supported\nmore")

    monkeypatch.setattr(rank_pool, "export_pool", refuse)
    blocks: Any = SimpleNamespace(device=torch.device("cuda", 0))
    params = RankPool(0, LAYOUT, blocks, DataNetwork("127.0.0.1")).located(ConnectorParams())
    assert params.cuda is None
    with pytest.raises(KVPathRefused, match="does not export memory"):
        cuda_ipc.map_peer_pool(params, torch.device("cuda", 0))


NO_WORK = ("aten::new_empty", "aten::detach_")


class Moved:
    """What both ends of a transfer queue on the device, by thread."""

    def __init__(self, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: dict[str, list[str]] = {"ship": [], "take": []}
        dispatch = LateDevice.__torch_dispatch__

        def look(late: LateDevice, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            actor = late.actor()
            is_queued = actor is not None and actor.stream is not None and not late._is_running and not func.is_view
            if is_queued and any(isinstance(each, torch.Tensor) for each in args) and func.name() not in NO_WORK:
                self.queued[actor.name].append(func.name())
            return dispatch(late, func, types, args, kwargs)

        monkeypatch.setattr(LateDevice, "__torch_dispatch__", look)


def test_a_message_costs_one_kernel_at_each_end_at_most(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered blocks are gathered by one kernel and scattered by one; adjacent blocks by none."""
    monkeypatch.setattr(process_group, "message_plan", lambda backend, block_bytes: (2, 1))
    moved = Moved(device, monkeypatch)

    def transfer(src: list[int], dst: list[int]) -> None:
        ends = Ends(device, num_blocks=16)
        ends.connect()
        done: list[KVTransferFailed | None] = []
        for queued in moved.queued.values():
            queued.clear()
        ends.receiver.receive(dst, done.append)
        ends.senders[0].send(src, dst, done.append)
        device.wait_until(lambda: len(done) == 2)
        assert done == [None, None] and ends.pool[dst].eq(7).all()
        nccl.paths.clear()

    def serve() -> None:
        transfer([8, 6, 4, 2, 0], [1, 5, 3, 9, 11])
        assert moved.queued["ship"] == ["aten::index_select.out"] * 2, "the last block is adjacent to itself"
        assert moved.queued["take"] == ["aten::index_copy_"] * 2
        transfer([2, 3, 4, 5, 6], [9, 10, 11, 12, 13])
        assert moved.queued == {"ship": [], "take": []}

    on_loop(device, serve)


def test_the_host_polls_a_few_times_a_transfer_and_not_for_each_message(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "message_plan", lambda backend, block_bytes: (1, 1))
    most: list[int] = []
    wait = SideStream.wait

    def look(stream: SideStream, mark: Any, timeout_s: float) -> None:
        most.append(max(len(group.works) for group in nccl.groups))
        wait(stream, mark, timeout_s)

    def serve() -> None:
        ends = Ends(device, num_blocks=16)
        ends.connect()
        monkeypatch.setattr(SideStream, "wait", look)
        done: list[KVTransferFailed | None] = []
        ends.receiver.receive(range(16), done.append)
        ends.senders[0].send(range(16), range(16), done.append)
        device.wait_until(lambda: len(done) == 2)
        assert done == [None, None]

    on_loop(device, serve)
    assert most[0] == 1 + 16, "the handshake's byte and all messages were queued before the first wait"
