r"""The transfers that take KV from this worker to the ones that decode: what is shipped when, and until when blocks are
kept. Pure.

    added -> begun -> reserved -> finished -> over         begun: ReserveKV is sent with the prompt's first chunk
      \        \         \                     /           reserved: decode has blocks; complete ones are shipped while
       \--------\---------\--> ended ---------/            later chunks still compute
                                                           finished: FinishTransfer is sent; the last shipments move

Shipping while the prompt still computes is the idea of Splitwise and Mooncake. Blocks that decode has cached are not
shipped. An ended transfer ships nothing more, but is over only when no shipment is in flight: then CloseTransfer tells
decode that nothing more will be written, and the holder may reuse the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tandem.handover.actions import A, Actions, SendToPeer, Ship
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import BYTES_PER_TOKEN
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVReserved, RenewLeases, ReserveKV
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, TandemError, WorkerLost

P = TypeVar("P")
"""What the engine keeps of a prompt."""

NO_BLOCK = -1
"""In place of the id of a block that is not there."""
YIELD_AFTER_S = 1.0
"""How long a computed prompt keeps its blocks for a decode worker that has none, while this worker needs blocks."""


@dataclass(eq=False)
class LeavingBlocks:
    """One group of a prompt's blocks. num_blocks: of the whole prompt."""

    num_blocks: int
    src_block_ids: list[int] = field(default_factory=list)
    """Own blocks whose content is complete, from the first on. NO_BLOCK for one that the engine has given back: no
    later token attends to it."""
    dst_block_ids: list[int] | None = None
    """Blocks of the decode worker, from `first_block` on; None until it has reserved them."""
    first_block: int = 0
    """The first one that decode needs."""
    num_shipped: int = 0
    """Given to the sender, or not needed by decode."""

    def next_ship(self, pair_id: str, transfer_id: str, group: int) -> Ship | None:
        """Returns a shipment of the blocks that are complete and not shipped yet, and counts them.

        Raises KVTransferFailed if decode has asked for one that is not there.
        """
        if self.dst_block_ids is None or len(self.src_block_ids) <= self.num_shipped:
            return None
        first, ready = self.num_shipped, len(self.src_block_ids)
        src = self.src_block_ids[first:ready]
        dst = self.dst_block_ids[first - self.first_block : ready - self.first_block]
        assert len(src) == len(dst), "decode has reserved a place for each block from the first one on"
        if NO_BLOCK in src:
            raise KVTransferFailed(f"decode asked for block {first + src.index(NO_BLOCK)} of group {group}, now reused")
        self.num_shipped = ready
        return Ship(pair_id, transfer_id, first, src, dst, group)

    @property
    def is_complete(self) -> bool:
        return len(self.src_block_ids) == self.num_blocks


@dataclass(eq=False)
class OutgoingTransfer(Generic[P]):
    """The KV of one prompt, for all its sequences. prompt: the holder's."""

    request: StartPrefill
    pair_id: str
    prompt: P
    groups: list[LeavingBlocks]
    reserve_sent: bool = False
    num_ships_in_flight: int = 0
    first_token_ids: dict[str, int] = field(default_factory=dict)
    """By attempt; 0 for one that has ended before its first token."""
    going_on: set[str] = field(default_factory=set)
    """Attempts that have a first token and that decode has to continue."""
    position_offset: int = 0
    """See FinishTransfer. Known once the prompt is computed."""
    computed_at: float | None = None
    """When all blocks were complete."""
    finish_sent: bool = False
    ended: bool = False

    @property
    def transfer_id(self) -> str:
        return self.request.transfer_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids) // BYTES_PER_TOKEN

    @property
    def is_reserved(self) -> bool:
        return self.groups[0].dst_block_ids is not None

    @property
    def is_unanswered(self) -> bool:
        """Whether the prompt is computed and its decode worker has had no room for it."""
        return self.computed_at is not None and not self.is_reserved and not self.ended

    @property
    def has_first_tokens(self) -> bool:
        return len(self.first_token_ids) == len(self.request.attempt_ids)

    @property
    def is_shipped(self) -> bool:
        """Whether decode has, or will get, all that it needs."""
        return self.finish_sent and all(group.num_shipped == group.num_blocks for group in self.groups)

    def reserve(self, message: KVReserved) -> KVTransferFailed | None:
        """Takes decode's blocks. Returns what is wrong with them."""
        if len(message.groups) != len(self.groups):
            return KVTransferFailed(f"decode reserved {len(message.groups)} groups of blocks of {len(self.groups)}")
        for given, group in zip(message.groups, self.groups, strict=True):
            first_block, num_given = given.first_block, len(given.block_ids)
            if first_block > group.num_blocks or num_given != group.num_blocks - first_block:
                reserved = f"{num_given} blocks from {first_block} on for a prompt of {group.num_blocks}"
                return KVTransferFailed(f"decode reserved {reserved}")
        for given, group in zip(message.groups, self.groups, strict=True):
            assert group.dst_block_ids is None and not group.num_shipped, "blocks are reserved once, before any leaves"
            group.dst_block_ids = given.block_ids
            group.first_block = group.num_shipped = given.first_block
        return None


class SendingHolder(Protocol[P, A]):
    """An engine that computes prompts which other workers decode, and owns the blocks with their KV.

    It calls `OutgoingTransfers.on_begun`, `on_computed` and `on_first_token` as it computes.
    """

    def stop(self, transfer: OutgoingTransfer[P], error: TandemError | None) -> Actions[A]:
        """Computes the prompt no further and ends its sequences, with `error` for the proxy if there is one."""

    def release_sent(self, transfer: OutgoingTransfer[P]) -> Actions[A]:
        """Nothing reads the prompt's blocks any more. Decode has all that it needs, unless `transfer.ended`."""


class OutgoingTransfers(Generic[P, A]):
    """All transfers of one worker, until nothing reads their blocks. lease_s: see `Leases`."""

    def __init__(self, lease_s: float, holder: SendingHolder[P, A]) -> None:
        self._holder = holder
        self._leases = Leases(lease_s)
        self._by_id: dict[str, OutgoingTransfer[P]] = {}
        self.num_expired_leases = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._by_id

    def get(self, transfer_id: str) -> OutgoingTransfer[P] | None:
        return self._by_id.get(transfer_id)

    def running(self, transfer_id: str) -> OutgoingTransfer[P] | None:
        """Returns a transfer unless it has ended."""
        transfer = self._by_id.get(transfer_id)
        return transfer if transfer is not None and not transfer.ended else None

    def full_pairs(self) -> set[str]:
        """Returns the pairs with a decode worker that has no room for a computed prompt."""
        return {transfer.pair_id for transfer in self._by_id.values() if transfer.is_unanswered}

    def unanswered(self, now: float) -> OutgoingTransfer[P] | None:
        """Returns the newest transfer whose decode worker has had no room for YIELD_AFTER_S.

        Two workers that ship to each other would wait for each other when both are full. One of them gives such a
        prompt up; the proxy dispatches it again, and what was computed may stay cached.
        """
        for transfer in reversed(self._by_id.values()):
            computed_at = transfer.computed_at
            if transfer.is_unanswered and computed_at is not None and now - computed_at >= YIELD_AFTER_S:
                return transfer
        return None

    def without_tokens(self, now: float) -> OutgoingTransfer[P] | None:
        """Returns the newest transfer whose blocks have been complete for YIELD_AFTER_S without all first tokens.

        Its blocks are kept meanwhile. Where each sequence of a prompt is computed by itself, one may wait behind
        another prompt, which waits for these blocks.
        """
        for transfer in reversed(self._by_id.values()):
            computed_at = transfer.computed_at
            is_waiting = computed_at is not None and not transfer.has_first_tokens and not transfer.ended
            if is_waiting and computed_at is not None and now - computed_at >= YIELD_AFTER_S:
                return transfer
        return None

    # ---- from the holder

    def add(self, request: StartPrefill, pair_id: str, prompt: P, num_blocks: list[int]) -> OutgoingTransfer[P]:
        """num_blocks: of the whole prompt, for each group."""
        assert request.transfer_id not in self._by_id, "the holder refuses a transfer that exists"
        assert num_blocks and min(num_blocks) > 0, "a prompt has at least one token"
        transfer = OutgoingTransfer(request, pair_id, prompt, [LeavingBlocks(number) for number in num_blocks])
        self._by_id[request.transfer_id] = transfer
        return transfer

    def on_begun(self, now: float, transfer: OutgoingTransfer[P]) -> Actions[A]:
        """Asks decode for blocks when the prompt's first chunk is scheduled, also if it is computed a second time."""
        if transfer.reserve_sent or transfer.ended:
            return []
        assert not transfer.is_reserved and not transfer.num_ships_in_flight, "decode answers what it was asked"
        transfer.reserve_sent = True
        request = transfer.request
        self._leases.begin(now, transfer.pair_id, transfer.transfer_id)
        reserve = ReserveKV(transfer.pair_id, transfer.transfer_id, transfer.num_prompt_tokens, request.adapter_digest)
        return [SendToPeer(transfer.pair_id, reserve)]

    def on_computed(
        self, now: float, transfer: OutgoingTransfer[P], groups: list[list[int]], position_offset: int = 0
    ) -> Actions[A]:
        """groups: the blocks of each group whose content is complete, from the first on. Ships new ones."""
        if transfer.ended:
            return []
        for group, block_ids in zip(transfer.groups, groups, strict=True):
            assert len(group.src_block_ids) <= len(block_ids) <= group.num_blocks, "complete blocks stay complete"
            group.src_block_ids = block_ids
        if transfer.computed_at is None and all(group.is_complete for group in transfer.groups):
            assert transfer.reserve_sent, "the first chunk came before the last"
            transfer.computed_at, transfer.position_offset = now, position_offset
        return self._ship(transfer)

    def on_first_token(
        self, transfer: OutgoingTransfer[P], attempt_id: str, token_id: int, goes_on: bool
    ) -> Actions[A]:
        """goes_on: whether decode continues the sequence."""
        assert attempt_id in transfer.request.attempt_ids and attempt_id not in transfer.first_token_ids
        assert not transfer.finish_sent, "FinishTransfer has the first tokens of all attempts"
        transfer.first_token_ids[attempt_id] = token_id
        if goes_on:
            transfer.going_on.add(attempt_id)
        return self._after_tokens(transfer)

    def on_attempt_ended(self, transfer: OutgoingTransfer[P], attempt_id: str) -> Actions[A]:
        """Ends the transfer if decode has to continue none of its sequences. Before or after the first token."""
        transfer.first_token_ids.setdefault(attempt_id, 0)
        transfer.going_on.discard(attempt_id)
        return self._after_tokens(transfer)

    def end(self, transfer: OutgoingTransfer[P], error: TandemError | None = None) -> Actions[A]:
        """Ends a transfer that nobody wants any more, or that cannot complete. error: for the proxy."""
        if self._by_id.get(transfer.transfer_id) is not transfer:
            return []  # it is over
        if transfer.ended:
            return self._settle(transfer)
        transfer.ended = True
        self._leases.end(transfer.transfer_id)
        return self._settle(transfer) + self._holder.stop(transfer, error)

    # ---- from the decode worker and the data path

    def on_reserved(self, message: KVReserved) -> Actions[A]:
        transfer = self._by_id.get(message.transfer_id)
        if transfer is None or not transfer.reserve_sent or transfer.is_reserved:
            return []
        error = transfer.reserve(message)
        return self.end(transfer, error) if error is not None else self._ship(transfer)

    def on_refused(self, transfer_id: str, error: ErrorInfo) -> Actions[A]:
        transfer = self._by_id.get(transfer_id)
        return self.end(transfer, error.to_error()) if transfer is not None else []

    def on_renewed(self, now: float, message: RenewLeases) -> None:
        self._leases.renew(now, message.pair_id, message.transfer_ids)

    def on_shipped(self, transfer_id: str, error: TandemError | None) -> Actions[A]:
        """Handles the end of one `Ship`. On success the shell has announced it."""
        transfer = self._by_id[transfer_id]
        transfer.num_ships_in_flight -= 1
        assert transfer.num_ships_in_flight >= 0, "each shipment ends once"
        return self.end(transfer, error) if error is not None else self._settle(transfer)

    def on_pair_lost(self, pair_id: str, reason: str) -> Actions[A]:
        error = WorkerLost(f"the decode worker was lost: {reason}")
        lost = [transfer for transfer in self._by_id.values() if transfer.pair_id == pair_id]
        return [action for transfer in lost for action in self.end(transfer, error)]

    def on_tick(self, now: float) -> Actions[A]:
        actions: Actions[A] = []
        for transfer_id in self._leases.expired(now):
            self.num_expired_leases += 1
            unclaimed = f"the decode worker has not renewed its lease on the KV blocks for {self._leases.term_s:g} s"
            actions += self.end(self._by_id[transfer_id], KVTransferFailed(unclaimed))
        return actions

    # ---- progress

    def _after_tokens(self, transfer: OutgoingTransfer[P]) -> Actions[A]:
        """Acts once each sequence has its first token or has ended."""
        if not transfer.has_first_tokens:
            return []
        return self._ship(transfer) if transfer.going_on else self.end(transfer)

    def _ship(self, transfer: OutgoingTransfer[P]) -> Actions[A]:
        """Ships complete blocks. The message that ends the transfer follows the last of them."""
        if transfer.ended or not transfer.is_reserved:
            return []
        assert self._by_id.get(transfer.transfer_id) is transfer, "a transfer that is over has no blocks to ship"
        actions: Actions[A] = []
        for number, group in enumerate(transfer.groups):
            try:
                ship = group.next_ship(transfer.pair_id, transfer.transfer_id, number)
            except KVTransferFailed as error:
                return actions + self.end(transfer, error)
            if ship is not None:
                transfer.num_ships_in_flight += 1
                actions.append(ship)
        if transfer.computed_at is not None and transfer.has_first_tokens and not transfer.finish_sent:
            # Decode waits for all blocks that it has reserved, so none may be left behind this message.
            assert all(group.num_shipped == group.num_blocks for group in transfer.groups)
            assert transfer.going_on, "a transfer whose sequences have all ended is ended, not finished"
            transfer.finish_sent = True
            tokens = [transfer.first_token_ids[attempt_id] for attempt_id in transfer.request.attempt_ids]
            finish = FinishTransfer(transfer.transfer_id, transfer.num_prompt_tokens, tokens, transfer.position_offset)
            actions.append(SendToPeer(transfer.pair_id, finish))
        return actions + self._settle(transfer)

    def _settle(self, transfer: OutgoingTransfer[P]) -> Actions[A]:
        """Lets the holder have the blocks back and forgets the transfer, unless something still reads them."""
        is_over = transfer.ended or transfer.is_shipped
        if transfer.num_ships_in_flight or not is_over or self._by_id.get(transfer.transfer_id) is not transfer:
            return []
        del self._by_id[transfer.transfer_id]
        self._leases.end(transfer.transfer_id)
        # Only here, also for a transfer that has failed: the path reads a block until its shipment is reported.
        actions = self._holder.release_sent(transfer)
        if transfer.ended and transfer.reserve_sent:
            actions.append(SendToPeer(transfer.pair_id, CloseTransfer(transfer.transfer_id)))
        return actions


@dataclass(eq=False)
class _TransferLease:
    pair_id: str
    expires_at: float


class Leases:
    """Limits how long prefill keeps blocks for a decode worker that has stopped renewing its lease.

    A lease begins with ReserveKV and ends with its transfer. Decode renews it while it wants the blocks, with one
    RenewLeases for all transfers of a pair. An expired lease fails its transfer only. Leases catch failures that leave
    the pair open: a lost control message, or a decode worker that has forgotten the transfer or is stuck. vLLM's NIXL
    connector has the same design. term_s: lifetime after a renewal.
    """

    def __init__(self, term_s: float) -> None:
        self.term_s = term_s
        self._leases: dict[str, _TransferLease] = {}
        self._seen_at: float | None = None

    def begin(self, now: float, pair_id: str, transfer_id: str) -> None:
        assert transfer_id not in self._leases, "a transfer asks for blocks once"
        self._leases[transfer_id] = _TransferLease(pair_id, now + self.term_s)

    def renew(self, now: float, pair_id: str, transfer_ids: list[str]) -> None:
        """Renews leases. Transfers that have ended or belong to another pair are ignored."""
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.pair_id == pair_id:
                lease.expires_at = now + self.term_s

    def end(self, transfer_id: str) -> None:
        self._leases.pop(transfer_id, None)

    def expired(self, now: float) -> list[str]:
        """Returns and ends the leases that have expired. Must be called often.

        A long gap between calls means that this process was stalled and renewals lie unread in its sockets, so that
        time does not count. Gaps up to half a term are safe: decode renews three times per term.
        """
        unseen_s = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        if unseen_s > self.term_s / 2:
            for lease in self._leases.values():
                lease.expires_at = max(lease.expires_at, min(lease.expires_at + unseen_s, now + self.term_s))
        expired = [transfer_id for transfer_id, lease in self._leases.items() if now >= lease.expires_at]
        for transfer_id in expired:
            del self._leases[transfer_id]
        return expired
