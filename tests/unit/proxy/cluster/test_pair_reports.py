"""Pairs as a worker reports them and as a proxy knows them, with reports that do not arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.handover.outgoing_pairs import ReportedPairs
from tandem.protocol.messages.checks import MAX_PAIRS
from tandem.protocol.messages.membership import PairChanges, PairStatus, PairTraffic
from tandem.proxy.cluster.worker_record import KnownPairs

EPOCHS = ("a", "b", "c")
PAIRS = st.sampled_from(EPOCHS).flatmap(
    lambda epoch: st.builds(
        PairStatus, st.just(f"decode-{epoch}"), st.just(epoch), st.sampled_from(["opening", "ready", "refused"])
    )
)
STEPS = st.one_of(
    st.tuples(st.just("pair"), PAIRS),
    st.tuples(st.just("gone"), st.sampled_from(EPOCHS)),
    st.tuples(st.just("report"), st.tuples(st.booleans(), st.booleans())),
    st.tuples(st.just("new proxy"), st.integers(0, 1)),
)


@given(st.lists(STEPS, max_size=40))
def test_a_proxy_knows_all_pairs_or_asks_for_them(steps: list[tuple[str, object]]) -> None:
    pairs: dict[str, PairStatus] = {}
    reports, proxies = ReportedPairs(), [KnownPairs(), KnownPairs()]

    def report(arrives: tuple[bool, bool]) -> None:
        message = reports.take(pairs.values())
        for number, proxy in enumerate(proxies):
            if not arrives[number]:
                continue
            before = {pair.decode_epoch: pair for pair in proxy.all()}
            changed = proxy.apply(message, reports.num_changes)
            after = {pair.decode_epoch: pair for pair in proxy.all()}
            assert set(changed) == {epoch for epoch in EPOCHS if before.get(epoch) != after.get(epoch)}
            assert len(changed) == len(set(changed))
            assert proxy.has_missed or after == pairs
            assert [pair.state for pair in proxy.refused()] == ["refused"] * any(
                pair.state == "refused" for pair in after.values()
            )
            if proxy.has_missed:
                reports.restart()

    for kind, value in steps:
        match kind, value:
            case "pair", PairStatus():
                pairs[value.decode_epoch] = value
            case "gone", str():
                pairs.pop(value, None)
            case "report", (bool(), bool()):
                report(value)  # type: ignore[arg-type]
            case "new proxy", int():
                proxies[value] = KnownPairs()
    report((True, True))
    report((True, True))
    for proxy in proxies:
        assert not proxy.has_missed
        assert {pair.decode_epoch: pair for pair in proxy.all()} == pairs
        assert all(proxy.is_ready(epoch) == (epoch in pairs and pairs[epoch].state == "ready") for epoch in EPOCHS)


def test_nothing_is_reported_while_nothing_changes() -> None:
    reports, pair = ReportedPairs(), PairStatus("decode-0", "a", "opening")
    ready = PairStatus("decode-0", "a", "ready")
    assert reports.take([pair]) == PairChanges(0, [pair])
    assert reports.take([pair]) is None
    assert reports.take([ready]) == PairChanges(1, [ready])
    assert reports.take([]) == PairChanges(2, [], ["a"])
    assert reports.take([]) is None
    assert reports.num_changes == 3


def test_the_traffic_of_a_pair_is_forgotten_with_it() -> None:
    known = KnownPairs()
    known.apply(PairChanges(0, [PairStatus("decode-0", "a", "ready"), PairStatus("decode-1", "b", "ready")]), 1)
    known.add_traffic([PairTraffic("decode-0", 5, 1, 0.5), PairTraffic("decode-1", 7, 1, 0.5)])
    known.apply(PairChanges(1, [], ["a"]), 2)
    assert [each.decode_worker_id for each in known.traffic()] == ["decode-1"]


def test_a_worker_cannot_make_a_proxy_remember_pairs_without_limit() -> None:
    known, num_reports = KnownPairs(), 3
    for number in range(num_reports):
        changed = [PairStatus("d", f"{number}-{i}", "refused") for i in range(MAX_PAIRS // 2)]
        known.apply(PairChanges(number, changed), number + 1)
        known.add_traffic(PairTraffic(f"{number}-{i}", 1, 1, 1.0) for i in range(MAX_PAIRS // 2))
    assert known.has_missed and not known.all() and not known.refused()
    assert len(known.traffic()) <= MAX_PAIRS
