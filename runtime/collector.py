"""When a process looks for garbage. Python's collector looks at all objects there are, and stops the interpreter for
as long as that takes: 10 ms in a proxy, 0.2 s where torch is loaded. What was loaded is never garbage.

So requests must leave none that refers to itself. It comes from errors: one that is raised holds the frames that it
came through, and what they hold. Where a frame holds the error in turn, also by way of the task or future that ended
with it, all that stays. Hence what is raised is kept in no variable that lasts, and kept errors are an `ErrorInfo`.
A `TimeoutError` of `asyncio.timeout` leads to the task as well; what is raised in its place has no context.
A context manager made of a generator, which ends an error, does too (Python 3.12 and newer).
`tests/integration/test_garbage.py` looks for what there is all the same.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_FULL_AFTER = 100
"""Collections of the middle generation, in place of 10. 256 streams that begin are six of these, and looking at all
that is theirs takes 13 ms; what goes on for long looks at it every ten seconds or so."""


def freeze_loaded_objects() -> None:
    """The collector looks at what is made from now on, and seldom at all of it. For a process that has loaded, and is
    about to serve."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_AFTER)


@contextmanager
def while_loading() -> Iterator[None]:
    """The collector rests, and does not look later at what was made meanwhile: importing torch and transformers takes
    a sixth less time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def forget_frames(error: BaseException) -> None:
    """Where an error ends, once it has been told.

    It holds all frames that it came through, and what they hold. Where one of these holds the error in turn, or a task
    that ended with it, that stays until the collector comes by.
    """
    rest, seen = [error], set[int]()
    while rest:
        each = rest.pop()
        if id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
            rest += [other for other in (each.__cause__, each.__context__) if other is not None]
