"""When a process looks for garbage. Python's collector looks at all objects there are, and stops the interpreter for
as long as that takes: 10 ms in a proxy, 0.2 s where torch is loaded. What was loaded is never garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FULL_AFTER = 100
"""Collections of the middle generation, in place of 10. 256 streams that begin are six of these, and looking at all
that is theirs takes 13 ms; what goes on for long looks at it every ten seconds or so."""


def keep_all_there_is() -> None:
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
