"""Answers that are files."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.descriptor_budget import DescriptorBudget


class Download(FileResponse):
    """A file, which is open while the client reads it: the descriptor counts until then."""

    def __init__(
        self,
        path: Path,
        descriptors: DescriptorBudget,
        client: str,
        headers: dict[str, str],
        media_type: str = "application/octet-stream",
    ) -> None:
        super().__init__(path, headers=headers, media_type=media_type)
        self._descriptors = descriptors
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientShareExceeded or Overloaded before anything is sent."""
        with self._descriptors.hold(self._client):
            await super().__call__(scope, receive, send)
