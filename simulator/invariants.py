"""Rules that hold at all times: waits are bounded, and what has ended, stopped or left is noticed in bounded time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from tandem.deploy.launch.hang_detector import INTERVAL_S, MAX_SILENCE_S
from tandem.handover.incoming import UNCLAIMED_TIMEOUT_S
from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, PROXY_SILENCE_S, WorkerLoad
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher
from tandem.proxy.cluster.worker_record import WorkerUse
from tandem.proxy.cluster.worker_table import WORKER_SILENCE_S
from tandem.proxy.dispatch.sequence import SUSPECT_DEATHS, Attempt, DispatchedSequence, TokenDelta
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.engine import NotedBlocks
from tandem.simulator.network import SILENT_S
from tandem.simulator.processes import SimulatedProxy, SimulatedWorker
from tandem.simulator.service import ServiceRules
from tandem.simulator.site import SimulatedLauncher
from tandem.simulator.timeline import ProcessLoop, Timeline
from tandem.worker.tier_traffic import REFRESH_INTERVAL_S

CHECK_S = 0.5
SHOWN_S = 0.2
"""Before the first heartbeat, in whose answer a worker would learn of the others as well."""
SOON_S = 2.5
"""Time for what takes a few messages, or the next heartbeat."""
OPEN_S = 6.0
"""Time to open a pair between processes that run and reach each other."""


class Invariants:
    """Checks the running processes every `CHECK_S`. report(rule, details): called when a rule is broken."""

    def __init__(self, cluster: SimulatedCluster, timeline: Timeline, report: Callable[[str, str], None]) -> None:
        self._cluster = cluster
        self._timeline = timeline
        self._report = report
        self._seen: dict[tuple[str, str], float] = {}  # since when something is as it may only be for a while
        self._by_epoch: dict[str, SimulatedWorker] = {}
        self._service = ServiceRules(cluster)
        self._claimed: set[tuple[str, str]] = set()  # transfers whose request has come, by worker
        cluster.world.call_later(CHECK_S, self._check)
        if cluster.shape.max_latency_s < 0.01:
            cluster.world.call_later(SHOWN_S, self._check_views)

    def _check_views(self) -> None:
        workers = self._cluster.workers
        registrations = {name: worker.presence and worker.presence._registration for name, worker in workers.items()}
        if None in registrations.values():
            return  # one still opens its tiers
        for name, registration in registrations.items():
            if len(registration._view) < len(workers):
                self._report("new workers are not shown to the others", name)

    def on_lost(self, worker_id: str, epoch: str, reason: str) -> None:
        """Checks why a proxy has removed a worker."""
        worker = self._cluster.workers.get(worker_id)
        if (
            worker is not None
            and reason.startswith("its process")
            and not worker.loop.is_dead
            and epoch == worker.epoch
        ):
            self._report("a running worker is taken for one that has exited", f"{worker_id} ({epoch}): {reason}")

    def check_delta(self, sequence: DispatchedSequence, attempt: Attempt, delta: TokenDelta) -> None:
        """A stream begins once decode has blocks, and its full blocks are cached at its end if none was ever evicted.

        An evicted one may have been the equal of a block that this sequence still held.
        """
        if attempt.route.is_shipped and attempt.times.reserved_at is None and not attempt.is_over:
            self._report("a stream began before decode had blocks", attempt.attempt_id)
        info = (
            attempt.route.decode if attempt.has_decoded else None
        )  # nothing is decoded behind a first token that ends
        if delta.finish_reason is None or info is None or (worker := self._cluster.process(info.pid)).loop.is_dead:
            return
        blocks = worker.blocks
        stored = sequence.prompt.token_ids + pack_token_ids(sequence.generated[:-1])
        prompt = sequence.prompt
        hasher = BlockHasher(self._cluster.shape.block_size, "simulated", prompt.cache_salt, (), prompt.adapter)
        hashes = hasher.prompt_hashes(stored)
        assert isinstance(blocks, NotedBlocks)
        if not worker.runs_vllm and not blocks.has_evicted and len(blocks.match(hashes)) < len(hashes):
            self._report("a finished sequence is not cached", f"{worker.name}: {attempt.attempt_id}")

    def _check(self) -> None:
        self._cluster.world.call_later(CHECK_S, self._check)
        now, seen = self._timeline.now, self._seen
        self._seen = {}
        for rule, details, limit_s in self._waits():
            since = self._seen[rule, details] = seen.get((rule, details), now)
            if now - since >= limit_s:
                self._report(rule, f"{details}, for {now - since:.1f} s")

    def _waits(self) -> Iterator[tuple[str, str, float]]:
        """Yields (rule, details, seconds) of what may last for so long."""
        yield from counts_of_launcher(self._cluster.launcher, self._timeline.now)
        yield from self._service.waits()
        for worker in self._cluster.workers.values():
            if worker.epoch is not None:
                self._by_epoch[worker.epoch] = worker
            if worker.loop.stopped_at is None and worker.presence is not None and not worker.runs_vllm:
                yield from self._of_worker(worker)
                yield from counts_of_worker(worker)
        for proxy in self._cluster.proxies.values():
            if proxy.loop.stopped_at is None and hasattr(proxy, "control"):
                yield from self._of_proxy(proxy)
                yield from counts_of_proxy(proxy)
            elif proxy.loop.is_frozen and self._is_watched(proxy):
                yield (
                    "a frozen proxy is not replaced",
                    f"{proxy.name} since {proxy.loop.stopped_at}",
                    MAX_SILENCE_S + SOON_S,
                )

    def _of_worker(self, worker: SimulatedWorker) -> Iterator[tuple[str, str, float]]:
        now, name = self._timeline.now, worker.name
        prefill, decode = worker.worker._scheduler.prefill, worker.worker._scheduler.decode
        held = {key for key, prompt in prefill.prompts.by_attempt.items() if not prompt.ended}
        held |= decode.sequences.by_attempt.keys()
        for proxy_id, attempt_id in sorted(held):
            proxy = self._cluster.proxies_by_id[proxy_id]
            if since := self._silent_since(proxy.loop, worker.loop, proxy.loop):
                details = f"{name}: {proxy_id} since {since}"
                yield "a request of a silent proxy is held", details, PROXY_SILENCE_S + SOON_S
            elif attempt_id not in proxy.dispatcher._running and self._is_calm(worker.loop, proxy.loop):
                yield "a request that has ended is held", f"{name}: {attempt_id}", SOON_S
        if now - worker.loop.running_since < SOON_S:
            return
        for sequence in decode.sequences.by_attempt.values():
            if now > sequence.prompt.arrived_at + sequence.prompt.request.deadline_s + 1:
                yield "a request is held beyond its deadline", f"{name}: {sequence.attempt_id}", 0
        for transfer in decode.transfers:
            waiting, request = transfer.prompt, transfer.request
            if waiting is None or request is None or transfer.is_given_up:
                continue
            self._claimed.add((name, transfer.transfer_id))
            prefill_worker = self._by_epoch.get(request.prefill_epoch)
            if prefill_worker is None or prefill_worker.has_left or worker.loop not in prefill_worker.watched_by:
                continue
            exited_at = [loop.ended_at or math.inf for loop in prefill_worker.loops]
            if waiting.arrived_at < min(exited_at) and max(exited_at) < now - 1:
                details = f"{name}: {transfer.transfer_id}"
                yield "a prompt waits for a prefill worker that has exited", details, CHECK_S
        for transfer in decode.transfers:
            details = f"{name}: {transfer.transfer_id}"
            if transfer.prompt is None:
                yield "a transfer waits for its request", details, UNCLAIMED_TIMEOUT_S + 1
                if (name, transfer.transfer_id) in self._claimed:
                    yield "a transfer waits for a request that has ended", details, 0
        table = worker.worker._traffic._outgoing_table
        for prompt in prefill.prompts.by_transfer.values():
            if prompt.ended or prompt.pair_id is None:
                continue
            pair, transfer_id = table.get(prompt.pair_id), prompt.request.transfer_id
            if pair is None or pair.state != "ready":
                yield "a prompt goes on after its pair was lost", f"{name}: {prompt.pair_id}", 0
                continue
            peer = self._cluster.process(pair.peer.pid)
            leaving = prompt.transfer
            has_begun = leaving is not None and leaving.reserve_sent
            is_waiting = leaving is not None and leaving.reserve_sent and not leaving.is_reserved
            is_closed = is_waiting and transfer_id in peer.incoming._closed
            if has_begun and peer.loop.is_frozen:
                details = f"{name}: {transfer_id} since {peer.loop.stopped_at}"
                yield "a lease does not expire", details, self._cluster.shape.lease_s + 1
            elif is_closed and self._is_calm(worker.loop, peer.loop):
                yield "a prompt waits for a transfer that is closed", f"{name}: {transfer_id}", CHECK_S
        for pair in table.pairs():
            if pair.state == "opening" and self._is_calm(worker.loop, self._cluster.process(pair.peer.pid).loop):
                yield "a pair does not open", f"{name}: {pair.pair_id}", OPEN_S
            other = self._cluster.workers.get(pair.peer.worker_id)
            if other is None or pair.state != "ready" or other.presence is None or other.pids[0] == pair.peer.pid:
                continue
            if pair.pair_id in other.worker._traffic._incoming_table._by_id:
                yield "a pair leads to another process", f"{name}: {pair.pair_id}", 0

    def _of_proxy(self, proxy: SimulatedProxy) -> Iterator[tuple[str, str, float]]:
        now, known = self._timeline.now, proxy.table.workers()
        if len({info.worker_id for info in known}) < len(known):
            yield "a worker is known twice", proxy.name, 0
        for info in known:
            loop = self._cluster.process(info.pid).loop
            since = self._silent_since(loop, loop, proxy.loop)
            if since and self._cluster.process(info.pid).has_left and self._changed_at(loop, proxy.loop) < since - 1:
                yield "a worker that has left is known", f"{proxy.name}: {info.epoch}", SOON_S
            elif since:
                if loop.is_dead and self._is_told(proxy, self._cluster.process(info.pid)):
                    yield "a worker that has exited is known", f"{proxy.name}: {info.epoch}", SOON_S
                yield "a silent worker is known", f"{proxy.name}: {info.epoch} since {since}", WORKER_SILENCE_S + SOON_S
        launcher = self._cluster.launcher
        roles = launcher.launcher._workers._roles if launcher.is_ready else {}
        gets_prompts = proxy.table.prefill_workers + proxy.table.decode_workers
        for record in proxy.table._by_epoch.values():
            worker, details = self._cluster.process(record.worker.pid), f"{proxy.name}: {record.worker.epoch}"
            if record in gets_prompts and not self._cluster.switch.can_connect(proxy.name, worker.loop.name):
                unheard_s = SILENT_S[1] * self._cluster.switch.is_silent(proxy.name, worker.loop.name)
                yield "a worker that is out of reach gets prompts", details, unheard_s + SOON_S
            elif record not in gets_prompts and not record.draining and self._is_calm(proxy.loop, worker.loop):
                yield "a worker that is in reach gets no prompts", details, SOON_S
            role = roles.get(record.worker.worker_id, record.role)
            # An operator may have changed the role just after the launcher did, which trusts its own order for a while.
            is_ordered = launcher.is_ready and now < launcher.launcher._workers._ordered.get(
                record.worker.worker_id, 0.0
            )
            is_known = proxy.name == "proxy-0" and self._is_calm(launcher.loop, proxy.loop)
            if is_known and role != record.role and not is_ordered:
                yield "the launcher takes a worker for one of another role", details, SOON_S
        # The first death whose step names a sequence counts for as many as make it a suspect.
        most = len(self._cluster.died_at) + (SUSPECT_DEATHS - 1 if self._cluster.num_failed_engines else 0)
        for sequence in proxy.dispatcher._sequences:
            if sequence.num_deaths > most:
                details = f"{proxy.name}: {sequence.num_deaths}, not {most}"
                yield "a request is blamed for more deaths than there were", details, 0

    def _is_told(self, proxy: SimulatedProxy, worker: SimulatedWorker) -> bool:
        """Whether the launcher saw a worker exit, and has reached the proxy for a while."""
        launcher, exited_at = self._cluster.launcher.loop, worker.loop.ended_at or 0.0
        saw_it = max(launcher.running_since, self._cluster.lost_until.get(worker.host, 0.0)) < exited_at
        return saw_it and self._is_calm(launcher, proxy.loop)

    def _is_watched(self, proxy: SimulatedProxy) -> bool:
        """Whether the launcher reaches a frozen proxy that has answered it before, and was not frozen since itself."""
        launcher, frozen_at = self._cluster.launcher, proxy.loop.stopped_at
        if frozen_at is None or launcher.loop.stopped_at is not None or launcher.loop.running_since > frozen_at:
            return False
        has_answered = frozen_at - proxy.loop.running_since > 2 * INTERVAL_S
        return launcher.is_ready and has_answered and self._cluster.switch.can_connect(launcher.name, proxy.name)

    def _silent_since(self, silent: ProcessLoop, worker: ProcessLoop, proxy: ProcessLoop) -> float | None:
        """Returns since when one of a worker and a proxy gets no heartbeats of the other one."""
        if not self._cluster.switch.can_connect(worker.name, proxy.name):
            return self._changed_at(worker, proxy)
        if silent.stopped_at is None:
            return None
        return max(silent.stopped_at, self._changed_at(worker, proxy))  # what a silent network has kept came then

    def _is_calm(self, *loops: ProcessLoop) -> bool:
        """Whether two processes run and reach each other, and have done so for a while."""
        if any(loop.stopped_at is not None for loop in loops):
            return False
        joined = all(self._cluster.switch.can_connect(one.name, two.name) for one, two in (loops, loops[::-1]))
        changed_at = max(
            *(loop.running_since for loop in loops), self._changed_at(*loops), self._changed_at(*loops[::-1])
        )
        return joined and self._timeline.now - changed_at > SOON_S

    def _changed_at(self, dealer: ProcessLoop, router: ProcessLoop) -> float:
        return self._cluster.switch.changed_at(dealer.name, router.name)


Wait = tuple[str, str, float]
LATE_S = 1.5
"""Time for some ticks of a worker, or for a few reports."""
MAX_OVERESTIMATE = 1.5
_NO_PAIRS: Any = SimpleNamespace(num_bytes=0, num_compared_blocks=0, num_corrupt_blocks=0, take_traffic=list)
"""Traffic for a report that is compared only: taking the traffic of pairs would change the next report."""


def counts_of_worker(worker: SimulatedWorker) -> Iterator[Wait]:
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


def counts_of_proxy(proxy: SimulatedProxy) -> Iterator[Wait]:
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


def counts_of_launcher(launcher: SimulatedLauncher, now: float) -> Iterator[Wait]:
    """Checks that a launcher that hears from proxies counts no process that has been followed by another."""
    if not launcher.is_ready or launcher.loop.stopped_at is not None:
        return
    product = launcher.launcher
    heard_at = max((each.heard_at for each in product._orders._proxies.values()), default=0.0)
    pids = {child.name: child.last_pid for child in product._children.values()}
    for name, (_, report) in product._reports._heard.items():
        if pids.get(name) != report.worker.pid and now - heard_at < LATE_S:
            yield "the launcher counts a process that has ended", f"{name} ({report.worker.pid})", 2 * LATE_S
