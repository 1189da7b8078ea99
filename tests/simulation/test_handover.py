"""Both schedulers in one simulation, in memory, under random event orders.

The simulated network delays every queue independently; copies take time and may fail; requests are aborted, deadlines
pass, pairs break, decode runs out of blocks. Each slot of the simulated pools records from which tokens its KV was
computed, and each next token is a function of all tokens before it, so outputs can be compared with a single process.

Invariants: nothing computes on another sequence's KV, no copy touches a block that it does not own, and each request
ends exactly once. At the end every block is free on both sides.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.decode_worker.actions import Receive, SendToPrefill
from tandem.decode_worker.scheduler import UNCLAIMED_TIMEOUT_S, DecodeScheduler
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.block_manager import BlockManager
from tandem.prefill_worker.actions import SendToDecode, Ship
from tandem.prefill_worker.scheduler import PrefillScheduler
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
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, WorkerLost
from tandem.worker.actions import SendToProxy

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


class Handover(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.prefill = PrefillScheduler(
            BlockManager(12, BLOCK_SIZE), "model", max_num_batched_tokens=6, max_num_seqs=4, lease_s=math.inf
        )
        self.decode = DecodeScheduler(BlockManager(12, BLOCK_SIZE), "model", max_num_seqs=3, max_num_batched_tokens=5)
        self.prefill_memory, self.decode_memory = Memory(12), Memory(12)
        self.pair_id = "pair-0"
        self.num_pairs = 1
        self.pair_closing = False
        self.to_prefill: deque[Any] = deque()
        self.to_decode: deque[Any] = deque()
        self.prefill_to_decode: deque[Any] = deque()
        self.decode_to_prefill: deque[Any] = deque()
        self.ships: deque[Ship] = deque()
        self.receives: deque[Receive] = deque()
        self.prefill_step: Batch | None = None
        self.decode_step: Batch | None = None
        self.wanted: list[Wanted] = []
        self.attempts: dict[str, Wanted] = {}  # by attempt_id
        self.current: dict[int, str] = {}  # attempt_id of the latest attempt, by id() of the sequence
        self.num_preempted = 0
        self.num_local = 0  # chunks that decode computed

    # ---- the proxy

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(0, 20),
        tail=st.lists(st.integers(0, 22), max_size=3),
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def start(self, prefix: int, length: int, tail: list[int], max_tokens: int, n: int) -> None:
        if self.pair_closing:
            return
        prompt = PREFIXES[prefix][:length] + tail or [1]
        stop = StopConditions(max_tokens, frozenset({EOS}))
        new = [Wanted(prompt, len(self.wanted) + i, stop) for i in range(n)]
        self.wanted += new
        self._dispatch(new)

    def _dispatch(self, sequences: list[Wanted]) -> None:
        first = sequences[0]
        attempt_ids = [f"r{len(self.attempts) + i}" for i in range(len(sequences))]
        for sequence, attempt_id in zip(sequences, attempt_ids, strict=True):
            self.attempts[attempt_id] = sequence
            self.current[id(sequence)] = attempt_id
        generated = len(first.tokens)
        alone = first.stop.max_tokens - generated == 1
        packed, seeds = pack_token_ids(first.prompt + first.tokens), [s.seed for s in sequences]
        transfer_id = f"t-{attempt_ids[0]}"
        priority = len(self.attempts) % 3 - 1
        if len(self.attempts) % 4 == 0:  # decode computes the prompt
            self.to_decode.append(
                PrepareDecode(
                    "proxy", attempt_ids, transfer_id, packed, SamplingParams(), seeds, first.stop,
                    DEADLINE_S, prefill_worker_id=None, prefill_epoch=None, num_generated=generated, priority=priority,
                )
            )  # fmt: skip
            return
        self.to_prefill.append(
            StartPrefill(
                "proxy", attempt_ids, transfer_id, packed, SamplingParams(), seeds, first.stop,
                DEADLINE_S, decode_worker_id=None if alone else "decode-0", decode_epoch=None if alone else "epoch",
                num_generated=generated, priority=priority,
            )
        )  # fmt: skip
        if not alone:
            self.to_decode.append(
                PrepareDecode(
                    "proxy", attempt_ids, transfer_id, packed, SamplingParams(), seeds, first.stop,
                    DEADLINE_S, prefill_worker_id="prefill-0", prefill_epoch="epoch", num_generated=generated,
                )
            )  # fmt: skip

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(self.wanted[data.draw(st.integers(0, len(self.wanted) - 1))])

    def _abort(self, sequence: Wanted) -> None:
        if not sequence.aborted and sequence.ended is None:
            sequence.aborted = True
            for queue in (self.to_prefill, self.to_decode):
                queue.append(AbortAttempt("proxy", self.current[id(sequence)]))

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

    def _perform(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendToProxy():
                    self._to_proxy(action.message)
                case SendToDecode():
                    self.prefill_to_decode.append((action.pair_id, action.message))
                case SendToPrefill():
                    self.decode_to_prefill.append((action.pair_id, action.message))
                case Ship():
                    self.ships.append(action)
                case Receive():
                    self.receives.append(action)

    @precondition(lambda self: self.to_prefill)
    @rule()
    def deliver_to_prefill(self) -> None:
        message = self.to_prefill.popleft()
        if isinstance(message, StartPrefill) and message.decode_worker_id and self.pair_closing:  # as the shell does
            for attempt_id in message.attempt_ids:
                self._to_proxy(AttemptFailed(attempt_id, ErrorInfo.of(WorkerLost("the pair is not ready"))))
        elif isinstance(message, StartPrefill):
            pair_id = self.pair_id if message.decode_worker_id else None
            self._perform(self.prefill.on_start(self.now, message, pair_id))
        else:
            self._perform(self.prefill.on_abort(message.proxy_id, message.attempt_id))

    @precondition(lambda self: self.to_decode)
    @rule()
    def deliver_to_decode(self) -> None:
        message = self.to_decode.popleft()
        if isinstance(message, PrepareDecode):
            self._perform(self.decode.on_prepare(self.now, message))
        else:
            self._perform(self.decode.on_abort(message.proxy_id, message.attempt_id))

    @precondition(lambda self: self.prefill_to_decode)
    @rule()
    def deliver_prefill_to_decode(self) -> None:
        pair_id, message = self.prefill_to_decode.popleft()
        match message:
            case ReserveKV():
                self._perform(self.decode.on_reserve(self.now, message))
            case ShipKV():
                self._perform(self.decode.on_ship(message))
            case FinishTransfer():
                self._perform(self.decode.on_finish_transfer(message))
            case CloseTransfer():
                self._perform(self.decode.on_close_transfer(message.transfer_id))
            case ClosePair():
                self._perform(self.decode.on_pair_lost(pair_id, "closed", True))

    @precondition(lambda self: self.decode_to_prefill)
    @rule()
    def deliver_decode_to_prefill(self) -> None:
        _, message = self.decode_to_prefill.popleft()
        if isinstance(message, KVReserved):
            self._perform(self.prefill.on_reserved(message))
        else:
            assert isinstance(message, KVRefused)
            self._perform(self.prefill.on_refused(message.transfer_id, message.error))

    @precondition(lambda self: self.ships)
    @rule()
    def copy(self) -> None:
        """The sender thread finishes one job: it writes, then announces (like the ipc connector)."""
        ship = self.ships.popleft()
        if self.pair_closing:
            self._perform(self.prefill.on_shipped(ship.transfer_id, KVTransferFailed("closed")))
            self._close_when_stopped()
            return
        for src, dst in zip(ship.src_block_ids, ship.dst_block_ids, strict=True):
            self.decode_memory.blocks[dst] = list(self.prefill_memory.blocks[src])
        announcement = ShipKV(ship.pair_id, 0, ship.transfer_id, ship.first_block, len(ship.src_block_ids))
        self.prefill_to_decode.append((ship.pair_id, announcement))
        self._perform(self.prefill.on_shipped(ship.transfer_id, None))

    @precondition(lambda self: self.receives)
    @rule()
    def receive(self) -> None:
        self._perform(self.decode.on_received(self.receives.popleft().transfer_id, None))

    @precondition(lambda self: not self.pair_closing)
    @rule()
    def break_pair(self) -> None:
        self.pair_closing = True
        self._perform(self.prefill.on_pair_lost(self.pair_id, "broken"))
        self._close_when_stopped()

    def _close_when_stopped(self) -> None:
        if not self.ships:
            self.prefill_to_decode.append((self.pair_id, ClosePair(self.pair_id, "broken")))
            self.pair_id, self.num_pairs = f"pair-{self.num_pairs}", self.num_pairs + 1
            self.pair_closing = False

    # ---- steps and time

    @rule()
    def begin_prefill_step(self) -> None:
        if self.prefill_step is None:
            batch, actions = self.prefill.schedule(self.now)
            assert sum(len(item.token_ids) for item in batch.items) <= 6
            self.prefill_step = batch if batch.items else None
            self._perform(actions)

    @precondition(lambda self: self.prefill_step)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def end_prefill_step(self, fails: bool) -> None:
        batch, self.prefill_step = self.prefill_step, None
        assert batch is not None
        outputs = []
        for item, (prompt, _) in zip(batch.items, self.prefill._step, strict=True):
            end = item.start + len(item.token_ids)
            self.prefill_memory.check(prompt.token_ids, prompt.block_table, item.start)
            self.prefill_memory.write(prompt.token_ids, prompt.block_table, item.start, end)
            assert bool(item.samples) == (end == len(prompt.token_ids))
            outputs.append(self._sample(prompt.token_ids, item.samples))
        if fails:
            self._perform(self.prefill.on_step_failed(RuntimeError("boom")))
        else:
            self._perform(self.prefill.on_step(self.now, outputs))

    def _sample(self, token_ids: list[int], samples: Any) -> ItemOutput:
        return ItemOutput([SampledToken(next_token(token_ids, sample.params.seed)) for sample in samples])

    @rule()
    def begin_decode_step(self) -> None:
        if self.decode_step is None:
            batch, actions = self.decode.schedule(self.now)
            self.decode_step = batch if batch.items else None
            self._perform(actions)

    @precondition(lambda self: self.decode_step)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def end_decode_step(self, fails: bool) -> None:
        batch, self.decode_step = self.decode_step, None
        assert batch is not None
        memory = self.decode_memory
        for source, destination in batch.block_copies:
            memory.blocks[destination] = list(memory.blocks[source])
        outputs = []
        for item, sequence in zip(batch.items, self.decode._running.step, strict=False):
            wanted = self.attempts[sequence.attempt_id]
            token_ids = wanted.prompt + sequence.output_token_ids
            assert len(token_ids) == sequence.num_tokens == item.start + 1
            memory.check(token_ids, sequence.block_table, item.start)
            memory.write(token_ids, sequence.block_table, item.start, item.start + 1)
            outputs.append(self._sample(token_ids, item.samples))
        chunks = batch.items[len(outputs) :]
        assert sum(len(item.token_ids) for item in chunks) <= 5
        for item, (prefill, _) in zip(chunks, self.decode._running.chunks, strict=True):
            end = item.start + len(item.token_ids)
            memory.check(prefill.token_ids, prefill.block_table, item.start)
            memory.write(prefill.token_ids, prefill.block_table, item.start, end)
            assert bool(item.samples) == (end == len(prefill.token_ids))
            outputs.append(self._sample(prefill.token_ids, item.samples))
            self.num_local += 1
        if fails:
            self._perform(self.decode.on_step_failed(RuntimeError("boom")))
        else:
            self._perform(self.decode.on_step(self.now, outputs))

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._perform(self.prefill.on_tick(self.now))
        self._perform(self.decode.on_tick(self.now))

    # ---- invariants

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.prefill.blocks.check()
        self.decode.blocks.check()

    @invariant()
    def copies_under_way_touch_only_their_own_blocks(self) -> None:
        targets: set[int] = set()
        for ship in self.ships:
            assert set(ship.src_block_ids) <= owned(self.prefill.blocks)
            assert set(ship.dst_block_ids) <= owned(self.decode.blocks)
            assert not targets & set(ship.dst_block_ids)
            targets |= set(ship.dst_block_ids)
        writing = [
            sequence.block_table[(sequence.num_tokens - 1) // BLOCK_SIZE] for sequence in self.decode._running.step
        ]
        for prefill, num_tokens in self.decode._running.chunks:
            start, end = prefill.num_computed_tokens, prefill.num_computed_tokens + num_tokens
            writing += prefill.block_table[start // BLOCK_SIZE : self.decode.blocks.num_blocks_for(end)]
        assert set(writing) <= owned(self.decode.blocks)
        assert len(set(writing)) == len(writing) and not targets & set(writing)
        tables = Counter(block_id for sequence in self.decode._running.sequences for block_id in sequence.block_table)
        assert all(tables[block_id] <= 1 for block_id in writing)

    def teardown(self) -> None:
        """Runs everything to its end without further faults, before any deadline."""
        for _ in range(1500):
            self.deliver_all()
            if all(sequence.ended or sequence.aborted for sequence in self.wanted):
                break
        self.deliver_all()
        for sequence in self.wanted:
            assert sequence.ended or sequence.aborted, f"{sequence} never ended"
            sequence.check()
        # Reservations that were overtaken by their request's end have no reader; they end at their own deadline.
        self.now += UNCLAIMED_TIMEOUT_S
        self._perform(self.decode.on_tick(self.now))
        for _ in range(3):
            self.deliver_all()
        for blocks in (self.prefill.blocks, self.decode.blocks):
            assert blocks.num_free == blocks.num_blocks

    def deliver_all(self) -> None:
        while self.to_prefill:
            self.deliver_to_prefill()
        while self.to_decode:
            self.deliver_to_decode()
        self.begin_prefill_step()
        if self.prefill_step:
            self.end_prefill_step(False)
        self.begin_decode_step()
        if self.decode_step:
            self.end_decode_step(False)
        while self.ships:
            self.copy()
        while self.prefill_to_decode or self.decode_to_prefill or self.receives:
            if self.prefill_to_decode:
                self.deliver_prefill_to_decode()
            if self.receives:
                self.receive()
            if self.decode_to_prefill:
                self.deliver_decode_to_prefill()


TestHandover = Handover.TestCase
TestHandover.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def _random_schedule(seed: int) -> Handover:
    """Longer and denser than hypothesis' search: enabled events run with these odds, 250 times."""
    rng = random.Random(seed)
    machine = Handover()

    def start() -> None:
        tail = [rng.randrange(23) for _ in range(rng.randint(0, 3))]
        machine.start(rng.randrange(3), rng.randint(0, 20), tail, rng.randint(1, 16), rng.choice([1, 1, 1, 2, 3]))

    events = [
        (3, lambda: len(machine.wanted) < 30, start),
        (1, lambda: machine.wanted, lambda: machine._abort(rng.choice(machine.wanted))),
        (8, lambda: machine.to_prefill, machine.deliver_to_prefill),
        (8, lambda: machine.to_decode, machine.deliver_to_decode),
        (8, lambda: machine.prefill_to_decode, machine.deliver_prefill_to_decode),
        (8, lambda: machine.decode_to_prefill, machine.deliver_decode_to_prefill),
        (4, lambda: machine.ships, machine.copy),
        (4, lambda: machine.receives, machine.receive),
        (0.2, lambda: not machine.pair_closing, machine.break_pair),
        (6, lambda: not machine.prefill_step, machine.begin_prefill_step),
        (6, lambda: machine.prefill_step, lambda: machine.end_prefill_step(rng.random() < 0.02)),
        (6, lambda: not machine.decode_step, machine.begin_decode_step),
        (6, lambda: machine.decode_step, lambda: machine.end_decode_step(rng.random() < 0.02)),
        (0.5, lambda: True, lambda: machine.tick(rng.choice([0.1, 1.0, 10.0]))),
    ]  # fmt: skip
    for _ in range(250):
        enabled = [(weight, act) for weight, is_enabled, act in events if is_enabled()]
        rng.choices([act for _, act in enabled], [weight for weight, _ in enabled])[0]()
        machine.blocks_are_conserved()
        machine.copies_under_way_touch_only_their_own_blocks()
    return machine


def test_two_thousand_random_schedules() -> None:
    finished: Counter[str | None] = Counter()
    num_preempted = num_cached = num_local = 0
    for seed in range(2000):
        machine = _random_schedule(seed)
        machine.teardown()
        finished.update(sequence.ended for sequence in machine.wanted)
        num_preempted += machine.num_preempted
        num_local += machine.num_local
        num_cached += min(machine.prefill.num_cached_tokens, machine.decode.num_cached_tokens)
    # The schedules must reach every case, or the test proves nothing.
    assert min(finished[reason] for reason in ("stop", "length", "worker_lost", "internal_error")) > 100, finished
    assert num_preempted > 1000 and num_cached > 10_000 and num_local > 1000
