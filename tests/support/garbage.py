"""Finds objects in reference cycles, which only the cyclic garbage collector would free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_garbage() -> Iterator[list[object]]:
    """Yields a list that is filled at the end with the objects in cycles that the context created."""
    found: list[object] = []
    gc.unfreeze()  # what another test has frozen, and left, would be found here as soon as something unfreezes it
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
    """Returns the locations of frames among the objects. folder: of the code, or a file, relative to the repository."""
    frames = [each for each in garbage if isinstance(each, FrameType)]
    places = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
    return [place for place in places if f"/{folder}" in place and "/tests/" not in place]
