"""What a NCCL path costs the host: kernels of a message, polls of a transfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed

from tandem.kv_transfer.connectors import block_messages
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.runtime.errors import KVTransferFailed
from tests.support.late_device import LateDevice
from tests.support.late_nccl import NCCLWorld
from tests.unit.kv_transfer.nccl_ends import Ends, on_loop

pytestmark = pytest.mark.usefixtures("without_watchdog")


def test_a_transfer_allocates_nothing_large_and_runs_no_kernel_for_the_first_time(
    device: LateDevice, nccl: NCCLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either may make the host wait for the whole device, where messages of other paths wait for their peers."""
    monkeypatch.setattr(block_messages, "message_plan", lambda backend, block_bytes: (2, 1))
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
    monkeypatch.setattr(block_messages, "message_plan", lambda backend, block_bytes: (2, 1))
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
    monkeypatch.setattr(block_messages, "message_plan", lambda backend, block_bytes: (1, 1))
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
