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
from typing import Any

import pytest
import torch
import torch.distributed

from tandem.kv_transfer.connectors import block_messages, cuda_ipc, cuda_stream, nccl_group
from tandem.kv_transfer.connectors.addresses import CONNECT_TIMEOUT_S
from tandem.kv_transfer.connectors.cuda_ipc import CudaIpcSender
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.process_group import ProcessGroupSender
from tandem.runtime.errors import KVPathRefused, KVTransferFailed
from tandem.runtime.processes.lifetime import end_process
from tests.support.late_device import LateDevice, install
from tests.support.late_nccl import LateNCCL, NCCLWorld
from tests.unit.kv_transfer.nccl_ends import WATCHDOG, Ends, on_loop

pytestmark = pytest.mark.usefixtures("without_watchdog")


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
    ours = max(CONNECT_TIMEOUT_S, nccl_group.TRANSFER_TIMEOUT_S)
    assert all(group.timeout > 1000 * timedelta(seconds=ours) for group in nccl.groups), "our deadlines come first"


def test_a_process_whose_watchdog_is_on_makes_no_group(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")

    def serve() -> None:
        ends, received = Ends(device), list[KVTransferFailed | None]()
        ends.receiver.receive([0], received.append)
        device.wait_until(lambda: bool(ends.ready and received))
        for error in (*ends.ready, *received):
            assert error is not None and "watchdog is on" in error.message

    on_loop(device, serve)
    nccl_group.disable_nccl_watchdog()
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


def test_closing_does_not_wait_for_the_abort(device: LateDevice, nccl: NCCLWorld) -> None:
    def serve() -> None:
        ends = Ends(device)
        ends.connect()
        closed: list[bool] = []
        ends.senders[0].close(lambda: closed.append(True))
        ends.receiver.close()  # `LateNCCL.abort` would fail here, as on any call that blocks the loop
        device.wait_until(lambda: bool(closed) and all(group.is_aborted for group in nccl.groups))

    on_loop(device, serve)


def test_a_peer_that_never_connects_can_be_closed(device: LateDevice, nccl: NCCLWorld) -> None:
    """NCCL holds the path's thread while it connects, and nothing can end that. The pair has a deadline of its own."""

    def serve() -> None:
        nccl.reaches = False
        ends = Ends(device)
        device.wait_until(lambda: len(nccl.groups) == 2)
        closed: list[bool] = []
        ends.senders[0].close(lambda: closed.append(True))
        ends.receiver.close()
        device.wait_until(lambda: bool(closed))
        assert not ends.ready

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

        sender = ProcessGroupSender("ship", "nccl", open_store, "", torch.zeros(4, 64), ready.append)
        device.wait_until(lambda: bool(asked))
        sender.close(lambda: closed.append(True))
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
    patch.setattr(block_messages, "message_plan", lambda backend, block_bytes: (1, 1))
    overwritten: list[bool] = []

    def serve() -> None:
        ends = Ends(device)
        ends.connect()
        group: Any = ends.receiver._group
        move, num_started = group._broadcast, 0

        def close_at_the_third(data: torch.Tensor) -> None:
            nonlocal num_started
            num_started += 1
            if num_started == 3:
                ends.receiver.close()
            move(data)

        group._broadcast = close_at_the_third
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
        sender = CudaIpcSender("ship", torch.zeros(2, 8), b"", lambda pool: pool, ready.append)
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

    def map_pool(address: bytes, on: torch.device) -> torch.Tensor:
        mapped = torch.zeros(2, 8, dtype=torch.uint8)
        weakref.finalize(mapped, record).atexit = False
        return mapped

    monkeypatch.setattr(cuda_ipc, "map_peer_pool", map_pool)

    def serve() -> None:
        device.default.put(lambda: None, lambda: bool(unmapped))  # a step that does not end before
        done: list[KVTransferFailed | None] = []
        source = torch.zeros(2, 8, dtype=torch.uint8)
        sender = CudaIpcSender("ship", source, b"", lambda pool: pool, done.append)
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


def test_a_pair_opens_where_cuda_ipc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers are refused when they map its pool, then use NCCL (`tests/unit/handover/pairs`)."""

    def refuse(blocks: Any) -> None:
        raise RuntimeError("CUDA error: operation not supported\nmore")

    monkeypatch.setattr(cuda_ipc, "export_pool", refuse)
    monkeypatch.setattr(cuda_ipc, "_addresses", {})
    address = cuda_ipc.pool_address(torch.zeros(4, 64))
    with pytest.raises(KVPathRefused, match="does not export memory"):
        cuda_ipc.map_peer_pool(address, torch.device("cuda", 0))
