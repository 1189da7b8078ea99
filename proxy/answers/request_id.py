"""A request's id: the client's own from `X-Request-Id`, or a new one; the answer tells it in the same header."""

from __future__ import annotations

import re
import secrets
from typing import Any

from litestar.connection import ASGIConnection

from tandem.proxy.api.schema import REQUEST_ID_PATTERN
from tandem.runtime.errors import InvalidRequest

HEADER = "x-request-id"
_VALID = re.compile(REQUEST_ID_PATTERN)


def request_id_of(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """The same whenever it is asked for. A header that is not valid counts as none."""
    state = connection.scope["state"]
    known: str | None = state.get("request_id")
    if known is None:
        given = connection.headers.get(HEADER, "")
        known = given if _VALID.fullmatch(given) else secrets.token_hex(12)
        state["request_id"] = known
    return known


def check_request_id(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """Raises InvalidRequest."""
    given = connection.headers.get(HEADER)
    if given is not None and not _VALID.fullmatch(given):
        raise InvalidRequest("X-Request-Id must be 1 to 128 visible ASCII characters without spaces.", HEADER)


def id_header(connection: ASGIConnection[Any, Any, Any, Any]) -> dict[str, str]:
    return {HEADER: request_id_of(connection)}
