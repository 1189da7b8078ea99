"""Mutation tests of the simulation: each ownership rule is broken in turn, and the random schedules must detect it.

A rule that can be broken undetected is either not needed or not tested. Seeds are those of
`tests/simulation/test_transfer.py`, which pass with the rules intact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.decode_worker.transfer import IncomingTransfer
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.protocol.messages.transfer import ClosePair
from tandem.runtime.errors import TandemError
from tandem.worker.pairs.incoming_table import IncomingPairLost, IncomingPairTable
from tandem.worker.pairs.outgoing_table import Connect, OutgoingPairTable, SendCloseToReceiver, StopSender
from tests.simulation.test_transfer import run

MAX_SEEDS, NUM_EVENTS = 5000, 100
Mutation = Callable[[pytest.MonkeyPatch], None]


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Blocks of an ended request are reused at once."""
    patch.setattr(IncomingTransfer, "may_still_be_written", property(lambda self: bool(self.receives)))


def running_receives_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Blocks are reused while the receiver still writes them."""

    def may_still_be_written(self: IncomingTransfer) -> bool:
        all_here = self.num_received_blocks == len(self.written_block_ids)
        return self.is_reserved and not (self.peer_stopped or all_here)

    patch.setattr(IncomingTransfer, "may_still_be_written", property(may_still_be_written))


def announced_counts_as_arrived(patch: pytest.MonkeyPatch) -> None:
    """Decoding begins while the receiver still writes."""

    def is_complete(self: IncomingTransfer) -> bool:
        all_announced = self.num_received_blocks == len(self.written_block_ids)
        return self.is_reserved and not self.has_gap and all_announced and self.first_token_ids is not None

    patch.setattr(IncomingTransfer, "is_complete", property(is_complete))


def silence_is_proof(patch: pytest.MonkeyPatch) -> None:
    """A prefill worker that no proxy knows any more counts as stopped."""
    on_view = IncomingPairTable.on_view

    def mutated(self: IncomingPairTable, workers: Any) -> list[Any]:
        return [
            msgspec.structs.replace(action, peer_stopped=True) if isinstance(action, IncomingPairLost) else action
            for action in on_view(self, workers)
        ]

    patch.setattr(IncomingPairTable, "on_view", mutated)


def a_broken_path_is_proof(patch: pytest.MonkeyPatch) -> None:
    """A pair that fails here counts as stopped, even if its peer writes directly."""
    on_opened = IncomingPairTable.on_opened
    patch.setattr(IncomingPairTable, "on_opened", lambda self, pair_id, peer_writes: on_opened(self, pair_id, False))


def the_peer_is_told_before_the_sender_has_stopped(patch: pytest.MonkeyPatch) -> None:
    fail = OutgoingPairTable.fail

    def mutated(self: OutgoingPairTable, now: float, pair_id: str, reason: str) -> list[Any]:
        actions = fail(self, now, pair_id, reason)
        closes = [
            SendCloseToReceiver(ClosePair(pair_id, reason)) for action in actions if isinstance(action, StopSender)
        ]
        return [*actions, *closes]

    patch.setattr(OutgoingPairTable, "fail", mutated)


def blocks_are_released_while_they_are_shipped(patch: pytest.MonkeyPatch) -> None:
    """A prompt that ends, e.g. by an expired lease, releases its blocks at once, and sends CloseTransfer."""
    settle = PrefillScheduler._settle
    on_shipped = PrefillScheduler.on_shipped

    def mutated(self: PrefillScheduler, prompt: PrefillPrompt) -> list[Any]:
        if prompt.ended:
            prompt.num_ships_in_flight = 0
        return settle(self, prompt)

    def shipped(self: PrefillScheduler, transfer_id: str, error: TandemError | None) -> list[Any]:
        return on_shipped(self, transfer_id, error) if transfer_id in self._by_transfer else []

    patch.setattr(PrefillScheduler, "_settle", mutated)
    patch.setattr(PrefillScheduler, "on_shipped", shipped)


def pair_ids_do_not_name_the_process(patch: pytest.MonkeyPatch) -> None:
    """A restarted prefill worker reuses the pair ids of its predecessor."""
    open_pair = OutgoingPairTable._open

    def mutated(self: OutgoingPairTable, now: float, peer: Any) -> Connect:
        worker, self.worker = self.worker, msgspec.structs.replace(self.worker, epoch="same")
        connect = open_pair(self, now, peer)
        self.worker = worker
        message = msgspec.structs.replace(connect.message, prefill_epoch=worker.epoch)
        return msgspec.structs.replace(connect, message=message)

    patch.setattr(OutgoingPairTable, "_open", mutated)


def pair_ids_are_used_again(patch: pytest.MonkeyPatch) -> None:
    """A late or duplicate OpenPair opens a pair that is gone."""
    patch.setattr(IncomingPairTable, "_remember", lambda self, pair_id: None)


def announced_blocks_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The next attempt at a prompt decodes from blocks that the receiver still writes."""

    def keep_arrived(self: IncomingTransfer, num_full_blocks: int) -> list[int]:
        self.num_kept_blocks = min(self.num_received_blocks, num_full_blocks - len(self.cached_block_ids))
        return self.written_block_ids[: self.num_kept_blocks]

    patch.setattr(IncomingTransfer, "keep_arrived", keep_arrived)


def blocks_behind_corrupt_ones_are_kept(patch: pytest.MonkeyPatch) -> None:
    def on_received(self: IncomingTransfer, is_whole: bool) -> None:
        self.num_arrived_blocks += self.receives.popleft()
        self.has_gap = self.has_gap or not is_whole

    patch.setattr(IncomingTransfer, "on_received", on_received)


def kept_blocks_still_count_as_written(patch: pytest.MonkeyPatch) -> None:
    """Blocks in the prefix cache are freed with the others when the transfer is over."""
    patch.setattr(IncomingTransfer, "own_block_ids", property(lambda self: self.written_block_ids))


def corrupt_blocks_are_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeScheduler, "on_corrupt", lambda self, transfer_id, error: self.on_received(transfer_id, None))


EITHER, ONE_SIDED, TWO_SIDED = (True, False), (True,), (False,)
MUTATIONS: list[tuple[Mutation, tuple[bool, ...]]] = [
    (no_quarantine, ONE_SIDED),
    (running_receives_are_forgotten, TWO_SIDED),
    (announced_counts_as_arrived, TWO_SIDED),
    (silence_is_proof, ONE_SIDED),
    (a_broken_path_is_proof, ONE_SIDED),
    (the_peer_is_told_before_the_sender_has_stopped, ONE_SIDED),
    (blocks_are_released_while_they_are_shipped, ONE_SIDED),
    (pair_ids_do_not_name_the_process, EITHER),
    (pair_ids_are_used_again, ONE_SIDED),  # with two-sided connectors the pairs' numbers refuse it too
    (announced_blocks_are_kept, TWO_SIDED),
    (blocks_behind_corrupt_ones_are_kept, EITHER),
    (kept_blocks_still_count_as_written, EITHER),
    (corrupt_blocks_are_used, EITHER),
]
CASES = [
    pytest.param(mutation, one_sided, id=f"{mutation.__name__}-{'one-sided' if one_sided else 'two-sided'}")
    for mutation, kinds in MUTATIONS
    for one_sided in kinds
]


@pytest.mark.parametrize(("mutation", "one_sided"), CASES)
def test_a_broken_rule_is_detected(mutation: Mutation, one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    for seed in range(MAX_SEEDS):
        try:
            run(seed, one_sided, NUM_EVENTS)
        except Exception as violation:  # an invariant, or code that fails on the impossible state
            print(f"noticed by seed {seed}: {type(violation).__name__}: {str(violation).splitlines()[:1]}")
            return
    pytest.fail(f"{MAX_SEEDS} schedules passed without this rule")
