"""Who may come in, and whose limits a request counts towards. Pure.

Keys are compared in constant time, each with every one that is valid, so that how long it takes tells nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence


class ApiKeys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._expected = [f"Bearer {key}".encode() for key in keys]

    def client_of(self, authorization: str) -> str | None:
        """A name for the key in this header, without the key; None for a wrong one."""
        given = authorization.encode("utf-8", "surrogateescape")
        found = None
        for number, expected in enumerate(self._expected):
            if hmac.compare_digest(given, expected):
                found = f"key {number}"
        return found
