"""Calls that need no worker are limited in all, and for each client."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.admission.budgets import ClientSlots


def test_one_client_leaves_room_for_others() -> None:
    slots = ClientSlots(5, 3)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(slots.hold("a"))
        with pytest.raises(ClientLimitExceeded, match="3 of your calls"), slots.hold("a"):
            pass
        for client in "bc":
            held.enter_context(slots.hold(client))
        with pytest.raises(QueueFull, match="5 calls are in flight") as full, slots.hold("d"):
            pass
        assert not isinstance(full.value, ClientLimitExceeded) and full.value.retry_after_s >= 1
    with slots.hold("a"):
        pass
    assert not slots._by_client, "clients that have no calls in flight are forgotten"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_call_is_refused_only_at_a_limit(calls: list[tuple[str, bool]]) -> None:
    """Each call begins, or the client's last one ends."""
    slots = ClientSlots(7, 4)
    held: dict[str, list[ExitStack]] = {client: [] for client in "abc"}
    for client, ends in calls:
        if ends:
            if held[client]:
                held[client].pop().close()
            continue
        call, num_all = ExitStack(), sum(map(len, held.values()))
        expected = ClientLimitExceeded if len(held[client]) == 4 else QueueFull if num_all == 7 else None
        try:
            call.enter_context(slots.hold(client))
        except QueueFull as error:
            assert type(error) is expected
        else:
            assert expected is None
            held[client].append(call)
