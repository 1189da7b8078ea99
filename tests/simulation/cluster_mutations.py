"""Faults that are put into the product one at a time, to see whether the simulated cluster shows them.

    python -m tests.simulation.cluster_mutations [--seeds 500] [--only NAME,...] [--json FILE]

Each replaces one text of one file, which must occur there exactly once, so the list follows the code. A process is
forked for each, in which functions get the changed code; it runs seeds until one breaks a rule. A fault that no
seed shows means that the draw or the checks are too weak, or that the code is not needed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import msgspec

from bench.support.report import Aim, Report
from tandem.simulator.run import run
from tandem.simulator.scenario import draw

ROOT = Path(__file__).parents[2]


SEEDS_AT_ONCE = 10


class Mutation(NamedTuple):
    """what: the fault, in words. file: relative to the root."""

    what: str
    file: str
    old: str
    new: str


TRAFFIC, OUTGOING, INCOMING = "worker/kv_traffic.py", "worker/pairs/outgoing.py", "worker/pairs/incoming.py"
OUTGOING_TABLE, INCOMING_TABLE = "worker/pairs/outgoing_table.py", "worker/pairs/incoming_table.py"
REGISTRATION, PRESENCE, WORKER = "worker/proxy_links.py", "worker/presence.py", "worker/worker.py"
CONTROL, DISPATCHER, ATTEMPT = "proxy/control.py", "proxy/dispatch/dispatcher.py", "proxy/dispatch/attempt.py"
DECODE, TRANSFER, PREFILL = (
    "decode_worker/decode_scheduler.py",
    "decode_worker/transfer.py",
    "prefill_worker/prefill_scheduler.py",
)
TABLE, PROMPTS = "proxy/cluster/worker_table.py", "prefill_worker/prompt_table.py"
SEQUENCES = "decode_worker/sequence_table.py"

SHELL = (
    Mutation(
        "the end of a shipment is not reported",
        TRAFFIC,
        "self._perform(self._prefill.on_shipped(action.transfer_id, error))",
        "pass",
    ),
    Mutation("leases are not renewed", TRAFFIC, "self._incoming_table.due_for_renewal(now)", "()"),
    Mutation(
        "blocks are reserved through a closed pair",
        TRAFFIC,
        "if self._incoming_table.is_open(message.pair_id):",
        "if True:",
    ),
    Mutation(
        "the end of a receive is not reported",
        TRAFFIC,
        "self._perform(self._decode.on_received(action.transfer_id, error))",
        "pass",
    ),
    Mutation(
        "messages to the sender of a pair are lost",
        TRAFFIC,
        "            self._send_back(action.pair_id, action.message)\n\n    def ship",
        "            pass\n\n    def ship",
    ),
    Mutation(
        "a shipment is announced before it is written",
        TRAFFIC,
        "        if not one_sided:\n",
        "        if True:\n",
    ),
    Mutation(
        "a broken control connection is not noticed",
        OUTGOING,
        'on_broken=partial(self.fail, action.pair_id, "its control connection broke")',
        "on_broken=None",
    ),
    Mutation(
        "a sender's end is not reported",
        OUTGOING,
        "sender.close(lambda: self._post(self._on_closed, pair_id))",
        "sender.close(lambda: None)",
    ),
    Mutation(
        "a sender counts as closed while it writes",
        OUTGOING,
        "sender.close(lambda: self._post(self._on_closed, pair_id))",
        "sender.close(lambda: None)\n            self._on_closed(pair_id)",
    ),
    Mutation(
        "a pair's socket is not closed",
        OUTGOING,
        "if (socket := self._sockets.pop(action.pair_id, None)) is not None:\n                        socket.close()",
        "self._sockets.pop(action.pair_id, None)",
    ),
    Mutation(
        "the exit of a prefill worker is not noticed",
        INCOMING,
        "partial(self._on_exit, pair_id, pid)",
        "partial(str)",
    ),
    Mutation(
        "a silent proxy is not lost",
        REGISTRATION,
        "                    self._lose(link)\n\n    def send_to_all",
        "                    pass\n\n    def send_to_all",
    ),
    Mutation(
        "requests of a lost proxy are not aborted",
        REGISTRATION,
        "        self._on_proxy_lost(proxy_id)\n\n    def _update_link",
        "\n    def _update_link",
    ),
    Mutation(
        "a worker does not register again",
        REGISTRATION,
        "                        link.known_by = None\n                    link.socket.send(self._register)",
        "                        link.known_by = None",
    ),
    Mutation("a worker has no clock ticks", PRESENCE, "                on_tick(now)\n", ""),
    Mutation("a drain has no end", PRESENCE, "if self._drain.is_over(now, self._requests.is_idle):", "if False:"),
    Mutation(
        "aborts are ignored",
        WORKER,
        "self._perform(self._scheduler.on_abort(message.proxy_id, message.attempt_id))",
        "pass",
    ),
    Mutation(
        "a refused prompt is not answered",
        "worker/to_proxy.py",
        "for attempt_id in message.attempt_ids[:MAX_SEQUENCES]:",
        "for attempt_id in ():",
    ),
    Mutation(
        "actions of an event do not start a step",
        WORKER,
        "                    self._tiers.find(action)\n        self._start_step()",
        "                    self._tiers.find(action)",
    ),
    Mutation("the end of a step is not counted", "worker/step_loop.py", "self._num_in_flight -= 1", "pass"),
    Mutation(
        "the dispatcher is not told of a lost worker",
        CONTROL,
        "self._state.dispatcher.on_worker_lost(gone.worker, gone.reason, gone.has_crashed, gone.has_left)",
        "pass",
    ),
    Mutation(
        "the connection to a lost worker stays open",
        CONTROL,
        "self._connections.close(gone.worker, is_gone=gone.is_gone)",
        "pass",
    ),
    Mutation("silent workers are not looked for", CONTROL, "self._apply(self._table.check(self._loop.time()))", "pass"),
    Mutation(
        "an unknown worker is not told so",
        CONTROL,
        "self._unchanged[known, self._table",
        "self._unchanged[True, self._table",
    ),
    Mutation(
        "a new worker is not shown to the others",
        CONTROL,
        "        for identity in self._identities.values():\n            self._socket.send(identity, view)",
        "        for identity in ():\n            self._socket.send(identity, view)",
    ),
    Mutation(
        "a broken connection to a worker is not noticed",
        "proxy/dispatch/worker_connections.py",
        "on_broken=lambda: on_broken(worker)",
        "on_broken=None",
    ),
)

PURE = (
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
    Mutation("a lost prefill worker costs no attempt", ATTEMPT, "self._first_released and self.has_decoded:", "True:"),
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
        INCOMING,
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
        "return bool(self.receives) or not (self.peer_stopped or all_here)",
        "return bool(self.receives)",
    ),
    Mutation(
        "decoding begins before all blocks have arrived",
        TRANSFER,
        "            and self.num_received_blocks == len(self.written_block_ids)\n",
        "",
    ),
    Mutation(
        "a transfer may begin after its request has ended",
        DECODE,
        "            self._transfers.close(prompt.request.transfer_id)\n            return actions",
        "            return actions",
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
        DECODE,
        "        if not transfer.peer_stopped:",
        "        if False:",
    ),
    Mutation("unclaimed reservations stay", DECODE, "now >= transfer.arrived_at + UNCLAIMED_TIMEOUT_S", "False"),
    Mutation(
        "a lost prefill worker does not end the prompts that wait for it",
        SEQUENCES,
        "if p.prefill_epoch == prefill_epoch]",
        "if False]",
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
        "return self.written_block_ids[: self.num_kept_blocks]",
        "return self.written_block_ids[1 : 1 + self.num_kept_blocks]",
    ),
    Mutation(
        "leases do not expire", PREFILL, "for transfer_id in self._leases.expired(now):", "for transfer_id in ():"
    ),
    Mutation(
        "blocks are released while they are shipped",
        PREFILL,
        "prompt.in_step or prompt.num_ships_in_flight or",
        "prompt.in_step or",
    ),
    Mutation(
        "blocks are released during their step",
        PREFILL,
        "if prompt.in_step or prompt.num_ships_in_flight",
        "if prompt.num_ships_in_flight",
    ),
    Mutation(
        "the decode worker is not told of a given up transfer",
        PREFILL,
        "if prompt.reserve_sent and prompt.pair_id is not None:",
        "if False:",
    ),
    Mutation("prompts of a lost pair go on", PROMPTS, "if prompt.pair_id == pair_id]", "if False]"),
    Mutation("two full workers wait for each other", PREFILL, "        if not late:\n", "        if True:\n"),
    Mutation(
        "blocks that decode has cached are shipped as well",
        PREFILL,
        "prompt.num_shipped_blocks = message.num_cached_blocks",
        "prompt.num_shipped_blocks = 0",
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
        "a worker that leaves is not removed",
        TABLE,
        'LostWorker(record.worker, "it has left", has_left=True)] if record is not None else []',
        "] if False else []",
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
        "return bool(self.receives) or not (self.peer_stopped or all_here)",
        "return not (self.peer_stopped or all_here)",
    ),
    Mutation("announced blocks count as arrived", TRANSFER, "            and not self.receives\n", ""),
    Mutation(
        "announced blocks are kept",
        TRANSFER,
        "min(self.num_arrived_blocks, num_full",
        "min(self.num_received_blocks, num_full",
    ),
    Mutation("blocks behind corrupt ones are kept", TRANSFER, "        elif not self.has_gap:\n", "        if True:\n"),
    Mutation(
        "kept blocks still count as written",
        TRANSFER,
        "return self.written_block_ids[self.num_kept_blocks :]",
        "return self.written_block_ids",
    ),
    Mutation(
        "corrupt blocks are used",
        DECODE,
        "        transfer.on_received(is_whole=False)\n        return self._give_up(transfer, error)",
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

LAUNCHER, ROLES, SUPERVISOR = (
    "deploy/launch/launcher.py",
    "deploy/launch/worker_roles.py",
    "deploy/processes/supervisor.py",
)
LAUNCH = (
    Mutation(
        "proxies are not told that a process has exited",
        LAUNCHER,
        "control.send(WorkerExited(name, pid, has_crashed(returncode)))",
        "pass",
    ),
    Mutation(
        "a worker that retired is not forgotten",
        LAUNCHER,
        "if not self._is_leaving(name):\n                self",
        "if False:\n                self",
    ),
    Mutation(
        "a worker that was stopped is not forgotten",
        LAUNCHER,
        "child.last_pid))\n        self._forget(name)",
        "child.last_pid))",
    ),
    Mutation(
        "a worker that does not drain is not killed",
        LAUNCHER,
        "            child.kill()\n            await",
        "            await",
    ),
    Mutation("silent processes are not replaced", LAUNCHER, "self._children[name].replace()", "pass"),
    Mutation(
        "a process that exited is not started again",
        LAUNCHER,
        'exited with %d; restarting it", name, pid, returncode)\n        return True',
        'exited with %d", name, pid, returncode)\n        return False',
    ),
    Mutation(
        "a worker that leaves is restarted",
        SUPERVISOR,
        'does not restart it."""\n        self._stopping.set()\n        self.send_signal(signal.SIGTERM)',
        'does not restart it."""\n        self.send_signal(signal.SIGTERM)',
    ),
    Mutation(
        "a restart that was asked for does not drain",
        SUPERVISOR,
        'when it has ended."""\n        self.send_signal(signal.SIGTERM)',
        'when it has ended."""\n        self.send_signal(signal.SIGKILL)',
    ),
    Mutation(
        "a process is never restarted twice",
        SUPERVISOR,
        "await asyncio.wait_for(self._stopping.wait(), delay_s)",
        "await self._stopping.wait()",
    ),
    Mutation("delays of restarts have no limit", SUPERVISOR, "min(2 * delay_s, MAX_RESTART_DELAY_S)", "64 * delay_s"),
    Mutation("workers that change their role leave as well", ROLES, "                surplus.remove(name)\n", ""),
    Mutation("workers that change their role are started as well", ROLES, "                added.remove(role)\n", ""),
    Mutation(
        "a role that was ordered does not count before it is reported",
        ROLES,
        "self._roles[name], self._ordered[name] = role, now + ORDER_S",
        "pass",
    ),
    Mutation(
        "a role that was refused counts",
        ROLES,
        "        self._ordered.pop(name, None)\n\n    def on_report",
        "        pass\n\n    def on_report",
    ),
    Mutation("reports do not change roles", ROLES, "        self._roles.update(changed)\n", ""),
)
"""Starting, watching, scaling and moving processes. Seeds show five within 100, as an operator who repeats a command
heals the others; each of these fails a test in `test_simulated_launcher.py`, or in the unit tests of the launcher."""

MUTATIONS = SHELL + PURE + TRANSFERS + LAUNCH


def mutated(mutation: Mutation) -> str:
    """Returns the changed source. Raises AssertionError unless the text occurs once."""
    source = (ROOT / mutation.file).read_text()
    num = source.count(mutation.old)
    assert num == 1, f"{mutation.file} has {num} times: {mutation.old}"
    return source.replace(mutation.old, mutation.new)


def apply(mutation: Mutation) -> None:
    """Gives the functions of the imported module the changed code."""
    module = importlib.import_module("tandem." + mutation.file.removesuffix(".py").replace("/", "."))
    changed = ModuleType(module.__name__)
    exec(compile(mutated(mutation), mutation.file, "exec", dont_inherit=True), vars(changed))
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        _replace_code(value, vars(changed)[name])
        for member, function in vars(value).items() if isinstance(value, type) else ():
            _replace_code(function, vars(vars(changed)[name]).get(member))


def _replace_code(old: Any, new: Any) -> None:
    for attribute in ("fget", "__func__"):  # of properties and class methods
        old, new = getattr(old, attribute, old), getattr(new, attribute, new)
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        old.__code__ = new.__code__


def _first_violation(mutation: Mutation, seeds: Sequence[int], answers: Any) -> None:
    """Runs in a process of its own. Puts the first seed that shows the fault, and the rule that it breaks."""
    apply(mutation)
    for seed in seeds:
        if violations := run(draw(seed)).violations:
            answers.put((seed, str(violations[0])))
            return
    answers.put((None, ""))


def find(mutation: Mutation, seeds: Sequence[int], timeout_s: float = 1800.0) -> tuple[int | None, str]:
    """Returns the first seed that shows the fault and the rule that it breaks, or (None, "")."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    process = context.Process(target=_first_violation, args=(mutation, seeds, answers))
    process.start()
    try:
        found: tuple[int | None, str] = answers.get(timeout=timeout_s)
    finally:
        process.kill()
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no further seeds are tried after this time")
    parser.add_argument("--only", default="", help="mutations that contain one of these texts, separated by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ends_at = time.monotonic() + options.limit_s
    chosen = [each for each in MUTATIONS if any(text in each.what for text in options.only.split(","))]
    found: dict[Mutation, tuple[int | None, int, str]] = dict.fromkeys(chosen, (None, 0, ""))
    while missing := [each for each in chosen if found[each][0] is None and found[each][1] < options.seeds]:
        for mutation in missing:  # some more seeds for each, so that a limit leaves out none
            if time.monotonic() > ends_at:
                break
            num_tried = found[mutation][1]
            last = min(options.seeds, num_tried + SEEDS_AT_ONCE)
            seed, rule = find(mutation, range(num_tried + 1, last + 1))
            found[mutation] = seed, seed or last, rule
            if seed is not None or last == options.seeds:
                print(f"{seed or '-':>4}  {mutation.what} ({mutation.file}): {rule[:160]}", flush=True)
        if time.monotonic() > ends_at:
            break
    report = [
        {
            "fault": mutation.what,
            "file": mutation.file,
            "part": "shell" if mutation in SHELL + LAUNCH else "pure",
            "seed": seed,
            "num_seeds": num_seeds,
            "rule": rule,
        }
        for mutation, (seed, num_seeds, rule) in found.items()
    ]
    num_found = sum(each["seed"] is not None for each in report)
    print(f"{num_found} of {len(report)} found within {options.seeds} seeds")
    if options.json:
        made_report(report, options.seeds).write(options.json)


def made_report(found: list[dict[str, Any]], num_seeds: int) -> Report:
    """found: each mutation with the first seed that shows it, or None, the number of seeds run, and the rule."""
    num_found = sum(each["seed"] is not None for each in found)
    aims = [Aim.of("mutations that a seed shows", num_found, len(found), "higher")]
    command = f"python -m tests.simulation.cluster_mutations --seeds {num_seeds}"
    return msgspec.structs.replace(Report.of("simulator_mutations", {"mutations": found}, aims), command=command)


if __name__ == "__main__":
    main()
