"""Two prefill workers and a decode worker in memory: real schedulers and pair tables, simulated network and processes.

The data paths keep the rules of `kv_transfer.fake`, with a number for the content of a block: one-sided (as `ipc`) or
two-sided (as `gloo`), block by block, with loss and corruption. A frozen process does nothing until it wakes, and then
goes on where it was; a killed one is followed by another at the same address. Control messages wait in a queue for each
connection. Nothing happens by itself: whoever holds the world picks the next event.

Checked at each write: the block belongs to the transfer that it is written for. At each decode step: every block holds
what was computed for the sequence's own tokens. `check`, after each event: every block has one owner.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

from engine.batch import ItemOutput
from protocol.dispatch import (
    AbortRequest,
    DecodeReserved,
    FirstToken,
    PrepareDecode,
    RequestFailed,
    RequestPreempted,
    StartPrefill,
    TokenBatch,
)
from protocol.errors import KVTransferFailed
from protocol.generation import SampledToken, SamplingParams, StopConditions
from protocol.token_ids import pack_token_ids
from protocol.transfer import (
    ConnectorParams,
)
from tests.unit.simulated_workers import BLOCK_SIZE, LEASE_S, Decode, Path, Prefill, Process, ReceiveJob

DEADLINE_S = 40.0


def next_token(token_ids: list[int]) -> int:
    return crc32(bytes(token_ids), 5) % 20


def block_content(token_ids: list[int], number: int, num_computed: int) -> int:
    """Keys and values of block `number` depend on every token up to its last one that is computed."""
    return crc32(bytes(token_ids[: min(num_computed, (number + 1) * BLOCK_SIZE)]), number)


@dataclass(eq=False)
class Wanted:
    """One sequence as its client sees it."""

    prompt: list[int]
    stop: StopConditions
    request_id: str = ""
    prefill: Prefill | None = None
    decode: Decode | None = None
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None


Event = tuple[float, Callable[[], None]]
"""Weight and what happens."""


class World:
    """Holds the proxy too. visible: epochs of the workers that it knows."""

    def __init__(self, seed: int, one_sided: bool, loss: float = 0.0, corruption: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.one_sided = one_sided
        self.connector = "ipc" if one_sided else "gloo"
        self.loss, self.corruption = loss, corruption
        self.data_pace, self.message_pace = self.rng.choice([0.3, 3.0]), self.rng.choice([0.8, 4.0])
        self.disorder = self.rng.choice([0.02, 0.4])
        self.num_started = 0
        self.decode = self._new_decode()
        self.prefills = [self._new_prefill(i) for i in range(2)]
        self.visible = {process.epoch for process in self.processes()}
        self.exits: deque[int] = deque()  # of processes that have ended, which the kernel has yet to report
        self.wanted: list[Wanted] = []
        self.lost_prompts: list[list[int]] = []
        self.attempts: dict[str, Wanted] = {}
        self.terminals: Counter[tuple[str, str]] = Counter()
        self.num_corrupted = self.num_found_corrupt = self.num_late_writes = self.num_duplicated = 0
        self.num_expired_leases = self.num_kept_blocks = 0

    # ---- processes

    def _new_decode(self) -> Decode:
        self.num_started += 1
        return Decode(self, self.num_started)

    def _new_prefill(self, index: int) -> Prefill:
        self.num_started += 1
        return Prefill(self, f"prefill-{index}", self.num_started)

    def processes(self) -> list[Process]:
        return [self.decode, *self.prefills]

    def is_running(self, pid: int) -> bool:
        return any(process.pid == pid for process in self.processes())

    def decode_at(self, pid: int) -> Decode:
        """The incarnation whose pool a path leads to; another may have its address by now."""
        return self.decode if self.decode.pid == pid else Decode(self, 0)

    def params_of(self, decode: Decode) -> ConnectorParams:
        return ConnectorParams(pid=decode.pid)

    def freeze(self, process: Process) -> None:
        process.frozen = True

    def thaw(self, process: Process) -> None:
        """It goes on, and registers again if it was taken for lost."""
        process.frozen = False
        self.visible.add(process.epoch)

    def notice_silence(self, process: Process) -> None:
        """The proxy has not heard of a frozen worker for too long."""
        self.visible.discard(process.epoch)
        self._lose(process)

    def restart(self, process: Process) -> None:
        """It is killed, and another starts at its address. What it sent last may be lost on the way."""
        process.alive = False
        self.exits.append(process.pid)
        self.visible.discard(process.epoch)
        if isinstance(process, Prefill):
            for pair_id in process.sockets:
                sent = self.decode.inbox[pair_id]
                for _ in range(self.rng.randint(0, len(sent))):
                    sent.pop()
            self.prefills[self.prefills.index(process)] = new = self._new_prefill(int(process.name[-1]))
            self.visible.add(new.epoch)
        else:
            self.decode = self._new_decode()
            self.visible.add(self.decode.epoch)
        self._lose(process)

    def _lose(self, process: Process) -> None:
        for sequence in self.wanted:
            if sequence.ended is None and process in (sequence.prefill, sequence.decode):
                self._end(sequence, "worker_lost")
                self.lost_prompts.append(sequence.prompt)

    # ---- the proxy

    def start(self) -> None:
        able = [p for p in self.prefills if p.epoch in self.visible and p.table.ready_pair(self.decode.epoch)]
        if not able or self.decode.epoch not in self.visible:
            return
        length = self.rng.choice([1, 4, 9, 15])
        if self.lost_prompts:
            self._dispatch_again(self.rng.choice(able))
            return
        prompt = [self.rng.randrange(3)] * min(8, length) + [self.rng.randrange(23) for _ in range(length - 8)]
        sequence = Wanted(prompt, StopConditions(self.rng.choice([2, 6]), frozenset()))
        self.wanted.append(sequence)
        self._dispatch(sequence, self.rng.choice(able))

    def _dispatch_again(self, prefill: Prefill) -> None:
        """A prompt that lost a worker, under another transfer_id."""
        sequence = Wanted(self.lost_prompts.pop(), StopConditions(6, frozenset()))
        self.wanted.append(sequence)
        self._dispatch(sequence, prefill)

    def _dispatch(self, sequence: Wanted, prefill: Prefill) -> None:
        request_id = f"r{len(self.attempts)}"
        self.attempts[request_id] = sequence
        sequence.request_id, sequence.prefill, sequence.decode = request_id, prefill, self.decode
        num_generated = len(sequence.tokens)
        alone = sequence.stop.max_tokens - num_generated == 1
        packed = pack_token_ids(sequence.prompt + sequence.tokens)
        prefill.inbox["proxy"].append(
            StartPrefill(
                "proxy", [request_id], f"t-{request_id}", packed, SamplingParams(), [1], sequence.stop,
                None if alone else self.decode.name, None if alone else self.decode.epoch, DEADLINE_S,
                num_generated=num_generated,
            )
        )  # fmt: skip
        if not alone:
            self.decode.inbox["proxy"].append(
                PrepareDecode(
                    "proxy", [request_id], f"t-{request_id}", packed, SamplingParams(), [1], sequence.stop,
                    prefill.name, prefill.epoch, DEADLINE_S, num_generated=num_generated,
                )
            )  # fmt: skip

    def abort(self, sequence: Wanted) -> None:
        if sequence.ended is None:
            self._end(sequence, "aborted")

    def _end(self, sequence: Wanted, reason: str) -> None:
        assert sequence.ended is None
        sequence.ended = reason
        for process in (sequence.prefill, sequence.decode):
            if process is not None and process.alive:
                process.inbox["proxy"].append(AbortRequest("proxy", sequence.request_id))

    def to_proxy(self, process: Process, message: Any) -> None:
        match message:
            case FirstToken():
                self._on_token(process, message.request_id, message.token, message.finish_reason)
            case TokenBatch():
                for token in message.tokens:
                    self._on_token(process, token.request_id, token.token, token.finish_reason)
            case RequestPreempted():
                self._count_terminal(process, message.request_id)
                sequence = self.attempts[message.request_id]
                if sequence.ended is None and sequence.request_id == message.request_id:
                    assert sequence.prefill is not None
                    able = [p for p in self.prefills if p.epoch in self.visible]
                    if able:
                        self._dispatch(sequence, self.rng.choice(able))
                    else:
                        self._end(sequence, "worker_lost")
            case RequestFailed():
                self._count_terminal(process, message.request_id)
                sequence = self.attempts[message.request_id]
                if sequence.ended is None and sequence.request_id == message.request_id:
                    self._end(sequence, message.error.code)
            case DecodeReserved():
                pass

    def _count_terminal(self, process: Process, request_id: str) -> None:
        self.terminals[process.epoch, request_id] += 1
        assert self.terminals[process.epoch, request_id] == 1, f"{process.epoch} ended {request_id} twice"

    def _on_token(self, process: Process, request_id: str, token: SampledToken, reason: str | None) -> None:
        if reason is not None:
            self._count_terminal(process, request_id)
        sequence = self.attempts[request_id]
        if sequence.ended is not None or sequence.request_id != request_id:
            return  # the client has gone, or the proxy has given up the worker
        assert token.token_id == next_token(sequence.prompt + sequence.tokens), "a token that is not the model's"
        sequence.tokens.append(token.token_id)
        if reason is not None:
            assert len(sequence.tokens) == sequence.stop.max_tokens
            sequence.ended = reason

    # ---- what may happen next

    def events(self) -> list[Event]:
        """All that can happen of itself, that is without a further fault, but for steps."""
        return [event for process in self.processes() for event in self.events_of(process)]

    def events_of(self, process: Process) -> list[Event]:
        """Messages, news of membership and exits, blocks that move, callbacks."""
        if not process.runs:
            return []
        events: list[Event] = [
            (self.message_pace, partial(self.deliver, process, connection))
            for connection, queue in process.inbox.items()
            if queue
        ]
        if process.view != self.visible:
            events.append((1.0, partial(self.show_view, process)))
        if isinstance(process, Prefill):
            for path in process.paths.values():
                events += self._sender_events(path)
        elif isinstance(process, Decode):
            if self.exits:
                events.append((1.0, self.report_exit))
            for pair_id, jobs in process.receives.items():
                if jobs:
                    events += self._receiver_events(pair_id, jobs[0])
        return events

    def random_event(self, rng: random.Random) -> Callable[[], None]:
        """With faults, and clients that come and go."""
        which = rng.randrange(4)
        if which == 3:
            events = self._outside_events()
        else:
            process = self.processes()[which]
            events = self.events_of(process) + self._faults_of(process)
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

    def _faults_of(self, process: Process) -> list[Event]:
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

    def deliver(self, process: Process, connection: str) -> None:
        process.on_message(connection, process.inbox[connection].popleft())  # type: ignore[attr-defined]

    def duplicate(self, process: Process, connection: str) -> None:
        self.num_duplicated += 1
        process.inbox[connection].appendleft(process.inbox[connection][0])

    def give_up_pair(self, process: Process) -> None:
        """For a reason of its own: a clogged connection, a message that breaks the rules."""
        if isinstance(process, Prefill) and (pairs := list(process.table.pairs())):
            process.perform_pairs(process.table.fail(self.now, self.rng.choice(pairs).pair_id, "clogged"))
        elif isinstance(process, Decode) and (incoming := list(process.table.pairs())):
            process.perform_pairs(process.table.fail(self.rng.choice(incoming).pair_id, "broke the rules"))

    def show_view(self, process: Process) -> None:
        process.view = set(self.visible)
        workers = [p.info for p in self.processes() if p.epoch in self.visible]  # type: ignore[attr-defined]
        if isinstance(process, Prefill):
            process.perform_pairs(process.table.on_view(self.now, workers))
        elif isinstance(process, Decode):
            process.perform_pairs(process.table.on_view(workers))

    def report_exit(self) -> None:
        pid = self.exits.popleft()
        for pair in list(self.decode.table.pairs()):
            if pid in pair.live_pids:
                self.decode.perform_pairs(self.decode.table.on_exit(pair.pair_id, pid))

    def pass_time(self, seconds: float) -> None:
        """No message arrives meanwhile, but every process that runs looks at its clock again and again."""
        num_looks = math.ceil(seconds / LEASE_S * 5)
        for _ in range(num_looks):
            self.now += seconds / num_looks
            self._tick()

    def _tick(self) -> None:
        for process in self.processes():
            if process.runs and isinstance(process, Prefill):
                process.perform_pairs(process.table.on_tick(self.now))
                process.on_tick()
            elif process.runs and isinstance(process, Decode):
                process.perform(process.scheduler.on_tick(self.now))
                process.renew_leases()

    # ---- data paths

    def _sender_events(self, path: Path) -> list[Event]:
        if not path.jobs:
            if path.closed and not path.told_closed:
                return [(2.0, lambda: self.tell_closed(path))]
            return []
        job = path.jobs[0]
        if path.broken or (path.closed and not job.begun):
            return [(2.0, lambda: path.source.end_job(path, KVTransferFailed("the pair is closed")))]
        if self.one_sided:
            if job.is_stuck:
                return [(1.0, lambda: self.break_sender(path))]
            return [(self.data_pace, lambda: self.write(path))]
        receives = path.target.receives.get(path.pair_id)
        take = receives[0] if receives else None
        if take is None or job.is_stuck or not path.target.runs or self._may_not_begin(path, take):
            return [(0.3, lambda: self.break_sender(path))]
        return [(self.data_pace, lambda: self.move(path, take))]

    def _may_not_begin(self, path: Path, take: ReceiveJob) -> bool:
        return path.pair_id not in path.target.receivers and not take.begun

    def _receiver_events(self, pair_id: str, job: ReceiveJob) -> list[Event]:
        decode = self.decode
        if self.one_sided:
            return [(3.0, lambda: decode.end_receive(pair_id, None))]  # it was written before it was announced
        if pair_id not in decode.receivers and not job.begun:
            return [(2.0, lambda: decode.end_receive(pair_id, KVTransferFailed("the pair is closed")))]
        path = next((p.paths[pair_id] for p in self.prefills if pair_id in p.paths), None)
        waits = path is None or not path.source.runs or path.broken or path.closed or not path.jobs
        if waits or (path is not None and path.jobs and path.jobs[0].is_stuck):
            return [(0.3, lambda: self.break_receiver(pair_id))]
        return []

    def tell_closed(self, path: Path) -> None:
        path.told_closed = True
        del path.source.paths[path.pair_id]
        path.source.perform_pairs(path.source.table.on_sender_closed(path.pair_id))

    def break_sender(self, path: Path) -> None:
        path.broken = True
        path.source.end_job(path, KVTransferFailed("nothing moves"))

    def break_receiver(self, pair_id: str) -> None:
        """The connection breaks at this end, so it breaks at the other."""
        for prefill in self.prefills:
            if pair_id in prefill.paths:
                prefill.paths[pair_id].broken = True
        self.decode.end_receive(pair_id, KVTransferFailed("nothing moves"))

    def write(self, path: Path) -> None:
        """One-sided: nobody on the other side is asked."""
        job = path.jobs[0]
        job.begun = True
        dst = job.ship.dst_block_ids[job.num_moved]
        if path.target is self.decode:
            transfer = self.decode.scheduler._transfers.get(job.ship.transfer_id)
            self.num_late_writes += transfer is None or transfer.transfer_id not in self.decode.scheduler._by_transfer
            path.target.write(path.source, job, dst)
        else:  # the memory of a process that is gone
            job.num_moved += 1
        if job.num_moved == len(job.ship.dst_block_ids):
            path.source.end_job(path, None)

    def move(self, path: Path, take: ReceiveJob) -> None:
        """Two-sided: a block that both ends have come to."""
        job = path.jobs[0]
        job.begun = take.begun = True
        assert job.ship.transfer_id == take.receive.transfer_id
        transfer = self.decode.scheduler._transfers.get(job.ship.transfer_id)
        self.num_late_writes += transfer is None or transfer.transfer_id not in self.decode.scheduler._by_transfer
        path.target.write(path.source, job, take.receive.block_ids[take.num_moved])
        take.num_moved += 1
        if job.num_moved == len(job.ship.dst_block_ids):
            path.target.end_receive(path.pair_id, None)
            path.source.end_job(path, None)

    # ---- steps

    def run_step(self, process: Process) -> None:
        """A step begins, or the one under way ends."""
        if isinstance(process, Prefill):
            self._prefill_step(process)
        elif isinstance(process, Decode):
            self._decode_step(process)

    def _prefill_step(self, prefill: Prefill) -> None:
        batch, prefill.step = prefill.step, None
        if batch is None:
            batch, actions = prefill.scheduler.schedule(self.now)
            prefill.step = batch if batch.items else None
            prefill.perform(actions)
            return
        outputs = []
        for item, (prompt, _) in zip(batch.items, prefill.scheduler._step, strict=True):
            end = item.start + len(item.token_ids)
            self._check_memory(prefill.memory, prompt.token_ids, prompt.block_table, item.start)
            self._compute(prefill.memory, prompt.token_ids, prompt.block_table, item.start, end)
            outputs.append(ItemOutput([SampledToken(next_token(prompt.token_ids)) for _ in item.samples]))
        prefill.perform(prefill.scheduler.on_step(self.now, outputs))

    def _decode_step(self, decode: Decode) -> None:
        batch, decode.step = decode.step, None
        if batch is None:
            batch, actions = decode.scheduler.schedule(self.now)
            decode.step = batch if batch.items else None
            decode.perform(actions)
            return
        outputs = []
        for item, sequence in zip(batch.items, decode.scheduler._running.step, strict=True):
            token_ids = self.attempts[sequence.request_id].prompt + sequence.output_token_ids
            self._check_memory(decode.memory, token_ids, sequence.block_table, item.start)
            self._compute(decode.memory, token_ids, sequence.block_table, item.start, item.start + 1)
            outputs.append(ItemOutput([SampledToken(next_token(token_ids))]))
        decode.perform(decode.scheduler.on_step(self.now, outputs))

    @staticmethod
    def _check_memory(memory: list[int], token_ids: list[int], block_table: list[int], num_computed: int) -> None:
        for number in range(-(-num_computed // BLOCK_SIZE)):
            expected = block_content(token_ids, number, num_computed)
            assert memory[block_table[number]] == expected, f"block {number} holds what is not its own"

    @staticmethod
    def _compute(memory: list[int], token_ids: list[int], block_table: list[int], start: int, end: int) -> None:
        for number in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            memory[block_table[number]] = block_content(token_ids, number, end)

    # ---- what must hold

    def check(self) -> None:
        """Every block has one owner, and none is owned by two transfers or by a transfer and a sequence."""
        for prefill in self.prefills:
            prefill.scheduler.blocks.check()
        self.decode.scheduler.blocks.check()
        owners: Counter[int] = Counter()
        for transfer in self.decode.scheduler._transfers.values():
            owners.update(transfer.own_block_ids)
        in_tables = {block_id for s in self.decode.scheduler._running.sequences for block_id in s.block_table}
        assert all(count == 1 for count in owners.values()), "a block in two hands"
        assert not in_tables & owners.keys(), "a block of a running sequence may still be written by a peer"

    def settle(self) -> None:
        """No more faults: everything comes to its end, every block comes back, every pair is ready again."""
        self.loss = self.corruption = 0.0
        for process in self.processes():
            if process.frozen:
                self.thaw(process)
        for _ in range(60):
            self.run_to_rest()
            if self._is_at_rest():
                break
            self.pass_time(3.0)  # retries of pairs, then deadlines
        assert self._is_at_rest(), self._why_not_at_rest()

    def run_to_rest(self) -> None:
        for _ in range(2000):
            if events := self.events():
                events[0][1]()
                continue
            for process in self.processes():
                self.run_step(process)
            if not self.events() and not any(process.step for process in self.processes()):
                return
        raise AssertionError("it does not come to rest")

    def _is_at_rest(self) -> bool:
        return self._why_not_at_rest() is None

    def _why_not_at_rest(self) -> str | None:
        if hanging := [sequence for sequence in self.wanted if sequence.ended is None]:
            return f"{hanging[0]} hangs"
        for process in self.processes():
            blocks = process.scheduler.blocks  # type: ignore[attr-defined]
            if blocks.num_free != blocks.num_blocks:
                return f"{blocks.num_blocks - blocks.num_free} blocks of {process.epoch} are lost"
        decode = self.decode.scheduler
        if decode._transfers or decode._by_request or decode._by_transfer:
            return "decode remembers what has ended"
        if any(prefill.scheduler._by_transfer for prefill in self.prefills):
            return "prefill remembers what has ended"
        if not all(prefill.table.ready_pair(self.decode.epoch) for prefill in self.prefills):
            return "a pair is not ready"
        if len(list(self.decode.table.pairs())) != len(self.prefills):
            return "decode keeps pairs that are gone"
        return None
