"""Membership, driven by messages and a clock value."""

from __future__ import annotations

import msgspec
import pytest

from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.proxy.cluster.registry import Registry
from tandem.runtime.errors import Overloaded, ProtocolError
from tandem.worker.registration import PROXY_SILENCE_S

SILENCE_S = 2.5


def worker(worker_id: str, epoch: str | None = None, pid: int = 1) -> WorkerInfo:
    role: Role = "prefill" if worker_id.startswith("prefill") else "decode"
    return WorkerInfo(worker_id, epoch or f"{worker_id}/1", role, f"ipc://{worker_id}", pid)


def register(info: WorkerInfo, max_model_len: int = 2048, version: int = PROTOCOL_VERSION) -> RegisterWorker:
    return RegisterWorker(version, info, max_model_len, vocab_size=1000, model_id="m", block_size=4)


def status(info: WorkerInfo, *peers: WorkerInfo, state: str = "ready") -> WorkerStatus:
    pairs = [PairStatus(peer.worker_id, peer.epoch, state) for peer in peers]  # type: ignore[arg-type]
    return WorkerStatus(info.worker_id, info.epoch, WorkerLoad(), pairs)


def cluster(num_prefill: int, num_decode: int) -> tuple[Registry, list[WorkerInfo], list[WorkerInfo]]:
    """Returns a registry with all pairs ready, and the prefill and decode workers."""
    registry = Registry(SILENCE_S)
    prefills = [worker(f"prefill-{i}") for i in range(num_prefill)]
    decodes = [worker(f"decode-{i}") for i in range(num_decode)]
    for info in prefills + decodes:
        registry.on_register(0.0, register(info))
    for info in prefills:
        registry.on_status(0.0, status(info, *decodes))
    return registry, prefills, decodes


def test_a_worker_joins_once() -> None:
    registry = Registry(SILENCE_S)
    info = worker("prefill-0")
    assert registry.on_register(0.0, register(info)).joined == [info]
    assert not registry.on_register(1.0, register(info))
    assert registry.workers() == [info]


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    registry = Registry(SILENCE_S)
    with pytest.raises(ProtocolError, match=rf"version 99.*speaks version {PROTOCOL_VERSION}"):
        registry.on_register(0.0, register(worker("prefill-0"), version=99))
    assert registry.workers() == []


def test_status_of_an_unknown_worker_or_epoch_asks_it_to_register() -> None:
    registry = Registry(SILENCE_S)
    assert not registry.on_status(0.0, status(worker("decode-0")))
    registry.on_register(0.0, register(worker("decode-0")))
    assert registry.on_status(0.1, status(worker("decode-0")))
    assert not registry.on_status(0.1, status(worker("decode-0", "another epoch")))


def test_silence_is_loss_and_status_is_a_heartbeat() -> None:
    registry = Registry(SILENCE_S)
    quiet, lively = worker("decode-0"), worker("decode-1")
    for info in (quiet, lively):
        registry.on_register(0.0, register(info))
    for step in range(1, 11):
        registry.on_status(step * 0.25, status(lively))
        assert not registry.check(step * 0.25)
    assert [gone.worker for gone in registry.check(2.75).lost] == [quiet]
    assert registry.workers() == [lively]
    assert not registry.on_status(3.0, status(quiet)), "the worker must register again"
    assert registry.on_register(3.0, register(quiet)).joined == [quiet]


def test_a_stopped_proxy_declares_no_worker_lost() -> None:
    registry = Registry(SILENCE_S)
    registry.on_register(0.0, register(worker("decode-0")))
    registry.check(0.25)
    assert not registry.check(4.0)
    assert not registry.check(4.25)
    assert [registry.check(4.0 + 0.25 * i) for i in range(2, 20)], "later silence counts"
    assert registry.workers() == []


def test_a_proxy_stopped_for_long_fails_its_requests() -> None:
    registry = Registry(SILENCE_S)
    info = worker("decode-0")
    registry.on_register(0.0, register(info))
    registry.check(0.25)
    [gone] = registry.check(0.25 + PROXY_SILENCE_S).lost
    assert gone.worker == info and "this proxy was stopped for 5.0 s" in gone.reason
    assert registry.on_register(5.5, register(info)).joined == [info]
    assert not registry.check(5.75)


def test_a_name_belongs_to_its_worker_while_it_lives() -> None:
    registry = Registry(SILENCE_S)
    first = worker("decode-0", "e1", pid=10)
    second = msgspec.structs.replace(first, epoch="e2", endpoint="tcp://10.0.0.9:4000", pid=99)
    registry.on_register(0.0, register(first))
    for step in range(1, 40):
        now = step * 0.25
        with pytest.raises(ProtocolError, match=r"process 10.*is already called decode-0.*another --name"):
            registry.on_register(now, register(second))
        assert registry.on_status(now, status(first)) and not registry.check(now)
        assert registry.workers() == [first]
    while not registry.check(now):
        now += 0.25
    assert registry.on_register(now, register(second)).joined == [second], "the first worker is silent"
    with pytest.raises(ProtocolError, match="process 99"):
        registry.on_register(now, register(first))
    registry.on_exited("decode-0", 99)
    assert registry.on_register(now, register(first)).joined == [first]


def test_an_exited_process_is_lost_at_once_but_not_its_successor() -> None:
    registry = Registry(SILENCE_S)
    old, new = worker("decode-0", "e1", pid=10), worker("decode-0", "e2", pid=11)
    registry.on_register(0.0, register(old))
    change = registry.on_register(1.0, register(new))
    assert ([gone.worker for gone in change.lost], change.joined) == ([old], [new])
    assert not registry.on_exited("decode-0", 10)
    assert [gone.worker for gone in registry.on_exited("decode-0", 11).lost] == [new]


def test_limits_are_those_of_the_weakest_worker() -> None:
    registry = Registry(SILENCE_S)
    with pytest.raises(Overloaded, match="no worker is ready"):
        registry.limits()
    registry.on_register(0.0, register(worker("prefill-0"), max_model_len=4096))
    registry.on_register(0.0, register(worker("decode-0"), max_model_len=2048))
    assert registry.limits().max_model_len == 2048


def test_readiness_names_what_is_missing() -> None:
    registry = Registry(SILENCE_S)
    prefill, decode = worker("prefill-0"), worker("decode-0")
    assert registry.why_not_ready() == "no worker is ready"
    registry.on_register(0.0, register(prefill))
    assert registry.why_not_ready() == "no decode worker is ready"
    registry.on_register(0.0, register(decode))
    assert "is connected" in str(registry.why_not_ready())
    registry.on_status(0.0, status(prefill, decode, state="refused"))
    assert "prefill-0 to decode-0 is refused" in str(registry.pair_trouble())
    assert "decode-0" not in str(registry.why_not_ready()), "strangers see this"
    registry.on_status(0.0, status(prefill, decode))
    assert registry.why_not_ready() is None


def test_a_pair_with_an_old_epoch_is_not_used() -> None:
    registry, [prefill], [_old] = cluster(1, 1)
    assert len(registry.paired_prefill_workers) == 1
    new = worker("decode-0", "decode-0/2")
    registry.on_register(1.0, register(new))
    assert not registry.paired_prefill_workers
    registry.on_status(1.0, status(prefill, new))
    [record] = registry.paired_prefill_workers
    assert [peer.worker for peer in record.decode_peers] == [new]
