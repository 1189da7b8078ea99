"""Blocks that arrive and leave: what is counted, compared and reported to the schedulers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.handover.actions import Receive, Ship
from tandem.handover.incoming import IncomingTransfer
from tandem.handover.kv_traffic import KVTraffic
from tandem.protocol.messages.transfer import FinishTransfer, KVReserved, ReservedBlocks, ShipKV
from tandem.runtime.errors import InvalidMessage, KVTransferFailed

BROKEN = KVTransferFailed("the path broke")


class Traffic:
    """A worker's KV traffic over paths and checksums whose jobs the test ends.

    jobs: callbacks of what is under way. calls: what the schedulers and the pair were told.
    """

    def __init__(self, *, checksums: bool = False, one_sided: bool = False, is_open: bool = True) -> None:
        self.jobs: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        self.now = 0.0
        pair = SimpleNamespace(connector="ipc", checksums=checksums, peer=SimpleNamespace(worker_id="decode-0"))
        sender = SimpleNamespace(send=lambda *job: self.jobs.append(job[-1]))
        self.traffic: KVTraffic[Any] = KVTraffic.__new__(KVTraffic)
        self.traffic.__dict__.update(
            _worker_id="prefill-0",
            _loop=asyncio.get_running_loop(),
            _clock=lambda: self.now,
            num_bytes=0,
            num_compared_blocks=0,
            num_corrupt_blocks=0,
            _perform=lambda actions: None,
            _metrics=SimpleNamespace(on_shipped=lambda *shipped: self.calls.append(("metrics", *shipped))),
            _receiving=SimpleNamespace(
                on_received=lambda name, error: self.calls.append(("received", name, error)),
                on_corrupt=lambda name, error: self.calls.append(("corrupt", name, error.message)),
                get=lambda name: IncomingTransfer(name, pair_id="pair"),
                fail=lambda transfer, error: self.calls.append(("fails", transfer.transfer_id, error.message)),
            ),
            _sending=SimpleNamespace(
                on_shipped=lambda name, error: self.calls.append(("shipped", name, error)),
                on_refused=lambda name, error: self.calls.append(("refused", name, error.message)),
            ),
            _incoming=SimpleNamespace(
                receive=lambda pair_id, block_ids, done: self.jobs.append(done),
                fail=lambda *failed: self.calls.append(("pair fails", *failed)),
            ),
            _outgoing=SimpleNamespace(
                sender=lambda pair_id: sender if is_open else None,
                send=lambda pair_id, message: self.calls.append(("announced", message.first_block)),
                fail=lambda *failed: self.calls.append(("pair fails", *failed)),
            ),
            _outgoing_table=SimpleNamespace(
                get=lambda pair_id: pair,
                announcement=lambda *fields: ShipKV(fields[0], 0, *fields[1:]),
                on_shipped=lambda *shipped: self.calls.append(("counted", *shipped)) or pair,
            ),
            _host=SimpleNamespace(
                pools=SimpleNamespace(checksums=lambda block_ids, done: self.jobs.append(done)),
                connectors={"ipc": SimpleNamespace(one_sided=one_sided)},
                block_bytes=100,
            ),
        )

    async def end(self, result: Any) -> list[tuple[Any, ...]]:
        """Ends the job under way. Returns what was told since."""
        self.calls.clear()
        self.now += 0.5
        self.jobs.pop()(result)
        for _ in range(3):
            await asyncio.sleep(0)
        return list(self.calls)

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.traffic.num_bytes, self.traffic.num_compared_blocks, self.traffic.num_corrupt_blocks


@pytest.mark.parametrize("one_sided", [True, False])
async def test_blocks_are_announced_once_and_counted_when_they_have_gone(one_sided: bool) -> None:
    """A path on which both ends take part needs the announcement first. The other one needs it behind the blocks."""
    made = Traffic(one_sided=one_sided)
    made.traffic.ship(Ship("pair", "t", 4, [1, 2, 3], [7, 8, 9]))
    assert made.calls == ([] if one_sided else [("announced", 4)])
    counted = [("counted", "pair", 300, 0.5), ("metrics", ("prefill-0", "decode-0", "ipc"), 300, 0.5)]
    announced = [("announced", 4)] if one_sided else []
    assert await made.end(None) == [*counted, *announced, ("shipped", "t", None)]
    assert made.figures == (300, 0, 0)


@pytest.mark.parametrize("result", [[5], BROKEN])
async def test_a_shipment_without_a_path_or_checksums_is_reported_later(result: Any) -> None:
    made = Traffic(checksums=True, is_open=result is BROKEN)
    made.traffic.ship(Ship("pair", "t", 4, [1], [7]))
    [shipped, _] = await made.end(result)
    assert shipped[:2] == ("shipped", "t") and str(shipped[2]) in ("the pair is closed", "the path broke")


@pytest.mark.parametrize("corrupt", [[], [7], [9], [7, 8, 9]])
async def test_blocks_that_differ_fail_their_transfer_and_no_pair(corrupt: list[int]) -> None:
    made = Traffic()
    made.traffic.receive(Receive("pair", "t", [7, 8, 9], [70, 80, 90]))
    assert await made.end(None) == [], "they are compared first"
    [call] = await made.end([0 if block_id in corrupt else 10 * block_id for block_id in (7, 8, 9)])
    if corrupt:
        assert call[:2] == ("corrupt", "t")
        assert f"{len(corrupt)} of 3 KV blocks received through pair pair differ" in call[2]
        assert call[2].endswith(f"the first in block {corrupt[0]}")
    else:
        assert call == ("received", "t", None)
    assert made.figures == (300, 3, len(corrupt))


async def test_blocks_that_cannot_be_compared_are_not_used() -> None:
    made = Traffic()
    made.traffic.receive(Receive("pair", "t", [7], [70]))
    await made.end(None)
    assert await made.end(BROKEN) == [("corrupt", "t", "the path broke")]
    assert made.figures == (100, 0, 0)


@pytest.mark.parametrize("direction", ["ship", "receive"])
async def test_an_assertion_about_a_transfer_ends_its_pair_and_not_the_worker(direction: str) -> None:
    def mistake(*arguments: Any) -> None:
        raise AssertionError("each shipment ends once")

    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    made = Traffic()
    machines: Any = made.traffic
    if direction == "ship":
        machines._sending.on_shipped = mistake
        made.traffic.ship(Ship("pair", "t", 0, [1], [2]))
    else:
        machines._receiving.on_received = mistake
        made.traffic.receive(Receive("pair", "t", [1]))
    calls = await made.end(None)
    [error] = raised
    assert isinstance(error, AssertionError), "it is logged"
    assert [call[:2] for call in calls if call[0] == "pair fails"] == [("pair fails", "pair")]


async def test_an_answer_that_is_refused_ends_its_transfer() -> None:
    """Decode renews the lease of what it has reserved, so nothing else would end it before the request's deadline."""
    made = Traffic()
    with pytest.raises(InvalidMessage):
        made.traffic._on_answer(KVReserved("t", [ReservedBlocks(0, [0, 0, 5])]))
    [(what, name, reason)] = made.calls
    assert (what, name) == ("refused", "t") and "duplicate" in reason


async def test_an_end_that_is_refused_ends_its_transfer() -> None:
    made = Traffic()
    with pytest.raises(InvalidMessage):
        made.traffic.on_message(FinishTransfer("t", 3, [-1]), vocab_size=10)
    [(what, name, reason)] = made.calls
    assert (what, name) == ("fails", "t") and "first_token_ids" in reason
