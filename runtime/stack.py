"""Calls of libraries that recurse deeply, on a stack of a chosen size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_stack_size = threading.Lock()
"""Held while the size of new threads' stacks, which is the process's, is changed."""


def call_with_stack(stack_bytes: int, function: Callable[[], T]) -> T:
    """Calls a function on a new thread with a stack of this size, and waits for it. Raises what the function raises."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    with _stack_size:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="large-stack", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return outcome.result()
