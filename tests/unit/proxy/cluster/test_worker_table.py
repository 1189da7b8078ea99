"""Membership, driven by messages and a clock value."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    PairTraffic,
    PrefixUpdate,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
    WorkerStatus,
)
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded

SILENCE_S = 2.5


def worker(worker_id: str, epoch: str | None = None, pid: int = 1) -> WorkerInfo:
    role: Role = "prefill" if worker_id.startswith("prefill") else "decode"
    return WorkerInfo(worker_id, epoch or f"{worker_id}/1", role, f"ipc://{worker_id}", pid)


def register(info: WorkerInfo, max_model_len: int = 2048, version: int = PROTOCOL_VERSION) -> RegisterWorker:
    return RegisterWorker(version, info, max_model_len, vocab_size=1000, model_id="m", block_size=4)


def status(info: WorkerInfo, *peers: WorkerInfo, state: str = "ready") -> WorkerStatus:
    pairs = [PairStatus(peer.worker_id, peer.epoch, state) for peer in peers]  # type: ignore[arg-type]
    return WorkerStatus(info.worker_id, info.epoch, info.role, WorkerLoad(), PairChanges(0, pairs))


def cluster(num_prefill: int, num_decode: int) -> tuple[WorkerTable, list[WorkerInfo], list[WorkerInfo]]:
    """Returns a table with all pairs ready, and the prefill and decode workers."""
    table = WorkerTable(SILENCE_S)
    prefills = [worker(f"prefill-{i}") for i in range(num_prefill)]
    decodes = [worker(f"decode-{i}") for i in range(num_decode)]
    for info in prefills + decodes:
        table.on_register(0.0, register(info))
    for info in prefills:
        table.on_status(0.0, status(info, *decodes))
    return table, prefills, decodes


def test_a_report_names_the_engine_of_each_worker() -> None:
    table = WorkerTable(SILENCE_S)
    for name, engine in (("prefill-0", "tandem 0.1.0"), ("decode-0", "vllm 0.32.0")):
        table.on_register(0.0, msgspec.structs.replace(register(worker(name)), engine=engine))
    assert [each.engine for each in table.report(0.0)] == ["tandem 0.1.0", "vllm 0.32.0"]


def test_limits_of_lost_workers_are_remembered_also_if_nobody_has_asked_for_them() -> None:
    table = WorkerTable(SILENCE_S)
    gone = worker("prefill-0")
    table.on_register(0.0, register(gone, max_model_len=4096))
    table.on_left(gone.epoch)
    assert not table.workers() and table.limits().max_model_len == 4096


def test_limits_are_those_of_the_weakest_worker() -> None:
    table = WorkerTable(SILENCE_S)
    with pytest.raises(Overloaded, match="no worker is ready"):
        table.limits()
    table.on_register(0.0, register(worker("prefill-0"), max_model_len=4096))
    table.on_register(0.0, register(worker("decode-0"), max_model_len=2048))
    assert table.limits().max_model_len == 2048


def update(log: PrefixLog, *numbers: int) -> PrefixUpdate:
    """Returns the next update of the log, after these blocks were added."""
    for number in numbers:
        log.add(number.to_bytes(8, "little") + bytes(8))
    return log.take()


def test_pool_and_tiers_are_two_streams() -> None:
    table, [prefill], [decode] = cluster(1, 1)
    pool, tiers, of_decode = PrefixLog(), PrefixLog(), PrefixLog()
    message = msgspec.structs.replace(
        status(prefill, decode), prefixes=update(pool, 1), tier_prefixes=update(tiers, 1, 2)
    )
    table.on_status(0.1, message)
    table.on_status(0.1, msgspec.structs.replace(status(decode), prefixes=update(of_decode, 1, 2, 3)))
    assert not any(table.needs_restart(info.epoch) for info in (prefill, decode)), "a worker may have no tiers"
    bits = {record.worker: record.bit for record in (*table.prefill_workers, *table.decode_workers)}
    assert table.prefixes.depths([1, 2, 3]) == {bits[prefill]: 1, bits[decode]: 3}
    assert table.tier_prefixes.depths([1, 2, 3]) == {bits[prefill]: 2}


@pytest.mark.parametrize("gap", ["prefixes", "tier_prefixes"])
def test_a_gap_in_either_stream_asks_for_a_restart_of_both(gap: str) -> None:
    table, [prefill], _ = cluster(1, 1)
    logs = {"prefixes": PrefixLog(), "tier_prefixes": PrefixLog()}

    def report() -> None:
        updates = {field: log.take() for field, log in logs.items()}
        table.on_status(0.1, msgspec.structs.replace(status(prefill), **updates))

    report()
    update(logs[gap], 1)  # lost
    report()
    assert table.needs_restart(prefill.epoch)
    for log in logs.values():
        log.restart()
    report()
    assert not table.needs_restart(prefill.epoch)
    assert [gap == field for field in logs] == [
        bool(index.depths([1])) for index in (table.prefixes, table.tier_prefixes)
    ]


def test_workers_that_leave_take_the_blocks_of_their_tiers_along() -> None:
    """A worker that takes the place of another one has the same bit in both indices, and no blocks."""
    table, [prefill], [decode] = cluster(1, 1)
    for info in (prefill, decode):
        table.on_status(0.1, msgspec.structs.replace(status(info), tier_prefixes=update(PrefixLog(), 1)))
    table.on_left(prefill.epoch)
    new = worker("prefill-7")
    table.on_register(0.2, register(new))
    assert list(table.tier_prefixes.depths([1])) == [table.decode_workers[0].bit]
    table.on_status(0.3, msgspec.structs.replace(status(new), tier_prefixes=update(PrefixLog(), 1)))
    assert sorted(table.tier_prefixes.depths([1])) == sorted(
        (table.decode_workers[0].bit, table.prefill_workers[0].bit)
    )
    for info in (new, decode):
        table.on_left(info.epoch)
    assert table.tier_prefixes.is_empty and table.prefixes.is_empty
    assert not table.needs_restart(new.epoch)


def test_a_report_without_pairs_counts_those_that_may_be_used() -> None:
    table, [prefill], [one, other] = cluster(1, 2)
    refused = [PairStatus("x", f"x-{n}", "refused", reason="layout" if n < 8 else "engine") for n in range(9)]
    ready = [PairStatus(each.worker_id, each.epoch, "ready") for each in (one, other)]
    pairs = [*ready, PairStatus("gone", "gone", "ready"), *refused]
    traffic = [PairTraffic(one.worker_id, 5, 1, 0.5)]
    message = msgspec.structs.replace(
        status(prefill), pairs=PairChanges(0, pairs), load=WorkerLoad(num_running=3, traffic=traffic)
    )
    table.on_status(0.1, message)

    def reported(*, with_pairs: bool) -> WorkerReport:
        return next(each for each in table.report(0.2, with_pairs=with_pairs) if each.worker == prefill)

    light, whole = reported(with_pairs=False), reported(with_pairs=True)
    assert (light.num_ready_pairs, light.load, light.pairs) == (2, WorkerLoad(num_running=3), [refused[8], refused[0]])
    assert (whole.num_ready_pairs, whole.load.traffic, whole.pairs) == (2, traffic, pairs)
    table.on_status(0.2, msgspec.structs.replace(status(other), draining=True))
    assert reported(with_pairs=False).num_ready_pairs == 1


def test_the_traffic_of_pairs_that_ship_nothing_now_stays_known() -> None:
    table, [prefill], [one, other] = cluster(1, 2)
    for figures in (PairTraffic(one.worker_id, 5, 1, 0.5), PairTraffic(other.worker_id, 7, 1, 0.5)):
        message = msgspec.structs.replace(status(prefill, one, other), load=WorkerLoad(traffic=[figures]), pairs=None)
        table.on_status(0.1, message)
    table.on_status(0.2, msgspec.structs.replace(status(prefill), pairs=None))
    [report] = [each for each in table.report(0.2) if each.worker == prefill]
    assert {each.decode_worker_id: each.num_bytes for each in report.load.traffic} == {"decode-0": 5, "decode-1": 7}
    table.on_status(0.3, status(prefill, one))
    [report] = [each for each in table.report(0.3) if each.worker == prefill]
    assert [each.decode_worker_id for each in report.load.traffic] == ["decode-0"]
