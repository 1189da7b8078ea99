"""What NCCL is told, and on which threads it may block. The group is a double: there is no GPU here.

As in NCCL, connecting and aborting block for as long as they like.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed
from torch.distributed import HashStore

from tandem.kv_transfer.connectors import process_group
from tandem.kv_transfer.connectors.process_group import ProcessGroupReceiver
from tandem.kv_transfer.ranks import rank_pool
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.runtime.errors import KVTransferFailed

WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_PROPAGATE_ERROR",
}  # fmt: skip


class Work:
    def __init__(self, group: NCCLDouble) -> None:
        self._group = group

    def wait(self, timeout: timedelta) -> None:
        if not self._group.may_connect.wait(30):
            raise RuntimeError("no test lets it connect")
        if self._group.aborting.is_set():
            raise RuntimeError("aborted")


class NCCLDouble:
    """may_connect, may_abort: what it waits for."""

    Options = SimpleNamespace
    made: ClassVar[list[NCCLDouble]] = []

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.told = {name: os.environ.get(name) for name in WATCHDOG}
        self.timeout: timedelta = options._timeout
        self.may_connect, self.may_abort, self.aborting = threading.Event(), threading.Event(), threading.Event()
        self.aborted_on: queue.SimpleQueue[str] = queue.SimpleQueue()
        NCCLDouble.made.append(self)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return Work(self)

    def abort(self) -> None:
        self.aborting.set()
        self.may_connect.set()
        self.may_abort.wait(30)
        self.aborted_on.put(threading.current_thread().name)


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> list[NCCLDouble]:
    NCCLDouble.made = []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NCCLDouble)
    return NCCLDouble.made


def open_receiver() -> tuple[ProcessGroupReceiver, queue.Queue[KVTransferFailed | None]]:
    ready: queue.Queue[KVTransferFailed | None] = queue.Queue()
    blocks = torch.zeros((4, 64), dtype=torch.uint8)
    return ProcessGroupReceiver("take", "nccl", HashStore, "127.0.0.1", blocks, ready.put), ready


def wait_for_group(doubles: list[NCCLDouble]) -> NCCLDouble:
    while not doubles:
        threading.Event().wait(0.001)
    return doubles[0]


def test_the_watchdog_is_off_while_a_pairs_group_is_made_and_only_then(
    doubles: list[NCCLDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    receiver, ready = open_receiver()
    group = wait_for_group(doubles)
    group.may_connect.set()
    assert ready.get(timeout=30) is None
    assert group.told == dict.fromkeys(WATCHDOG, "0")
    assert {name: os.environ[name] for name in WATCHDOG if name in os.environ} == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    ours = max(process_group.CONNECT_TIMEOUT_S, process_group.TRANSFER_TIMEOUT_S)
    assert group.timeout > 1000 * timedelta(seconds=ours), "our deadlines must come first"
    group.may_abort.set()
    receiver.close()


def test_closing_does_not_wait_for_the_abort(doubles: list[NCCLDouble]) -> None:
    receiver, ready = open_receiver()
    group = wait_for_group(doubles)
    group.may_connect.set()
    assert ready.get(timeout=30) is None
    receiver.close()  # would wait for `may_abort` if it aborted here
    group.may_abort.set()
    assert group.aborted_on.get(timeout=30) == "abort-group"


def test_a_peer_that_never_connects_is_given_up_once(
    doubles: list[NCCLDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "CONNECT_TIMEOUT_S", 0.05)
    receiver, ready = open_receiver()
    error = ready.get(timeout=30)
    assert error is not None and "not connected" in error.message
    group = wait_for_group(doubles)
    group.may_abort.set()
    assert group.aborted_on.get(timeout=30) == "abort-group"
    receiver.close()
    with pytest.raises(queue.Empty):
        ready.get(timeout=0.2)


def test_nothing_is_written_after_an_error_was_reported(
    doubles: list[NCCLDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, ready = open_receiver()
    group = wait_for_group(doubles)
    group.may_connect.set()
    assert ready.get(timeout=30) is None

    def fail(*arguments: Any) -> None:
        raise ValueError("no room for a copy")

    monkeypatch.setattr(process_group, "copy_blocks", fail)
    done: queue.Queue[KVTransferFailed | None] = queue.Queue()
    receiver.receive([0, 2], done.put)
    assert group.aborting.wait(30)
    with pytest.raises(queue.Empty):
        done.get(timeout=0.1)  # a receive may still write until the group is gone
    group.may_abort.set()
    error = done.get(timeout=30)
    assert error is not None and "no room" in error.message
    receiver.close()


def test_a_torch_without_nccl_can_import_and_use_gloo() -> None:
    code = (
        "import torch.distributed; del torch.distributed.ProcessGroupNCCL\n"
        "from tandem.kv_transfer.registry import load_connector; load_connector('gloo')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_worker_starts_where_cuda_ipc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(blocks: Any) -> None:
        raise RuntimeError("CUDA error: operation not supported\nmore")

    monkeypatch.setattr(rank_pool, "device_id", lambda device: "GPU-a")
    monkeypatch.setattr(rank_pool, "export_pool", refuse)
    blocks: Any = SimpleNamespace(device=torch.device("cuda", 0))
    params = RankPool(0, KVLayout("model", "bfloat16", 2, 2, 16, 16), blocks, "127.0.0.1").located(ConnectorParams())
    assert params.cuda is None
    assert params.device_id not in ("", "GPU-a"), "no peer may think that it can map the pool"
