"""The prompts whose KV a vLLM worker ships while it computes them. Pure.

The engine request of one sequence ships for all that share the prompt, also when that sequence has ended. Its blocks
are kept from the end of the request until nothing reads them any more (`vllm_worker.extensions.tandem_connector`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.decode_worker.actions import SendToPeer, Ship
from tandem.prefill_worker.prefill_scheduler import YIELD_AFTER_S
from tandem.prefill_worker.transfer_leases import Leases
from tandem.protocol.messages.dispatch import PromptMessage, StartPrefill
from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVReserved, RenewLeases, ReserveKV
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, TandemError, WorkerLost
from tandem.vllm_worker.scheduler.engine_orders import AbortRequests, ComputedBlocks, EndShipping, VllmAction


@dataclass(eq=False)
class OutgoingTransfer:
    """One prompt. src_block_ids: own blocks whose content is complete."""

    message: StartPrefill
    pair_id: str
    engine_id: str
    num_blocks: int
    reserve_sent: bool = False
    dst_block_ids: list[int] | None = None
    num_decode_cached_blocks: int = 0
    src_block_ids: list[int] = field(default_factory=list)
    num_shipped_blocks: int = 0
    """Given to the sender, or cached by decode."""
    num_ships_in_flight: int = 0
    first_token_ids: dict[str, int] = field(default_factory=dict)
    """By attempt; 0 for one that has ended before its first token."""
    going_on: set[str] = field(default_factory=set)
    """Attempts that have a first token and that decode has to continue."""
    computed_at: float | None = None
    """When all blocks were complete."""
    finish_sent: bool = False
    ended: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.token_ids) // BYTES_PER_TOKEN

    def next_ship(self) -> Ship | None:
        """Returns a shipment of the blocks that are complete and not shipped yet, and counts it as in flight."""
        assert self.dst_block_ids is not None
        first, ready, num_cached = self.num_shipped_blocks, len(self.src_block_ids), self.num_decode_cached_blocks
        if ready <= first:
            return None
        self.num_shipped_blocks = ready
        self.num_ships_in_flight += 1
        src, dst = self.src_block_ids[first:ready], self.dst_block_ids[first - num_cached : ready - num_cached]
        return Ship(self.pair_id, self.message.transfer_id, first, src, dst)


class OutgoingTransfers:
    """The prompts that are shipped, until nothing reads their blocks.

    fail_prompt: called when a transfer cannot complete; ends the prompt's streams. on_shipped_all: called when decode
    has, or will get, all that it needs. num_blocks_for: returns the number of blocks for so many tokens.
    """

    def __init__(
        self,
        lease_s: float,
        num_blocks_for: Callable[[int], int],
        fail_prompt: Callable[[StartPrefill, TandemError], list[VllmAction]],
        on_shipped_all: Callable[[StartPrefill], None],
    ) -> None:
        self._leases = Leases(lease_s)
        self._num_blocks_for = num_blocks_for
        self._fail_prompt = fail_prompt
        self._on_shipped_all = on_shipped_all
        self._by_id: dict[str, OutgoingTransfer] = {}
        self._by_engine_id: dict[str, OutgoingTransfer] = {}
        self.num_expired_leases = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._by_id

    def message_of(self, engine_id: str) -> StartPrefill | None:
        """Returns the prompt that an engine request ships, unless the transfer has ended."""
        transfer = self._by_engine_id.get(engine_id)
        return transfer.message if transfer is not None and not transfer.ended else None

    def ships(self, message: PromptMessage) -> bool:
        return self._of(message) is not None

    def add(self, message: StartPrefill, pair_id: str, engine_id: str) -> None:
        num_blocks = self._num_blocks_for(len(message.token_ids) // BYTES_PER_TOKEN)
        transfer = OutgoingTransfer(message, pair_id, engine_id, num_blocks)
        self._by_id[message.transfer_id] = self._by_engine_id[engine_id] = transfer

    # ---- from the engine

    def on_begun(self, now: float, engine_id: str) -> list[VllmAction]:
        """Asks decode for blocks when the prompt's first chunk is scheduled."""
        transfer = self._by_engine_id.get(engine_id)
        if transfer is None or transfer.reserve_sent or transfer.ended:
            return []
        transfer.reserve_sent = True
        message = transfer.message
        self._leases.begin(now, transfer.pair_id, message.transfer_id)
        reserve = ReserveKV(transfer.pair_id, message.transfer_id, transfer.num_prompt_tokens, message.adapter_digest)
        return [SendToPeer(transfer.pair_id, reserve)]

    def on_computed(self, now: float, computed: ComputedBlocks) -> list[VllmAction]:
        transfer = self._by_engine_id.get(computed.engine_id)
        if transfer is None:
            return []
        transfer.src_block_ids = computed.block_ids[: transfer.num_blocks]
        if len(transfer.src_block_ids) == transfer.num_blocks:
            transfer.computed_at = now
        return self._ship(transfer)

    def on_engine_error(self, engine_id: str, error: TandemError) -> list[VllmAction]:
        """Handles the end of a request that ships, before it has computed its prompt."""
        transfer = self._by_engine_id.get(engine_id)
        return [] if transfer is None else self._fail(transfer, error)

    def on_first_token(self, message: PromptMessage, attempt_id: str, token_id: int, goes_on: bool) -> list[VllmAction]:
        """goes_on: whether decode continues the sequence."""
        transfer = self._of(message)
        if transfer is None:
            return []
        transfer.first_token_ids[attempt_id] = token_id
        if goes_on:
            transfer.going_on.add(attempt_id)
        return self._after_tokens(transfer)

    def on_attempt_ended(self, message: PromptMessage, attempt_id: str) -> list[VllmAction]:
        """Ends the transfer if decode has to continue none of its sequences. Before or after the first token."""
        transfer = self._of(message)
        if transfer is None:
            return []
        transfer.first_token_ids.setdefault(attempt_id, 0)
        transfer.going_on.discard(attempt_id)
        return self._after_tokens(transfer)

    def unanswered(self, now: float) -> str | None:
        """Returns the newest engine request whose blocks the decode worker has had no room for, since YIELD_AFTER_S."""
        for transfer in reversed(self._by_id.values()):
            is_waiting = transfer.dst_block_ids is None and not transfer.ended
            if is_waiting and transfer.computed_at is not None and now - transfer.computed_at >= YIELD_AFTER_S:
                return transfer.engine_id
        return None

    # ---- from the decode worker and the data path (see worker.kv_traffic)

    def on_reserved(self, message: KVReserved) -> list[VllmAction]:
        transfer = self._by_id.get(message.transfer_id)
        if transfer is None or not transfer.reserve_sent or transfer.dst_block_ids is not None:
            return []
        num_cached, num_given = message.num_cached_blocks, len(message.block_ids)
        if num_cached > transfer.num_blocks or num_given != transfer.num_blocks - num_cached:
            error = f"decode reserved {num_cached} + {num_given} blocks for a prompt of {transfer.num_blocks}"
            return self._fail(transfer, KVTransferFailed(error))
        transfer.dst_block_ids = message.block_ids
        transfer.num_decode_cached_blocks = transfer.num_shipped_blocks = num_cached
        return self._ship(transfer)

    def on_refused(self, transfer_id: str, error: ErrorInfo) -> list[VllmAction]:
        transfer = self._by_id.get(transfer_id)
        return self._fail(transfer, error.to_error()) if transfer is not None else []

    def on_renewed(self, now: float, message: RenewLeases) -> None:
        self._leases.renew(now, message.pair_id, message.transfer_ids)

    def on_shipped(self, transfer_id: str, error: TandemError | None) -> list[VllmAction]:
        transfer = self._by_id[transfer_id]
        transfer.num_ships_in_flight -= 1
        return self._fail(transfer, error) if error is not None else self._settle(transfer)

    def on_pair_lost(self, pair_id: str, reason: str) -> list[VllmAction]:
        error = WorkerLost(f"the decode worker was lost: {reason}")
        lost = [transfer for transfer in self._by_id.values() if transfer.pair_id == pair_id]
        return [action for transfer in lost for action in self._fail(transfer, error)]

    def on_tick(self, now: float) -> list[VllmAction]:
        actions: list[VllmAction] = []
        for transfer_id in self._leases.expired(now):
            self.num_expired_leases += 1
            unclaimed = f"the decode worker has not renewed its lease on the KV blocks for {self._leases.term_s:g} s"
            actions += self._fail(self._by_id[transfer_id], KVTransferFailed(unclaimed))
        return actions

    # ---- ends

    def end(self, transfer_id: str) -> list[VllmAction]:
        """Ends a transfer that nobody wants any more."""
        transfer = self._by_id.get(transfer_id)
        if transfer is None or transfer.ended:
            return []
        transfer.ended = True
        self._leases.end(transfer_id)
        return [*self._settle(transfer), AbortRequests([transfer.engine_id])]

    def _of(self, message: PromptMessage) -> OutgoingTransfer | None:
        """Returns the prompt's transfer, unless it has ended."""
        transfer = self._by_id.get(message.transfer_id)
        return transfer if transfer is not None and transfer.message is message and not transfer.ended else None

    def _fail(self, transfer: OutgoingTransfer, error: TandemError) -> list[VllmAction]:
        if transfer.ended:
            return self._settle(transfer)
        ended = self.end(transfer.message.transfer_id)
        return ended + self._fail_prompt(transfer.message, error)

    def _after_tokens(self, transfer: OutgoingTransfer) -> list[VllmAction]:
        """Acts once each sequence has its first token or has ended."""
        if len(transfer.first_token_ids) < len(transfer.message.attempt_ids):
            return []
        return self._ship(transfer) if transfer.going_on else self.end(transfer.message.transfer_id)

    def _ship(self, transfer: OutgoingTransfer) -> list[VllmAction]:
        if transfer.ended or transfer.dst_block_ids is None:
            return []
        actions: list[VllmAction] = []
        if (ship := transfer.next_ship()) is not None:
            actions.append(ship)
        has_tokens = len(transfer.first_token_ids) == len(transfer.message.attempt_ids)
        if transfer.computed_at is not None and has_tokens and not transfer.finish_sent:
            transfer.finish_sent = True
            actions.append(SendToPeer(transfer.pair_id, self._finish_message(transfer)))
        return actions + self._settle(transfer)

    def _finish_message(self, transfer: OutgoingTransfer) -> FinishTransfer:
        message = transfer.message
        tokens = [transfer.first_token_ids[attempt_id] for attempt_id in message.attempt_ids]
        return FinishTransfer(message.transfer_id, transfer.num_prompt_tokens, tokens)

    def _settle(self, transfer: OutgoingTransfer) -> list[VllmAction]:
        """Lets the engine have the blocks back, and forgets the transfer, unless something still reads them."""
        transfer_id = transfer.message.transfer_id
        all_shipped = transfer.finish_sent and transfer.num_shipped_blocks == transfer.num_blocks
        if transfer.num_ships_in_flight or not (transfer.ended or all_shipped) or transfer_id not in self._by_id:
            return []
        del self._by_id[transfer_id], self._by_engine_id[transfer.engine_id]
        self._leases.end(transfer_id)
        actions: list[VllmAction] = [EndShipping(transfer.engine_id)]
        if not transfer.ended:
            self._on_shipped_all(transfer.message)
        elif transfer.reserve_sent:
            actions.append(SendToPeer(transfer.pair_id, CloseTransfer(transfer_id)))
        return actions
