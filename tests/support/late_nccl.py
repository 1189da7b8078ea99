"""A double of ProcessGroupNCCL on a `LateDevice`, with its semantics as far as a path of two ranks meets them.

The first message connects, and blocks the host until the peer connects too; nothing can end that wait. `broadcast` runs
in the caller's stream. `send` and `recv` run in a stream of torch's pool, behind the caller's stream; `Work.wait`
returns at once and makes the caller's stream wait. `abort` blocks the host. A message that was aborted ends like one
that has arrived, but leaves part of its data. The watchdog ends the process on work older than the group's time-out, if
error handling is on. It does not see what a graph replays.
"""

from __future__ import annotations

import os
from collections import defaultdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.late_device import LateDevice, LateEvent, LateStream

PARTIAL = 0xDD
"""What a message leaves behind that was aborted."""


class NCCLWorld:
    """All groups of one test. reaches: whether peers find each other. processes_ended: why the watchdog ended one."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.paths: dict[str, dict[int, LateNCCL]] = defaultdict(dict)
        self.groups: list[LateNCCL] = []
        self.reaches = True
        self.processes_ended: list[str] = []
        self.Options = lambda: SimpleNamespace(config=SimpleNamespace())
        device.on_time.append(self._watch)

    def __call__(self, store: str, rank: int, size: int, options: Any) -> LateNCCL:
        """Stands for the class. store: the path's id."""
        return LateNCCL(self, store, rank, options)

    def _watch(self) -> None:
        for group in self.groups:
            for work in group.works:
                is_late = not work.end.query() and timedelta(seconds=self.device.now - work.started) > group.timeout
                if is_late and group.told["TORCH_NCCL_ASYNC_ERROR_HANDLING"] != "0":
                    self.processes_ended.append("work is older than the group's time-out")


class LateWork:
    def __init__(self, device: LateDevice, end: LateEvent) -> None:
        self._device = device
        self.end = end
        self.started = device.now

    def wait(self, timeout: timedelta | None = None) -> None:
        self._device.current_stream().wait_event(self.end)


class Message:
    """A kernel that sends or receives. is_taken: a send whose data the peer has."""

    def __init__(self, group: LateNCCL, tensor: torch.Tensor, is_send: bool, stream: LateStream) -> None:
        self.group = group
        self.stream = stream
        self.tensor = tensor
        self.is_send = is_send
        self.is_taken = False

    def can_run(self) -> bool:
        if self.group.is_aborted:
            return True
        return self.is_taken if self.is_send else self._sent() is not None

    def run(self) -> None:
        self.group.messages.remove(self)
        if self.is_taken or self.is_send:
            return
        if self.group.is_aborted:
            self.tensor.view(-1)[: self.tensor.numel() // 2] = PARTIAL
            return
        sent = self._sent()
        assert sent is not None and sent.tensor.shape == self.tensor.shape
        self.tensor.copy_(sent.tensor)
        sent.is_taken = True

    def _sent(self) -> Message | None:
        """The oldest send of the peer that has begun."""
        peer = self.group.peer()
        if peer is None or peer.is_aborted:
            return None
        head = next((message for message in peer.messages if message.is_send and not message.is_taken), None)
        return head if head is not None and head.stream.queue and head.stream.queue[0][1] == head.run else None


class LateNCCL:
    def __init__(self, world: NCCLWorld, path_id: str, rank: int, options: Any) -> None:
        self._world = world
        self.path_id, self.rank = path_id, rank
        self.options = options
        self.timeout: timedelta = options._timeout
        self.told = {name: os.environ.get(name) for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)}
        self.stream: LateStream = world.device.Stream()
        self.messages: list[Message] = []
        self.works: list[LateWork] = []
        self.is_connected = self.is_aborted = False
        world.groups.append(self)

    def peer(self) -> LateNCCL | None:
        return self._world.paths[self.path_id].get(1 - self.rank) if self._world.reaches else None

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> LateWork:
        return self._start(tensors[0], is_send=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> LateWork:
        return self._start(tensors[0], is_send=False)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp, "it would run in a stream of the pool"
        self._start(tensors[0], self.rank == options.rootRank, self._world.device.current_stream())

    def _start(self, tensor: torch.Tensor, is_send: bool, stream: LateStream | None = None) -> LateWork:
        device = self._world.device
        if not self.is_connected:
            self._world.paths[self.path_id][self.rank] = self
            device.block("ncclCommInitRank", lambda: self.peer() is not None)
            self.is_connected = True
        if self.is_aborted:
            raise RuntimeError("the communicator was aborted")
        if stream is None:
            stream = self.stream
            stream.wait_stream(device.current_stream())
        actor = device.actor()
        if actor is not None and actor.graph is not None:
            actor.graph.operations.append(lambda on: self._put(tensor, is_send, on))
            return LateWork(device, device.Event())
        self._put(tensor, is_send, stream)
        end = device.Event()
        end.record(stream)
        self.works.append(work := LateWork(device, end))
        return work

    def _put(self, tensor: torch.Tensor, is_send: bool, stream: LateStream) -> None:
        message = Message(self, tensor, is_send, stream)
        self.messages.append(message)
        stream.put(message.run, message.can_run)

    def abort(self) -> None:
        device = self._world.device
        device.block("ncclCommAbort")
        self.is_aborted = True
        device.block("ncclCommAbort", lambda: not self.messages)
