"""The workers that may decode what a worker computes, kept up to date by each event."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.dispatch import Pong
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.proxy.cluster.worker_table import WorkerTable

NUM_WORKERS = 4
ROLES = st.sampled_from(["prefill", "decode", "any"])
WORKERS = st.integers(0, NUM_WORKERS - 1)
EVENTS = st.one_of(
    st.tuples(st.just("register"), WORKERS, ROLES),
    st.tuples(st.just("leave"), WORKERS, st.none()),
    st.tuples(st.just("exit"), WORKERS, st.none()),
    st.tuples(st.just("role"), WORKERS, ROLES),
    st.tuples(st.just("drain"), WORKERS, st.booleans()),
    st.tuples(st.just("ordered to drain"), WORKERS, st.none()),
    st.tuples(st.just("ordered to change"), WORKERS, ROLES),
    st.tuples(st.just("pair"), WORKERS, st.tuples(WORKERS, st.sampled_from(["opening", "ready", "gone"]))),
    st.tuples(st.just("silence"), WORKERS, st.none()),
    st.tuples(st.just("ping"), WORKERS, st.none()),
    st.tuples(st.just("pong"), WORKERS, st.sampled_from(["last", "last", "before", "of another"])),
)


@given(st.lists(EVENTS, max_size=40))
def test_decode_peers_are_those_that_a_look_at_everything_would_find(events: list[tuple[str, int, object]]) -> None:
    table, now = WorkerTable(2.5), 0.0
    epochs = dict.fromkeys(range(NUM_WORKERS), 0)
    pairs: dict[int, dict[str, PairStatus]] = {number: {} for number in range(NUM_WORKERS)}
    roles: dict[int, Role] = dict.fromkeys(range(NUM_WORKERS), "any")
    draining = dict.fromkeys(range(NUM_WORKERS), False)
    pings = dict.fromkeys(range(NUM_WORKERS), 0)
    unanswered: set[str] = set()

    def info(number: int) -> WorkerInfo:
        return WorkerInfo(f"w{number}", f"{number}/{epochs[number]}", roles[number], f"ipc://{number}", 1)

    def report(number: int) -> None:
        me = info(number)
        all_pairs = PairChanges(0, list(pairs[number].values()))
        table.on_status(
            now, WorkerStatus(me.worker_id, me.epoch, me.role, WorkerLoad(), all_pairs, draining=draining[number])
        )

    for kind, number, value in events:
        now += 0.1
        match kind, value:
            case "register", str():
                epochs[number], roles[number], pairs[number] = epochs[number] + 1, msgspec.convert(value, Role), {}
                draining[number] = False
                table.on_register(now, RegisterWorker(PROTOCOL_VERSION, info(number), 100, 100, "m", 4))
            case "leave", _:
                table.on_left(info(number).epoch)
            case "exit", _:
                table.on_exited(f"w{number}", 1, "crash")
            case "role", str():
                roles[number] = msgspec.convert(value, Role)
                report(number)
            case "drain", bool():
                draining[number] = value
                report(number)
            case "ordered to drain", _:
                table.on_drain_ordered(now, f"w{number}")
            case "ordered to change", str():
                table.change_role(now, f"w{number}", msgspec.convert(value, Role))
            case "pair", (int() as peer, str() as state):
                other = info(peer)
                if state == "gone" or peer == number:
                    pairs[number].pop(other.epoch, None)
                else:
                    pairs[number][other.epoch] = PairStatus(other.worker_id, other.epoch, state)  # type: ignore[arg-type]
                report(number)
            case "silence", _:
                now += 2.0
                table.check(now)
            case "ping", _ if info(number).epoch in {each.epoch for each in table.workers()}:
                pings[number] = table.on_ping(now, info(number).epoch)
                unanswered.add(info(number).epoch)
            case "pong", str():
                epoch, last = info(number).epoch, pings[number]
                answer = {"last": Pong(epoch, last), "before": Pong(epoch, last - 1), "of another": Pong("x", last)}
                table.on_pong(epoch, answer[value])
                if value == "last":
                    unanswered.discard(epoch)
        unanswered &= {each.epoch for each in table.workers()}
        check(table, unanswered)


def check(table: WorkerTable, unanswered: set[str]) -> None:
    prefills = table.prefill_workers
    reports = table.report(1000.0)
    assert {each.worker.epoch for each in reports if each.unanswered_s is not None} == unanswered
    assert table.num_unanswered == len(unanswered)
    takes_work = {each.worker.epoch for each in reports if not each.draining} - unanswered
    assert {each.worker.epoch for each in prefills + table.decode_workers} == takes_work
    decodes = {record.worker.epoch: record for record in table.decode_workers}
    assert all(record.role in PREFILL_ROLES and not record.draining for record in prefills)
    assert all(record.role in DECODE_ROLES and not record.draining for record in decodes.values())
    for record in prefills:
        ready = {pair.decode_epoch for pair in record.pairs.all() if pair.state == "ready"}
        expected = (ready | {record.worker.epoch}) & decodes.keys()
        assert record.decode_peers == {epoch: decodes[epoch] for epoch in expected}
        assert record.num_ready_pairs == len(ready & decodes.keys())
    assert table.paired_prefill_workers == [record for record in prefills if record.decode_peers]
