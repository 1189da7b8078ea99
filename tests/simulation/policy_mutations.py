"""Faults in what decides: schedulers, tables and routing, and the rules of blocks that two workers write."""

from __future__ import annotations

from tests.simulation.mutation import (
    ATTEMPT,
    CONTROL,
    DECODE,
    DISPATCHER,
    GENERATION,
    INCOMING_TABLE,
    INDEX,
    KNOWN_PAIRS,
    LOAD,
    OUTGOING_TABLE,
    PREFILL,
    PRESENCE,
    SEQUENCES,
    SHIPMENT,
    TABLE,
    TRAFFIC,
    TRANSFER,
    Mutation,
)

PURE = (
    Mutation("an ended request is not counted", GENERATION, "services.metrics.requests.labels(outcome).inc()", "pass"),
    Mutation("an ended attempt is not aborted", DISPATCHER, "for worker in attempt.busy_workers:", "for worker in ():"),
    Mutation(
        "an ended sequence still counts on its worker", DISPATCHER, "self._router.sequence_ended(attempt.route)", "pass"
    ),
    Mutation("an ended attempt stays in the table", DISPATCHER, "del self._running[attempt.attempt_id]", "pass"),
    Mutation(
        "a lost attempt is not followed by another",
        DISPATCHER,
        "            self._start_over(sequence)\n        return delta",
        "            pass\n        return delta",
    ),
    Mutation(
        "waiting prompts are not tried again",
        DISPATCHER,
        "        self._retry_timer = None\n        self.on_cluster_changed()",
        "        self._retry_timer = None",
    ),
    Mutation(
        "a lost prefill worker costs no attempt",
        ATTEMPT,
        "may_go_on = self._first_released and (",
        "may_go_on = True or (",
    ),
    Mutation(
        "the first token is released without its blocks",
        ATTEMPT,
        "if first.finish_reason is None and not self._decode_reserved:",
        "if False:",
    ),
    Mutation(
        "what a sequence has generated is forgotten",
        "proxy/dispatch/sequence.py",
        "self.generated += [",
        "self.generated = [",
    ),
    Mutation(
        "another process may answer for a decode worker",
        TRAFFIC,
        "if message.decode_epoch != self._epoch:",
        "if False:",
    ),
    Mutation(
        "a failed pair is opened again while its sender writes",
        OUTGOING_TABLE,
        'pair.state == "failed" and pair.closed and',
        'pair.state == "failed" and',
    ),
    Mutation("a failed pair is not opened again", OUTGOING_TABLE, "now - pair.failed_at > RETRY_INTERVAL_S", "False"),
    Mutation(
        "pairs with workers that left stay",
        OUTGOING_TABLE,
        "gone = [pair for epoch, pair in self._by_epoch.items() if epoch not in self._view]",
        "gone = []",
    ),
    Mutation(
        "a closed pair is not forgotten",
        OUTGOING_TABLE,
        "if not pair.dropped or not (pair.closed or",
        "if True or not (pair.closed or",
    ),
    Mutation(
        "the exit of a peer is ignored",
        INCOMING_TABLE,
        "        pair.live_pids.discard(pid)\n        if pair.live_pids:",
        "        if True:",
    ),
    Mutation(
        "silence is proof that a peer has stopped",
        INCOMING_TABLE,
        'left the cluster", False))',
        'left the cluster", True))',
    ),
    Mutation(
        "a broken pair is proof that its peer has stopped",
        INCOMING_TABLE,
        "return [close, IncomingPairLost(pair_id, reason, False)]",
        "return [close, IncomingPairLost(pair_id, reason, True)]",
    ),
    Mutation(
        "a closed pair does not stop its receiver",
        INCOMING_TABLE,
        "return [StopReceiver(pair.pair_id), IncomingPairLost(pair.pair_id, reason, True)]",
        "return [IncomingPairLost(pair.pair_id, reason, True)]",
    ),
    Mutation(
        "blocks of an ended request are reused at once",
        TRANSFER,
        "return bool(self.receives) or not (self.peer_stopped or all_announced)",
        "return bool(self.receives)",
    ),
    Mutation(
        "decoding begins before all blocks have arrived",
        TRANSFER,
        "            and all(group.is_announced for group in self.groups)\n",
        "",
    ),
    Mutation(
        "a transfer may begin after its request has ended",
        TRANSFER,
        "        self._closed[transfer.transfer_id] = None\n",
        "",
    ),
    Mutation(
        "decode ignores aborts", DECODE, "return self._end(sequence) if sequence is not None else []", "return []"
    ),
    Mutation(
        "decode has no deadlines",
        SEQUENCES,
        "return [s for s in self.by_attempt.values() if now >=",
        "return [s for s in () if now >=",
    ),
    Mutation(
        "prefill is not told that a request has ended",
        TRANSFER,
        "        if transfer.pair_id and not transfer.peer_stopped:",
        "        if False:",
    ),
    Mutation("unclaimed reservations stay", TRANSFER, "now >= each.announced_at + UNCLAIMED_TIMEOUT_S", "False"),
    Mutation(
        "a lost prefill worker does not end the prompts that wait for it",
        TRANSFER,
        "each.request.prefill_epoch == prefill_epoch]",
        "False]",
    ),
    Mutation(
        "a block is published under the next one's hash",
        DECODE,
        "(sequence.num_tokens - 2) //",
        "(sequence.num_tokens - 2 - self.blocks.block_size) //",
    ),
    Mutation(
        "kept blocks are published one too far",
        TRANSFER,
        "return blocks.written_block_ids[: blocks.num_kept]",
        "return blocks.written_block_ids[1 : 1 + blocks.num_kept]",
    ),
    Mutation(
        "leases do not expire", SHIPMENT, "for transfer_id in self._leases.expired(now):", "for transfer_id in ():"
    ),
    Mutation(
        "blocks are released while they are shipped",
        SHIPMENT,
        "if transfer.num_ships_in_flight or not is_over or",
        "if not is_over or",
    ),
    Mutation(
        "blocks are released during their step",
        PREFILL,
        "if not prompt.ended or prompt.in_step or",
        "if not prompt.ended or",
    ),
    Mutation(
        "the decode worker is not told of a given up transfer",
        SHIPMENT,
        "if transfer.ended and transfer.reserve_sent:",
        "if False:",
    ),
    Mutation("prompts of a lost pair go on", SHIPMENT, "if transfer.pair_id == pair_id]", "if False]"),
    Mutation("two full workers wait for each other", PREFILL, "        if transfer is None:\n", "        if True:\n"),
    Mutation(
        "blocks that decode has cached are shipped as well",
        SHIPMENT,
        "group.first_block = group.num_shipped = given.first_block",
        "group.first_block, group.num_shipped = given.first_block, 0",
    ),
    Mutation(
        "a new process is taken for the one that exited",
        TABLE,
        "for each in gone if each.pid == pid]",
        "for each in gone]",
    ),
    Mutation("silence is never noticed", TABLE, "self._timers.silent(now, self._worker_silence_s)]", "()]"),
    Mutation(
        "a restarted worker does not replace itself",
        TABLE,
        "        for old in namesakes:\n            self._delete(old.epoch)\n",
        "",
    ),
    Mutation(
        "a gap in the changes of pairs is not noticed",
        KNOWN_PAIRS,
        "update.since not in (0, self._num_changes)",
        "False",
    ),
    Mutation(
        "pairs with gone workers stay known",
        KNOWN_PAIRS,
        "for epoch in gone if self._forget(epoch)",
        "for epoch in gone if False",
    ),
    Mutation(
        "workers get prompts before they have answered",
        "proxy/cluster/worker_record.py",
        "return self.answers and not self.draining",
        "return not self.draining",
    ),
    Mutation(
        "a worker that has joined or changed is no decode peer",
        TABLE,
        "            self._update_peer(each, record.worker.epoch)",
        "            pass",
    ),
    Mutation(
        "a worker that leaves is not removed",
        TABLE,
        'has_failed = cause == "failure"',
        "return MembershipChange()",
    ),
    Mutation(
        "prefixes with other beginnings are shared",
        "protocol/prefix_hash.py",
        "digest = blake2b(parent, digest_size=_DIGEST_BYTES)",
        "digest = blake2b(digest_size=_DIGEST_BYTES)",
    ),
    Mutation(
        "a shared block is freed with its first holder",
        "engine/kv_cache/block_manager.py",
        "            if self._num_holders[block_id]:\n                continue\n",
        "",
    ),
)

TRANSFERS = (
    Mutation(
        "blocks are reused while the receiver still writes them",
        TRANSFER,
        "return bool(self.receives) or not (self.peer_stopped or all_announced)",
        "return not (self.peer_stopped or all_announced)",
    ),
    Mutation("announced blocks count as arrived", TRANSFER, "            and not self.receives\n", ""),
    Mutation(
        "announced blocks are kept",
        TRANSFER,
        "min(blocks.num_arrived, num_blocks)",
        "min(blocks.num_announced, num_blocks)",
    ),
    Mutation("blocks behind corrupt ones are kept", TRANSFER, "        elif not self.has_gap:\n", "        if True:\n"),
    Mutation(
        "kept blocks still count as written",
        TRANSFER,
        "group.written_block_ids[group.num_kept :]",
        "group.written_block_ids",
    ),
    Mutation(
        "corrupt blocks are used",
        TRANSFER,
        "        transfer.on_received(is_whole=False)\n        return self.fail(transfer, error)",
        "        return self.on_received(transfer_id, None)",
    ),
    Mutation(
        "the pair ids of a restarted process begin anew",
        OUTGOING_TABLE,
        "-{self.worker.epoch}-{number}",
        "-{number}",
    ),
)
"""Rules of blocks that two workers write. Most need two-sided paths or corrupt blocks."""


VIEWS = (
    Mutation(
        "blocks that a worker has evicted stay in the router's index",
        INDEX,
        "            self._remove(block_hash, mask)\n            holder.held.discard(block_hash)",
        "            holder.held.discard(block_hash)",
    ),
    Mutation(
        "a gap in the changes of prefixes is not noticed",
        INDEX,
        "update.number != holder.last_number + 1:",
        "update.number < holder.last_number:",
    ),
    Mutation(
        "a worker's own prompts are counted twice",
        LOAD,
        "{level: n - self._own[level] for level",
        "{level: n for level",
    ),
    Mutation(
        "promised blocks count as free", LOAD, "load.num_free_blocks - self._num_promised", "load.num_free_blocks"
    ),
    Mutation(
        "proxies answer with an old version of the view",
        CONTROL,
        "        self._unchanged = self._encode_unchanged()\n        view",
        "        view",
    ),
    Mutation(
        "a version of the view is taken with a whole one only",
        PRESENCE,
        "        link.version = message.version\n        for",
        "        if message.since == 0:\n            link.version = message.version\n        for",
    ),
    Mutation(
        "another role of a worker is not passed on",
        PRESENCE,
        "            if known is None or known != worker:",
        "            if known is None:",
    ),
    Mutation(
        "a view is renewed only for the last of the gone workers",
        PRESENCE,
        "self._is_view_stale |= not any(epoch in each.workers for each in self._links)",
        "self._is_view_stale = not any(epoch in each.workers for each in self._links)",
    ),
    Mutation("tiers are refreshed once", "worker/tier_traffic.py", "        self._refreshing.discard(name)\n", ""),
    Mutation(
        "blocks are shipped at the end only",
        "prefill_worker/prompt.py",
        "else self.block_table[: self.num_computed_tokens // block_size]",
        "else []",
    ),
    Mutation(
        "the addresses of a pair are in another order",
        TRAFFIC,
        "PairAccepted(pair_id, action.connector, addresses, action.checksums)",
        "PairAccepted(pair_id, action.connector, addresses[::-1], action.checksums)",
    ),
)
"""Faults that another mechanism heals, or that only make requests late: views that are wrong show them."""
