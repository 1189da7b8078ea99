"""Slots: shared among clients, and given to one holder alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.admission.fair_slots import FairSlots
from tests.support.async_tests import in_loop


class Clients:
    """Holds slots for clients until they are told to end."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.began: list[str] = []
        self.has_begun: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._tasks: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []

    async def ask(self, client: str, *, alone_s: float = 0.0) -> None:
        may_end = asyncio.Event()
        hold = self._slots.slot_alone(client, alone_s) if alone_s else self._slots.slot(client)
        self._tasks.append((client, asyncio.create_task(self._run(client, hold, may_end)), may_end))
        await self.settle()

    async def end(self, client: str, *, cancel: bool = False) -> None:
        """Ends the first task of the client."""
        [found, *_] = [each for each in self._tasks if each[0] == client]
        self._tasks.remove(found)
        if cancel:
            found[1].cancel()
        found[2].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _run(self, client: str, hold: AbstractAsyncContextManager[None], may_end: asyncio.Event) -> None:
        async with hold:
            self.began.append(client)
            self.has_begun[client].set()
            await may_end.wait()


@in_loop
async def test_a_client_that_holds_slots_for_long_leaves_some_to_others() -> None:
    clients = Clients(FairSlots(4, 3))
    for _ in range(10):
        await clients.ask("alice")
    assert clients.began == ["alice"] * 3
    await clients.ask("bob")
    await clients.ask("bob")
    assert clients.began == ["alice"] * 3 + ["bob"]
    await clients.end("alice")
    assert clients.began[-1] == "bob", "the client that holds fewer is next"
    await clients.end("bob")
    assert clients.began[-1] == "alice"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16))
@in_loop
async def test_clients_that_hold_as_many_slots_take_turns(asked: list[str]) -> None:
    clients = Clients(FairSlots(1, 1))
    await clients.ask("first")
    waiting: dict[str, int] = {}
    for client in asked:
        await clients.ask(client)
        waiting[client] = waiting.get(client, 0) + 1
    holder, expected = "first", ["first"]
    while waiting:
        next_one, number = next(iter(waiting.items()))
        del waiting[next_one]
        if number > 1:
            waiting[next_one] = number - 1  # behind all others
        await clients.end(holder)
        holder = next_one
        expected.append(next_one)
    assert clients.began == expected
    await clients.end(holder)


@in_loop
async def test_no_slot_is_granted_beside_one_alone() -> None:
    clients = Clients(FairSlots(4, 3))
    await clients.ask("alice")
    await clients.ask("suspect", alone_s=60.0)
    await clients.ask("bob")
    assert clients.began == ["alice"], "it waits until no slot is held, and new ones wait for it"
    await clients.end("alice")
    assert clients.began == ["alice", "suspect"]
    await clients.end("suspect")
    assert clients.began == ["alice", "suspect", "bob"]
    await clients.end("bob")
    await clients.ask("suspect", alone_s=0.01)
    await clients.ask("carol")
    assert clients.began[3] == "suspect"
    async with asyncio.timeout(30):
        await clients.has_begun["carol"].wait()  # one that holds a slot for long does not stop others for ever


@in_loop
async def test_cancelled_holders_leave_no_slot_taken() -> None:
    clients = Clients(FairSlots(1, 1))
    await clients.ask("alice")
    for alone_s in (0.0, 60.0):
        await clients.ask("bob", alone_s=alone_s)
        await clients.end("bob", cancel=True)
    await clients.end("alice", cancel=True)
    await clients.ask("suspect", alone_s=60.0)
    await clients.end("suspect", cancel=True)
    await clients.ask("carol")
    assert clients.began == ["alice", "suspect", "carol"]


@pytest.mark.parametrize("num_cancelled", [1, 2, 5])
@in_loop
async def test_a_cancelled_turn_leaves_its_client_where_it_was_in_the_round(num_cancelled: int) -> None:
    clients = Clients(FairSlots(1, 1))
    await clients.ask("first")
    for _ in range(num_cancelled + 1):
        await clients.ask("alice")
    await clients.ask("bob")
    for _ in range(num_cancelled):
        await clients.end("alice", cancel=True)
    await clients.end("first")
    assert clients.began == ["first", "alice"]
    await clients.end("alice")
    assert clients.began[2:] == ["bob"]
    await clients.end("bob")


@pytest.mark.parametrize("num_cancelled", [1, 2, 5])
@in_loop
async def test_a_slot_that_nobody_used_leaves_its_client_where_it_was_in_the_round(num_cancelled: int) -> None:
    """Its caller was cancelled after the slot was granted, and before it ran."""
    slots = FairSlots(1, 1)
    began: list[str] = []

    async def hold(client: str) -> None:
        async with slots.slot(client):
            began.append(client)

    await slots.acquire("first")
    tasks = [asyncio.create_task(hold(client)) for client in ["alice"] * num_cancelled + ["bob", "alice"]]
    await asyncio.sleep(0)
    slots.release("first")
    for task in tasks[:num_cancelled]:  # the slot is granted to each of them, one after the other
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert began == ["alice", "bob"]


@in_loop
async def test_one_alone_that_was_cancelled_before_it_ran_makes_the_next_wait_for_nobody() -> None:
    slots = FairSlots(2, 1)
    began: list[str] = []

    async def hold(client: str, alone: bool) -> None:
        async with slots.slot_alone(client, 60.0) if alone else slots.slot(client):
            began.append(client)
            await asyncio.Event().wait()

    await slots.acquire("first")
    asked = [("suspect", True), ("next suspect", True), ("alice", False)]
    tasks = [asyncio.create_task(hold(client, alone)) for client, alone in asked]
    await asyncio.sleep(0)
    slots.release("first")  # grants a slot to the first of them
    tasks[0].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert began == ["next suspect"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not slots.has_share("suspect")


@in_loop
async def test_others_get_slots_between_two_that_are_alone() -> None:
    clients = Clients(FairSlots(2, 1))
    for _ in range(3):
        await clients.ask("suspect", alone_s=60.0)
    for client in ("alice", "bob", "carol"):
        await clients.ask(client)
    assert clients.began == ["suspect"]
    await clients.end("suspect")
    assert clients.began[1:] == ["alice", "bob"]
    await clients.end("alice")
    assert len(clients.began) == 3, "the next one waits until both have ended, and carol for it"
    await clients.end("bob")
    assert clients.began[3:] == ["suspect"]
    await clients.end("suspect")
    assert clients.began[4:] == ["carol"]
    await clients.end("carol")
    assert clients.began[5:] == ["suspect"]
    await clients.end("suspect")


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "alone", "end", "cancel"]), st.sampled_from("abc")), max_size=30),
    st.integers(1, 3),
)
@in_loop
async def test_nobody_waits_for_a_slot_that_could_be_granted(actions: list[tuple[str, str]], num_slots: int) -> None:
    """Whatever ends or is cancelled in between, everything gets its turn once the holders end."""
    slots = FairSlots(num_slots, num_slots)
    clients = Clients(slots)
    asked: list[str] = []
    for action, client in actions:
        if action in ("ask", "alone"):
            await clients.ask(client, alone_s=60.0 if action == "alone" else 0.0)
            asked.append(client)
        elif client in asked:
            await clients.end(client, cancel=action == "cancel")
            asked.remove(client)
    for client in asked:
        await clients.end(client)
    await clients.settle()
    for client in "abc":
        async with asyncio.timeout(30), slots.slot_alone(client, 60.0):
            pass
