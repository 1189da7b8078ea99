"""API keys. Pure.

A key is compared in constant time with every valid one, so that the time of an answer reveals nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence


class ApiKeys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._expected = [f"Bearer {key}".encode() for key in keys]

    def client_of(self, authorization: str) -> str | None:
        """Returns a name for the key in this header that does not contain the key, or None for a wrong one."""
        given = authorization.encode("utf-8", "surrogateescape")
        found = None
        for number, expected in enumerate(self._expected):
            if hmac.compare_digest(given, expected):
                found = f"key {number}"
        return found
