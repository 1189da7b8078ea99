"""Two workers with both roles in one simulation, in memory, under random event orders.

Each request is prefilled on one of them and decoded on the same or on the other one, so KV travels in both directions.

The simulated network delays every queue independently; copies take time and may fail; requests are aborted, deadlines
pass, pairs break, workers run out of blocks. Each slot of the simulated pools records from which tokens its KV was
computed, and each next token is a function of all tokens before it, so outputs can be compared with a single process.

Invariants: nothing computes on another sequence's KV, no copy touches a block that it does not own, and each request
ends exactly once. At the end every block is free on both sides.
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

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.decode_worker.scheduler import UNCLAIMED_TIMEOUT_S
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.block_manager import BlockManager
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
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.messages.transfer import (
    ClosePair,
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    KVReserved,
    ReserveKV,
    ShipKV,
)
from tandem.protocol.worker_actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, WorkerLost
from tandem.worker.scheduler import WorkerScheduler

BLOCK_SIZE = 4
DEADLINE_S = 50.0
EOS = 7
PREFIXES = [[(7 * i + k) % 23 for i in range(20)] for k in range(3)]


def content(token_ids: list[int]) -> int:
    """What KV depends on: every token up to its own."""
    return crc32(bytes(token_ids))


def next_token(token_ids: list[int], seed: int) -> int:
    return crc32(bytes(token_ids), seed) % 20


@dataclass
class Wanted:
    """One sequence as its client sees it."""

    prompt: list[int]
    seed: int
    stop: StopConditions
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    aborted: bool = False

    def reference(self) -> tuple[list[int], str]:
        tokens: list[int] = []
        while True:
            tokens.append(next_token(self.prompt + tokens, self.seed))
            if (reason := self.stop.check(tokens[-1], len(tokens))) is not None:
                return tokens, reason

    def check(self) -> None:
        expected, reason = self.reference()
        assert self.tokens == expected[: len(self.tokens)]
        if self.ended in ("stop", "length"):
            assert (self.tokens, self.ended) == (expected, reason)


class Memory:
    """A KV pool: for each slot, the content of its KV."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [[-1] * BLOCK_SIZE for _ in range(num_blocks)]

    def check(self, token_ids: list[int], block_table: list[int], end: int) -> None:
        for position in range(end):
            slot = self.blocks[block_table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert slot == content(token_ids[: position + 1]), f"computing on keys of another sequence, at {position}"

    def write(self, token_ids: list[int], block_table: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.blocks[block_table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = content(token_ids[: position + 1])


def owned(blocks: BlockManager) -> set[int]:
    return set(blocks._num_holders) | blocks._quarantined


class Worker:
    """inbox: messages from the proxy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scheduler = WorkerScheduler(
            BlockManager(12, BLOCK_SIZE), "model", max_num_batched_tokens=6, max_num_seqs=3, lease_s=math.inf
        )
        self.memory = Memory(12)
        self.inbox: deque[Any] = deque()
        self.steps: deque[Batch] = deque()
        self.sampled: list[int] = []  # by the last step, as the device has them


class Pair:
    """The path of KV from one worker to the other. out, back: control messages, with the pair's id at the time."""

    def __init__(self, source: Worker, target: Worker) -> None:
        self.source = source
        self.target = target
        self.number = 0
        self.is_closing = False
        self.out: deque[Any] = deque()
        self.back: deque[Any] = deque()
        self.ships: deque[Ship] = deque()
        self.receives: deque[Receive] = deque()

    @property
    def pair_id(self) -> str:
        return f"{self.source.name}-{self.target.name}-{self.number}"


class Handover(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.workers = [Worker("a"), Worker("b")]
        a, b = self.workers
        self.pairs = [Pair(a, b), Pair(b, a)]
        self.wanted: list[Wanted] = []
        self.attempts: dict[str, Wanted] = {}  # by attempt_id
        self.current: dict[int, str] = {}  # attempt_id of the latest attempt, by id() of the sequence
        self.num_preempted = 0
        self.num_local = 0  # prompts that were decoded where they were computed
        self.num_ahead = self.num_dropped = 0  # steps scheduled ahead; tokens after a sequence's end

    # ---- the proxy

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(0, 20),
        tail=st.lists(st.integers(0, 22), max_size=3),
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def start(self, prefix: int, length: int, tail: list[int], max_tokens: int, n: int) -> None:
        prompt = PREFIXES[prefix][:length] + tail or [1]
        stop = StopConditions(max_tokens, frozenset({EOS}))
        new = [Wanted(prompt, len(self.wanted) + i, stop) for i in range(n)]
        self.wanted += new
        self._dispatch(new)

    def _dispatch(self, sequences: list[Wanted]) -> None:
        first = sequences[0]
        attempt_ids = [f"r{len(self.attempts) + i}" for i in range(len(sequences))]
        number = len(self.attempts)
        for sequence, attempt_id in zip(sequences, attempt_ids, strict=True):
            self.attempts[attempt_id] = sequence
            self.current[id(sequence)] = attempt_id
        generated = len(first.tokens)
        prefill = self.workers[number % 2]
        decode = self.workers[number // 2 % 2]
        is_last = first.stop.max_tokens - generated == 1
        self.num_local += prefill is decode and not is_last
        shared: dict[str, Any] = {
            "proxy_id": "proxy",
            "attempt_ids": attempt_ids,
            "transfer_id": f"t-{attempt_ids[0]}",
            "token_ids": pack_token_ids(first.prompt + first.tokens),
            "sampling": SamplingParams(frequency_penalty=1.0 if first.seed % 8 == 0 else 0.0),
            "seeds": [s.seed for s in sequences],
            "stop": first.stop,
            "deadline_s": DEADLINE_S,
            "num_generated": generated,
            "priority": number % 3 - 1,
        }
        peer = None if is_last else decode.name
        prefill.inbox.append(StartPrefill(**shared, decode_worker_id=peer, decode_epoch=peer))
        if prefill is not decode and not is_last:
            decode.inbox.append(PrepareDecode(**shared, prefill_worker_id=prefill.name, prefill_epoch=prefill.name))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(self.wanted[data.draw(st.integers(0, len(self.wanted) - 1))])

    def _abort(self, sequence: Wanted) -> None:
        if not sequence.aborted and sequence.ended is None:
            sequence.aborted = True
            for worker in self.workers:
                worker.inbox.append(AbortAttempt("proxy", self.current[id(sequence)]))

    def _to_proxy(self, message: Any) -> None:
        match message:
            case FirstToken(attempt_id=attempt_id, token=token, finish_reason=reason):
                self._on_token(attempt_id, token, reason)
            case TokenBatch(tokens=tokens):
                for token in tokens:
                    self._on_token(token.attempt_id, token.token, token.finish_reason)
            case AttemptPreempted(attempt_id=attempt_id):
                self.num_preempted += 1
                sequence = self.attempts[attempt_id]
                assert self.current[id(sequence)] == attempt_id
                if not sequence.aborted:
                    self._dispatch([sequence])
            case AttemptFailed(attempt_id=attempt_id, error=error):
                # Both workers may report the same loss; the proxy acts on the first report and aborts the rest.
                sequence = self.attempts[attempt_id]
                if sequence.ended is None and self.current[id(sequence)] == attempt_id:
                    self._abort(sequence)
                    sequence.ended = error.code
            case DecodeReserved():
                pass

    def _on_token(self, attempt_id: str, token: SampledToken, reason: str | None) -> None:
        sequence = self.attempts[attempt_id]
        if sequence.aborted:
            return
        assert sequence.ended is None, f"{attempt_id} continues after its end"
        assert self.current[id(sequence)] == attempt_id
        sequence.tokens.append(token.token_id)
        sequence.ended = reason
        sequence.check()

    # ---- the shells

    def _pair_from(self, worker: Worker) -> Pair:
        return self.pairs[self.workers.index(worker)]

    def _perform(self, worker: Worker, actions: list[Any]) -> None:
        out = self._pair_from(worker)
        into = self.pairs[1 - self.pairs.index(out)]
        for action in actions:
            match action:
                case SendToProxy():
                    self._to_proxy(action.message)
                case SendToPeer(pair_id=pair_id, message=message):
                    if isinstance(message, KVReserved | KVRefused):
                        into.back.append((pair_id, message))
                    else:
                        out.out.append((pair_id, message))
                case Ship():
                    out.ships.append(action)
                case Receive():
                    into.receives.append(action)

    def deliver(self, worker: Worker) -> None:
        """Delivers the proxy's next message."""
        message = worker.inbox.popleft()
        scheduler, pair = worker.scheduler, self._pair_from(worker)
        match message:
            case StartPrefill(decode_epoch=epoch):
                if epoch is None or epoch == worker.name:
                    self._perform(
                        worker,
                        scheduler.prefill.on_start(self.now, message, None, decodes_here=epoch == worker.name),
                    )
                elif pair.is_closing:  # as the shell does
                    for attempt_id in message.attempt_ids:
                        self._to_proxy(AttemptFailed(attempt_id, ErrorInfo.of(WorkerLost("the pair is not ready"))))
                else:
                    self._perform(worker, scheduler.prefill.on_start(self.now, message, pair.pair_id))
            case PrepareDecode():
                self._perform(worker, scheduler.decode.on_prepare(self.now, message))
            case AbortAttempt():
                self._perform(worker, scheduler.on_abort(message.proxy_id, message.attempt_id))

    def deliver_out(self, pair: Pair) -> None:
        pair_id, message = pair.out.popleft()
        decode = pair.target.scheduler.decode
        match message:
            case ReserveKV():
                actions = decode.on_reserve(self.now, message)
            case ShipKV():
                actions = decode.on_ship(message)
            case FinishTransfer():
                actions = decode.on_finish_transfer(message)
            case CloseTransfer():
                actions = decode.on_close_transfer(message.transfer_id)
            case _:
                assert isinstance(message, ClosePair)
                actions = decode.on_pair_lost(pair_id, "closed", True)
        self._perform(pair.target, actions)

    def deliver_back(self, pair: Pair) -> None:
        _, message = pair.back.popleft()
        prefill = pair.source.scheduler.prefill
        if isinstance(message, KVReserved):
            self._perform(pair.source, prefill.on_reserved(message))
        else:
            self._perform(pair.source, prefill.on_refused(message.transfer_id, message.error))

    def copy(self, pair: Pair) -> None:
        """The sender thread finishes one job: it writes, then announces (like the ipc connector)."""
        ship = pair.ships.popleft()
        prefill = pair.source.scheduler.prefill
        if pair.is_closing:
            self._perform(pair.source, prefill.on_shipped(ship.transfer_id, KVTransferFailed("closed")))
            self._close_when_stopped(pair)
            return
        for src, dst in zip(ship.src_block_ids, ship.dst_block_ids, strict=True):
            pair.target.memory.blocks[dst] = list(pair.source.memory.blocks[src])
        announcement = ShipKV(ship.pair_id, 0, ship.transfer_id, ship.first_block, len(ship.src_block_ids))
        pair.out.append((ship.pair_id, announcement))
        self._perform(pair.source, prefill.on_shipped(ship.transfer_id, None))

    def receive(self, pair: Pair) -> None:
        self._perform(pair.target, pair.target.scheduler.decode.on_received(pair.receives.popleft().transfer_id, None))

    def break_pair(self, pair: Pair) -> None:
        pair.is_closing = True
        self._perform(pair.source, pair.source.scheduler.prefill.on_pair_lost(pair.pair_id, "broken"))
        self._close_when_stopped(pair)

    def _close_when_stopped(self, pair: Pair) -> None:
        if not pair.ships:
            pair.out.append((pair.pair_id, ClosePair(pair.pair_id, "broken")))
            pair.number += 1
            pair.is_closing = False

    # ---- steps and time

    def begin_step(self, worker: Worker) -> None:
        """Begins a step, or schedules the one behind the step that runs."""
        scheduler = worker.scheduler
        batch, actions = scheduler.schedule_ahead(self.now) if worker.steps else scheduler.schedule(self.now)
        assert sum(len(item.token_ids) for item in batch.items) <= 6 + 3
        if batch.items:
            self.num_ahead += len(worker.steps)
            worker.steps.append(batch)
        self._perform(worker, actions)

    def end_step(self, worker: Worker, fails: bool) -> None:
        batch = worker.steps.popleft()
        scheduler, memory = worker.scheduler, worker.memory
        if fails:
            worker.steps.clear()
            self._perform(worker, scheduler.on_step_failed(RuntimeError("boom")))
            return
        for source, destination in batch.block_copies:
            memory.blocks[destination] = list(memory.blocks[source])
        outputs = []
        steps = scheduler.decode._running.steps
        running = steps[0].sequences if steps else []
        computing = scheduler.prefill._step if len(batch.items) > len(running) else []  # else of the step behind
        for item, sequence in zip(batch.items, running, strict=False):
            wanted = self.attempts[sequence.attempt_id]
            token_ids = wanted.prompt + sequence.output_token_ids
            assert item.follows is None or not item.samples[0].params.has_penalties
            if item.follows is not None and len(token_ids) == item.start:  # it was aborted before the token came
                token_ids.append(worker.sampled[item.follows])
            assert len(token_ids) == item.start + 1
            assert token_ids[-1] == (item.token_ids[0] if item.follows is None else worker.sampled[item.follows])
            memory.check(token_ids, sequence.block_table, item.start)
            memory.write(token_ids, sequence.block_table, item.start, item.start + 1)
            outputs.append(_sample(token_ids, item.samples))
            self.num_dropped += sequence.ended and item.follows is not None
        for item, (prompt, _) in zip(batch.items[len(running) :], computing, strict=True):
            end = item.start + len(item.token_ids)
            memory.check(prompt.token_ids, prompt.block_table, item.start)
            memory.write(prompt.token_ids, prompt.block_table, item.start, end)
            assert bool(item.samples) == (end == len(prompt.token_ids))
            outputs.append(_sample(prompt.token_ids, item.samples))
        worker.sampled = [token.token_id for output in outputs for token in output.tokens]
        self._perform(worker, scheduler.on_step(self.now, outputs))

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers:
            self._perform(worker, worker.scheduler.on_tick(self.now))

    def enabled(self) -> list[tuple[float, Callable[[], None]]]:
        """Returns what may happen next, with weights, apart from new requests, aborts, failing steps and time."""
        events: list[tuple[float, Callable[[], None]]] = []
        for worker in self.workers:
            if worker.inbox:
                events.append((8, partial(self.deliver, worker)))
            if len(worker.steps) < 2:
                events.append((6, partial(self.begin_step, worker)))
            if worker.steps:
                events.append((6, partial(self.end_step, worker, False)))
        for pair in self.pairs:
            events += [(8, partial(self.deliver_out, pair))] if pair.out else []
            events += [(8, partial(self.deliver_back, pair))] if pair.back else []
            events += [(4, partial(self.copy, pair))] if pair.ships else []
            events += [(4, partial(self.receive, pair))] if pair.receives else []
            events += [(0.1, partial(self.break_pair, pair))] if not pair.is_closing else []
        return events

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        events = self.enabled()
        events[data.draw(st.integers(0, len(events) - 1))][1]()

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule()
    def fail_a_step(self) -> None:
        self.end_step(next(worker for worker in self.workers if worker.steps), True)

    # ---- invariants

    @invariant()
    def blocks_are_conserved(self) -> None:
        for worker in self.workers:
            worker.scheduler.blocks.check()

    @invariant()
    def copies_in_flight_touch_only_their_own_blocks(self) -> None:
        for pair in self.pairs:
            target = pair.target.scheduler
            targets: set[int] = set()
            for ship in pair.ships:
                assert set(ship.src_block_ids) <= owned(pair.source.scheduler.blocks)
                assert set(ship.dst_block_ids) <= owned(target.blocks)
                assert not targets & set(ship.dst_block_ids)
                targets |= set(ship.dst_block_ids)
            running = target.decode._running
            ends: dict[int, set[int]] = {}  # by sequence, the blocks that its steps write
            in_flight = Counter[int]()
            for step in running.steps:
                for s in step.sequences:
                    place = (s.num_tokens - 1 + in_flight[id(s)]) // BLOCK_SIZE
                    ends.setdefault(id(s), set()).add(s.block_table[place])
                    in_flight[id(s)] += 1
            writing = [block_id for blocks in ends.values() for block_id in blocks]
            for prompt, num_tokens in target.prefill._step:
                start, end = prompt.num_computed_tokens, prompt.num_computed_tokens + num_tokens
                writing += prompt.block_table[start // BLOCK_SIZE : target.blocks.num_blocks_for(end)]
            assert set(writing) <= owned(target.blocks)
            assert len(set(writing)) == len(writing) and not targets & set(writing)
            tables = Counter(block_id for sequence in running.sequences for block_id in sequence.block_table)
            assert all(tables[block_id] <= 1 for block_id in writing)

    def teardown(self) -> None:
        """Runs everything to its end without further faults, before any deadline."""
        for number in range(1500):
            self.deliver_all()
            if number % 100 == 99:  # workers that wait for each other's blocks
                self.tick(1.0)
            if all(sequence.ended or sequence.aborted for sequence in self.wanted):
                break
        self.deliver_all()
        for sequence in self.wanted:
            assert sequence.ended or sequence.aborted, f"{sequence} never ended"
            sequence.check()
        # Reservations that were overtaken by their request's end have no reader; they end at their own deadline.
        self.tick(UNCLAIMED_TIMEOUT_S)
        for _ in range(3):
            self.deliver_all()
        for worker in self.workers:
            assert worker.scheduler.blocks.num_free == worker.scheduler.blocks.num_blocks

    def deliver_all(self) -> None:
        for worker in self.workers:
            while worker.inbox:
                self.deliver(worker)
            if not worker.steps:
                self.begin_step(worker)
            if worker.steps:
                self.end_step(worker, False)
        for pair in self.pairs:
            while pair.ships:
                self.copy(pair)
            while pair.out or pair.back or pair.receives:
                if pair.out:
                    self.deliver_out(pair)
                if pair.receives:
                    self.receive(pair)
                if pair.back:
                    self.deliver_back(pair)


def _sample(token_ids: list[int], samples: Any) -> ItemOutput:
    return ItemOutput([SampledToken(next_token(token_ids, sample.params.seed)) for sample in samples])


TestHandover = Handover.TestCase
TestHandover.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def _random_schedule(seed: int) -> Handover:
    """Longer and denser than hypothesis' search: enabled events run with these odds, 300 times."""
    rng = random.Random(seed)
    machine = Handover()

    def start() -> None:
        tail = [rng.randrange(23) for _ in range(rng.randint(0, 3))]
        machine.start(rng.randrange(3), rng.randint(0, 20), tail, rng.randint(1, 16), rng.choice([1, 1, 1, 2, 3]))

    for _ in range(300):
        events = machine.enabled()
        events.append((0.5, lambda: machine.tick(rng.choice([0.1, 1.0, 10.0]))))
        if len(machine.wanted) < 30:
            events.append((3, start))
        if machine.wanted:
            events.append((1, lambda: machine._abort(rng.choice(machine.wanted))))
        stepping = [worker for worker in machine.workers if worker.steps]
        if stepping:
            events.append((0.2, lambda: machine.end_step(rng.choice(stepping), True)))  # noqa: B023  # called at once
        rng.choices([act for _, act in events], [weight for weight, _ in events])[0]()
        machine.blocks_are_conserved()
        machine.copies_in_flight_touch_only_their_own_blocks()
    return machine


def test_random_schedules() -> None:
    finished: Counter[str | None] = Counter()
    num_preempted = num_cached = num_local = num_ahead = num_dropped = 0
    for seed in range(800):
        machine = _random_schedule(seed)
        machine.teardown()
        finished.update(sequence.ended for sequence in machine.wanted)
        num_preempted += machine.num_preempted
        num_local += machine.num_local
        num_ahead += machine.num_ahead
        num_dropped += machine.num_dropped
        num_cached += sum(worker.scheduler.decode.num_cached_tokens for worker in machine.workers)
    # The schedules must reach every case, or the test proves nothing.
    assert min(finished[reason] for reason in ("stop", "length", "worker_lost", "internal_error")) > 40, finished
    assert num_preempted > 400 and num_cached > 4000 and num_local > 400
    assert num_ahead > 4000 and num_dropped > 400
