"""The id of an HTTP request: the client's own from `X-Request-Id`, or a new one. The answer carries the same header.

Answers of the Messages API have it as `request-id` too, where Anthropic's clients look for it.
"""

from __future__ import annotations

import re
import secrets

from starlette.requests import Request

from tandem.proxy.api.schema import REQUEST_ID_PATTERN
from tandem.runtime.errors import InvalidRequest

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
_VALID = re.compile(REQUEST_ID_PATTERN)


def request_id_of(request: Request) -> str:
    """Returns the same id for every call with this request. An invalid header is ignored."""
    state = request.scope["state"]
    known: str | None = state.get("request_id")
    if known is None:
        given = request.headers.get(HEADER, "")
        known = given if _VALID.fullmatch(given) else secrets.token_hex(12)
        state["request_id"] = known
    return known


def check_request_id(request: Request) -> None:
    """Raises InvalidRequest where the client's header is invalid."""
    given = request.headers.get(HEADER)
    if given is not None and not _VALID.fullmatch(given):
        raise InvalidRequest("X-Request-Id must be 1 to 128 visible ASCII characters without spaces.", HEADER)


def id_header(request: Request) -> dict[str, str]:
    request_id = request_id_of(request)
    return {HEADER: request_id, ANTHROPIC_HEADER: request_id} if is_anthropic(request) else {HEADER: request_id}


def is_anthropic(request: Request) -> bool:
    """Returns whether the request is for Anthropic's Messages API."""
    return str(request.scope.get("path", "")).startswith("/v1/messages")
