"""The prompts whose KV comes to a vLLM worker from another one. Pure.

When both PrepareDecode and ReserveKV are here, one engine request is added for all sequences of the prompt, which gets
its blocks from vLLM: the reservation. It begins to decode when all KV has arrived. The other sequences are added then,
and find the prompt in the prefix cache.

vLLM keeps the blocks of a request that was aborted meanwhile until it is told that nothing more will be written
(`decode_worker.transfer` says when that is known).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.decode_worker.actions import Receive, SendToPeer, SendToProxy
from tandem.decode_worker.transfer import UNCLAIMED_TIMEOUT_S, IncomingTransfer, Transfers
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import DecodeReserved, PrepareDecode
from tandem.protocol.messages.transfer import FinishTransfer, KVRefused, KVReserved, ReserveKV, ShipKV
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, Overloaded, TandemError, WorkerLost
from tandem.vllm_worker.scheduler.engine_orders import AbortRequests, AllocatedBlocks, EndReceiving, VllmAction

_ENDED = "the request has ended on the decode worker"


@dataclass(eq=False)
class ArrivingPrompt:
    """A prompt whose KV has not arrived. engine_id: request that gets the KV, once it is added."""

    message: PrepareDecode
    engine_id: str = ""


class IncomingTransfers:
    """Prompts and their transfers, until the sequences begin or end.

    add_receiver: returns the order that adds the engine request for a prompt. begin: called with a prompt whose KV has
    arrived and its transfer; starts the sequences. fail_prompt: ends the sequences of a prompt, with an error for the
    proxy or without. open_attempts: returns the prompt's attempts that have not ended.
    """

    def __init__(
        self,
        add_receiver: Callable[[ArrivingPrompt], list[VllmAction]],
        begin: Callable[[ArrivingPrompt, IncomingTransfer], list[VllmAction]],
        fail_prompt: Callable[[PrepareDecode, TandemError | None], list[VllmAction]],
        open_attempts: Callable[[PrepareDecode], list[str]],
    ) -> None:
        self._add_receiver = add_receiver
        self._begin = begin
        self._fail_prompt = fail_prompt
        self._open_attempts = open_attempts
        self._transfers = Transfers()
        self._prompts: dict[str, ArrivingPrompt] = {}  # by transfer
        self._receivers: dict[str, str] = {}  # engine request -> transfer, until the engine has its blocks back
        self.num_received = 0

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of transfers that were given up, to which the peer may still write."""
        given_up = (each for each in self._transfers.values() if each.transfer_id not in self._prompts)
        return sum(len(each.own_block_ids) for each in given_up)

    @property
    def is_blocked(self) -> bool:
        """Whether a prompt waits for blocks."""
        waiting = (self._transfers.get(transfer_id) for transfer_id in self._receivers.values())
        return any(each is not None and not each.is_reserved for each in waiting)

    def waits_for(self, message: PrepareDecode) -> bool:
        """Whether the prompt's KV has not arrived."""
        prompt = self._prompts.get(message.transfer_id)
        return prompt is not None and prompt.message is message

    # ---- from the proxy

    def why_refused(self, message: PrepareDecode) -> TandemError | None:
        transfer_id = message.transfer_id
        if transfer_id in self._prompts:
            return KVTransferFailed(f"transfer {transfer_id} exists already")
        if self._transfers.is_closed(transfer_id):
            return KVTransferFailed("the prefill worker has given up the transfer")
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.is_reserved:
            return KVTransferFailed("the transfer belongs to a request that has ended, and may still write")
        if transfer is not None and transfer.adapter != message.adapter_digest:
            return KVTransferFailed("the prefill worker computed with another LoRA adapter")
        return None

    def on_prepare(self, message: PrepareDecode) -> list[VllmAction]:
        self._prompts[message.transfer_id] = ArrivingPrompt(message)
        return self._reserve(message.transfer_id)

    def on_attempt_ended(self, message: PrepareDecode) -> list[VllmAction]:
        """Gives the transfer up when none of its sequences is left."""
        if message.transfer_id not in self._prompts or self._open_attempts(message):
            return []
        return self._give_up(message.transfer_id, KVTransferFailed(_ENDED))

    # ---- from the engine

    def on_allocated(self, allocated: AllocatedBlocks) -> list[VllmAction]:
        transfer_id = self._receivers.get(allocated.engine_id)
        transfer = self._transfers.get(transfer_id) if transfer_id is not None else None
        prompt = self._prompts.get(transfer_id) if transfer_id is not None else None
        if transfer_id is None or transfer is None or prompt is None:
            return []  # given up meanwhile: the engine has the orders that end the request
        transfer.reserve(allocated.cached_block_ids, allocated.block_ids, [])
        num_cached = len(allocated.cached_block_ids)
        answer = KVReserved(transfer_id, num_cached, allocated.block_ids)
        attempts = self._open_attempts(prompt.message)
        reserved = [SendToProxy(prompt.message.proxy_id, DecodeReserved(attempt_id)) for attempt_id in attempts]
        self.num_received += len(attempts)
        return [SendToPeer(transfer.pair_id, answer), *reserved]

    def message_of(self, engine_id: str) -> PrepareDecode | None:
        """Returns the prompt whose KV an engine request waits for."""
        prompt = self._prompts.get(self._receivers.get(engine_id, ""))
        return prompt.message if prompt is not None else None

    def on_engine_error(self, engine_id: str, error: TandemError) -> list[VllmAction]:
        """Handles the end of a request that waits for KV."""
        message = self.message_of(engine_id)
        return self._give_up(message.transfer_id, error) if message is not None else []

    # ---- from the prefill worker and the data path (see worker.kv_traffic)

    def on_reserve(self, now: float, message: ReserveKV) -> list[VllmAction]:
        transfer_id = message.transfer_id
        if self._transfers.get(transfer_id) is not None:
            return []
        error: TandemError | None = None
        if self._transfers.is_closed(transfer_id):
            error = KVTransferFailed(_ENDED)
        elif len(self._transfers) >= MAX_HELD_SEQUENCES:
            error = Overloaded("this worker has too many transfers")
        prompt = self._prompts.get(transfer_id)
        if prompt is not None and prompt.message.adapter_digest != message.adapter:
            error = KVTransferFailed("the prefill worker computed with another LoRA adapter")
            del self._prompts[transfer_id]
            self._transfers.close(transfer_id)
            return [_refusal(message.pair_id, transfer_id, error), *self._fail_prompt(prompt.message, error)]
        if error is not None:
            return [_refusal(message.pair_id, transfer_id, error)]
        self._transfers.add(IncomingTransfer(transfer_id, message.pair_id, now, message.adapter))
        return self._reserve(transfer_id)

    def on_ship(self, message: ShipKV) -> list[VllmAction]:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or not transfer.is_reserved:
            raise KVTransferFailed(f"blocks arrived for transfer {message.transfer_id}, which is not open")
        block_ids = transfer.announce(message)
        return [Receive(transfer.pair_id, transfer.transfer_id, block_ids, message.checksums)]

    def on_received(self, transfer_id: str, error: TandemError | None) -> list[VllmAction]:
        transfer = self._transfers[transfer_id]
        transfer.on_received(is_whole=error is None)
        if error is not None:
            transfer.peer_stopped = True  # the receiver is broken, and only it writes
            return self._give_up(transfer_id, error)
        return self._advance(transfer)

    def on_corrupt(self, transfer_id: str, error: TandemError) -> list[VllmAction]:
        self._transfers[transfer_id].on_received(is_whole=False)
        return self._give_up(transfer_id, error)

    def on_finish_transfer(self, message: FinishTransfer) -> list[VllmAction]:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return []
        transfer.first_token_ids, transfer.position_offset = message.first_token_ids, message.position_offset
        return self._advance(transfer)

    def on_close_transfer(self, transfer_id: str) -> list[VllmAction]:
        """Handles a transfer that the peer has ended. The peer reports the reason to the proxy, except for aborts."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        transfer.peer_stopped = True
        return self._give_up(transfer_id, None)

    def on_pair_lost(self, pair_id: str, reason: str, peer_stopped: bool) -> list[VllmAction]:
        actions: list[VllmAction] = []
        for transfer in self._transfers.of_pair(pair_id):
            transfer.peer_stopped = transfer.peer_stopped or peer_stopped
            actions += self._give_up(transfer.transfer_id, WorkerLost(f"the prefill worker was lost: {reason}"))
        return actions

    def on_prefill_lost(self, prefill_epoch: str) -> list[VllmAction]:
        error = WorkerLost("the prefill worker was lost")
        lost = [key for key, prompt in self._prompts.items() if prompt.message.prefill_epoch == prefill_epoch]
        return [action for transfer_id in lost for action in self._give_up(transfer_id, error)]

    def on_tick(self, now: float) -> list[VllmAction]:
        actions: list[VllmAction] = []
        for transfer in list(self._transfers.values()):
            is_unclaimed = transfer.transfer_id not in self._prompts and not transfer.is_reserved
            if is_unclaimed and now >= transfer.arrived_at + UNCLAIMED_TIMEOUT_S:
                actions += self._give_up(transfer.transfer_id, KVTransferFailed("the proxy's request did not arrive"))
        return actions

    def wanted_transfers(self, pair_id: str) -> list[str]:
        transfers = self._transfers.of_pair(pair_id)
        return [each.transfer_id for each in transfers if each.transfer_id in self._prompts or not each.is_reserved]

    # ---- beginnings and ends

    def _reserve(self, transfer_id: str) -> list[VllmAction]:
        prompt = self._prompts.get(transfer_id)
        if prompt is None or prompt.engine_id or self._transfers.get(transfer_id) is None:
            return []
        actions = self._add_receiver(prompt)
        self._receivers[prompt.engine_id] = transfer_id
        return actions

    def _advance(self, transfer: IncomingTransfer) -> list[VllmAction]:
        """Starts the sequences if their KV is complete, or lets the engine have the blocks of an abandoned transfer."""
        transfer_id = transfer.transfer_id
        prompt = self._prompts.get(transfer_id)
        if prompt is not None:
            if not transfer.is_complete:
                return []
            if (error := transfer.why_unusable(prompt.message)) is not None:
                return self._give_up(transfer_id, error)
            del self._prompts[transfer_id], self._receivers[prompt.engine_id]
            self._transfers.close(transfer_id)
            return self._begin(prompt, transfer)
        if transfer.may_still_be_written:
            return []
        self._transfers.close(transfer_id)
        engine_id = next((key for key, value in self._receivers.items() if value == transfer_id), None)
        if engine_id is None:
            return []
        del self._receivers[engine_id]
        return [EndReceiving(engine_id)]  # also if no allocation is known: its report may be on the way

    def _give_up(self, transfer_id: str, error: TandemError | None) -> list[VllmAction]:
        """Ends the sequences of a transfer that will not complete. The proxy gets `error` for those that are open."""
        actions: list[VllmAction] = []
        prompt = self._prompts.pop(transfer_id, None)
        if prompt is not None:
            actions += self._fail_prompt(prompt.message, error)
            if prompt.engine_id:
                actions.append(AbortRequests([prompt.engine_id]))
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._transfers.close(transfer_id)
            return actions
        if not transfer.peer_stopped:
            actions.append(_refusal(transfer.pair_id, transfer_id, error or KVTransferFailed(_ENDED)))
        return actions + self._advance(transfer)


def _refusal(pair_id: str, transfer_id: str, error: TandemError) -> SendToPeer:
    return SendToPeer(pair_id, KVRefused(transfer_id, ErrorInfo.of(error)))
