"""Net changes between two calls of `take`, against a set that is compared before and after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.tiers.tier import ChangeLog


@given(st.lists(st.one_of(st.integers(0, 4), st.none())))
def test_changes_turn_what_was_known_into_what_is_there(steps: list[int | None]) -> None:
    log = ChangeLog()
    there: set[bytes] = set()
    known: set[bytes] = set()
    for step in [*steps, None]:
        if step is None:
            changes = log.take()
            assert len(set(changes.added)) == len(changes.added) and len(set(changes.removed)) == len(changes.removed)
            assert known.isdisjoint(changes.added) and known.issuperset(changes.removed)
            known = (known | set(changes.added)) - set(changes.removed)
            assert known == there
            continue
        block_hash = bytes([step]) * 16
        if block_hash in there:
            log.remove(block_hash)
        else:
            log.add(block_hash)
        there ^= {block_hash}
