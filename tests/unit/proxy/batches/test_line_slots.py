"""Places for running lines: shared among clients, and given to one line alone."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from tandem.proxy.batches import line_slots
from tandem.proxy.batches.line_slots import LineSlots


class Clients:
    """Holds places for clients until they are told to end."""

    def __init__(self, slots: LineSlots) -> None:
        self._slots = slots
        self.began: list[str] = []
        self._tasks: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []

    async def ask(self, client: str, *, alone: bool = False) -> None:
        may_end = asyncio.Event()
        hold = self._slots.hold_alone(client) if alone else self._slots.hold(client)
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
            await may_end.wait()


def test_a_client_with_long_lines_leaves_places_to_others() -> None:
    async def main() -> None:
        clients = Clients(LineSlots(4, 3))
        for _ in range(10):
            await clients.ask("alice")
        assert clients.began == ["alice"] * 3
        await clients.ask("bob")
        await clients.ask("bob")
        assert clients.began == ["alice"] * 3 + ["bob"]
        await clients.end("alice")
        assert clients.began[-1] == "bob", "the client with fewer running lines is next"
        await clients.end("bob")
        assert clients.began[-1] == "alice"

    asyncio.run(main())


def test_nothing_runs_beside_a_line_that_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clients = Clients(LineSlots(4, 3))
        await clients.ask("alice")
        await clients.ask("suspect", alone=True)
        await clients.ask("bob")
        assert clients.began == ["alice"], "it waits until all running lines have ended, and new ones wait for it"
        await clients.end("alice")
        assert clients.began == ["alice", "suspect"]
        await clients.end("suspect")
        assert clients.began == ["alice", "suspect", "bob"]
        monkeypatch.setattr(line_slots, "ALONE_S", 0.01)
        await clients.end("bob")
        await clients.ask("suspect", alone=True)
        await clients.ask("carol")
        assert clients.began[3:] == ["suspect"]
        await asyncio.sleep(0.05)
        assert clients.began[3:] == ["suspect", "carol"], "a long line does not stop others for ever"

    asyncio.run(main())


def test_lines_that_are_cancelled_leave_no_place_taken() -> None:
    async def main() -> None:
        clients = Clients(LineSlots(1, 1))
        await clients.ask("alice")
        for alone in (False, True):
            await clients.ask("bob", alone=alone)
            await clients.end("bob", cancel=True)
        await clients.end("alice", cancel=True)
        await clients.ask("suspect", alone=True)
        await clients.end("suspect", cancel=True)
        await clients.ask("carol")
        assert clients.began == ["alice", "suspect", "carol"]

    asyncio.run(main())
