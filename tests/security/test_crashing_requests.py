"""A request that ends every worker that computes it is refused after three; requests beside it are answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.membership import Role, WorkerInfo
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.proxy.answers.errors import status_of
from tandem.proxy.dispatch.sequence import MAX_DEATHS, TRIAL_S, DispatchedSequence, PromptTask, RequestCrashesWorkers
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import TandemError, WorkerLost
from tests.support.clocked_loop import ClockedLoop
from tests.support.proxy_cluster import Cluster, turn

POISON = Prompt(pack_token_ids([66, 6, 6]), 3)
LIMIT_STEPS = 2000


def play(scenario: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    loop = ClockedLoop()

    async def run() -> None:
        cluster = Cluster(worker_wait_s=30.0, workers=())
        await scenario(cluster)
        cluster.check_nothing_is_left()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockedLoop)
    loop.now += seconds


async def after(seconds: float) -> None:
    """Lets every task wait, then the time pass, in which delayed retries begin, and then every task run."""
    await turn()
    pass_time(seconds)
    await turn()


class Workers:
    """Plays workers that compute what they hold in a random order. One that computes a killer dies and is replaced.

    kills: whether a prompt of these bytes is a killer, by default POISON alone. killers_first: they are computed before
    others, so they always find some beside them. num_killed: workers so far. reports_first: the peer of a dead worker
    reports its loss before the launcher does. names_step: workers fail by an error, and name the attempts of the step:
    the killer's and some others that they hold.
    """

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        reports_first: bool = False,
        names_step: bool = False,
        roles: Sequence[Role] = ("prefill", "prefill", "decode", "decode"),
        kills: Callable[[bytes], bool] = lambda prompt: prompt == POISON.token_ids,
        killers_first: bool = False,
    ) -> None:
        self.cluster, self._rng, self._reports_first, self._names_step = cluster, rng, reports_first, names_step
        self._kills, self._killers_first = kills, killers_first
        self._num_joined = 0
        self.num_killed = 0
        self.answers: dict[int, list[int] | TandemError] = {}
        self._readers: list[asyncio.Task[None]] = []
        for role in roles:
            self.join(role)

    def join(self, role: Role) -> None:
        self._num_joined += 1
        name = f"{role}-{self._num_joined}"
        self.cluster.join(WorkerInfo(name, f"{name}/e", role, f"ipc://{name}", self._num_joined))

    def start(self, prompt: Prompt) -> None:
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        try:
            task = PromptTask(prompt, StopConditions(3), 100.0)
            [sequence] = self.cluster.dispatcher.start(task, [SamplingParams()], ready.put_nowait)
        except RequestCrashesWorkers as error:
            self.answers[len(self._readers)] = error
            return
        self._readers.append(asyncio.create_task(self._read(len(self._readers), sequence, ready)))

    async def _read(self, number: int, sequence: DispatchedSequence, ready: asyncio.Queue[DispatchedSequence]) -> None:
        tokens: list[int] = []
        try:
            while True:
                await ready.get()
                if (delta := self.cluster.dispatcher.take(sequence)) is not None:
                    tokens += [token.token_id for token in delta.tokens]
                    if delta.finish_reason is not None:
                        self.answers[number] = tokens
                        return
        except TandemError as error:
            self.answers[number] = error
        finally:
            self.cluster.dispatcher.drop(sequence)

    async def compute_all(self) -> None:
        """Returns when every request has been answered."""
        for _ in range(LIMIT_STEPS):
            await turn()
            if len(self.answers) == len(self._readers):
                return
            await self.compute_one()
        raise AssertionError(f"{len(self._readers) - len(self.answers)} requests have no answer")

    def in_flight(self) -> dict[str, bool]:
        """Returns whether they are killers, of the attempts that are in flight."""
        starts = {s.attempt_ids[0]: s for _, s in self.cluster.pool.of(StartPrefill)}
        running = (key for key, each in self.cluster.dispatcher._running.items() if not each.is_over)
        return {key: self._kills(starts[key].token_ids[:12]) for key in running}

    async def compute_one(self) -> None:
        """Some worker computes some prompt that it holds, and decode finishes it."""
        running = self.in_flight()
        if not running:
            pass_time(0.1)  # until a delayed retry
            return
        first = [key for key, is_killer in running.items() if is_killer and self._killers_first]
        attempt_id = self._rng.choice(first or list(running))
        route = self.cluster.dispatcher._running[attempt_id].route
        assert route.prefill is not None and route.decode is not None
        if running[attempt_id]:
            self.num_killed += 1
            await self.end(route.prefill, attempt_id)
            return
        self.cluster.first(attempt_id, 1, worker=route.prefill)
        self.cluster.token(attempt_id, 2, worker=route.decode)
        self.cluster.token(attempt_id, 3, "length", worker=route.decode)

    async def end(self, worker: WorkerInfo, attempt_id: str) -> None:
        """The attempt is the cause."""
        if self._names_step:
            self.fail(worker, attempt_id)
        else:
            await self.kill(worker)

    def fail(self, worker: WorkerInfo, attempt_id: str) -> None:
        running = self.cluster.dispatcher._running.items()
        others = [
            key for key, each in running if each.runs_on(worker) and not each.is_over and self._rng.random() < 0.5
        ]
        self.cluster.fail(worker, [attempt_id, *others, "of another proxy"])
        self.join(worker.role)

    async def kill(self, worker: WorkerInfo) -> None:
        if self._reports_first:
            for attempt_id, attempt in list(self.cluster.dispatcher._running.items()):
                peer = attempt.route.decode
                if attempt.runs_on(worker) and peer is not None and peer != worker and not attempt.is_over:
                    self.cluster.failed(peer, attempt_id, WorkerLost("the peer was lost"))
            if self._rng.random() < 0.5:
                await turn()  # some are dispatched again before the launcher reports the exit
        self.cluster.lose(worker)
        self.join(worker.role)


def innocent(number: int) -> Prompt:
    return Prompt(pack_token_ids([1, 2, number]), 3)


@example(seed=0, num_before=12, num_after=12, reports_first=False)
@given(st.integers(0, 1 << 16), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_the_cause_is_refused_and_nothing_beside_it(
    seed: int, num_before: int, num_after: int, reports_first: bool
) -> None:
    """Whatever the order in which the workers compute."""

    async def scenario(cluster: Cluster) -> None:
        workers = Workers(cluster, random.Random(seed), reports_first)
        for number in range(num_before):
            workers.start(innocent(number))
        workers.start(POISON)
        for number in range(num_after):
            workers.start(innocent(100 + number))
        await workers.compute_all()
        error = workers.answers.pop(num_before)
        assert isinstance(error, RequestCrashesWorkers) and status_of(error) == 400
        # One more if a retry was dispatched before the death was known.
        assert workers.num_killed in ((MAX_DEATHS, MAX_DEATHS + 1) if reports_first else (MAX_DEATHS,))
        assert all(answer == [1, 2, 3] for answer in workers.answers.values()), workers.answers
        with pytest.raises(RequestCrashesWorkers):
            cluster.dispatcher.start(
                PromptTask(POISON, StopConditions(3), 1.0), [SamplingParams(seed=5)], lambda _: None
            )

    play(scenario)


@example(seed=0, num_before=12, num_copies=4, num_after=12)
@given(st.integers(0, 1 << 16), st.integers(0, 12), st.integers(1, 4), st.integers(0, 12))
def test_a_prompt_costs_two_workers_that_name_their_step(
    seed: int, num_before: int, num_copies: int, num_after: int
) -> None:
    """Also if several requests have it."""

    async def scenario(cluster: Cluster) -> None:
        workers = Workers(cluster, random.Random(seed), names_step=True)
        for number in range(num_before):
            workers.start(innocent(number))
        for _ in range(num_copies):
            workers.start(POISON)
        for number in range(num_after):
            workers.start(innocent(100 + number))
        await workers.compute_all()
        for number in range(num_before, num_before + num_copies):
            assert isinstance(workers.answers.pop(number), RequestCrashesWorkers)
        assert workers.num_killed == 2
        assert all(answer == [1, 2, 3] for answer in workers.answers.values()), workers.answers

    play(scenario)


@given(st.integers(0, 1 << 16), st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=60), st.booleans())
def test_random_deaths_refuse_nothing(seed: int, events: list[int], reports_first: bool) -> None:
    """Workers die for reasons of their own while requests wait: none is refused, however often it was present.

    No worker dies while a suspect is in flight; that would be taken for a proof.
    """

    async def scenario(cluster: Cluster) -> None:
        rng = random.Random(seed)
        workers = Workers(cluster, rng, reports_first)
        num_started = 0
        for event in events:
            await turn()
            if event == 0:
                workers.start(innocent(num_started))
                num_started += 1
            elif event == 1:
                await workers.compute_one()
            elif not cluster.dispatcher._trials.is_running:
                await workers.kill(rng.choice(cluster.worker_table.workers()))
        await workers.compute_all()
        assert all(answer == [1, 2, 3] for answer in workers.answers.values()), workers.answers

    play(scenario)


def test_what_is_no_reason_for_suspicion() -> None:
    """Workers that leave, and workers lost after decode began, count against nothing."""

    async def scenario(cluster: Cluster) -> None:
        workers = Workers(cluster, random.Random(0), reports_first=False)
        workers.start(innocent(0))
        for _ in range(6):
            await after(1.0)
            [attempt] = cluster.dispatcher._running.values()
            assert attempt.route.prefill is not None and not attempt.refused_at
            worker = attempt.route.prefill
            cluster.worker_table.on_left(worker.epoch)
            cluster.dispatcher.on_worker_lost(worker, "it has left")
            workers.join("prefill")
        await workers.compute_all()
        sequences = cluster.start([SamplingParams()], 50, 100.0)
        for number in range(6):
            await turn()
            [(attempt_id, attempt)] = cluster.dispatcher._running.items()
            assert attempt.route.prefill is not None and attempt.route.decode is not None and not attempt.refused_at
            cluster.first(attempt_id, 2 * number, worker=attempt.route.prefill)
            cluster.token(attempt_id, 2 * number + 1, worker=attempt.route.decode)
            assert cluster.dispatcher.take(sequences[0]) is not None
            await workers.kill(attempt.route.decode)
            assert cluster.dispatcher.take(sequences[0]) is None
        assert sequences[0].num_deaths == 0
        cluster.dispatcher.drop(sequences[0])

    play(scenario)


@pytest.mark.parametrize("names_step", [False, True], ids=["not named", "named"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@given(st.integers(0, 1 << 16), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=40)
def test_innocents_are_not_blamed_for_new_killers(
    num_workers: int, names_step: bool, seed: int, num_innocents: int, num_killers: int
) -> None:
    """Another client sends a new killer whenever an innocent prompt is in flight, so that each meets their retries.

    No killer is sent twice, so no earlier death points to it.
    """

    async def scenario(cluster: Cluster) -> None:
        innocents = [innocent(number) for number in range(num_innocents)]
        harmless = {each.token_ids for each in innocents}
        both: tuple[Role, ...] = ("prefill", "decode")
        roles = [role for role in both for _ in range(num_workers)]
        workers = Workers(
            cluster, random.Random(seed), False, names_step, roles, lambda prompt: prompt not in harmless, True
        )
        for prompt in innocents:
            workers.start(prompt)
        num_sent = 0
        for _ in range(LIMIT_STEPS):
            await turn()
            if num_sent < num_killers and not all(workers.in_flight().values()):
                workers.start(Prompt(pack_token_ids([66, 6, num_sent]), 3))
                num_sent += 1
            if len(workers.answers) == len(workers._readers):
                break
            await workers.compute_one()
        for number in range(num_innocents):
            assert workers.answers.pop(number) == [1, 2, 3]
        assert len(workers.answers) == num_sent
        assert all(isinstance(error, RequestCrashesWorkers | WorkerLost) for error in workers.answers.values())

    play(scenario)


def test_a_stream_is_not_blamed_for_new_killers_in_its_steps() -> None:
    """A decode worker fails as it decodes, and a prefill worker as it is computed again, each beside a new killer."""

    async def scenario(cluster: Cluster) -> None:
        workers = Workers(cluster, random.Random(0), names_step=True, roles=("prefill", "decode"))
        workers.start(innocent(0))
        await turn()
        [(stream, attempt)] = cluster.dispatcher._running.items()
        prefill, decode = attempt.route.workers
        cluster.first(stream, 1, worker=prefill)
        cluster.token(stream, 2, worker=decode)
        await turn()
        for number, role in enumerate(("decode", "prefill")):
            workers.start(Prompt(pack_token_ids([66, 6, number]), 3))
            await turn()
            routes = {key: each.route for key, each in cluster.dispatcher._running.items() if not each.is_over}
            [worker] = {next(each for each in route.workers if each.role == role) for route in routes.values()}
            assert len(routes) == 2
            cluster.fail(worker, [*routes])
            workers._readers[-1].cancel()  # its client hangs up
            await turn()
            workers.join(worker.role)
            await turn()
        assert 0 not in workers.answers
        for _ in range(20):
            await after(1.0)
            for key, each in list(cluster.dispatcher._running.items()):
                if not each.is_over:
                    cluster.first(key, 3, "length", worker=each.route.prefill)
        assert workers.answers[0] == [1, 2, 3]

    play(scenario)


def test_a_trial_closes_its_workers_for_a_limited_time() -> None:
    """A suspect that computes for long does not keep the only worker from others for ever, and proves nothing then."""

    async def scenario(cluster: Cluster) -> None:
        workers = Workers(cluster, random.Random(0), roles=("prefill", "decode"))
        workers.start(POISON)
        for _ in range(2):
            await turn()
            [attempt] = cluster.dispatcher._running.values()
            await workers.kill(attempt.route.prefill)
            await after(2.0)  # no worker can still compute an aborted attempt
        [suspect] = cluster.dispatcher._running.values()
        assert set(suspect.refused_at.values()) == {MAX_DEATHS}
        workers.start(innocent(1))
        await turn()
        assert len(cluster.dispatcher._running) == 1, "it waits"
        await after(TRIAL_S + 1)
        assert len(cluster.dispatcher._running) == 2 and not suspect.refused_at
        await workers.kill(suspect.route.prefill)
        await turn()
        assert not workers.answers, "the other prompt may have been the cause"
        for _ in range(50):
            await after(1.0)
            await workers.compute_one()
        await turn()
        assert workers.answers.pop(1) == [1, 2, 3]
        assert isinstance(workers.answers.pop(0), RequestCrashesWorkers)

    play(scenario)


def test_silence_and_broken_connections_prove_no_crash() -> None:
    async def scenario(cluster: Cluster) -> None:
        workers = Workers(cluster, random.Random(0), reports_first=False)
        workers.start(innocent(0))
        for number in range(5):
            await after(3.0)
            [attempt] = cluster.dispatcher._running.values()
            if number % 2:
                cluster.lose(attempt.route.prefill, has_crashed=False)
                workers.join("prefill")
            else:
                cluster.dispatcher.on_worker_lost(attempt.route.prefill, "a connection to it broke")
        await after(3.0)
        await workers.compute_all()
        assert workers.answers == {0: [1, 2, 3]}

    play(scenario)
