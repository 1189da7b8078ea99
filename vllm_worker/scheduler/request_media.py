"""The images and videos of one prompt, for the engine requests of all its sequences. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tandem.runtime.errors import TandemError


class RequestMedia:
    """Created when a prompt with media arrives. Belongs to the loop, except `features` and `error` once it is ready.

    features: vLLM's, of all items in the order of the prompt. error: why there are none. is_ready: one of both is set.
    num_streams: open sequences of the prompt; the last one that ends releases the media.
    """

    def __init__(self) -> None:
        self.features: Sequence[Any] = ()
        self.error: TandemError | None = None
        self.is_ready = False
        self.num_streams = 0
        self._on_release = ExitStack()

    def on_release(self, callback: Callable[[], object]) -> None:
        """Has the release call this once."""
        self._on_release.callback(callback)

    def drop(self) -> None:
        """A sequence has ended."""
        self.num_streams -= 1
        self.release_if_unused()

    def release_if_unused(self) -> None:
        """Gives back what the media hold. vLLM keeps the tensors of requests that it has not ended yet."""
        if not self.num_streams:
            self._on_release.close()
