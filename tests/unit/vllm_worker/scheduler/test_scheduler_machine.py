"""Random histories of a prefill and a decode worker with vLLM's engine, whose schedulers are the product's."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.vllm_worker.scheduler.pair_model import ModelWorker, PairModel

WORKERS = st.sampled_from(["p", "d"])
STOPS = st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3)

FAULTS: list[Callable[[PairModel], None]] = [
    lambda model: model.lose_connection("p"),
    lambda model: model.lose_connection("d"),
    lambda model: model.close_pair(),
    lambda model: model.close_pair(loses_messages=True),
    PairModel.break_pair,
    PairModel.lose_sight,
    PairModel.kill_prefill,
]


class TwoVllmWorkers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = PairModel()

    def _worker(self, name: str) -> ModelWorker:
        return self.model.prefill if name == "p" else self.model.decode

    @initialize(num_sequences=st.integers(1, 3), num_tokens=st.integers(1, 13), max_tokens=st.integers(1, 4))
    def dispatch_first(self, num_sequences: int, num_tokens: int, max_tokens: int) -> None:
        self.model.dispatch(num_sequences, num_tokens, 0, max_tokens, stops=(), decodes_here=False, deadline_s=100.0)

    @rule(
        num_sequences=st.integers(1, 3), num_tokens=st.integers(2, 13), num_generated=st.sampled_from([0, 0, 1]),
        max_tokens=st.integers(1, 4), stops=STOPS, decodes_here=st.sampled_from([False, False, False, True]),
        deadline_s=st.sampled_from([8.0, 100.0]),
    )  # fmt: skip
    def dispatch(
        self, num_sequences: int, num_tokens: int, num_generated: int, max_tokens: int,
        stops: frozenset[tuple[int, int]], decodes_here: bool, deadline_s: float,
    ) -> None:  # fmt: skip
        self.model.dispatch(
            num_sequences, num_tokens, num_generated, max_tokens,
            stops=stops, decodes_here=decodes_here, deadline_s=deadline_s,
        )  # fmt: skip

    @rule(data=st.data(), count=st.integers(1, 3))
    def deliver(self, data: st.DataObject, count: int) -> None:
        names = [name for name, queue in self.model.queues.items() if queue]
        if names:
            name = data.draw(st.sampled_from(names))
            for _ in range(count):
                if self.model.queues[name]:  # a delivery may close the pair and lose what is left
                    self.model.deliver(name)

    @rule(name=WORKERS)
    def step(self, name: str) -> None:
        self.model.step(self._worker(name))

    @rule(name=WORKERS)
    def report(self, name: str) -> None:
        self.model.report(self._worker(name))

    @rule(name=WORKERS, count=st.integers(1, 3))
    def step_and_report(self, name: str, count: int) -> None:
        for _ in range(count):
            self.model.step(self._worker(name))
            self.model.report(self._worker(name))

    @precondition(lambda self: self.model.ships)
    @rule(data=st.data(), fails=st.sampled_from([False] * 7 + [True]))
    def finish_ship(self, data: st.DataObject, fails: bool) -> None:
        self.model.finish_ship(data.draw(st.integers(0, len(self.model.ships) - 1)) if not fails else 0, fails)

    @precondition(lambda self: self.model.receives)
    @rule(is_corrupt=st.sampled_from([False] * 7 + [True]))
    def finish_receive(self, is_corrupt: bool) -> None:
        self.model.finish_receive(0, is_corrupt)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = [name for name, attempt in self.model.attempts.items() if not attempt.is_over]
        if running:
            self.model.abort(data.draw(st.sampled_from(running)))

    @rule(fault=st.sampled_from(FAULTS))
    def fail(self, fault: Callable[[PairModel], None]) -> None:
        fault(self.model)

    @rule(seconds=st.sampled_from([1.0, 4.0]), count=st.sampled_from([1, 3]), renew=st.booleans())
    def tick(self, seconds: float, count: int, renew: bool) -> None:
        for _ in range(count):
            self.model.tick(seconds, renew)

    @rule(data=st.data(), name=WORKERS, preempts=st.booleans())
    def disturb_engine(self, data: st.DataObject, name: str, preempts: bool) -> None:
        engine = self._worker(name).engine
        statuses = ("running",) if preempts else ("waiting", "running")
        engine_ids = [each for each, request in engine.requests.items() if request.status in statuses]
        if engine_ids:
            engine_id = data.draw(st.sampled_from(engine_ids))
            engine.preempt(engine_id) if preempts else engine.fail(engine_id)

    @rule(num_cached=st.integers(0, 2))
    def cache(self, num_cached: int) -> None:
        self.model.decode.engine.num_cached = num_cached

    @invariant()
    def tokens_are_right(self) -> None:
        self.model.check_tokens()

    def teardown(self) -> None:
        self.model.settle()
        self.model.check_over()


TwoVllmWorkers.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_histories = TwoVllmWorkers.TestCase
