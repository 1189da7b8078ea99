"""The time that a client gives a request: the header `X-Request-Timeout`, in seconds from its arrival."""

from __future__ import annotations

import math
from typing import Any

from litestar.connection import ASGIConnection

from tandem.runtime.errors import InvalidRequest

HEADER = "x-request-timeout"


def request_timeout_s(connection: ASGIConnection[Any, Any, Any, Any]) -> float | None:
    """None where the header is missing. Raises InvalidRequest."""
    given = connection.headers.get(HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("X-Request-Timeout must be a number of seconds above 0.", HEADER)
    return seconds
