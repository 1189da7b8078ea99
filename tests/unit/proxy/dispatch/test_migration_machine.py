"""Random lives of requests: workers join and are lost, messages are late, clients disconnect, deadlines pass.

Each token is a function of the sequence's seed and its position, as with a model. Whatever happens, a reader gets a
prefix of that sequence, in order and once, and one end. When workers are ready again, every sequence finishes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tandem.protocol.messages.dispatch import (
    AttemptPreempted,
    DecodeReserved,
    FirstToken,
    NewToken,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.generation import SampledToken, SamplingParams
from tandem.protocol.messages.membership import Role, WorkerInfo
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.dispatch.crashes import MAX_DEATHS, RequestCrashesWorkers
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.runtime.errors import DeadlineExceeded, KVTransferFailed, TandemError, WorkerLost
from tests.support.clocked_loop import ClockedLoop
from tests.support.proxy_cluster import Cluster, turn

WAIT_S, DEADLINE_S = 30.0, 100.0
seen: Counter[str] = Counter()
"""How sequences ended and after how many tokens they were dispatched, over all runs."""
PICK = st.integers(0, 1 << 16)


def token_of(seed: int, place: int) -> int:
    return 1 + (seed * 7919 + place * 104729) % 400


class PlayedAttempt:
    """The workers' side of one attempt. The messages of each worker keep their order."""

    def __init__(self, prepare: Any, attempt_id: str, seed: int) -> None:
        self.attempt_id, self.seed, self.stop = attempt_id, seed, prepare.stop
        self.num_before: int = prepare.num_generated
        given = unpack_token_ids(prepare.token_ids)[3:]
        assert given == [token_of(seed, place) for place in range(self.num_before)], "no token is lost or invented"
        self.first_sent = self.reserved = False
        self.num_sent = 0  # by decode

    def first(self) -> FirstToken:
        self.first_sent = True
        token_id = token_of(self.seed, self.num_before)
        reason = self.stop.check(token_id, self.num_before + 1)
        return FirstToken(self.attempt_id, SampledToken(token_id), reason, 0.0, 0.0)

    def next(self) -> TokenBatch:
        self.num_sent += 1
        place = self.num_before + self.num_sent
        token_id = token_of(self.seed, place)
        return TokenBatch([NewToken(self.attempt_id, SampledToken(token_id), self.stop.check(token_id, place + 1))])

    @property
    def has_more(self) -> bool:
        return self.num_before + 1 + self.num_sent < self.stop.max_tokens


class SequenceReader:
    """Takes the tokens of one sequence, as a `Generation` does."""

    def __init__(self, machine: Requests, sequence: DispatchedSequence, num_tokens: int) -> None:
        self.sequence, self.num_tokens = sequence, num_tokens
        self.tokens: list[int] = []
        self.ends: list[str | TandemError] = []
        self.task = machine.loop.create_task(self._read(machine.cluster))

    async def _read(self, cluster: Cluster) -> None:
        try:
            while True:
                delta = await cluster.next_tokens(self.sequence)
                self.tokens += [token.token_id for token in delta.tokens]
                if delta.finish_reason is not None:
                    self.ends.append(delta.finish_reason)
                    return
        except TandemError as error:
            self.ends.append(error)
        except asyncio.CancelledError:
            self.ends.append("left")
        finally:
            cluster.dispatcher.drop(self.sequence)


class Requests(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = ClockedLoop()
        self.attempts: dict[str, PlayedAttempt] = {}
        self.readers: list[SequenceReader] = []
        self.gone: list[WorkerInfo] = []
        self.num_workers = 0
        self.num_seen = 0
        self.cluster = self.run(self._make)
        for role in ("prefill", "decode", "decode"):
            self.join(role)

    async def _make(self) -> Cluster:
        return Cluster(worker_wait_s=WAIT_S, workers=())

    def run(self, work: Any) -> Any:
        async def play() -> Any:
            made = await work()
            await turn()
            return made

        made = self.loop.run_until_complete(play())
        self._see()
        return made

    def do(self, work: Any) -> None:
        async def play() -> None:
            work()

        self.run(play)

    def _see(self) -> None:
        """Records what was dispatched since the last call."""
        if not hasattr(self, "cluster"):
            return
        sent = self.cluster.pool.sent
        for _, message in sent[self.num_seen :]:
            if isinstance(message, StartPrefill):
                for attempt_id, seed in zip(message.attempt_ids, message.seeds, strict=True):
                    self.attempts[attempt_id] = PlayedAttempt(message, attempt_id, seed)
                    seen[f"after {message.num_generated} tokens"] += 1
        self.num_seen = len(sent)

    def running(self) -> list[PlayedAttempt]:
        return [self.attempts[attempt_id] for attempt_id in self.cluster.dispatcher._running]

    # ---- events

    @precondition(lambda self: len(self.readers) < 12)
    @rule(seeds=st.integers(1, 3), num_tokens=st.integers(2, 12))
    def start(self, seeds: int, num_tokens: int) -> None:
        samplings = [SamplingParams(seed=len(self.readers) + number) for number in range(seeds)]
        made: list[DispatchedSequence] = []

        def begin() -> None:
            with contextlib.suppress(RequestCrashesWorkers):  # all have the same prompt
                made.extend(self.cluster.start(samplings, num_tokens, DEADLINE_S))

        self.do(begin)
        self.readers += [SequenceReader(self, sequence, num_tokens) for sequence in made]

    @precondition(lambda self: self.running())
    @rule(pick=PICK, what=st.sampled_from(["first", "reserved", "token", "token", "preempt", "lost", "broken"]))
    def receive_any(self, pick: int, what: str) -> None:
        running = self.running()
        attempt = running[pick % len(running)]
        route = self.cluster.dispatcher._running[attempt.attempt_id].route
        if route.decode is None:
            what = "broken" if what == "broken" else "first"
        if what == "first" and not attempt.first_sent:
            self.receive(route.prefill, attempt.first())
        elif what == "reserved":
            self.receive(route.decode, DecodeReserved(attempt.attempt_id))
        elif what == "token" and attempt.has_more and attempt.first_sent:
            self.receive(route.decode, attempt.next())
        elif what == "preempt" and attempt.first_sent:
            self.receive(route.decode, AttemptPreempted(attempt.attempt_id))
        elif what == "lost":
            self.do(lambda: self.cluster.failed(route.decode, attempt.attempt_id, WorkerLost("the pair is gone")))
        elif what == "broken":
            self.do(lambda: self.cluster.failed(route.prefill, attempt.attempt_id, KVTransferFailed("it broke")))

    @precondition(lambda self: self.running())
    @rule(count=st.integers(1, 6))
    def work(self, count: int) -> None:
        """Every worker sends its next messages."""
        for _ in range(count):
            for attempt in self.running():
                request = self.cluster.dispatcher._running.get(attempt.attempt_id)
                if request is None:
                    continue
                if not attempt.first_sent:
                    self.receive(request.route.prefill, attempt.first())
                elif attempt.has_more and request.route.decode is not None:
                    self.receive(request.route.decode, attempt.next())

    def receive(self, worker: WorkerInfo, message: Any) -> None:
        self.do(lambda: self.cluster.dispatcher.on_message(worker, message))

    @precondition(lambda self: self.attempts)
    @rule(pick=PICK)
    def receive_late(self, pick: int) -> None:
        """Any worker sends a message about an attempt that is over."""
        over = [a for a in self.attempts.values() if a.attempt_id not in self.cluster.dispatcher._running]
        workers = self.gone + self.cluster.worker_table.workers()
        if over and workers:
            attempt_id = over[pick % len(over)].attempt_id
            worker = workers[pick % len(workers)]
            self.receive(worker, TokenBatch([NewToken(attempt_id, SampledToken(499), "length")]))
            self.receive(worker, FirstToken(attempt_id, SampledToken(499), "length", 0.0, 0.0))

    @rule(role=st.sampled_from(["prefill", "decode"]))
    def join(self, role: Role) -> None:
        if len(self.cluster.worker_table.workers()) < 5:
            self.num_workers += 1
            name = f"{role}-{self.num_workers}"
            worker = WorkerInfo(name, f"{name}/e", role, f"ipc://{name}", self.num_workers)
            self.do(lambda: self.cluster.join(worker))

    @precondition(lambda self: len(self.cluster.worker_table.workers()) > 1)
    @rule(pick=PICK)
    def replace(self, pick: int) -> None:
        """Plays the usual case: work, a loss, and a new worker of that role."""
        self.work(1 + pick % 3)
        self.lose(pick)
        self.join(self.gone[-1].role)

    @precondition(lambda self: self.cluster.worker_table.workers())
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        workers = self.cluster.worker_table.workers()
        worker = workers[pick % len(workers)]
        self.gone.append(worker)
        self.do(lambda: self.cluster.lose(worker))

    @precondition(lambda self: self.cluster.worker_table.workers())
    @rule(pick=PICK)
    def lose_sight_of(self, pick: int) -> None:
        """Loses a worker, which registers again under the same epoch."""
        workers = self.cluster.worker_table.workers()
        worker = workers[pick % len(workers)]
        self.do(lambda: self.cluster.lose(worker))
        self.do(lambda: self.cluster.join(worker))

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.do(self.readers[pick % len(self.readers)].task.cancel)

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        """Advances the clock in small steps, so that timers fire in order."""
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.loop.now = min(end, self.loop.now + 0.25)
            self.do(lambda: None)

    # ---- invariants

    @invariant()
    def tokens_come_once_and_in_order(self) -> None:
        for reader in self.readers:
            seed = reader.sequence.sampling.seed
            assert reader.tokens == [token_of(seed, place) for place in range(len(reader.tokens))]
            assert len(reader.ends) <= 1
            if reader.ends == ["length"]:
                assert len(reader.tokens) == reader.num_tokens

    def teardown(self) -> None:
        """Workers are ready again, and nothing else fails."""
        for role in ("prefill", "decode"):
            self.num_workers += 1
            worker = WorkerInfo(f"{role}-last", f"{role}-last/e", role, "ipc://last", self.num_workers)  # type: ignore[arg-type]
            self.do(lambda worker=worker: self.cluster.join(worker))  # type: ignore[misc]
        for _ in range(99):
            self.work(1)
            if all(reader.ends for reader in self.readers):
                break
            self.pass_time(1.0)
        for reader in self.readers:
            [end] = reader.ends
            seen[end if isinstance(end, str) else end.code] += 1
            allowed = (DeadlineExceeded, NoWorkerReady, WorkerLost, KVTransferFailed, RequestCrashesWorkers)
            assert end in ("length", "left") or isinstance(end, allowed), end
            if isinstance(end, RequestCrashesWorkers):
                assert reader.sequence.num_deaths >= MAX_DEATHS
            if isinstance(end, WorkerLost | KVTransferFailed):
                assert "the last of 8 attempts" in end.message
        self.tokens_come_once_and_in_order()
        self.cluster.check_nothing_is_left()
        self.loop.close()


Requests.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.hypothesis
def test_requests_outlive_their_workers() -> None:
    seen.clear()
    run_state_machine_as_test(Requests)
    assert seen["length"] and seen["left"] and seen["after 0 tokens"], seen
    assert sum(seen[f"after {number} tokens"] for number in range(1, 12)) >= 5, seen
