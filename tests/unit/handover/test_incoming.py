"""One incoming transfer: which blocks may arrive, which have, and who may still write. Limits of the table of all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.handover import incoming
from tandem.handover.actions import SendToPeer
from tandem.handover.incoming import ArrivingBlocks, IncomingTransfer, IncomingTransfers
from tandem.protocol.messages.dispatch import PrepareDecode
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import KVRefused, ReserveKV, ShipKV
from tests.unit.handover.test_scripts import Holder

CACHED, WRITTEN = [1, 2], [10, 11, 12, 13, 14]


def reserved(num_sequences: int = 1) -> IncomingTransfer[str]:
    blocks = ArrivingBlocks(len(CACHED), list(WRITTEN))
    return IncomingTransfer("t", request(num_sequences), "prompt", "pair", groups=[blocks])


def ship(first_block: int, num_blocks: int, checksums: list[int] | None = None, pair_id: str = "pair") -> ShipKV:
    return ShipKV(pair_id, 0, "t", first_block, num_blocks, checksums or [])


def request(num_sequences: int) -> PrepareDecode:
    ids = [f"a{number}" for number in range(num_sequences)]
    return PrepareDecode(
        "p", ids, "t", pack_token_ids([1, 2]), SamplingParams(), [0] * num_sequences, StopConditions(3), 9.0,
        prefill_worker_id="x", prefill_epoch="x",
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=5), st.integers(0, 8), st.booleans())
def test_arrived_blocks_are_kept_up_to_the_first_gap(
    receives: list[tuple[int, bool]], num_full_blocks: int, has_first_tokens: bool
) -> None:
    """num_full_blocks: of the prompt. Each receive has a number of blocks, and whether they are whole."""
    transfer, num_announced = reserved(), 0
    if has_first_tokens:
        transfer.first_token_ids = [5]
    whole: list[bool] = []
    for num_blocks, is_whole in receives:
        num_blocks = min(num_blocks, len(WRITTEN) - num_announced)
        if not num_blocks:
            break
        transfer.announce(ship(2 + num_announced, num_blocks))
        assert transfer.may_still_be_written and not transfer.is_complete
        num_announced += num_blocks
        transfer.on_received(is_whole)
        whole += [is_whole] * num_blocks
    num_arrived = (*whole, False).index(False)
    assert transfer.num_arrived_blocks == num_arrived
    is_everything_here = num_announced == len(WRITTEN)
    assert transfer.may_still_be_written == (not is_everything_here)
    assert transfer.is_complete == (has_first_tokens and num_arrived == len(WRITTEN))
    num_full_blocks = max(num_full_blocks, len(CACHED))
    kept = WRITTEN[: min(num_arrived, num_full_blocks - len(CACHED))]
    assert transfer.open_block_ids == WRITTEN
    transfer.is_given_up = True
    assert transfer.keep(num_full_blocks - len(CACHED)) == kept
    assert kept + transfer.open_block_ids == WRITTEN


def test_transfers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MAX_HELD_SEQUENCES", 2)
    transfers: IncomingTransfers[str, Any] = IncomingTransfers(Holder())
    assert [transfers.on_reserve(0.0, ReserveKV("pair", name, 7)) for name in "ab"] == [[], []]
    [refused] = transfers.on_reserve(0.0, ReserveKV("pair", "c", 7))
    assert isinstance(refused, SendToPeer) and isinstance(refused.message, KVRefused)
    assert refused.message.error.code == "overloaded" and "too many transfers" in refused.message.error.message
    transfers.on_close_transfer("a")
    assert transfers.on_reserve(0.0, ReserveKV("pair", "d", 7)) == []


def test_remembered_transfers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_NUM_REMEMBERED_TRANSFERS", 3)
    transfers: IncomingTransfers[str, Any] = IncomingTransfers(Holder())
    for number in range(10):
        transfers.on_reserve(0.0, ReserveKV("pair", f"t{number}", 7))
        transfers.on_close_transfer(f"t{number}")
    assert list(transfers._closed) == ["t7", "t8", "t9"]
