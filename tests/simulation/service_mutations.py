"""Faults that retries heal: operations in order that cut what runs, and requests that are served badly."""

from __future__ import annotations

from tests.simulation.mutation import (
    DECODE,
    DISPATCHER,
    LAUNCHER,
    LOAD,
    PREFILL,
    PRESENCE,
    PROMPTS,
    SUPERVISOR,
    Mutation,
)

COMMANDS = "deploy/operations/changes.py"
ADMISSION, DRAIN, SCHEDULER = "proxy/admission/admission.py", "runtime/drain.py", "worker/worker_scheduler.py"

IN_ORDER = (
    Mutation(
        "a worker that is scaled away is killed", LAUNCHER, "        child.terminate()\n", "        child.kill()\n"
    ),
    Mutation(
        "a worker that drains is killed before its limit",
        LAUNCHER,
        "timeout_s = self._config.drain_timeout_s + DRAIN_GRACE_S",
        "timeout_s = STOP_GRACE_S",
    ),
    Mutation(
        "a drain ends before its limit",
        DRAIN,
        "now - self._began_at >= self._limit_s",
        "now - self._began_at >= SETTLE_S",
    ),
    Mutation(
        "a drained worker leaves before its last tokens have come",
        DRAIN,
        "has_settled = self._idle_since is not None and now - self._idle_since >= SETTLE_S",
        "has_settled = self._idle_since is not None",
    ),
    Mutation(
        "a worker that is told to leave does not drain",
        "worker/serving_worker.py",
        "return self._presence is not None and self._presence.drain()",
        "self.stop()\n        return True",
    ),
    Mutation(
        "workers that drain get prompts",
        "proxy/cluster/worker_record.py",
        "return self.answers and not self.draining",
        "return self.answers",
    ),
    Mutation(
        "a drain does not wait for prompts",
        SCHEDULER,
        "return self.prefill.prompts.is_idle and self.decode.is_idle",
        "return self.decode.is_idle",
    ),
    Mutation(
        "a drain does not wait for sequences without blocks",
        DECODE,
        "return not self.sequences.by_attempt\n",
        "return not len(self.running)\n",
    ),
    Mutation(
        "a drain does not wait for blocks that are shipped",
        PROMPTS,
        "return not self.by_transfer\n",
        "return not self.waiting and not self.computing\n",
    ),
    Mutation(
        "pairs with workers of another role are dropped",
        "handover/outgoing_pairs.py",
        "if epoch not in self._view]\n        actions",
        "if epoch not in self._view or self._view[epoch].role not in DECODE_ROLES]\n        actions",
    ),
    Mutation("a draining process is signalled again", SUPERVISOR, "if self._drained != process:", "if True:"),
    Mutation(
        "a worker that has taken a role opens no pairs", PRESENCE, "        self._traffic.on_role(self.info)\n", ""
    ),
    Mutation(
        "a worker's file keeps the role before the change",
        PRESENCE,
        "self._role_file.write(role)",
        "self._role_file.write(self.info.role)",
    ),
    Mutation(
        "a drained worker has left while its process runs",
        COMMANDS,
        "return not has_process and not any(",
        "return not any(",
    ),
    Mutation(
        "a restart goes on before all proxies can use the worker",
        COMMANDS,
        "return all(any(_is_new(each, name, old_epoch) for each in report.workers) for report in reports)",
        "return any(_is_new(each, name, old_epoch) for report in reports for each in report.workers)",
    ),
    Mutation(
        "a worker that no proxy knew is back as soon as it is started",
        COMMANDS,
        "        if not is_worker_name(name):  # no report mentions it",
        "        if old_epoch is None:",
    ),
    Mutation(
        "the answer to an earlier order decides a later one",
        "deploy/launch/worker_roles.py",
        "if order is None or order.number != answer.number:",
        "if order is None:",
    ),
)

SERVICE = (
    Mutation(
        "prompts do not wait for a worker",
        DISPATCHER,
        "if asyncio.get_running_loop().time() < waiting.until:",
        "if False:",
    ),
    Mutation(
        "sequences of all clients count against one",
        ADMISSION,
        "running = self._running.get(client, 0)",
        "running = self._running.total()",
    ),
    Mutation(
        "requests of the same priority are displaced",
        ADMISSION,
        "if ticket.priority > priority and ticket",
        "if ticket.priority >= priority and ticket",
    ),
    Mutation(
        "no age outweighs a priority",
        "prefill_worker/step.py",
        "p.arrived_at + AGING_S * p.request.priority",
        "p.request.priority, p.arrived_at",
    ),
    Mutation(
        "workers that hang stay",
        "deploy/launch/hang_detector.py",
        "found |= dict.fromkeys(self._workers.silent(",
        "found or dict.fromkeys(self._workers.silent(",
    ),
    Mutation(
        "silent workers are replaced as soon as proxies",
        "deploy/launch/hang_detector.py",
        "self._workers.silent(self._reported_at, MAX_WORKER_SILENCE_S), MAX_WORKER",
        "self._workers.silent(self._reported_at, MAX_SILENCE_S), MAX_WORKER",
    ),
    Mutation(
        "sequences of the last step are the first of the next one",
        "decode_worker/running.py",
        "key=lambda sequence: id(sequence) in stepped)",
        "key=lambda sequence: id(sequence) not in stepped)",
    ),
    Mutation(
        "fewer than may always wait are refused while the queue is standing",
        "proxy/admission/admission.py",
        "return max(MIN_WAITING, len(self._first_tokens))",
        "return min(MIN_WAITING, len(self._first_tokens))",
    ),
    Mutation(
        "new sequences take the blocks that the running ones grow into",
        "decode_worker/decode_scheduler.py",
        "is_full = needed + len(self._running) > blocks.num_free_without(cached)",
        "is_full = needed > blocks.num_free_without(cached)",
    ),
    Mutation(
        "the first full block of each chunk is not cached",
        PREFILL,
        "for i in range(prompt.num_published_blocks, num_full):",
        "for i in range(prompt.num_published_blocks + 1, num_full):",
    ),
    Mutation(
        "the longest prompts are computed first",
        "prefill_worker/step.py",
        "(p.request.priority, p.num_remaining_tokens, p.number)",
        "(p.request.priority, -p.num_remaining_tokens, p.number)",
    ),
    Mutation(
        "predictions leave out what waits ahead",
        LOAD,
        "return (self.prompts.ahead_of(priority) + num_tokens) / (share * self.tokens_per_s)",
        "return num_tokens / (share * self.tokens_per_s)",
    ),
    Mutation(
        "sequences do not count where a decode worker is chosen",
        LOAD,
        "return self.num_sequences - _POOL_WEIGHT * (",
        "return -_POOL_WEIGHT * (",
    ),
)

PLANNER = "deploy/autoscale/planner.py"

PLANS = (
    Mutation(
        "the planner takes more workers of a role than the other gets",
        PLANNER,
        "decode -= min(prefill - num_prefill, self._decode.spare(now, num_decode))",
        "decode -= self._decode.spare(now, num_decode)",
    ),
    Mutation(
        "the planner goes down to the need of the moment",
        PLANNER,
        "ever = max(count for _, count in self._needs)",
        "ever = need",
    ),
    Mutation("the planner forgets when it moved workers at its limit", PLANNER, "self._rebalanced_at = now", "pass"),
    Mutation(
        "the planner goes up at once",
        PLANNER,
        "if self._covers(now, UP_AFTER_S) and least_recently > current:",
        "if need > current:",
    ),
    Mutation(
        "the planner never goes down",
        PLANNER,
        "self._needs[1][0] <= now - DOWN_AFTER_S",
        "self._needs[1][0] <= now - UP_AFTER_S",
    ),
)

RANKS = (
    Mutation(
        "blocks that a follower lacks count as loaded",
        "kv_transfer/ranks/worker_tiers.py",
        "num_blocks = min(answer.num_blocks for answer in answers)",
        "num_blocks = answers[0].num_blocks",
    ),
)
