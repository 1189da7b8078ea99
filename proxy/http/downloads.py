"""Answers that are files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.descriptor_budget import DescriptorBudget

_NUM_DESCRIPTORS = 2
"""The one by which the file is found, and the one that Starlette reads."""


class Download(FileResponse):
    """A file, which is open while the client reads it: its descriptors count until then.

    It may be deleted at any moment. So it is opened before anything is sent, and found by its descriptor from then on.
    """

    def __init__(
        self,
        open_file: Callable[[], Awaitable[BinaryIO]],
        descriptors: DescriptorBudget,
        client: str,
        headers: dict[str, str],
        media_type: str = "application/octet-stream",
    ) -> None:
        """open_file: may raise the error that tells the client why there is no such file."""
        super().__init__("", headers=headers, media_type=media_type)
        self._open = open_file
        self._descriptors = descriptors
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientShareExceeded, Overloaded and as `open_file` does before anything is sent."""
        with self._descriptors.hold(self._client, _NUM_DESCRIPTORS), await self._open() as file:
            self.path = f"/proc/self/fd/{file.fileno()}"
            await super().__call__(scope, receive, send)
