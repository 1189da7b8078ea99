"""Load from a process of its own, with the least part of the processor.

It stands for other machines, but runs on the few cores of this one. A nice value alone does not give way where Linux
gives each session an equal part (`runtime.scheduling`), so the process has a session of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_NICENESS = 19
_spawn = multiprocessing.get_context("spawn")  # no locks or sockets of the parent


class LoadProcess:
    """A context manager; runs one thing at a time."""

    def __enter__(self) -> Self:
        self._pipe, far_end = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(far_end,), daemon=True)
        self._process.start()
        far_end.close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.join()

    async def prepare(
        self, load: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], Awaitable[T]]:
        """Hand a function of a module over, with all that it takes; what is returned lets it begin.

        That gives what the function gives, and raises RuntimeError where it failed.
        """

        def hand_over() -> None:
            self._pipe.send((load, args, kwargs))
            self._pipe.recv()

        def let_run() -> T:
            self._pipe.send(None)
            failed, result = self._pipe.recv()
            if failed:
                raise RuntimeError(f"{load.__name__} failed: {result}")
            return result  # type: ignore[no-any-return]

        await asyncio.to_thread(hand_over)
        return partial(asyncio.to_thread, let_run)


def step_aside() -> None:
    """For the calling process."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


def _serve(pipe: Connection) -> None:
    step_aside()
    while True:
        try:
            load, args, kwargs = pipe.recv()
            pipe.send("ready")
            pipe.recv()
        except EOFError:  # the parent has gone
            return
        try:
            answer = (False, asyncio.run(load(*args, **kwargs)))
        except Exception as error:
            answer = (True, repr(error))
        pipe.send(answer)
