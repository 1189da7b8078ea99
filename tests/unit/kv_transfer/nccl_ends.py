"""Both ends of a NCCL path on a device and a NCCL that act late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from tandem.kv_transfer.connectors.process_group import ProcessGroupReceiver, ProcessGroupSender
from tandem.runtime.errors import KVTransferFailed
from tests.support.late_device import LOOP, LateDevice

WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_PROPAGATE_ERROR",
}  # fmt: skip


def on_loop(device: LateDevice, function: Callable[[], None]) -> None:
    """Runs the function as the event loop, where nothing may block, until it ends."""
    device.start(LOOP, function, is_daemon=False)
    device.run()


class Ends:
    """The ends of a path that are opened. addresses, ready: what their callbacks got."""

    def __init__(self, device: LateDevice, senders: int = 1, num_blocks: int = 4, path: str = "path") -> None:
        self.addresses: list[bytes | KVTransferFailed] = []
        self.ready: list[KVTransferFailed | None] = []
        self.pool = torch.zeros((num_blocks, 64), dtype=torch.uint8)
        store: Any = lambda: path  # noqa: E731
        serve: Any = lambda: (path, b"address")  # noqa: E731
        self.receiver = ProcessGroupReceiver("take", "nccl", serve, "", self.pool, self.addresses.append)
        source = torch.full((num_blocks, 64), 7, dtype=torch.uint8)
        self.senders = [
            ProcessGroupSender("ship", "nccl", store, "", source, self.ready.append) for _ in range(senders)
        ]
        self.device = device

    def connect(self) -> None:
        self.device.wait_until(lambda: bool(self.addresses and self.ready))
        assert self.addresses == [b"address"] and self.ready == [None]
