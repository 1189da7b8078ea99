"""Bounds the processor time of code that clients bring."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tandem.runtime.errors import InvalidRequest


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raises InvalidRequest inside, where Python code runs for longer. On a main thread that has no other such timer.

    By processor time and not by the clock: a busy machine is not the client's fault.
    """
    assert threading.current_thread() is threading.main_thread()

    def on_late(_number: int, _frame: FrameType | None) -> None:
        raise InvalidRequest(f"Rendering takes more than {seconds:g} s; send a simpler template.", "chat_template")

    before = signal.signal(signal.SIGVTALRM, on_late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
