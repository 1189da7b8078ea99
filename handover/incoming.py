r"""The transfers that bring KV to this worker: who owns their blocks, and when these may be reused. Pure.

    announced ---\                                     announced: ReserveKV is here (from the prefill worker)
                  wanted -> allocated -> complete      prepared: PrepareDecode is here (from the proxy)
    prepared ----/    \         \                      wanted: both are here, in either order
                       \         \-> given up -> over  complete: all KV and the first tokens are here
                        \-> over

The written blocks belong to the transfer while the peer may still write them. That ends when all have arrived, when the
peer has stopped (CloseTransfer, ClosePair), or when its process has exited. A time-out is no proof, because a frozen
process may wake up and write. A block that has arrived is not written again, so the arrived blocks of a transfer that
was given up may stay in the prefix cache for the next attempt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tandem.handover.actions import A, Actions, Receive, SendToPeer, SendToProxy
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import DecodeReserved, PrepareDecode
from tandem.protocol.messages.transfer import (
    FinishTransfer,
    KVRefused,
    KVReserved,
    ReservedBlocks,
    ReserveKV,
    ShipKV,
)
from tandem.runtime.errors import ErrorInfo, InternalError, KVTransferFailed, Overloaded, TandemError, WorkerLost

P = TypeVar("P")
"""What the engine keeps of a prompt."""

UNCLAIMED_TIMEOUT_S = 10.0
"""How long ReserveKV waits for its PrepareDecode, which travels on another connection."""
_NUM_REMEMBERED_TRANSFERS = 10_000
_OTHER_ADAPTER = "prefill computes the prompt with another LoRA adapter than decode was told"
_ENDED = "the decode worker no longer has the request"
"""A reason to try again: this worker may have lost a proxy that still waits. One that does not wait ignores it."""


@dataclass(eq=False)
class ArrivingBlocks:
    """One group of a prompt's blocks, from the first one on that the peer writes. See `ReservedBlocks`."""

    first_block: int
    written_block_ids: list[int]
    num_announced: int = 0
    """Written blocks that ShipKV messages have named, from the first on."""
    num_arrived: int = 0
    """Written blocks that have arrived without a gap."""
    num_kept: int = 0
    """Arrived blocks that the holder has taken back early."""

    def announce(self, message: ShipKV) -> list[int]:
        """Returns the blocks that are now on the data path. Raises KVTransferFailed if they are not the next ones."""
        if message.num_blocks < 1:
            raise KVTransferFailed(f"a shipment of {message.num_blocks} blocks")
        first = message.first_block - self.first_block
        last = first + message.num_blocks
        if first != self.num_announced or last > len(self.written_block_ids):
            raise KVTransferFailed(f"{message.num_blocks} blocks from {message.first_block} on arrived out of order")
        if message.checksums and len(message.checksums) != message.num_blocks:
            raise KVTransferFailed(f"{len(message.checksums)} checksums arrived for {message.num_blocks} blocks")
        self.num_announced = last
        assert self.num_arrived <= self.num_announced <= len(self.written_block_ids)
        return self.written_block_ids[first:last]

    @property
    def is_announced(self) -> bool:
        return self.num_announced == len(self.written_block_ids)


@dataclass(eq=False)
class IncomingTransfer(Generic[P]):
    """The KV of one prompt that arrives, or will arrive, from a peer. prompt: the holder's, once it is prepared."""

    transfer_id: str
    request: PrepareDecode | None = None
    prompt: P | None = None
    pair_id: str = ""
    """Set once ReserveKV is here."""
    announced_at: float = 0.0
    adapter: str = ""
    """Digest of the LoRA adapter of ReserveKV."""
    groups: list[ArrivingBlocks] = field(default_factory=list)
    """Empty until blocks are allocated."""
    receives: deque[tuple[int, int]] = field(default_factory=deque)
    """(group, number of blocks) of each receive in flight, in order."""
    is_given_up: bool = False
    peer_stopped: bool = False
    has_gap: bool = False
    """Whether blocks were corrupted or lost."""
    first_token_ids: list[int] | None = None
    position_offset: int = 0
    """Offset of positions, from FinishTransfer."""

    @property
    def is_allocated(self) -> bool:
        return bool(self.groups)

    @property
    def is_waiting(self) -> bool:
        """Whether the holder looks for its blocks."""
        return bool(self.pair_id) and self.prompt is not None and not self.is_given_up and not self.is_allocated

    @property
    def blocks(self) -> ArrivingBlocks:
        """The blocks of an engine with one group."""
        [only] = self.groups
        return only

    @property
    def num_arrived_blocks(self) -> int:
        return sum(group.num_arrived for group in self.groups)

    @property
    def open_block_ids(self) -> list[int]:
        """Written blocks that the holder has not taken back."""
        return [block_id for group in self.groups for block_id in group.written_block_ids[group.num_kept :]]

    def announce(self, message: ShipKV) -> list[int]:
        """Returns the blocks that are now on the data path. Raises KVTransferFailed if the peer cannot mean them."""
        if self.pair_id != message.pair_id:
            raise KVTransferFailed(f"blocks arrived for transfer {self.transfer_id}, which belongs to another pair")
        if not 0 <= message.group < len(self.groups):
            raise KVTransferFailed(f"blocks arrived for group {message.group} of {len(self.groups)}")
        block_ids = self.groups[message.group].announce(message)
        self.receives.append((message.group, message.num_blocks))
        return block_ids

    def on_received(self, is_whole: bool) -> None:
        """Handles the end of the oldest receive in flight."""
        assert self.receives, "each receive ends once"
        group, num_blocks = self.receives.popleft()
        if not is_whole:
            self.has_gap = True
        elif not self.has_gap:
            self.groups[group].num_arrived += num_blocks
        assert self.groups[group].num_arrived <= self.groups[group].num_announced

    def keep(self, num_blocks: int) -> list[int]:
        """Returns the blocks that have arrived, up to `num_blocks`, which belong to the holder from now on."""
        assert self.is_given_up, "the blocks of a transfer that may complete stay together"
        blocks = self.blocks
        assert not blocks.num_kept, "the holder takes blocks back once"
        blocks.num_kept = max(0, min(blocks.num_arrived, num_blocks))
        return blocks.written_block_ids[: blocks.num_kept]

    def why_unusable(self) -> KVTransferFailed | None:
        """Returns what is wrong with the end of a complete transfer."""
        assert self.request is not None
        num_tokens, num_sequences = len(self.first_token_ids or ()), len(self.request.attempt_ids)
        if num_tokens != num_sequences:
            return KVTransferFailed(f"the prefill worker sent {num_tokens} first tokens for {num_sequences} sequences")
        if self.position_offset and not self.request.media:  # it could lie outside of the model's positions
            return KVTransferFailed("the prefill worker sent a position offset for a prompt without media")
        return None

    @property
    def is_complete(self) -> bool:
        return (
            self.is_allocated
            and not self.has_gap
            and not self.receives
            and all(group.is_announced for group in self.groups)
            and self.first_token_ids is not None
        )

    @property
    def may_still_be_written(self) -> bool:
        if not self.is_allocated:
            return False
        all_announced = all(group.is_announced for group in self.groups)
        return bool(self.receives) or not (self.peer_stopped or all_announced)


class ReceivingHolder(Protocol[P, A]):
    """An engine that decodes prompts which other workers compute, and owns the blocks for their KV."""

    def allocate(self, transfer: IncomingTransfer[P]) -> Actions[A]:
        """Finds blocks for the prompt. `IncomingTransfers.on_allocated` follows, at once or later."""

    def resume(self, transfer: IncomingTransfer[P]) -> Actions[A]:
        """Starts the sequences: all KV is there. The transfer's blocks are the holder's own from now on."""

    def give_up(self, transfer: IncomingTransfer[P], error: TandemError | None) -> Actions[A]:
        """Ends what is left of the prompt's sequences, with `error` for the proxy if there is one.

        Blocks that have arrived may be kept (`IncomingTransfer.keep`); the others must not be reused before
        `release_received`.
        """

    def release_received(self, transfer: IncomingTransfer[P]) -> Actions[A]:
        """Nothing is written any more to the blocks of a transfer that was given up."""


class IncomingTransfers(Generic[P, A]):
    """All transfers to one worker, and the ids of those that have ended."""

    def __init__(self, holder: ReceivingHolder[P, A]) -> None:
        self._holder = holder
        self._by_id: dict[str, IncomingTransfer[P]] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[IncomingTransfer[P]]:
        return iter(list(self._by_id.values()))

    def get(self, transfer_id: str) -> IncomingTransfer[P] | None:
        return self._by_id.get(transfer_id)

    def wanted(self, transfer_id: str) -> IncomingTransfer[P] | None:
        """Returns a transfer whose sequences wait for its KV."""
        transfer = self._by_id.get(transfer_id)
        return transfer if transfer is not None and transfer.prompt is not None and not transfer.is_given_up else None

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of transfers that were given up, to which the peer may still write."""
        return sum(len(transfer.open_block_ids) for transfer in self._by_id.values() if transfer.is_given_up)

    @property
    def is_blocked(self) -> bool:
        """Whether a prompt waits for blocks."""
        return any(transfer.is_waiting for transfer in self._by_id.values())

    def wanted_ids(self, pair_id: str) -> list[str]:
        """Returns the transfers of a pair whose leases must be renewed: all but those that were given up."""
        return [each.transfer_id for each in self._of_pair(pair_id) if not each.is_given_up]

    # ---- from the proxy

    def why_refused(self, request: PrepareDecode) -> TandemError | None:
        transfer_id = request.transfer_id
        if transfer_id in self._closed:
            return KVTransferFailed("the prefill worker has given up the transfer")
        transfer = self._by_id.get(transfer_id)
        if transfer is None:
            return None
        if transfer.is_given_up:
            return KVTransferFailed("the transfer belongs to a request that has ended, and may still write")
        if transfer.prompt is not None:
            return InternalError(f"transfer {transfer_id} exists already")
        return KVTransferFailed(_OTHER_ADAPTER) if transfer.adapter != request.adapter_digest else None

    def on_prepare(self, request: PrepareDecode, prompt: P) -> Actions[A]:
        """Takes a prompt that is not refused."""
        transfer = self._by_id.setdefault(request.transfer_id, IncomingTransfer(request.transfer_id))
        assert transfer.prompt is None and not transfer.is_given_up and not transfer.is_allocated
        transfer.request, transfer.prompt = request, prompt
        return self._holder.allocate(transfer) if transfer.pair_id else []

    # ---- from the holder

    def on_allocated(
        self, transfer: IncomingTransfer[P], groups: list[ArrivingBlocks], attempt_ids: Iterable[str]
    ) -> Actions[A]:
        """attempt_ids: those that have not ended."""
        assert transfer.is_waiting and transfer.request is not None and groups
        assert not any(group.num_announced or group.num_kept for group in groups), "nothing was shipped before"
        transfer.groups = groups
        answer = KVReserved(
            transfer.transfer_id,
            [ReservedBlocks(group.first_block, group.written_block_ids) for group in groups],
        )
        proxy_id = transfer.request.proxy_id
        reserved = [SendToProxy(proxy_id, DecodeReserved(attempt_id)) for attempt_id in attempt_ids]
        return [SendToPeer(transfer.pair_id, answer), *reserved]

    def fail(self, transfer: IncomingTransfer[P], error: TandemError | None) -> Actions[A]:
        """Ends a transfer that will not complete. error: for the proxy and the peer; None if nobody wants it now."""
        if transfer.is_given_up:
            return self._advance(transfer)
        assert self._by_id.get(transfer.transfer_id) is transfer, "a transfer that is over cannot fail"
        transfer.is_given_up = True
        actions: Actions[A] = []
        if transfer.prompt is not None:
            actions += self._holder.give_up(transfer, error)
        if transfer.pair_id and not transfer.peer_stopped:
            actions.append(_refusal(transfer.pair_id, transfer.transfer_id, error or KVTransferFailed(_ENDED)))
        return actions + self._advance(transfer)

    # ---- from the prefill worker and the data path

    def on_reserve(self, now: float, message: ReserveKV) -> Actions[A]:
        transfer_id = message.transfer_id
        transfer = self._by_id.get(transfer_id)
        if transfer is not None and transfer.pair_id:
            return []
        if transfer_id in self._closed:
            return [_refusal(message.pair_id, transfer_id, KVTransferFailed(_ENDED))]
        if transfer is None:
            if len(self._by_id) >= MAX_HELD_SEQUENCES:
                return [_refusal(message.pair_id, transfer_id, Overloaded("this worker has too many transfers"))]
            transfer = self._by_id[transfer_id] = IncomingTransfer(transfer_id)
        assert not transfer.is_allocated, "blocks are allocated for a pair"
        transfer.pair_id, transfer.announced_at, transfer.adapter = message.pair_id, now, message.adapter
        if transfer.request is None:
            return []
        if transfer.request.adapter_digest != message.adapter:
            return self.fail(transfer, KVTransferFailed(_OTHER_ADAPTER))
        return self._holder.allocate(transfer)

    def on_ship(self, message: ShipKV) -> Actions[A]:
        """Receives blocks, even of a transfer that was given up, so that both peers count the same blocks.

        Raises KVTransferFailed if the peer violates the protocol; the pair must then be closed.
        """
        transfer = self._by_id.get(message.transfer_id)
        if transfer is None or not transfer.is_allocated:
            raise KVTransferFailed(f"blocks arrived for transfer {message.transfer_id}, which is not open")
        return [Receive(transfer.pair_id, transfer.transfer_id, transfer.announce(message), message.checksums)]

    def on_received(self, transfer_id: str, error: TandemError | None) -> Actions[A]:
        """Handles the end of one `Receive`."""
        transfer = self._by_id[transfer_id]
        transfer.on_received(is_whole=error is None)
        if error is not None:
            transfer.peer_stopped = True  # the receiver is broken, and only it writes
            return self.fail(transfer, error)
        return self._advance(transfer)

    def on_corrupt(self, transfer_id: str, error: TandemError) -> Actions[A]:
        """Handles a `Receive` whose blocks differ from what was sent. They are never used; the pair stays open."""
        transfer = self._by_id[transfer_id]
        transfer.on_received(is_whole=False)
        return self.fail(transfer, error)

    def on_finish_transfer(self, message: FinishTransfer) -> Actions[A]:
        transfer = self._by_id.get(message.transfer_id)
        if transfer is None:
            return []
        transfer.first_token_ids, transfer.position_offset = message.first_token_ids, message.position_offset
        return self._advance(transfer)

    def on_close_transfer(self, transfer_id: str) -> Actions[A]:
        """Handles a transfer that the peer has ended. The peer reports the reason to the proxy, except for aborts."""
        transfer = self._by_id.get(transfer_id)
        if transfer is None:
            return []
        transfer.peer_stopped = True
        return self.fail(transfer, None)

    def on_pair_lost(self, pair_id: str, reason: str, peer_stopped: bool) -> Actions[A]:
        """Handles a peer that sends no more messages. peer_stopped: it writes no more blocks either."""
        actions: Actions[A] = []
        for transfer in self._of_pair(pair_id):
            transfer.peer_stopped = transfer.peer_stopped or peer_stopped
            actions += self.fail(transfer, WorkerLost(f"the prefill worker was lost: {reason}"))
        return actions

    def on_prefill_lost(self, prefill_epoch: str) -> Actions[A]:
        """Ends prompts that wait for a lost prefill worker, whether or not their transfer has begun."""
        error = WorkerLost("the prefill worker was lost")
        waiting = [each for each in self if each.request is not None and not each.is_given_up]
        lost = [each for each in waiting if each.request is not None and each.request.prefill_epoch == prefill_epoch]
        return [action for transfer in lost for action in self.fail(transfer, error)]

    def on_tick(self, now: float) -> Actions[A]:
        error = KVTransferFailed("the proxy's request did not arrive")
        unclaimed = [each for each in self if each.prompt is None and now >= each.announced_at + UNCLAIMED_TIMEOUT_S]
        return [action for transfer in unclaimed for action in self.fail(transfer, error)]

    # ---- beginnings and ends

    def _advance(self, transfer: IncomingTransfer[P]) -> Actions[A]:
        """Starts the sequences if their KV is complete, or ends a transfer that was given up if it is over."""
        if transfer.is_given_up:
            # No time-out ends this wait: a frozen peer may wake up and write into blocks that others have by then.
            if transfer.may_still_be_written:
                return []
            self._close(transfer)
            return self._holder.release_received(transfer) if transfer.prompt is not None else []
        if transfer.prompt is None or not transfer.is_complete:
            return []
        if (error := transfer.why_unusable()) is not None:
            return self.fail(transfer, error)
        # The counterpart of `OutgoingTransfers._ship`: what was reserved was shipped, and all of it is here.
        assert all(group.num_arrived == len(group.written_block_ids) for group in transfer.groups)
        self._close(transfer)
        return self._holder.resume(transfer)

    def _close(self, transfer: IncomingTransfer[P]) -> None:
        """Forgets the transfer, and refuses messages about it that arrive late."""
        assert not transfer.receives, "a receive in flight still writes"
        assert transfer.is_complete or not transfer.may_still_be_written, "its blocks may be reused from now on"
        del self._by_id[transfer.transfer_id]
        self._closed[transfer.transfer_id] = None
        if len(self._closed) > _NUM_REMEMBERED_TRANSFERS:
            self._closed.popitem(last=False)

    def _of_pair(self, pair_id: str) -> list[IncomingTransfer[P]]:
        return [transfer for transfer in self._by_id.values() if transfer.pair_id == pair_id]


def _refusal(pair_id: str, transfer_id: str, error: TandemError) -> SendToPeer:
    return SendToPeer(pair_id, KVRefused(transfer_id, ErrorInfo.of(error)))
