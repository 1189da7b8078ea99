"""A device that runs queued work as late as its events allow, in seeded random order, in place of torch.cuda.

As torch has it, `Stream()` returns one of 32 streams in turn, so that some callers share one.

Tensors are on the CPU. Inside `stream(...)`, operations on them are queued and their outputs hold poison until they
have run; elsewhere they run at once, as the host's own. Threads are greenlets ("actors"), so a seed gives one order of
the host's actions too. Work of the host that may block fails on the actor named "loop".
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tandem.engine.cuda import streams
from tandem.kv_transfer.connectors import cuda_ipc, cuda_stream, job_thread, nccl_group

Ready = Callable[[], bool]
LOOP = "loop"
POOL_SIZE = 32
"""Streams that torch has for all who ask it for one, on each device and of each priority."""


class Deadlock(AssertionError):
    """Neither the host nor the device can go on."""


class Actor:
    """A thread of the host. ready: whether it can go on. stream: what operations are queued on."""

    def __init__(self, device: LateDevice, name: str, function: Callable[[], None], is_daemon: bool) -> None:
        self.name = name
        self.is_daemon = is_daemon
        self.ready: Ready = lambda: True
        self.wakes_at: float | None = None
        self.stream: LateStream | None = None
        self.graph: LateGraph | None = None
        self.greenlet = greenlet(function, device.hub)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.queue: deque[tuple[Ready, Callable[[], None]]] = deque()
        device.streams.append(self)

    def put(self, run: Callable[[], None], ready: Ready = lambda: True) -> None:
        self.queue.append((ready, run))

    def can_run(self) -> bool:
        return bool(self.queue) and self.queue[0][0]()

    def wait_event(self, event: LateEvent) -> None:
        number = event.num_recorded  # a later record does not count
        self.put(lambda: None, lambda: event.num_done >= number)

    def wait_stream(self, other: LateStream) -> None:
        event = LateEvent(self._device)
        event.record(other)
        self.wait_event(event)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.num_recorded = self.num_done = 0

    def record(self, stream: LateStream | None = None) -> None:
        self.num_recorded += 1
        number = self.num_recorded

        def done() -> None:
            self.num_done = max(self.num_done, number)

        (stream or self._device.current_stream()).put(done)

    def query(self) -> bool:
        return self.num_done >= self.num_recorded

    def synchronize(self) -> None:
        self._device.block("cudaEventSynchronize", self.query)


class LateGraph:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.operations: list[Callable[[LateStream], None]] = []
        """Each queues its work in a stream."""

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        stream = self._device.current_stream()
        for operation in self.operations:
            operation(stream)


class LateDevice(TorchDispatchMode):
    """Has torch.cuda's functions for streams, events and graphs. on_time: called when the clock has moved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.hub = getcurrent()
        self.streams: list[LateStream] = []
        self.default = LateStream(self)
        self._pool = [LateStream(self) for _ in range(POOL_SIZE)]
        self._num_taken = 0
        self.actors: list[Actor] = []
        self.now = 0.0
        self.on_time: list[Callable[[], None]] = []
        self._device_share = self.rng.choice([0.05, 0.3, 0.6])
        self._is_running = False

    # ---- torch.cuda

    def Stream(self, device: Any = None) -> LateStream:
        self._num_taken += 1
        return self._pool[self._num_taken % POOL_SIZE]

    def new_stream(self, device: Any = None) -> LateStream:
        """Stands for a stream of CUDA's runtime."""
        return LateStream(self)

    def Event(self, blocking: bool = False) -> LateEvent:
        return LateEvent(self)

    def CUDAGraph(self) -> LateGraph:
        return LateGraph(self)

    def device(self, device: Any) -> Any:
        return nullcontext()

    def current_stream(self, device: Any = None) -> LateStream:
        actor = self.actor()
        return (actor.stream if actor is not None else None) or self.default

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        actor = self.actor()
        assert actor is not None
        before, actor.stream = actor.stream, stream
        try:
            yield
        finally:
            actor.stream = before

    @contextmanager
    def graph(self, graph: LateGraph, **options: Any) -> Iterator[None]:
        actor = self.actor()
        assert actor is not None
        actor.graph = graph
        try:
            with self.stream(LateStream(self)):
                yield
        finally:
            actor.graph = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        actor = self.actor()
        is_created = not any(isinstance(each, torch.Tensor) for each in [*args, *kwargs.values()])
        if self._is_running or actor is None or actor.stream is None or is_created:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host reads a value that the device may not have computed")
        if func._schema.is_mutable:
            self._queue(actor, lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        outputs = func(*args, **kwargs)
        if func.is_view and all(_is_view_of(output, args[0]) for output in _tensors(outputs)):
            return outputs
        tree_map_only(torch.Tensor, poison, outputs)

        def compute() -> None:
            for output, result in zip(_tensors(outputs), _tensors(func(*args, **kwargs)), strict=True):
                output.copy_(result)

        self._queue(actor, compute)
        return outputs

    def _queue(self, actor: Actor, operation: Callable[[], None]) -> None:
        if actor.graph is not None:
            actor.graph.operations.append(lambda stream: stream.put(operation))
        else:
            assert actor.stream is not None
            actor.stream.put(operation)

    # ---- the host

    def actor(self) -> Actor | None:
        current = getcurrent()
        return next((actor for actor in self.actors if actor.greenlet is current), None)

    def start(self, name: str, function: Callable[[], None], is_daemon: bool = True) -> Actor:
        self.actors.append(actor := Actor(self, name, function, is_daemon))
        return actor

    def wait_until(self, ready: Ready) -> None:
        """Let others run until `ready()`."""
        actor = self.actor()
        if actor is None:
            return
        actor.ready = ready
        self.hub.switch()

    def block(self, what: str, ready: Ready = lambda: True) -> None:
        """A call that may block."""
        actor = self.actor()
        assert actor is None or actor.name != LOOP, f"{what} on the event loop"
        self.wait_until(ready)

    def sleep(self, seconds: float) -> None:
        actor = self.actor()
        assert actor is not None
        actor.wakes_at = wakes_at = self.now + seconds
        self.block("a sleep", lambda: self.now >= wakes_at)
        actor.wakes_at = None

    def run(self) -> None:
        """Run until every actor that is no daemon has ended. Raises what an actor raises, and Deadlock."""
        with torch.inference_mode(), self:  # for all actors: it belongs to the thread
            while any(not actor.is_daemon for actor in self.actors):
                ready = [actor for actor in self.actors if actor.ready()]
                busy = [stream for stream in self.streams if stream.can_run()]
                if self.rng.random() < 0.1 and min(self._wake_times(), default=math.inf) < self.now + 1:  # a poll
                    self._pass_time()
                elif busy and (not ready or self.rng.random() < self._device_share):
                    self._run_one(self.rng.choice(busy))
                elif ready:
                    self._switch_to(self.rng.choice(ready))
                else:
                    self._pass_time()

    def _run_one(self, stream: LateStream) -> None:
        self._is_running = True
        try:
            stream.queue.popleft()[1]()
        finally:
            self._is_running = False

    def _switch_to(self, actor: Actor) -> None:
        actor.ready = lambda: True
        actor.greenlet.switch()
        if actor.greenlet.dead:
            self.actors.remove(actor)

    def _pass_time(self) -> None:
        times = self._wake_times()
        if not times:
            raise Deadlock(f"all wait: {[actor.name for actor in self.actors]}")
        self.now = max(self.now, min(times))
        for look in self.on_time:
            look()

    def _wake_times(self) -> list[float]:
        return [actor.wakes_at for actor in self.actors if actor.wakes_at is not None]

    # ---- threads

    def executor(self, num_threads: int, name: str, initializer: Any = None) -> LateExecutor:
        assert num_threads == 1
        return LateExecutor(self, name)

    def thread(self, target: Callable[[], None], name: str = "thread", daemon: bool = True) -> Any:
        return SimpleNamespace(start=lambda: self.start(name, target))


class LateExecutor:
    """A ThreadPoolExecutor of one thread."""

    def __init__(self, device: LateDevice, name: str) -> None:
        self._device = device
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = deque()
        device.start(name, self._run)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((function, arguments, future))
        return future

    def shutdown(self, wait: bool) -> None:
        assert not wait

    def _run(self) -> None:
        while True:
            self._device.wait_until(lambda: bool(self._jobs))
            function, arguments, future = self._jobs.popleft()
            try:
                result = function(*arguments)
            except AssertionError:
                raise
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def poison(tensor: torch.Tensor) -> None:
    """Indices become zero, which is valid; all else becomes a value that no test computes."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(0xEE)
    else:
        tensor.zero_()


def _is_view_of(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Operators such as `to` and `reshape` return a view or a copy."""
    return output.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def install(device: LateDevice, patch: pytest.MonkeyPatch) -> None:
    """Puts the device in place of torch.cuda, and its actors in place of the threads of data paths."""
    for name in ("Stream", "Event", "CUDAGraph", "device", "stream", "current_stream", "graph"):
        patch.setattr(torch.cuda, name, getattr(device, name))
    patch.setattr(streams, "_warm_up_stream", functools.cache(lambda: device.Stream()))
    patch.setattr(cuda_stream, "time", SimpleNamespace(monotonic=lambda: device.now, sleep=device.sleep))
    patch.setattr(cuda_stream, "_POLL_INTERVAL_S", 0.2)
    patch.setattr(cuda_stream, "_new_stream", device.new_stream)
    patch.setattr(cuda_stream, "_free_streams", cuda_stream._FreeStreams())
    patch.setattr(job_thread, "ThreadPoolExecutor", device.executor)
    threads = SimpleNamespace(Lock=threading.Lock, Thread=device.thread)
    patch.setattr(nccl_group, "threading", threads)


def map_at_once(device: LateDevice, pool: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
    """Lets `ipc` map `pool`, in place of the driver."""

    def map_peer_pool(address: bytes, on: torch.device) -> torch.Tensor:
        device.block("cudaIpcOpenMemHandle")
        return pool

    patch.setattr(cuda_ipc, "map_peer_pool", map_peer_pool)
