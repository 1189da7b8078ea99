"""Executes the actions of `handover.pairs.incoming_table`: receivers of data paths, and watches for the exits of peers.

Lives on the loop. Callbacks of receivers come on other threads and are posted to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from tandem.handover.kv_host import KVPools
from tandem.handover.pairs.incoming_table import (
    AcceptPair,
    IncomingPairAction,
    IncomingPairLost,
    IncomingPairTable,
    PrefillLost,
    SendToSender,
    StopReceiver,
)
from tandem.kv_transfer.connector import KVReceiver, OnDone
from tandem.protocol.codec import MessageTooLarge
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.transfer import ClosePair, OpenPair, PairAccepted, PairRefused
from tandem.runtime.errors import KVTransferFailed, first_line
from tandem.runtime.processes.exits import WatchExit
from tandem.runtime.threads import post

log = logging.getLogger(__name__)


class IncomingPairs:
    """All pairs of one decode worker.

    send: sends to a peer, by pair id. on_pair_lost: called with (pair_id, reason, peer_stopped). on_prefill_lost:
    called with the prefill worker's epoch.
    """

    def __init__(
        self,
        epoch: str,
        table: IncomingPairTable,
        pools: KVPools,
        watch_exit: WatchExit,
        send: Callable[[str, PairAccepted | PairRefused | ClosePair], None],
        on_pair_lost: Callable[[str, str, bool], None],
        on_prefill_lost: Callable[[str], None],
    ) -> None:
        self._epoch = epoch
        self._table = table
        self._pools = pools
        self._send = send
        self._on_pair_lost = on_pair_lost
        self._on_prefill_lost = on_prefill_lost
        self._receivers: dict[str, KVReceiver] = {}
        self._watch_exit = watch_exit
        self._watches: dict[str, list[Callable[[], None]]] = {}  # each ends a watch
        self._loop = asyncio.get_running_loop()

    def receive(self, pair_id: str, block_ids: Sequence[int], on_done: OnDone) -> None:
        receiver = self._receivers.get(pair_id)
        if receiver is None:
            on_done(KVTransferFailed("the pair is closed"))
        else:
            receiver.receive(block_ids, on_done)

    # ---- events

    def on_open(self, message: OpenPair) -> None:
        if message.decode_epoch != self._epoch:  # its peer's view is old, and must not replace a pair with this process
            self._send(message.pair_id, ClosePair(message.pair_id, "another process answers at its address"))
            return
        self._perform(self._table.on_open(message))

    def on_close(self, pair_id: str, reason: str) -> None:
        self._perform(self._table.on_close(pair_id, reason))

    def on_view(self, workers: list[WorkerInfo]) -> None:
        self._perform(self._table.on_view(workers))

    def fail(self, pair_id: str, reason: str) -> None:
        """Ends a pair whose data path broke or whose peer violates the protocol."""
        self._perform(self._table.fail(pair_id, reason))

    def _on_exit(self, pair_id: str, pid: int) -> None:
        self._perform(self._table.on_exit(pair_id, pid))

    def close(self) -> None:
        for pair_id in list(self._receivers):
            self._close_receiver(pair_id)

    # ---- actions

    def _perform(self, actions: list[IncomingPairAction]) -> None:
        for action in actions:
            match action:
                case SendToSender(message):
                    if isinstance(message, PairRefused):
                        log.error("refused pair %s: %s", message.pair_id, message.reason)
                    self._send(message.pair_id, message)
                case AcceptPair():
                    if action.warning:
                        log.warning("%s", action.warning)
                    self._accept(action)
                case StopReceiver():
                    self._close_receiver(action.pair_id)
                case IncomingPairLost():
                    effect = "lost its transfers" if self._table.is_open(action.pair_id) else "failed"
                    log.warning("pair %s %s: %s", action.pair_id, effect, action.reason)
                    self._on_pair_lost(action.pair_id, action.reason, action.peer_stopped)
                case PrefillLost():
                    self._on_prefill_lost(action.prefill_epoch)

    def _accept(self, action: AcceptPair) -> None:
        pair_id = action.pair_id
        self._watches[pair_id] = []
        on_addresses = partial(post, self._loop, self._answer, action)
        try:
            self._receivers[pair_id] = self._pools.open_receiver(
                action.connector, pair_id, action.num_senders, on_addresses
            )
        except Exception as error:  # KVPathRefused; with any other, too, the peer waits for an answer
            if not isinstance(error, KVTransferFailed):
                log.exception("the receiver of pair %s cannot be opened", pair_id)
            self._on_impossible(action, first_line(error))
            return
        self._watch(pair_id, action.pids)

    def _answer(self, action: AcceptPair, addresses: list[list[bytes]] | KVTransferFailed) -> None:
        pair_id = action.pair_id
        if pair_id not in self._receivers:
            return  # closed meanwhile
        if isinstance(addresses, KVTransferFailed):
            self._on_impossible(action, addresses.message)
            return
        try:
            self._send(pair_id, PairAccepted(pair_id, action.connector, addresses, action.checksums))
        except MessageTooLarge:
            num_bytes = sum(len(address) for rank in addresses for address in rank)
            self._on_impossible(action, f"the addresses of all paths have {num_bytes} bytes, too many for a message")
            return
        self._table.on_accepted(pair_id, self._table.connectors[action.connector].one_sided)

    def _on_impossible(self, action: AcceptPair, reason: str) -> None:
        self._perform(self._table.on_receiver_impossible(action.pair_id, action.connector, reason))

    def _watch(self, pair_id: str, pids: list[int]) -> None:
        for pid in pids:
            if pair_id not in self._watches:
                return  # the exit of one rank has closed the pair
            try:
                end = self._watch_exit(pid, partial(self._on_exit, pair_id, pid))
            except ProcessLookupError:
                self._perform(self._table.on_exit(pair_id, pid))
            except OSError as error:  # it may still live and write
                self.fail(pair_id, f"cannot watch process {pid}: {error}")
                return
            else:
                self._watches[pair_id].append(end)

    def _close_receiver(self, pair_id: str) -> None:
        if (receiver := self._receivers.pop(pair_id, None)) is not None:  # None if it could not be opened
            receiver.close()
        for end in self._watches.pop(pair_id):
            end()
