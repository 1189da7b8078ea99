"""Requests to an application in this process, without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from tandem.proxy.admission.api_key import ApiKey
from tandem.runtime.errors import InternalError


async def call(
    app: ASGIApp, path: str, body: bytes, host: str, key: ApiKey | None
) -> tuple[int, dict[str, str], bytes]:
    """Sends a POST request to the application. Returns status, headers and body of the answer.

    Raises InternalError if the application ends before its answer is complete.
    """
    sent: list[Message] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not given:
            await asyncio.Event().wait()  # this client does not disconnect
        return given.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": (host, 0),
        "server": ("batch", 0),
        "state": {} if key is None else {"api_key": key},
    }
    await app(scope, receive, send)
    if len(sent) < 2 or sent[-1].get("more_body", False):
        raise InternalError("the server failed while it wrote the answer")
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])
