"""Limits on the number of connections, in total and from one address."""

from __future__ import annotations

import pytest

from tandem.proxy.answers.errors import TooManyFromClient
from tandem.proxy.http.connections.connection_limits import ConnectionLimits


def test_both_limits_and_closed_connections_free_a_place(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[None] = []
    limits = ConnectionLimits(3, 2, lambda: refused.append(None), clock=lambda: 5.0)
    assert limits.add("a") is None and limits.add("a") is None
    assert isinstance(limits.add("a"), TooManyFromClient)
    assert limits.add("b") is None
    error = limits.add("c")
    assert error is not None and not isinstance(error, TooManyFromClient)
    assert limits.num_open == 3 and len(refused) == 2
    assert len(caplog.records) == 1, "one line in ten seconds"
    limits.remove("a")
    assert limits.add("c") is None
    for client in ("a", "b", "c"):
        limits.remove(client)
    assert limits.num_open == 0 and not limits._by_client
