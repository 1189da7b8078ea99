"""Salts of cached prefixes, which tell workers whose request it is without telling them the API key. Pure."""

from __future__ import annotations

from hashlib import sha256

_CLIENT_CHARACTERS = 16
"""Characters at the start of a scoped salt that are the same in all requests of a client."""


def scoped_salt(cache_scope: str, cache_salt: str) -> str:
    """Returns the salt of a request's cached prefixes: its own salt within the scope of its API key.

    cache_scope: "" without API keys; then the request's own salt is used as it is.
    """
    if not cache_scope:
        return cache_salt
    client = sha256(b"tandem client\0" + cache_scope.encode()).hexdigest()[:_CLIENT_CHARACTERS]
    return client + sha256(b"tandem cache salt\0" + f"{cache_scope}\0{cache_salt}".encode()).hexdigest()


def client_of(scoped_salt: str) -> str:
    """Returns what is the same in all requests of a client, whatever salts they name. "" without API keys and salts."""
    return scoped_salt[:_CLIENT_CHARACTERS]
