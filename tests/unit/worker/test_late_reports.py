"""Threads of data paths and checksums report to a worker whose loop is closed: it ends, and nobody waits for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.handover.actions import Receive, Ship
from tandem.handover.kv_traffic import KVTraffic

SHIP, RECEIVE = Ship("pair", "transfer", 0, [1], [2]), Receive("pair", "transfer", [2], [3])


def traffic_of_a_worker(reports: list[Any], checksums: bool) -> KVTraffic[Any]:
    """Returns one whose paths and checksums keep their callbacks in `reports`. Its loop is closed."""
    loop = asyncio.new_event_loop()
    loop.close()
    pair = SimpleNamespace(connector="ipc", checksums=checksums)
    traffic = KVTraffic.__new__(KVTraffic)
    traffic.__dict__.update(
        _loop=loop,
        _clock=lambda: 0.0,
        num_bytes=0,
        _incoming=SimpleNamespace(receive=lambda pair_id, block_ids, done: reports.append(done)),
        _outgoing=SimpleNamespace(sender=lambda pair_id: SimpleNamespace(send=lambda *job: reports.append(job[-1]))),
        _outgoing_table=SimpleNamespace(get=lambda pair_id: pair, announcement=lambda *fields: None),
        _host=SimpleNamespace(
            pools=SimpleNamespace(checksums=lambda block_ids, done: reports.append(done)),
            connectors={"ipc": SimpleNamespace(one_sided=True)},
            block_bytes=1,
        ),
    )
    return traffic


@pytest.mark.parametrize("job", ["ship", "ship with checksums", "receive", "receive with checksums"])
def test_a_late_report_is_dropped(job: str) -> None:
    reports: list[Any] = []
    traffic = traffic_of_a_worker(reports, job.endswith("checksums"))
    if job == "receive with checksums":
        traffic._on_received(RECEIVE, None)
    elif job == "receive":
        traffic.receive(RECEIVE)
    else:
        traffic.ship(SHIP)
    [report] = reports
    report([3] if job.endswith("checksums") else None)
