"""Rules that hold at all times about what processes count, report and expect, beside what they do.

Each function yields (rule, details, seconds) of what is wrong now and may last for so long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, WorkerLoad
from tandem.proxy.cluster.worker_record import WorkerUse
from tandem.simulator.processes import SimulatedProxy, SimulatedWorker
from tandem.simulator.site import SimulatedLauncher
from tandem.worker.tier_traffic import REFRESH_INTERVAL_S

Wait = tuple[str, str, float]
LATE_S = 1.5
"""Time for some ticks of a worker, or for a few reports."""
MAX_OVERESTIMATE = 1.5
_NO_PAIRS: Any = SimpleNamespace(num_bytes=0, num_compared_blocks=0, num_corrupt_blocks=0, take_traffic=list)
"""Traffic for a report that is compared only: taking the traffic of pairs would change the next report."""


def of_worker(worker: SimulatedWorker) -> Iterator[Wait]:
    """Checks that a running worker reports what it holds, ships what it can, and knows what its tiers hold."""
    name, scheduler = worker.name, worker.worker._scheduler
    prefill, decode, blocks = scheduler.prefill, scheduler.decode, scheduler.blocks
    take = worker.worker._take_load
    load = take.func(*take.args[:2], _NO_PAIRS, *take.args[3:], 0)
    waiting: Counter[int] = Counter()
    for prompt in prefill.prompts.by_transfer.values():
        if not prompt.is_computed and (not prompt.ended or prompt.in_step):
            waiting[prompt.request.priority] += len(prompt.token_ids) - prompt.num_computed_tokens
    told = load.num_waiting_tokens, load.num_decoding, load.num_free_blocks, load.num_running + load.num_waiting
    num_held = len(blocks._num_holders) + len(blocks._quarantined)
    num_sequences, num_prompts = len(decode.sequences.by_attempt), len(prefill.prompts.by_transfer)
    held = waiting.total(), num_sequences, blocks.num_blocks - num_held, num_sequences + num_prompts
    if told != held or Counter(dict(load.waiting_tokens)) != waiting:
        yield "a worker reports otherwise than it holds", f"{name}: {told} instead of {held}, {waiting}", 0
    pairs, incoming = worker.worker._traffic._outgoing_table, worker.worker._traffic._incoming_table
    for prompt in prefill.prompts.by_transfer.values():
        transfer_id, pair = prompt.request.transfer_id, pairs.get(prompt.pair_id or "")
        if prompt.ended or pair is None:
            continue
        if pair.peer.epoch != prompt.request.decode_epoch:
            yield "a prompt is shipped to another process than decodes it", f"{name}: {transfer_id}", 0
        num_ready = prompt.num_computed_tokens // blocks.block_size
        transfer = prompt.transfer
        if transfer is not None and transfer.is_reserved and transfer.groups[0].num_shipped < num_ready:
            yield "blocks that are computed are not shipped", f"{name}: {transfer_id}", 0
    for arriving in decode.transfers:
        request, source = arriving.request, incoming._by_id.get(arriving.pair_id)
        if request is None or source is None or arriving.is_given_up:
            continue
        if request.prefill_epoch != source.prefill_epoch:
            yield "a prompt gets blocks of another process than computes it", f"{name}: {arriving.transfer_id}", 0
    tiers, is_serving = worker.pools.tiers, worker.presence._registration is not None
    for tier in scheduler.tiers._tiers.values() if is_serving else ():
        if not tiers.is_idle(tier.name) or tier.error:
            continue
        present = tiers.present(tier.name)
        # A block that another rank lacked when it was loaded is forgotten, although rank 0 still has it.
        missed = present - tier.hashes.keys() if len(worker.pids) == 1 else set[bytes]()
        for block_hash in (tier.hashes.keys() - present) | missed:
            details = f"{name}: {tier.name}: {block_hash.hex()}"
            yield "a tier's directory is not refreshed", details, 2 * REFRESH_INTERVAL_S + LATE_S


def of_proxy(proxy: SimulatedProxy) -> Iterator[Wait]:
    """Checks that the router counts on each worker what the attempts in flight have there, once each."""
    yield from _lists(proxy)
    num_own: Counter[str] = Counter()
    num_promised: Counter[str] = Counter()
    own_tokens: Counter[str] = Counter()
    uses: dict[int, str] = {id(each.use): each.worker.epoch for each in proxy.table._by_epoch.values()}
    prefills = {id(attempt.prefill): attempt.prefill for attempt in proxy.dispatcher._running.values()}
    for attempt in proxy.dispatcher._running.values():
        if attempt.route.decode_use is not None:
            num_own[uses.get(id(attempt.route.decode_use), "")] += 1
    for prefill in prefills.values():
        if not prefill._has_ended:
            own_tokens[uses.get(id(prefill.route.compute_use), "")] += prefill.route.num_uncached_tokens
            if prefill.route.decode_use is not None:
                num_promised[uses.get(id(prefill.route.decode_use), "")] += prefill.route.num_blocks
    for record in proxy.table._by_epoch.values():
        epoch, use = record.worker.epoch, record.use
        details = f"{proxy.name}: {record.worker.worker_id}"
        counted = use._num_own, use._num_promised, use.prompts._own.total()
        if counted != (true := (num_own[epoch], num_promised[epoch], own_tokens[epoch])):
            yield "the router counts otherwise than attempts are in flight", f"{details}: {counted}, not {true}", 0
        if use.num_free_blocks + use._num_promised != record.load.num_free_blocks and record.load.num_blocks:
            yield "blocks are neither free nor promised", details, 0
        is_heard = proxy.table._timers.silence_s(proxy.timeline.now, epoch) < LATE_S / 2
        if proxy.router._num_proxies == 1 and is_heard:
            yield from _overestimates(details, use, record.load)


def _lists(proxy: SimulatedProxy) -> Iterator[Wait]:
    """Checks the lists that the router chooses from, which follow from what each worker has reported."""
    table = proxy.table
    working = {epoch: each for epoch, each in table._by_epoch.items() if each.answers and not each.draining}
    decode = {epoch for epoch, each in working.items() if each.role in DECODE_ROLES}
    prefill = {epoch: each for epoch, each in working.items() if each.role in PREFILL_ROLES}
    peers = {
        epoch: {peer for peer in decode if peer == epoch or each.pairs.is_ready(peer)}
        for epoch, each in prefill.items()
    }
    expected = (
        prefill.keys(), decode, {epoch for epoch in decode if working[epoch].role == "decode"},
        {epoch for epoch, of_worker in peers.items() if of_worker}, peers,
    )  # fmt: skip
    of_roles = table.prefill_workers, table.decode_workers, table.decode_only_workers, table.paired_prefill_workers
    listed = (
        *({each.worker.epoch for each in records} for records in of_roles),
        {epoch: set(each.decode_peers) for epoch, each in prefill.items()},
    )
    if listed != expected:
        yield "the router chooses from other workers than there are", f"{proxy.name}: {listed}, not {expected}", 0


def _overestimates(details: str, use: WorkerUse, load: WorkerLoad) -> Iterator[Wait]:
    """A worker is expected to have the more of what it reports and of what this proxy has sent there.

    More is assumed if there are other proxies, until the next report.
    """
    most = (Counter(dict(load.waiting_tokens)) | use.prompts._own).total()
    if use.prompts.total > MAX_OVERESTIMATE * most:  # prompts may be added and end since the report
        yield "a worker seems to have more prompts than it has", details, LATE_S
    if use.num_sequences > max(load.num_decoding, use._num_own):
        yield "a worker seems to have more sequences than it has", details, LATE_S


def of_launcher(launcher: SimulatedLauncher, now: float) -> Iterator[Wait]:
    """Checks that a launcher that hears from proxies counts no process that has been followed by another."""
    if not launcher.is_ready or launcher.loop.stopped_at is not None:
        return
    product = launcher.launcher
    heard_at = max((each.heard_at for each in product._orders._proxies.values()), default=0.0)
    pids = {child.name: child.last_pid for child in product._children.values()}
    for name, (_, report) in product._reports._heard.items():
        if pids.get(name) != report.worker.pid and now - heard_at < LATE_S:
            yield "the launcher counts a process that has ended", f"{name} ({report.worker.pid})", 2 * LATE_S
