"""What only the collector would find: objects that refer to themselves, which live until all objects are looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_garbage() -> Iterator[list[object]]:
    """What only the collector would have found of what was made in this context; filled in at its end."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def frames_in(folder: str, garbage: list[object]) -> list[str]:
    """Where each of the frames is that are kept; folder: of the code, as it is in the repository."""
    frames = [each for each in garbage if isinstance(each, FrameType)]
    places = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
    return [place for place in places if f"/{folder}" in place]
