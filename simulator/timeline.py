"""Virtual time: an event loop for each process, and one order of all their events, which a seed decides."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from tandem.runtime.tasks import jobs

_MIN_TASKS = 100
_SLICE_S = 0.01
"""Time between two turns of a process that is slowed, times its slowness."""


class _Handle:
    """One callback. Has what asyncio uses of `asyncio.TimerHandle`."""

    __slots__ = ("_args", "_context", "_is_cancelled", "_when", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, when: float):
        self.callback = callback
        self._args = args
        self._context = context if context is not None else copy_context()
        self._when = when
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def when(self) -> float:
        return self._when


class Timeline:
    """Runs the callbacks of all loops, one at a time. Time passes only when no callback is ready.

    Within a loop, callbacks keep their order; which loop is next is random. on_error(loop name, exception): called
    when a callback or a task raises.
    """

    def __init__(self, rng: random.Random, on_error: Callable[[str, BaseException], None]) -> None:
        self.now = 0.0
        self.rng = rng
        self.on_error = on_error
        self.num_events = 0
        self.loops: list[ProcessLoop] = []
        self._ready: list[ProcessLoop] = []  # with callbacks, in the order in which they got their first one
        self._timers: list[tuple[float, int, ProcessLoop, _Handle]] = []
        self._numbers = itertools.count()

    def new_loop(self, name: str) -> ProcessLoop:
        loop = ProcessLoop(self, name)  # type: ignore[abstract]  # what is missing raises NotImplementedError
        self.loops.append(loop)
        return loop

    def add_ready(self, loop: ProcessLoop) -> None:
        self._ready.append(loop)

    def add_timer(self, loop: ProcessLoop, handle: _Handle) -> None:
        heapq.heappush(self._timers, (handle._when, next(self._numbers), loop, handle))

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Runs until the condition holds. Returns False if it does not before virtual time `deadline`."""
        ready, timers, randrange = self._ready, self._timers, self.rng.randrange  # most of a run is spent here
        while not until():
            if ready:
                number = randrange(len(ready)) if len(ready) > 1 else 0
                if not ready[number].run_once():
                    del ready[number]
                self.num_events += 1
                continue
            if not timers or timers[0][0] > deadline:
                self.now = max(self.now, deadline)
                return False
            when, _, loop, handle = heapq.heappop(timers)
            if not handle._is_cancelled:
                self.now = max(self.now, when)
                loop.add(handle)
        return True


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process. A frozen one keeps its callbacks; a killed one drops them."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.name = name
        self._timeline = timeline
        self._callbacks: deque[_Handle] = deque()
        self.running_since = timeline.now
        self.stopped_at: float | None = None
        """When it was killed, or frozen and not woken since."""
        self.ended_at: float | None = None
        self.is_frozen = self.is_dead = self.has_ended = False
        self.slowness = 1.0
        """More for a process that gets that part of its CPU time: messages and timers wait for its next turn."""
        self._is_queued = False
        self._tasks: list[asyncio.Task[Any]] = []  # kept: what is collected runs its `finally` blocks
        self._max_tasks = _MIN_TASKS  # then those that are done are left out
        self.signal_handlers: dict[int, Callable[[], object]] = {}

    # ---- the process's fate

    def freeze(self) -> None:
        self.is_frozen = True
        self._stop()

    def wake(self) -> None:
        if self.is_frozen and not self.is_dead and not self.has_ended:
            self.is_frozen = False
            self.running_since, self.stopped_at = self._timeline.now, None
            self._queue()

    def end(self) -> None:
        """Its main function has returned, so no callback runs any more. The process may live on for a while."""
        self.has_ended = True
        self._stop()
        self._callbacks.clear()

    def _stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self._timeline.now

    def kill(self) -> None:
        self.is_dead = True
        self.ended_at = self._timeline.now
        self._stop()
        self._callbacks.clear()

    def discard(self) -> None:
        """Kills the process and ends its coroutines now, so that none runs its `finally` blocks during another run."""
        self.kill()
        asyncio._set_running_loop(self)
        try:
            for task in self._tasks:
                with suppress(BaseException):  # `close` would not reach into asynchronous generators
                    task.get_coro().throw(asyncio.CancelledError())
                with suppress(BaseException):
                    task.get_coro().close()
        finally:
            asyncio._set_running_loop(None)
        jobs.difference_update(self._tasks)

    # ---- used by the timeline

    def add(self, handle: _Handle) -> None:
        if not self.is_dead and not self.has_ended:
            self._callbacks.append(handle)
            self._queue()

    def _queue(self) -> None:
        if self._callbacks and not self._is_queued and not self.is_frozen:
            self._is_queued = True
            self._timeline.add_ready(self)

    def run_once(self) -> bool:
        """Runs the oldest callback. Returns whether there are more to run."""
        if self._callbacks and not self.is_frozen:
            handle = self._callbacks.popleft()
            if not handle._is_cancelled:
                self.run_handle(handle)
        self._is_queued = bool(self._callbacks) and not self.is_frozen
        return self._is_queued

    def run_handle(self, handle: _Handle) -> None:
        asyncio._set_running_loop(self)
        try:
            handle._context.run(handle.callback, *handle._args)
        except Exception as error:
            self._timeline.on_error(self.name, error)
        finally:
            asyncio._set_running_loop(None)

    # ---- asyncio's interface

    def time(self) -> float:
        return self._timeline.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context, self._timeline.now)
        self.add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        return self.call_at(self._timeline.now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        if self.slowness > 1.0:
            slice_s = self.slowness * _SLICE_S
            when = max(when, math.ceil(when / slice_s) * slice_s)
        handle = _Handle(callback, args, context, when)
        if not self.is_dead:
            self._timeline.add_timer(self, handle)
        return handle

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        self.signal_handlers[sig] = partial(callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._max_tasks:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._max_tasks = 2 * len(self._tasks) + _MIN_TASKS
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:  # the tasks of a killed process are pending for ever
            error = context.get("exception") or RuntimeError(context["message"])
            self._timeline.on_error(self.name, error)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.is_dead
