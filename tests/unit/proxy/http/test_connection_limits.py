"""Limits on the number of connections, in total and from one address."""

from __future__ import annotations

import pytest

from tandem.proxy.answers.errors import TooManyFromClient
from tandem.proxy.http.connection_limits import ConnectionLimits


class Connection:
    """A connection that notes whether it was abandoned."""

    def __init__(self, limits: ConnectionLimits, address: str, has_request: bool = False) -> None:
        self.limits, self.address, self.has_request = limits, address, has_request
        self.is_abandoned = False
        self.error = limits.add(address, self)

    def abandon(self) -> None:
        self.is_abandoned = True
        self.close()

    def close(self) -> None:
        self.limits.remove(self.address, self)


def test_both_limits_and_closed_connections_free_a_place(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[None] = []
    limits = ConnectionLimits(3, 2, lambda: refused.append(None), clock=lambda: 5.0)
    first, second = Connection(limits, "a"), Connection(limits, "a")
    assert first.error is second.error is None
    assert isinstance(Connection(limits, "a").error, TooManyFromClient)
    other = Connection(limits, "b")
    assert other.error is None
    error = Connection(limits, "c").error
    assert error is not None and not isinstance(error, TooManyFromClient)
    assert limits.num_open == 3 and len(refused) == 2
    assert len(caplog.records) == 1, "one line in ten seconds"
    first.close()
    later = Connection(limits, "c")
    assert later.error is None
    for connection in (second, other, later):
        connection.close()
    assert limits.num_open == 0 and not limits._by_client and not limits._open


def test_the_oldest_connection_without_a_request_makes_room_for_a_probe() -> None:
    limits = ConnectionLimits(3, 3, closes_oldest=True)
    busy, idle, later = Connection(limits, "a", has_request=True), Connection(limits, "a"), Connection(limits, "a")
    probe = Connection(limits, "kubelet")
    assert probe.error is None and limits.num_open == 3
    assert [each.is_abandoned for each in (busy, idle, later)] == [False, True, False]
    later.has_request = probe.has_request = True
    assert Connection(limits, "kubelet").error is None
    assert busy.is_abandoned and limits.num_open == 3, "where all have requests, the oldest one"
