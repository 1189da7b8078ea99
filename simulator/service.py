"""How well requests are served: nobody starves, what hangs is replaced, and nothing waits for what is there.

Each answer would be right in the end, so only these rules find it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.deploy.launch.hang_detector import MAX_WORKER_SILENCE_S
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.prefill_worker.step import AGING_S
from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.processes import SimulatedProxy, SimulatedWorker
from tandem.simulator.scenario import START_S

SOON_S = 2.5
"""Time for what takes a few messages, or the next heartbeat."""
OPEN_S = 6.0
"""Time to open a pair between processes that run and reach each other."""
LATE_S = 0.3
"""Time after a deadline in which a worker looks at its clock."""
TIERS_S = 10.0
"""Time in which a prompt that has to load from a tier again and again begins, although others take its blocks."""
STEP_S = 5.0
"""Time in which each running sequence takes part in a step, however many run."""
WAKE_S = 1.0
"""By which a prompt that waits may exceed its limit."""
READ_S = 2.0
"""In which a client reads what came before its time-out."""
DETECT_S = 35.0
"""By which a worker that hangs may be noticed later than its limit: reports age, and come late by a little each."""

Wait = tuple[str, str, float]
"""A rule, details, and the seconds for which something may be so."""


class ServiceRules:
    """What workers and proxies owe to those that wait."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._first: dict[str, tuple[PrefillPrompt, float]] = {}
        """By worker, the prompt whose turn it is, and since when."""

    def waits(self) -> Iterator[Wait]:
        now = self._cluster.timeline.now
        yield from self._in_order()
        for worker in self._cluster.workers.values():
            is_slow = any(loop.slowness > 1.0 for loop in worker.loops)
            if worker.loop.is_frozen and not self._cluster.orderly.is_leaving(worker):
                yield "a worker that hangs is not replaced", worker.name, MAX_WORKER_SILENCE_S + DETECT_S
            elif worker.presence is not None and not is_slow and self._has_run(worker, now):
                yield from self._of_worker(now, worker) if not worker.runs_vllm else ()
            else:
                self._first.pop(worker.name, None)
        for proxy in self._cluster.proxies.values():
            if hasattr(proxy, "control") and self._has_run(proxy, now):
                yield from self._of_proxy(proxy)

    def _in_order(self) -> Iterator[Wait]:
        """Operations in order keep few workers from serving at the same time, and no phase without a worker."""
        cluster, orderly = self._cluster, self._cluster.orderly
        if (
            orderly.disturbed_by
            or cluster.is_restored
            or not cluster.launcher.is_ready
            or cluster.shape.config.autoscale
        ):
            return
        away = [
            name for name, worker in cluster.workers.items()
            if worker.loop.is_dead or worker.presence is None or orderly.is_leaving(worker)
        ]  # fmt: skip
        away += self._unconnected(away) if not orderly.has_moved else []
        if len(away) > orderly.max_away and cluster.timeline.now > START_S:
            yield "too many workers are away in order", ", ".join(away), 0
        for proxy in cluster.proxies.values() if not orderly.max_away else ():
            has_run = hasattr(proxy, "control") and self._has_run(proxy, cluster.timeline.now)
            if has_run and (missing := proxy.table.why_not_ready()) is not None:
                yield "the cluster does not serve in order", f"{proxy.name}: {missing}", OPEN_S

    def _unconnected(self, away: list[str]) -> list[str]:
        """Returns the workers that lack pairs with others that have run for longer. away: those that do not serve."""
        there = [worker for name, worker in self._cluster.workers.items() if name not in away]
        found: list[str] = []
        for worker in there:
            tables = worker.worker._traffic._outgoing_table
            ready = {pair.peer.epoch for pair in tables.pairs() if pair.state == "ready"}
            if worker.role not in PREFILL_ROLES:
                continue
            for peer in there:
                if peer is not worker and peer.role in DECODE_ROLES and peer.epoch not in ready:
                    found.append(max(worker, peer, key=lambda each: each.pids[0]).name)
        return sorted(set(found))

    def _has_run(self, process: SimulatedWorker | SimulatedProxy, now: float) -> bool:
        return all(loop.stopped_at is None and now - loop.running_since > SOON_S for loop in process.loops)

    def _of_worker(self, now: float, worker: SimulatedWorker) -> Iterator[Wait]:
        scheduler = worker.worker._scheduler
        prompts, running = scheduler.prefill.prompts, scheduler.decode.running.sequences
        for prompt in prompts.by_transfer.values():
            if now > prompt.late_at + LATE_S and not prompt.ended:
                yield "a prompt is held beyond its deadline", f"{worker.name}: {prompt.request.transfer_id}", 0
        yield from self._of_queue(now, worker)
        for sequence in running if len(running) > 1 else ():
            if sequence.may_step and sequence.has_more_steps:
                details = f"{worker.name}: {sequence.attempt_id} of {len(sequence.output_token_ids)} tokens"
                yield "a running sequence takes part in no step", details, STEP_S

    def _of_queue(self, now: float, worker: SimulatedWorker) -> Iterator[Wait]:
        """The prompt whose turn it is begins before all others, once there are blocks.

        Others may begin while it loads from a tier, and while its decode worker has no room for an earlier prompt.
        """
        prefill = worker.worker._scheduler.prefill
        prompts = prefill.prompts
        first = min(prefill._candidates(), key=_turn, default=None)
        before, since = self._first.get(worker.name, (None, now))
        shares_pair = (
            first is not None
            and first.pair_id is not None
            and sum(each.pair_id == first.pair_id for each in prompts.by_transfer.values()) > 1
        )
        limit_s = TIERS_S if self._cluster.shape.tiers else SOON_S
        if first is None or first.has_begun or shares_pair:
            self._first.pop(worker.name, None)
            return
        if first is not before:
            self._first[worker.name] = first, now
        elif any(each.started_at > since + limit_s for each in prompts.computing.values()):
            yield "a prompt is passed by later ones", f"{worker.name}: {first.request.transfer_id}", 0

    def _of_proxy(self, proxy: SimulatedProxy) -> Iterator[Wait]:
        dispatcher = proxy.dispatcher
        is_tried = dispatcher._trials.is_running or dispatcher._trials.suspects
        if dispatcher._waiting and not is_tried and proxy.table.why_not_ready() is None:
            yield "a prompt waits although workers are ready", proxy.name, SOON_S
        for waiting in dispatcher._waiting if not is_tried else ():
            first, wait_s = waiting.sequences[0], self._cluster.shape.config.routing.worker_wait_s
            if any(each.is_wanted for each in waiting.sequences):
                details = f"{proxy.name}: after {len(first.times)} attempts, due at {first.deadline:.4f}"
                yield "a prompt waits for a worker for too long", details, wait_s + WAKE_S
        for number in proxy.refusals.late(proxy.services.request_timeout_s) if proxy.loop.slowness == 1.0 else ():
            yield "a request goes on beyond its time-out", f"{proxy.name}: request {number}", READ_S


def _turn(prompt: PrefillPrompt) -> tuple[float, int]:
    """Waiting for long outweighs a sooner priority."""
    return prompt.arrived_at + AGING_S * prompt.request.priority, prompt.number
