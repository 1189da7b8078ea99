"""Sends answers that are not streamed, and limits the memory of those that clients have not read yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.proxy.answers.request_id import id_header
from tandem.proxy.http.starlette_app import client_of
from tandem.runtime.errors import Overloaded

MAX_UNREAD_BYTES = 1 << 30
"""All whole answers together that are being sent. Half of it is for one client."""
_PIECE_BYTES = 64 * 1024


class WholeAnswers:
    """Counts the bytes of whole answers from the first byte sent until the last one is in the transport's buffer."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_client: Counter[str] = Counter()
        self.num_bytes = 0

    def json(self, request: Request, body: bytes) -> Response:
        """Returns an answer, which raises Overloaded in place of its first byte where it would exceed a limit."""
        return _WholeAnswer(self, body, headers=id_header(request), media_type="application/json")

    @contextmanager
    def hold(self, client: str, num_bytes: int) -> Generator[None, None, None]:
        """Counts the bytes during the context. Raises Overloaded where they would exceed a limit."""
        own = self._by_client[client] + num_bytes
        if self.num_bytes + num_bytes > self._max_bytes or own > self._max_bytes // 2:
            whose = "your" if own > self._max_bytes // 2 else "all"
            raise Overloaded(f"{whose} unread answers are too large for this proxy's memory; read them, then try again")
        self._by_client[client] += num_bytes
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            self._by_client[client] -= num_bytes
            if not self._by_client[client]:
                del self._by_client[client]


class _WholeAnswer(Response):
    """Sends its body in pieces, each when the transport has room: the transport would copy and keep a whole one."""

    def __init__(self, answers: WholeAnswers, body: bytes, headers: dict[str, str], media_type: str) -> None:
        super().__init__(body, headers=headers, media_type=media_type)
        self._answers = answers
        self._whole = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._whole
        with self._answers.hold(client_of(Request(scope)), len(body)):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, max(1, len(body)), _PIECE_BYTES):
                end = start + _PIECE_BYTES
                more = end < len(body)
                await send({"type": "http.response.body", "body": body[start:end], "more_body": more})
