"""Membership, driven by messages and a clock value."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PROXY_SILENCE_S,
    LeaveCause,
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
from tandem.runtime.errors import Overloaded, ProtocolError

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


def test_a_worker_joins_once() -> None:
    table = WorkerTable(SILENCE_S)
    info = worker("prefill-0")
    assert table.on_register(0.0, register(info)).joined == [info]
    assert not table.on_register(1.0, register(info))
    assert table.workers() == [info]


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    table = WorkerTable(SILENCE_S)
    with pytest.raises(ProtocolError, match=rf"version 99.*speaks version {PROTOCOL_VERSION}"):
        table.on_register(0.0, register(worker("prefill-0"), version=99))
    assert table.workers() == []


def test_status_of_an_unknown_worker_or_epoch_asks_it_to_register() -> None:
    table = WorkerTable(SILENCE_S)
    assert not table.on_status(0.0, status(worker("decode-0")))
    table.on_register(0.0, register(worker("decode-0")))
    assert table.on_status(0.1, status(worker("decode-0")))
    assert not table.on_status(0.1, status(worker("decode-0", "another epoch")))


def test_silence_is_loss_and_status_is_a_heartbeat() -> None:
    table = WorkerTable(SILENCE_S)
    quiet, lively = worker("decode-0"), worker("decode-1")
    for info in (quiet, lively):
        table.on_register(0.0, register(info))
    for step in range(1, 11):
        table.on_status(step * 0.25, status(lively))
        assert not table.check(step * 0.25)
    assert [gone.worker for gone in table.check(2.75).lost] == [quiet]
    assert table.workers() == [lively]
    assert not table.on_status(3.0, status(quiet)), "the worker must register again"
    assert table.on_register(3.0, register(quiet)).joined == [quiet]


def test_a_stopped_proxy_declares_no_worker_lost() -> None:
    table = WorkerTable(SILENCE_S)
    table.on_register(0.0, register(worker("decode-0")))
    table.check(0.25)
    assert not table.check(4.0)
    assert not table.check(4.25)
    assert [table.check(4.0 + 0.25 * i) for i in range(2, 20)], "later silence counts"
    assert table.workers() == []


def test_a_slow_machine_loses_no_workers() -> None:
    """The proxy is late each time, and so are the workers' reports, which it has not read yet."""
    table = WorkerTable(SILENCE_S)
    info = worker("decode-0")
    table.on_register(0.0, register(info))
    table.check(0.25)
    now, reports_at = 0.25, [3.2, 6.1, 9.0]
    while now < 9.0:
        now += 0.9
        assert not table.check(now), now
        for at in [at for at in reports_at if at <= now]:
            reports_at.remove(at)
            assert table.on_status(now, status(info))


def test_only_an_exit_by_a_crash_says_so() -> None:
    table = WorkerTable(SILENCE_S)
    first, silent = worker("decode-0", pid=7), worker("decode-1", pid=8)
    for info in (first, silent):
        table.on_register(0.0, register(info))
    [gone] = table.on_exited("decode-0", 7, "order").lost
    assert (gone.worker, gone.has_crashed, gone.has_left) == (first, False, True)
    now = 0.0
    while not (change := table.check(now)):
        now += 0.25
    [gone] = change.lost
    assert gone.worker == silent and not gone.has_crashed
    [gone] = table.on_exited("decode-1", 8, "crash").lost
    assert gone.worker == silent and gone.has_crashed, "it was silent while it wrote its core file"
    assert not table.on_exited("decode-1", 8, "crash")


def test_a_worker_that_wakes_up_and_crashes_later_has_not_crashed_before() -> None:
    table = WorkerTable(SILENCE_S)
    frozen, awake = worker("decode-0", "e1", pid=7), worker("decode-0", "e2", pid=7)
    table.on_register(0.0, register(frozen))
    now = 0.0
    while not table.check(now):
        now += 0.25
    table.on_register(now, register(awake))
    assert [gone.worker for gone in table.on_exited("decode-0", 7, "crash").lost] == [awake]


def test_a_proxy_stopped_for_long_fails_its_requests() -> None:
    table = WorkerTable(SILENCE_S)
    info = worker("decode-0")
    table.on_register(0.0, register(info))
    table.check(0.25)
    [gone] = table.check(0.25 + PROXY_SILENCE_S).lost
    assert gone.worker == info and "this proxy was stopped for 5.0 s" in gone.reason
    assert table.on_register(5.5, register(info)).joined == [info]
    assert not table.check(5.75)


def test_a_name_belongs_to_its_worker_while_it_lives() -> None:
    table = WorkerTable(SILENCE_S)
    first = worker("decode-0", "e1", pid=10)
    second = msgspec.structs.replace(first, epoch="e2", endpoint="tcp://10.0.0.9:4000", pid=99)
    table.on_register(0.0, register(first))
    for step in range(1, 40):
        now = step * 0.25
        with pytest.raises(ProtocolError, match=r"process 10.*is already called decode-0.*another --name"):
            table.on_register(now, register(second))
        assert table.on_status(now, status(first)) and not table.check(now)
        assert table.workers() == [first]
    while not table.check(now):
        now += 0.25
    assert table.on_register(now, register(second)).joined == [second], "the first worker is silent"
    with pytest.raises(ProtocolError, match="process 99"):
        table.on_register(now, register(first))
    table.on_exited("decode-0", 99, "crash")
    assert table.on_register(now, register(first)).joined == [first]


def test_an_exited_process_is_lost_at_once_but_not_its_successor() -> None:
    table = WorkerTable(SILENCE_S)
    old, new = worker("decode-0", "e1", pid=10), worker("decode-0", "e2", pid=11)
    table.on_register(0.0, register(old))
    change = table.on_register(1.0, register(new))
    assert ([gone.worker for gone in change.lost], change.joined) == ([old], [new])
    assert not table.on_exited("decode-0", 10, "crash")
    assert [gone.worker for gone in table.on_exited("decode-0", 11, "crash").lost] == [new]


def test_limits_of_lost_workers_are_remembered_also_if_nobody_has_asked_for_them() -> None:
    table = WorkerTable(SILENCE_S)
    gone = worker("prefill-0")
    table.on_register(0.0, register(gone, max_model_len=4096))
    table.on_left(gone.epoch)
    assert not table.workers() and table.limits().max_model_len == 4096


@pytest.mark.parametrize(("cause", "has_crashed"), [("order", False), ("failure", True), ("silence", False)])
def test_only_an_end_by_order_or_silence_is_no_fault_of_a_request(cause: LeaveCause, has_crashed: bool) -> None:
    table = WorkerTable(SILENCE_S)
    table.on_register(0.0, register(worker("prefill-0")))
    [lost] = table.on_left(worker("prefill-0").epoch, cause, ["7-1"] if has_crashed else []).lost
    assert (lost.has_crashed, lost.has_left, lost.is_gone) == (has_crashed, not has_crashed, True)
    assert lost.attempt_ids == ({"7-1"} if has_crashed else set())
    assert not table.on_exited("prefill-0", worker("prefill-0").pid, "crash"), "it is counted once"


def test_limits_are_those_of_the_weakest_worker() -> None:
    table = WorkerTable(SILENCE_S)
    with pytest.raises(Overloaded, match="no worker is ready"):
        table.limits()
    table.on_register(0.0, register(worker("prefill-0"), max_model_len=4096))
    table.on_register(0.0, register(worker("decode-0"), max_model_len=2048))
    assert table.limits().max_model_len == 2048


def test_readiness_names_what_is_missing() -> None:
    table = WorkerTable(SILENCE_S)
    prefill, decode = worker("prefill-0"), worker("decode-0")
    assert table.why_not_ready() == "no worker is ready"
    table.on_register(0.0, register(prefill))
    assert table.why_not_ready() == "no decode worker is ready"
    table.on_register(0.0, register(decode))
    assert "is connected" in str(table.why_not_ready())
    table.on_status(0.0, status(prefill, decode, state="refused"))
    assert "prefill-0 to decode-0 is refused" in str(table.trouble())
    assert "decode-0" not in str(table.why_not_ready()), "strangers see this"
    table.on_status(0.0, status(prefill, decode))
    assert table.why_not_ready() is None


def test_a_pair_with_an_old_epoch_is_not_used() -> None:
    table, [prefill], [_old] = cluster(1, 1)
    assert len(table.paired_prefill_workers) == 1
    new = worker("decode-0", "decode-0/2")
    table.on_register(1.0, register(new))
    assert not table.paired_prefill_workers
    table.on_status(1.0, status(prefill, new))
    [record] = table.paired_prefill_workers
    assert [peer.worker for peer in record.decode_peers.values()] == [new]


def test_a_role_change_is_refused_when_it_would_stop_the_service() -> None:
    table, _, _ = cluster(1, 2)
    assert "last worker that may prefill" in table.change_role(1.0, "prefill-0", "decode")
    assert table.change_role(1.0, "prefill-0", "any") == ""
    assert table.change_role(1.0, "decode-0", "prefill") == ""
    assert table.change_role(1.0, "decode-1", "prefill") == "", "prefill-0 decodes too"
    assert "last worker that may decode" in table.change_role(1.0, "prefill-0", "prefill")
    assert [info.role for info in table.workers()] == ["any", "prefill", "prefill"]


def test_the_last_worker_that_may_prefill_becomes_a_decode_worker_where_these_compute_prompts() -> None:
    """It could not return to its role in a cluster that had started without prefill workers. Found by the simulator."""
    table = WorkerTable(3.5, decode_may_prefill=True)
    for number in range(2):
        table.on_register(0.0, register(worker(f"decode-{number}")))
    assert table.change_role(1.0, "decode-0", "any") == ""
    assert table.change_role(1.0, "decode-0", "decode") == ""
    assert table.change_role(1.0, "decode-0", "prefill") == ""
    assert "last worker that may decode" in table.change_role(1.0, "decode-1", "prefill")
    assert table.change_role(1.0, "decode-0", "decode") == ""


def test_a_role_change_of_an_unknown_or_draining_worker_is_refused() -> None:
    table, _, [decode, _] = cluster(1, 2)
    assert "no worker decode-7 is registered" in table.change_role(1.0, "decode-7", "any")
    table.on_status(0.1, msgspec.structs.replace(status(decode), draining=True))
    assert "draining" in table.change_role(1.0, "decode-0", "any")
    assert "last worker that may decode" in table.change_role(1.0, "decode-1", "prefill"), "decode-0 is leaving"


def test_a_worker_drains_from_the_order_on() -> None:
    """It used to take a role until its next report."""
    table, _, [decode, other] = cluster(1, 2)
    table.on_drain_ordered(1.0, "decode-0")
    assert "draining" in table.change_role(1.0, "decode-0", "any")
    assert "last worker that may decode" in table.change_role(1.0, "decode-1", "prefill")
    table.on_status(1.1, status(decode))  # sent before the order
    assert "draining" in table.change_role(1.1, "decode-0", "any")
    table.on_status(1.2, msgspec.structs.replace(status(decode), draining=True))
    table.on_status(2.5, msgspec.structs.replace(status(decode), draining=True))
    assert "draining" in table.change_role(2.5, "decode-0", "any")
    table.on_drain_ordered(3.0, "decode-1")
    table.on_status(4.5, status(other))
    assert table.change_role(4.5, "decode-1", "any") == "", "the order never arrived"


def test_a_report_that_was_sent_before_the_order_does_not_undo_it() -> None:
    table, [prefill], [decode, _] = cluster(1, 2)
    assert table.change_role(1.0, "decode-0", "any") == ""
    table.on_status(1.01, status(decode))
    assert table.report(1.01)[1].worker.role == "any"
    assert table.change_role(1.02, "prefill-0", "decode") == "", "decode-0 may prefill"
    table.on_status(1.03, msgspec.structs.replace(status(decode), role="any"))
    table.on_status(1.04, msgspec.structs.replace(status(decode), role="decode"))  # by order of another proxy
    assert table.report(1.04)[1].worker.role == "decode"
    table.on_status(1.9, status(prefill))
    assert table.report(1.9)[0].worker.role == "decode"
    table.on_status(2.1, status(prefill))
    assert table.report(2.1)[0].worker.role == "prefill", "the order never arrived"


def test_a_worker_reports_its_role() -> None:
    table, [prefill], [decode] = cluster(1, 1)
    before = table.num_changes
    table.on_status(0.1, msgspec.structs.replace(status(decode), role="any"))
    assert table.num_changes == before + 1
    assert [record.worker for record in table.prefill_workers] == [decode, prefill]
    assert table.report(0.1)[1].worker.role == "any"
    assert not table.on_register(0.2, register(msgspec.structs.replace(decode, role="any"))), "it is not restarted"


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


def test_a_process_that_is_gone_with_its_host_neither_crashed_nor_left() -> None:
    """Its prompts count the attempt: a request may be the cause, but it is not blamed for it."""
    table = WorkerTable(SILENCE_S)
    table.on_register(0.0, register(worker("decode-0", pid=7)))
    [gone] = table.on_exited("decode-0", 7, "unknown").lost
    assert (gone.has_crashed, gone.has_left) == (False, False)


def test_an_orderly_end_that_is_heard_of_after_the_exit_excuses_attempts() -> None:
    """The launcher did not ask for the end, and its report overtook the worker's own."""
    table = WorkerTable(SILENCE_S)
    gone = worker("decode-0", pid=7)
    table.on_register(0.0, register(gone))
    [crashed] = table.on_exited("decode-0", 7, "crash").lost
    assert crashed.has_crashed and not table.on_left("another")
    [late] = table.on_left(gone.epoch, "order").lost
    assert (late.worker, late.has_left, late.has_crashed) == (gone, True, False)
    assert not table.on_left(gone.epoch, "order")
    table.on_register(0.0, register(gone))
    table.on_exited("decode-0", 7, "crash")
    assert not table.on_left(gone.epoch, "failure"), "it is counted once"
