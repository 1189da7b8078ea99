"""Two workers on one late device: their pools, block managers, steps, and a path of `ipc` or `nccl` between them.

Real: `ModelRunner.run` around a model that only writes and reads blocks, the connectors, block managers, CUDA graphs'
capture. Simulated: the device (`tests.support.late_device`), NCCL, threads.

Invariants: a step reads what was written for its prompt; no data arrives in blocks that have another owner; nothing
that may block runs on the event loop; the watchdog ends no process; every transfer ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed

from tandem.engine import model_runner
from tandem.engine.batch import Batch
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.kv_transfer.connectors import block_messages, nccl_group
from tandem.kv_transfer.connectors.cuda_ipc import CudaIpcSender
from tandem.kv_transfer.connectors.process_group import ProcessGroupReceiver, ProcessGroupSender
from tandem.runtime.errors import KVTransferFailed
from tests.support.late_device import LOOP, LateDevice, install, map_at_once
from tests.support.late_nccl import NCCLWorld

NUM_BLOCKS, BLOCK_BYTES = 6, 8
Error = KVTransferFailed | None


class Worker:
    """A pool, its blocks, and the engine thread with its queue of steps. is_split: the path moves some heads of each
    block, so that every message needs a buffer."""

    def __init__(self, world: StreamWorld, name: str, is_split: bool) -> None:
        self._device = world.device
        self._post = world.post
        whole = torch.zeros((NUM_BLOCKS, BLOCK_BYTES * (2 if is_split else 1)), dtype=torch.uint8)
        self.pool = whole[:, :BLOCK_BYTES]
        self.blocks = BlockManager(NUM_BLOCKS, 1)
        self._steps: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._runner: Any = object.__new__(model_runner.ModelRunner)
        self._runner.device = torch.device("cuda", 0)
        self._stream = self._device.Stream()
        self._device.start(name, self._run)

    def step(self, compute: Callable[[], None], on_done: Callable[[], None]) -> None:
        self._steps.append((compute, on_done))

    def _run(self) -> None:
        while True:
            self._device.wait_until(lambda: bool(self._steps))
            compute, on_done = self._steps.popleft()
            self._runner._launch = lambda batch, before, compute=compute: (
                compute() or (lambda _: (None, lambda tokens: []))
            )
            with self._device.stream(self._stream):
                model_runner.ModelRunner.run(self._runner, Batch([]))
            self._post(on_done)


class StreamWorld:
    """One schedule. connector: ipc or nccl. faults: a path may be closed or a peer may freeze in the middle."""

    def __init__(self, seed: int, connector: str, patch: pytest.MonkeyPatch, faults: bool = True) -> None:
        self.device = LateDevice(seed)
        self.rng = self.device.rng
        self.nccl = NCCLWorld(self.device)
        self._posted: deque[Callable[[], None]] = deque()
        self.connector = connector
        install(self.device, patch)
        patch.setattr(torch.distributed, "ProcessGroupNCCL", self.nccl)
        for name, value in nccl_group.NCCL_ENVIRONMENT.items():
            patch.setenv(name, value)
        plan = (self.rng.choice([1, 2]), 1)  # blocks per message, buffers
        patch.setattr(block_messages, "message_plan", lambda backend, block_bytes: plan)
        patch.setattr(nccl_group, "MESSAGES_AHEAD", self.rng.choice([1, 2]))
        is_split = self.rng.random() < 0.5
        self.prefill, self.decode = (Worker(self, name, is_split) for name in ("prefill", "decode"))
        map_at_once(self.device, self.decode.pool, patch)
        self.prompts_left = 6
        self.num_open = 0  # prompts, and local work
        self.num_computed = self.num_failed = 0
        self.waiting: deque[Callable[[], bool]] = deque()  # for blocks
        self.closes_after = self.rng.choice([None, None, None, 2, 3, 4]) if faults else None
        self.freezes = faults and connector == "nccl" and self.rng.random() < 0.15
        self.is_closed = self.is_frozen = False
        self.quarantined: list[int] = []

    def post(self, callback: Callable[[], None]) -> None:
        self._posted.append(callback)

    def run(self) -> None:
        self.device.start(LOOP, self._loop, is_daemon=False)
        self.device.run()
        assert not self.nccl.processes_ended, self.nccl.processes_ended
        for worker in (self.prefill, self.decode):
            worker.blocks.check()

    def _loop(self) -> None:
        self._open()
        while self.num_open or self.waiting or self.prompts_left:
            self.device.wait_until(lambda: bool(self._posted))
            self._posted.popleft()()
            for _ in range(len(self.waiting)):
                start = self.waiting.popleft()
                if not start():
                    self.waiting.append(start)

    # ---- the path

    def _open(self) -> None:
        def ready(error: Error) -> None:
            assert error is None, error
            for number in range(self.prompts_left):
                self.waiting.append(partial(self._start_prompt, number + 1))
            self.prompts_left = 0

        post: Callable[[Error], None] = lambda error: self.post(lambda: ready(error))  # noqa: E731
        if self.connector == "ipc":
            self.sender: Any = CudaIpcSender("ship", self.prefill.pool, b"", lambda pool: pool, post)
            return
        store: Any = lambda: "path"  # noqa: E731
        serve: Any = lambda: ("path", b"")  # noqa: E731
        self.receiver = ProcessGroupReceiver("take", "nccl", serve, "", self.decode.pool, lambda address: None)
        self.sender = ProcessGroupSender("ship", "nccl", store, "", self.prefill.pool, post)

    def _close(self) -> None:
        """The pair is given up. Blocks that a one-sided sender may still write are kept until it has closed."""
        self.is_closed = True
        if self.connector == "nccl":
            self.receiver.close()

        def closed() -> None:
            self.decode.blocks.end_quarantine(self.quarantined)
            self.quarantined = []
            self.num_open -= 1

        self.num_open += 1
        self.sender.close(lambda: self.post(closed))

    # ---- prompts

    def _start_prompt(self, content: int) -> bool:
        num_blocks = self.rng.randint(1, 4)
        if not (self.prefill.blocks.can_allocate(num_blocks) and self.decode.blocks.can_allocate(num_blocks)):
            return False
        self.num_open += 1
        src, dst = self.prefill.blocks.allocate(num_blocks), self.decode.blocks.allocate(num_blocks)
        self.rng.shuffle(src)
        self.prefill.step(partial(write, self.prefill.pool, src, content), lambda: self._ship(src, dst, content))
        return True

    def _ship(self, src: list[int], dst: list[int], content: int) -> None:
        def shipped(error: Error) -> None:
            self.prefill.blocks.release(src)
            self._local_work(self.prefill, 100 + content)
            if self.connector == "ipc":
                arrived(error)

        def arrived(error: Error) -> None:
            if error is None:
                self._decode(dst, content)
            else:
                self._lose(dst)

        if self.connector == "nccl":
            self.receiver.receive(dst, lambda error: self.post(lambda: arrived(error)))
        self.is_frozen = self.is_frozen or (self.freezes and content == 2)
        if self.is_frozen:
            self.prefill.blocks.release(src)  # announced, but never sent
        else:
            self.sender.send(src, dst, lambda error: self.post(lambda: shipped(error)))
        if self.closes_after == content and not self.is_closed:
            self.post(self._close)

    def _lose(self, dst: list[int]) -> None:
        self.num_failed += 1
        self.decode.blocks.release(dst)
        self._local_work(self.decode, 50)
        self.num_open -= 1

    def _decode(self, dst: list[int], content: int) -> None:
        seen = torch.empty((len(dst), BLOCK_BYTES), dtype=torch.uint8)

        def decoded() -> None:
            assert holds(seen, content), f"prompt {content} reads {seen.flatten().tolist()}"
            self.num_computed += 1
            self.decode.blocks.release(dst)
            self._local_work(self.decode, 200)
            self.num_open -= 1

        self.decode.step(partial(read, self.decode.pool, dst, seen), decoded)

    def _local_work(self, worker: Worker, content: int) -> None:
        """A prompt that this worker computes itself: a step that samples nothing, then one that reads what it wrote."""
        num_blocks = self.rng.randint(1, 2)
        if not worker.blocks.can_allocate(num_blocks):
            return
        self.num_open += 1
        blocks = worker.blocks.allocate(num_blocks)
        seen = torch.empty((num_blocks, BLOCK_BYTES), dtype=torch.uint8)

        def end() -> None:
            worker.blocks.release(blocks)
            self.num_open -= 1

        def check() -> None:
            assert holds(seen, content), f"own blocks hold {seen.flatten().tolist()}, not {content}"
            end()

        def written() -> None:
            if self.rng.random() < 0.3:
                end()  # it was aborted
            else:
                worker.step(partial(read, worker.pool, blocks, seen), check)

        worker.step(partial(write, worker.pool, blocks, content), written)


def write(pool: torch.Tensor, blocks: list[int], content: int) -> None:
    for number, block in enumerate(blocks):
        pool[block].fill_(content + 10 * number)


def holds(seen: torch.Tensor, content: int) -> bool:
    """Returns whether blocks that were read are those that `write` wrote, in order."""
    return all(bool(row.eq(content + 10 * number).all()) for number, row in enumerate(seen))


def read(pool: torch.Tensor, blocks: list[int], seen: torch.Tensor) -> None:
    for row, block in enumerate(blocks):
        seen[row].copy_(pool[block])


def run(seed: int, connector: str, patch: pytest.MonkeyPatch) -> StreamWorld:
    world = StreamWorld(seed, connector, patch)
    world.run()
    return world


def run_graphs(seed: int, patch: pytest.MonkeyPatch) -> None:
    """Captures a model that writes to and reads from a pool, then mixes replays with steps without a graph.

    Inputs are copied to the graph's buffer late. Each step's output must be that of its own inputs.
    """
    device = LateDevice(seed)
    rng = device.rng
    install(device, patch)
    cuda = torch.device("cuda", 0)
    runs = vars(model_runner)  # with the functions that `install` has replaced
    waits = lambda: runs["end_of_work"](cuda)()  # noqa: E731
    pool = torch.zeros(NUM_BLOCKS, dtype=torch.int64)
    flat = torch.zeros(2, dtype=torch.int64)  # a block, and what to write to it

    def model() -> torch.Tensor:
        pool.index_copy_(0, flat[:1], flat[1:] * 3)
        return pool.index_select(0, flat[:1]) + 1

    def serve() -> None:
        with device.stream(device.Stream()):
            capture = runs["cuda_capture"]()
            flat.copy_(torch.tensor([0, 7]))
            replays = [capture(model) for _ in range(2)]
            flat.copy_(torch.tensor([0, 9]))
            first = model()
            waits()
            assert first.tolist() == [28] and pool.tolist() == [27] + [0] * (NUM_BLOCKS - 1), "the capture still writes"
            for _ in range(6):
                block, token = rng.randrange(NUM_BLOCKS), rng.randrange(1, 100)
                flat.copy_(torch.tensor([block, token]), non_blocking=True)
                output = rng.choice([*replays, model])()
                waits()
                assert output.tolist() == [token * 3 + 1] and pool.tolist()[block] == token * 3

    device.start("engine", serve, is_daemon=False)
    device.run()
