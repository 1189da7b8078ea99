"""Three workers in memory: real schedulers and pair tables, simulated network and processes.

Two compute prompts and one decodes, or all are elastic: each computes, decodes, and ships to both others.

Data paths are those of `tests.support.fake_connector`: one-sided (like `ipc`) or two-sided (like `gloo`), block by
block, delayed, with loss and corruption. A frozen process does nothing until it wakes up; a killed one is followed by
another at the same address. Control messages wait in a queue per connection. The caller picks the next event.

Invariants. At each write: the block belongs to the transfer that it is written for. At each decode step: every block
holds what was computed for the sequence's own tokens. After each event (`check`): every block has one owner.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

from tandem.engine.batch import Batch, ItemOutput
from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    AttemptPreempted,
    DecodeReserved,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.generation import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, Role
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.worker_actions import Ship
from tests.simulation.simulated_workers import BLOCK_SIZE, LEASE_S, Memory, Worker
from tests.support.fake_connector import FakeNetwork, Faults

DEADLINE_S = 40.0
FIXED: dict[str, Role] = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
ELASTIC: dict[str, Role] = {"worker-0": "any", "worker-1": "any", "worker-2": "any"}


def next_token(token_ids: list[int]) -> int:
    return crc32(bytes(token_ids), 5) % 20


def block_content(token_ids: list[int], number: int, num_computed: int) -> int:
    """KV of block `number` depends on every token up to its last computed one."""
    return crc32(bytes(token_ids[: min(num_computed, (number + 1) * BLOCK_SIZE)]), number)


@dataclass(eq=False)
class Wanted:
    """One sequence as its client sees it."""

    prompt: list[int]
    stop: StopConditions
    attempt_id: str = ""
    prefill: Worker | None = None
    decode: Worker | None = None
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None


Event = tuple[float, Callable[[], None]]
"""Weight and callback."""


class World:
    """Includes the proxy. visible: epochs of the workers that the proxy knows. tiers: names of the tiers; what
    `host` holds is the worker's own and outlives its process, the others' content is shared."""

    def __init__(
        self,
        seed: int,
        one_sided: bool,
        loss: float = 0.0,
        corruption: float = 0.0,
        elastic: bool = False,
        tiers: tuple[str, ...] = (),
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.one_sided = one_sided
        self.connector = "ipc" if one_sided else "gloo"
        faults = Faults(self.rng.choice([0.0, 0.0, 0.0, 0.5]), loss, corruption)
        self.network = FakeNetwork(lambda: self.now, seed, one_sided, faults, self._check_write)
        self.ships: dict[str, deque[Ship]] = defaultdict(deque)  # shipments given to a path, by path id
        self.data_pace, self.message_pace = self.rng.choice([0.3, 3.0]), self.rng.choice([0.8, 4.0])
        self.disorder = self.rng.choice([0.02, 0.4])
        self.num_started = 0
        self.tiers = tiers
        self._tier_contents: dict[tuple[str, str], dict[bytes, int]] = defaultdict(dict)
        self.num_loaded_blocks = 0
        self.roles = ELASTIC if elastic else FIXED
        self.workers = [self._new_worker(name) for name in self.roles]
        self.visible = {worker.epoch for worker in self.workers}
        self.wanted: list[Wanted] = []
        self.lost_prompts: list[list[int]] = []
        self.attempts: dict[str, Wanted] = {}
        self.terminals: Counter[tuple[str, str]] = Counter()
        self.num_found_corrupt = self.num_late_writes = self.num_duplicated = 0
        self.num_expired_leases = self.num_kept_blocks = self.num_reordered = 0
        self.num_ahead = 0  # steps that were scheduled while the step before ran
        self.disordered: set[str] = set()  # pairs whose control messages are delayed, reordered and duplicated

    # ---- processes

    def _new_worker(self, name: str) -> Worker:
        self.num_started += 1
        return Worker(self, name, self.roles[name], self.num_started)

    def tier_content(self, worker: Worker, tier: str) -> dict[bytes, int]:
        """Returns the content of each block of a tier, by hash."""
        return self._tier_contents[tier, worker.name if tier == "host" else ""]

    @property
    def prefills(self) -> list[Worker]:
        """The first two workers, which compute prompts."""
        return self.workers[:2]

    @property
    def decode(self) -> Worker:
        """The last worker, to which the first two ship."""
        return self.workers[2]

    def routes(self) -> list[tuple[Worker, Worker]]:
        """Returns the workers that a prompt may be computed and decoded on."""
        prefills = [worker for worker in self.workers if worker.info.role in PREFILL_ROLES]
        decodes = [worker for worker in self.workers if worker.info.role in DECODE_ROLES]
        return [(prefill, decode) for prefill in prefills for decode in decodes]

    def named(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def is_running(self, pid: int) -> bool:
        return any(worker.pid == pid for worker in self.workers)

    def freeze(self, worker: Worker) -> None:
        worker.frozen = True
        for path_id, side in worker.paths.items():
            self.network.freeze(path_id, side)

    def thaw(self, worker: Worker) -> None:
        """Wakes the process, which registers again if it was declared lost."""
        worker.frozen = False
        for path_id, side in worker.paths.items():
            self.network.thaw(path_id, side)
        self.visible.add(worker.epoch)

    def notice_silence(self, worker: Worker) -> None:
        """The proxy declares a frozen worker lost."""
        self.visible.discard(worker.epoch)
        self._lose(worker)

    def restart(self, worker: Worker) -> None:
        """Kills the process and starts another at its address. The last messages through its own sockets may be
        lost."""
        worker.alive = False
        for path_id, side in worker.paths.items():
            self.network.kill(path_id, side)
        for other in self.workers:
            if other is not worker and other.info.role in DECODE_ROLES:
                other.exits.append(worker.pid)
        self.visible.discard(worker.epoch)
        for pair_id, peer in worker.sockets.items():
            sent = self.named(peer).inbox[pair_id]
            for _ in range(self.rng.randint(0, len(sent))):
                sent.pop()
        self.workers[self.workers.index(worker)] = new = self._new_worker(worker.name)
        self.visible.add(new.epoch)
        self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        for sequence in self.wanted:
            if sequence.ended is None and worker in (sequence.prefill, sequence.decode):
                self._end(sequence, "worker_lost")
                self.lost_prompts.append(sequence.prompt)

    # ---- the proxy

    def start(self) -> None:
        able = [
            (prefill, decode)
            for prefill, decode in self.routes()
            if {prefill.epoch, decode.epoch} <= self.visible and (prefill is decode or prefill.path_to(decode))
        ]
        if not able:
            return
        length = self.rng.choice([1, 4, 9, 15])
        if self.lost_prompts:  # dispatched again, under another transfer_id
            self.ask(self.lost_prompts.pop(), 6, *self.rng.choice(able))
            return
        prompt = [self.rng.randrange(3)] * min(8, length) + [self.rng.randrange(23) for _ in range(length - 8)]
        self.ask(prompt, self.rng.choice([2, 6]), *self.rng.choice(able))

    def ask(self, prompt: list[int], num_tokens: int, prefill: Worker, decode: Worker | None = None) -> Wanted:
        sequence = Wanted(prompt, StopConditions(num_tokens, frozenset()))
        self.wanted.append(sequence)
        self._dispatch(sequence, prefill, decode or self.decode)
        return sequence

    def _dispatch(self, sequence: Wanted, prefill: Worker, decode: Worker) -> None:
        attempt_id = f"r{len(self.attempts)}"
        self.attempts[attempt_id] = sequence
        sequence.attempt_id, sequence.prefill, sequence.decode = attempt_id, prefill, decode
        num_generated = len(sequence.tokens)
        alone = sequence.stop.max_tokens - num_generated == 1
        packed = pack_token_ids(sequence.prompt + sequence.tokens)
        prefill.inbox["proxy"].append(
            StartPrefill(
                "proxy", [attempt_id], f"t-{attempt_id}", packed, SamplingParams(), [1], sequence.stop,
                DEADLINE_S,
                decode_worker_id=None if alone else decode.name, decode_epoch=None if alone else decode.epoch,
                num_generated=num_generated,
            )
        )  # fmt: skip
        if not alone and prefill is not decode:
            decode.inbox["proxy"].append(
                PrepareDecode(
                    "proxy", [attempt_id], f"t-{attempt_id}", packed, SamplingParams(), [1], sequence.stop,
                    DEADLINE_S,
                    prefill_worker_id=prefill.name, prefill_epoch=prefill.epoch, num_generated=num_generated,
                )
            )  # fmt: skip

    def abort(self, sequence: Wanted) -> None:
        if sequence.ended is None:
            self._end(sequence, "aborted")

    def _end(self, sequence: Wanted, reason: str) -> None:
        assert sequence.ended is None
        sequence.ended = reason
        for worker in dict.fromkeys((sequence.prefill, sequence.decode)):
            if worker is not None and worker.alive:
                worker.inbox["proxy"].append(AbortAttempt("proxy", sequence.attempt_id))

    def to_proxy(self, process: Worker, message: Any) -> None:
        match message:
            case FirstToken():
                self._on_token(process, message.attempt_id, message.token, message.finish_reason)
            case TokenBatch():
                for token in message.tokens:
                    self._on_token(process, token.attempt_id, token.token, token.finish_reason)
            case AttemptPreempted():
                self._count_terminal(process, message.attempt_id)
                sequence = self.attempts[message.attempt_id]
                if sequence.ended is None and sequence.attempt_id == message.attempt_id:
                    able = [route for route in self.routes() if {worker.epoch for worker in route} <= self.visible]
                    if able:
                        self._dispatch(sequence, *self.rng.choice(able))
                    else:
                        self._end(sequence, "worker_lost")
            case AttemptFailed():
                self._count_terminal(process, message.attempt_id)
                sequence = self.attempts[message.attempt_id]
                if sequence.ended is None and sequence.attempt_id == message.attempt_id:
                    self._end(sequence, message.error.code)
            case DecodeReserved():
                pass

    def _count_terminal(self, process: Worker, attempt_id: str) -> None:
        self.terminals[process.epoch, attempt_id] += 1
        assert self.terminals[process.epoch, attempt_id] == 1, f"{process.epoch} ended {attempt_id} twice"

    def _on_token(self, process: Worker, attempt_id: str, token: SampledToken, reason: str | None) -> None:
        if reason is not None:
            self._count_terminal(process, attempt_id)
        sequence = self.attempts[attempt_id]
        if sequence.ended is not None or sequence.attempt_id != attempt_id:
            return  # the client has disconnected, or the proxy has declared the worker lost
        assert token.token_id == next_token(sequence.prompt + sequence.tokens), "a token that is not the model's"
        sequence.tokens.append(token.token_id)
        if reason is not None:
            assert len(sequence.tokens) == sequence.stop.max_tokens
            sequence.ended = reason

    # ---- events

    def events(self) -> list[Event]:
        """Returns all events that happen without further faults, except steps."""
        return [event for process in self.workers for event in self.events_of(process)] + self._path_events()

    def _path_events(self) -> list[Event]:
        """Returns events of data paths: block moves and callbacks."""
        return [(self.data_pace, act) for act in self.network.choices()]

    def events_of(self, process: Worker) -> list[Event]:
        """Returns messages, callbacks, membership changes and exits."""
        if not process.runs:
            return []
        events: list[Event] = [
            (self.message_pace, partial(self.deliver, process, connection))
            for connection, queue in process.inbox.items()
            if queue
        ]
        if process.tier_jobs:
            events.append((self.data_pace, process.answer_tier))
        if process.later:
            events.append((3.0, lambda: process.later.popleft()()))
        if process.view != self.visible:
            events.append((1.0, partial(self.show_view, process)))
        if process.exits:
            events.append((1.0, lambda: process.on_exit(process.exits.popleft())))
        return events

    def random_event(self, rng: random.Random) -> Callable[[], None]:
        """Includes faults, new clients and disconnects."""
        which = rng.randrange(4)
        if which == 3:
            events = self._outside_events()
        else:
            process = self.workers[which]
            events = self.events_of(process) + self._path_events() + self._faults_of(process)
            if process.runs:
                events.append((3.0, partial(self.run_step, process)))
        return rng.choices([act for _, act in events], [weight for weight, _ in events])[0]

    def _outside_events(self) -> list[Event]:
        events: list[Event] = [(0.4, lambda: self.pass_time(self.rng.choice([0.1, 1.0, 3.0, 15.0, 45.0])))]
        if len(self.wanted) < 12:
            events.append((2.0, self.start))
        open_ones = [sequence for sequence in self.wanted if sequence.ended is None]
        if open_ones:
            events.append((0.5, lambda: self.abort(self.rng.choice(open_ones))))
        return events

    def _faults_of(self, process: Worker) -> list[Event]:
        events: list[Event] = [(0.05, partial(self.restart, process))]
        if process.frozen:
            events.append((0.4, partial(self.thaw, process)))
            if process.epoch in self.visible:
                events.append((0.4, partial(self.notice_silence, process)))
            return events
        events += [(0.1, partial(self.freeze, process)), (0.1, partial(self.give_up_pair, process))]
        for connection, queue in process.inbox.items():
            if queue and connection != "proxy":
                events.append((self.disorder, partial(self.duplicate, process, connection)))
                if len(queue) > 1:
                    events.append((self.disorder, partial(queue.rotate, 1)))
        return events

    def deliver(self, process: Worker, connection: str) -> None:
        queue = process.inbox[connection]
        if connection in self.disordered:
            number = self.rng.randrange(len(queue))
            self.num_reordered += number > 0
            queue.rotate(-number)
            if self.rng.random() < 0.5:
                self.num_duplicated += 1
                queue.append(queue[0])  # repeat it after the others
        process.on_message(connection, queue.popleft())

    def duplicate(self, process: Worker, connection: str) -> None:
        self.num_duplicated += 1
        process.inbox[connection].appendleft(process.inbox[connection][0])

    def give_up_pair(self, worker: Worker) -> None:
        """A worker closes a pair on its own, e.g. for a full connection or an invalid message."""
        outgoing, incoming = list(worker.outgoing.pairs()), list(worker.incoming.pairs())
        number = self.rng.randrange(max(1, len(outgoing) + len(incoming)))
        if number < len(outgoing):
            worker.perform_pairs(worker.outgoing.fail(self.now, outgoing[number].pair_id, "clogged"))
        elif incoming:
            pair = incoming[number - len(outgoing)]
            worker.perform_pairs(worker.incoming.fail(pair.pair_id, "broke the rules"))

    def show_view(self, worker: Worker) -> None:
        worker.view = set(self.visible)
        worker.on_view([each.info for each in self.workers if each.epoch in self.visible])

    def pass_time(self, seconds: float) -> None:
        """No message arrives meanwhile, but all running processes tick."""
        num_looks = math.ceil(seconds / LEASE_S * 5)
        for _ in range(num_looks):
            self.now += seconds / num_looks
            self._tick()

    def _tick(self) -> None:
        for worker in self.workers:
            if worker.runs:
                worker.on_tick()

    def _check_write(self, pair_id: str, block_id: int) -> None:
        """Checks that the block belongs to the transfer that is first in the path's queue."""
        target = next((worker for worker in self.workers if worker.paths.get(pair_id) == "receiver"), None)
        if target is None:
            return  # the memory of a process that has exited
        transfer_id = self.ships[pair_id][0].transfer_id
        transfer = target.scheduler.decode._transfers.get(transfer_id)
        assert transfer is not None and block_id in transfer.own_block_ids, "a write to a block of another owner"
        self.num_late_writes += transfer_id not in target.scheduler.decode._by_transfer

    # ---- steps

    def run_step(self, worker: Worker) -> None:
        """Begins a step, or ends the running one; then schedules the one behind it."""
        scheduler = worker.scheduler
        if worker.steps:
            worker.perform(scheduler.on_step(self.now, self._outputs(worker, worker.steps.popleft())))
        else:
            self._begin(worker, *scheduler.schedule(self.now))
        if worker.steps:
            self.num_ahead += self._begin(worker, *scheduler.schedule_ahead(self.now))

    def _begin(self, worker: Worker, batch: Batch, actions: list[Any]) -> bool:
        if batch.items:
            worker.steps.append(batch)
        worker.perform(actions)
        return bool(batch.items)

    def _outputs(self, worker: Worker, batch: Batch) -> list[ItemOutput]:
        """Computes a step that ends."""
        scheduler = worker.scheduler
        outputs = []
        steps = scheduler.decode._running.steps
        running = steps[0].sequences if steps else []
        for item, sequence in zip(batch.items, running, strict=False):
            token_ids = self.attempts[sequence.attempt_id].prompt + sequence.output_token_ids
            if len(token_ids) == item.start:  # it was aborted before its token came
                token_ids = [*token_ids, next_token(token_ids)]
            self._check_memory(worker.memory, token_ids, sequence.block_table, item.start)
            self._compute(worker.memory, token_ids, sequence.block_table, item.start, item.start + 1)
            outputs.append(ItemOutput([SampledToken(next_token(token_ids))]))
        computing = scheduler.prefill._step if len(batch.items) > len(running) else []  # else of the step behind
        for item, (prompt, _) in zip(batch.items[len(running) :], computing, strict=True):
            end = item.start + len(item.token_ids)
            self._check_memory(worker.memory, prompt.token_ids, prompt.block_table, item.start)
            self._compute(worker.memory, prompt.token_ids, prompt.block_table, item.start, end)
            outputs.append(ItemOutput([SampledToken(next_token(prompt.token_ids)) for _ in item.samples]))
        return outputs

    @staticmethod
    def _check_memory(memory: Memory, token_ids: list[int], block_table: list[int], num_computed: int) -> None:
        for number in range(-(-num_computed // BLOCK_SIZE)):
            expected = block_content(token_ids, number, num_computed)
            assert memory[block_table[number]] == expected, f"block {number} holds KV of another sequence"

    @staticmethod
    def _compute(memory: Memory, token_ids: list[int], block_table: list[int], start: int, end: int) -> None:
        for number in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            memory[block_table[number]] = block_content(token_ids, number, end)

    # ---- invariants

    def check(self) -> None:
        """Every block has one owner: a transfer or a sequence, not both."""
        for worker in self.workers:
            scheduler = worker.scheduler
            scheduler.blocks.check()
            owners: Counter[int] = Counter()
            for transfer in scheduler.decode._transfers.values():
                owners.update(transfer.own_block_ids)
            tables = [sequence.block_table for sequence in scheduler.decode._running.sequences]
            tables += [prompt.block_table for prompt in scheduler.prefill._by_transfer.values()]
            assert all(count == 1 for count in owners.values()), "a block has two owners"
            in_tables = {block_id for table in tables for block_id in table}
            assert not in_tables & owners.keys(), "a block in use may still be written by a peer"

    def settle(self) -> None:
        """Without further faults: everything ends, every block is freed, every pair is ready again."""
        self.network.faults = Faults()
        self.disordered = set()
        for process in self.workers:
            if process.frozen:
                self.thaw(process)
        for _ in range(60):
            self.run_to_rest()
            if self._is_at_rest():
                break
            self.pass_time(3.0)  # retries of pairs, then deadlines
        assert self._is_at_rest(), self._why_not_at_rest()

    def advance(self, until: Callable[[], bool]) -> None:
        """Runs events without faults until the condition holds."""
        for _ in range(500):
            if until():
                return
            is_late = bool(self.disordered) and self.rng.random() < 0.8
            if not is_late and (events := self.events()):
                events[0][1]()
                self.check()
                continue
            for process in self.workers:
                if process.runs and not until():
                    self.run_step(process)
        raise AssertionError("it does not come so far")

    def deliver_all(self) -> None:
        """Delivers everything in flight; nothing is computed."""
        for _ in range(2000):
            events = self.events()
            if not events:
                return
            events[0][1]()
        raise AssertionError("messages without end")

    def run_to_rest(self) -> None:
        for _ in range(2000):
            if events := self.events():
                events[0][1]()
                continue
            for process in self.workers:
                if process.runs:
                    self.run_step(process)
            if not self.events() and not any(process.runs and process.steps for process in self.workers):
                return
        raise AssertionError("it does not come to rest")

    def _is_at_rest(self) -> bool:
        return self._why_not_at_rest() is None

    def _why_not_at_rest(self) -> str | None:
        if hanging := [sequence for sequence in self.wanted if sequence.ended is None]:
            return f"{hanging[0]} hangs"
        for process in self.workers:
            scheduler = process.scheduler
            blocks, prefill, decode = scheduler.blocks, scheduler.prefill, scheduler.decode
            if blocks.num_free != blocks.num_blocks:
                return f"{blocks.num_blocks - blocks.num_free} blocks of {process.epoch} are lost"
            if decode._transfers or decode._by_request or decode._by_transfer or prefill._by_transfer:
                return f"{process.epoch} remembers what has ended"
            if not scheduler.tiers.is_idle:
                return f"{process.epoch} waits for a tier"
            peers = [source for source, target in self.routes() if target is process and source is not process]
            if not all(source.path_to(process) for source in peers):
                return f"a pair with {process.epoch} is not ready"
            if len(list(process.incoming.pairs())) != len(peers):
                return f"{process.epoch} keeps pairs that are gone"
        return None
