"""Limits the CPU time of code that clients send."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tandem.runtime.errors import InvalidRequest


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raises InvalidRequest in the body of the `with` when it has used this much CPU time. Main thread only.

    Limits CPU time and not elapsed time, so that a busy machine causes no errors.
    """
    assert threading.current_thread() is threading.main_thread()

    def on_timer(_number: int, _frame: FrameType | None) -> None:
        raise InvalidRequest(
            f"Rendering chat_template takes more than {seconds:g} s; send a simpler template.", "chat_template"
        )

    before = signal.signal(signal.SIGVTALRM, on_timer)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
