"""Leases with any renewals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.handover.outgoing import Leases

TERM_S = 8.0


@given(st.lists(st.tuples(st.floats(0.0, TERM_S / 4), st.booleans()), max_size=60))
def test_a_lease_expires_one_term_after_its_last_renewal(events: list[tuple[float, bool]]) -> None:
    leases = Leases(TERM_S)
    leases.begin(0.0, "pair-0", "t")
    leases.expired(0.0)
    now = renewed_at = 0.0
    for elapsed_s, renews in events:
        now += elapsed_s
        gone = leases.expired(now)
        assert gone == (["t"] if now >= renewed_at + TERM_S else [])
        if gone:
            return
        if renews:
            renewed_at = now
            leases.renew(now, "pair-0", ["t"])
