"""What a client without a key learns, leaves behind, and counts as."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from starlette.requests import Request

from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.http.connection_limits import ConnectionLimits, client_network
from tandem.proxy.http.routes.generation_routes import traceparent_of
from tandem.proxy.http.starlette_app import client_of


def test_the_reason_for_not_being_ready_names_no_address() -> None:
    table = WorkerTable(2.5)
    prefill = WorkerInfo("prefill-0", "p", "prefill", "tcp://10.0.0.1:7000", 1)
    decode = WorkerInfo("decode-0", "d", "decode", "tcp://10.0.0.2:7000", 2)
    for worker in (prefill, decode):
        table.on_register(0.0, RegisterWorker(PROTOCOL_VERSION, worker, 100, 100, "m", 64))
    pair = PairStatus("decode-0", "d", "refused", reason="10.0.0.2 has another layout")
    table.on_status(0.0, WorkerStatus("prefill-0", "p", "prefill", WorkerLoad(), PairChanges(0, [pair])))
    reason = table.why_not_ready()
    assert reason is not None and "10.0.0" not in reason and "decode-0" not in reason
    assert "10.0.0.2 has another layout" in str(table.trouble()), "operators see it"


def request_with(name: bytes, value: bytes, address: str = "1.2.3.4") -> Request:
    return Request({"type": "http", "headers": [(name, value)], "client": (address, 5), "state": {}})


VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "given", ["", VALID.upper(), VALID + "0", VALID * 1000, VALID[:-1] + "\n", VALID.replace("-", "_")]
)
def test_only_a_w3c_traceparent_is_kept(given: str) -> None:
    assert traceparent_of(request_with(b"traceparent", given.encode())) == ""
    assert traceparent_of(request_with(b"traceparent", VALID.encode())) == VALID


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert client_network("2001:db8:1:2::1") == client_network("2001:db8:1:2:ffff::2") == "2001:db8:1:2::/64"
    assert client_network("2001:db8:1:3::1") != client_network("2001:db8:1:2::1")
    assert client_network("::ffff:10.0.0.1") == client_network("10.0.0.1") == "10.0.0.1"
    assert client_network("fe80::1%eth0") == "fe80::/64" and client_network("") == ""
    assert client_of(request_with(b"", b"", "2001:db8::1")) == client_of(request_with(b"", b"", "2001:db8::2"))
    limits = ConnectionLimits(10, 2)
    opened = [Mock() for _ in range(4)]
    errors = [limits.add(f"2001:db8:{rest}", opened[i]) for i, rest in enumerate((":1", ":2", ":3", "0:1::"))]
    assert [error is None for error in errors] == [True, True, False, True]
    for number, address in ((0, "2001:db8::4"), (1, "2001:db8::5"), (3, "2001:db8:0:1::")):
        limits.remove(address, opened[number])
    assert limits.num_open == 0
