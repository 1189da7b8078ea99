"""One API key as the proxy sees it: a client with limits, a scope in the prefix cache, and running requests."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from tandem.runtime.errors import InvalidRequest, TandemError


class InvalidApiKey(InvalidRequest):
    """The API key is missing, wrong or revoked."""

    code = "invalid_api_key"


class ApiKey:
    """A valid key. The key itself is not kept.

    client: whose limits requests with this key count towards. cache_scope: requests with different scopes share no
    cached prefix; a hash, so that workers and the media process learn neither the key nor the client.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.cache_scope = sha256(b"tandem cache scope\0" + client.encode()).hexdigest()
        self._is_revoked = False
        self._running: set[Callable[[TandemError], None]] = set()

    def begin(self, fail: Callable[[TandemError], None]) -> None:
        """Notes a running request, which `fail` ends. The caller owes one `end`. Raises InvalidApiKey if revoked."""
        if self._is_revoked:
            raise _revoked()
        self._running.add(fail)

    def end(self, fail: Callable[[TandemError], None]) -> None:
        self._running.discard(fail)

    def revoke(self) -> None:
        """Ends the running requests, and those that begin later: a revoked key may be in a stranger's hands."""
        self._is_revoked = True
        running, self._running = self._running, set()
        for fail in running:
            fail(_revoked())


def _revoked() -> InvalidApiKey:
    return InvalidApiKey("The API key was revoked while the request was running; ask the operator for another key.")
