"""Salts of cached prefixes: they separate clients, and tell a worker which requests have the same client."""

from __future__ import annotations

from tandem.protocol.prefix_hash import client_of, scoped_salt


def test_a_client_is_recognised_whatever_salts_it_names() -> None:
    first, second = scoped_salt("team a", "x"), scoped_salt("team a", "y")
    assert first != second and client_of(first) == client_of(second) != ""
    assert client_of(scoped_salt("team b", "x")) != client_of(first)
    assert client_of(scoped_salt("", "")) == ""
