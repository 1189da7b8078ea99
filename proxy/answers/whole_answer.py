"""Answers that are not streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.proxy.answers.json_parts import Part, pieces


class WholeAnswer(Response):
    """A body in parts. It is sent in pieces, so that the limits on what a client leaves unread hold for it."""

    def __init__(
        self, parts: Sequence[Part], headers: Mapping[str, str], on_end: Callable[[], None], status: int = 200
    ) -> None:
        """headers: by default the body is JSON. on_end: called when it is sent, or the client has disconnected."""
        self.status_code = status
        self.background = None
        num_bytes = sum(map(len, parts))
        self.init_headers({"content-type": "application/json", **headers, "content-length": str(num_bytes)})
        self._parts = parts
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            for piece in pieces(self._parts):
                if last:
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                last = piece
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._on_end()
