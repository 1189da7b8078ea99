"""Transfers under random faults: frozen, woken, killed and restarted peers, loss, corruption, late writes, duplicated
and reordered control messages, aborts, deadlines. `tests.simulation.transfer_world` lists the invariants."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.transfer_world import World

EXHAUSTIVE = pytest.mark.exhaustive
PROCESSES = st.integers(0, 2)
TIERS: list[tuple[str, ...]] = [(), ("host",), ("host", "disk", "store")]


class Transfers(RuleBasedStateMachine):
    """Hypothesis chooses the next event, and shrinks failures."""

    world: World

    @initialize(seed=st.integers(0, 1000), one_sided=st.booleans(), elastic=st.booleans(), tiers=st.sampled_from(TIERS))
    def begin(self, seed: int, one_sided: bool, elastic: bool, tiers: tuple[str, ...]) -> None:
        self.world = World(seed, one_sided, loss=0.05, corruption=0.05, elastic=elastic, tiers=tiers)

    @initialize(pairs_first=st.booleans())
    def pairs(self, pairs_first: bool) -> None:
        if pairs_first and hasattr(self, "world"):
            self.world.run_to_rest()

    @rule(which=st.integers(0, 100), times=st.integers(1, 8))
    def go_on(self, which: int, times: int) -> None:
        """The next message, block, callback, membership change or exit."""
        for _ in range(times):
            if events := self.world.events():
                events[which % len(events)][1]()

    @rule(which=PROCESSES)
    def step(self, which: int) -> None:
        process = self.world.workers[which]
        if process.runs:
            self.world.run_step(process)

    @rule()
    def start(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.wanted)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.world.abort(self.world.wanted[which % len(self.world.wanted)])

    @rule(which=PROCESSES)
    def freeze(self, which: int) -> None:
        self.world.freeze(self.world.workers[which])

    @rule(which=PROCESSES)
    def thaw(self, which: int) -> None:
        self.world.thaw(self.world.workers[which])

    @rule(which=PROCESSES)
    def notice_silence(self, which: int) -> None:
        process = self.world.workers[which]
        if process.frozen and process.epoch in self.world.visible:
            self.world.notice_silence(process)

    @rule(which=PROCESSES)
    def restart(self, which: int) -> None:
        self.world.restart(self.world.workers[which])

    @rule(which=PROCESSES)
    def give_up_pair(self, which: int) -> None:
        process = self.world.workers[which]
        if process.runs:
            self.world.give_up_pair(process)

    @rule(which=PROCESSES, connection=st.integers(0, 5), reorder=st.booleans())
    def duplicate_or_reorder(self, which: int, connection: int, reorder: bool) -> None:
        process = self.world.workers[which]
        pairs = [name for name, queue in process.inbox.items() if queue and name != "proxy"]
        if pairs and reorder:
            process.inbox[pairs[connection % len(pairs)]].rotate(1)
        elif pairs:
            self.world.duplicate(process, pairs[connection % len(pairs)])

    @rule(seconds=st.sampled_from([0.1, 3.0, 15.0, 50.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def run(seed: int, one_sided: bool, num_events: int, elastic: bool = False, tiers: tuple[str, ...] = ()) -> World:
    world = World(seed, one_sided, loss=0.05, corruption=0.2, elastic=elastic, tiers=tiers)
    world.run_to_rest()  # pairs are opened before traffic
    rng = random.Random(seed)
    for index in range(num_events):
        world.random_event(rng)()
        if index % 8 == 0:
            world.check()
    world.settle()
    return world


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
@pytest.mark.parametrize(
    ("elastic", "seeds"),
    [
        (False, range(2500)),
        (True, range(1000)),
        pytest.param(False, range(2500, 5000), marks=EXHAUSTIVE),
        pytest.param(True, range(1000, 2500), marks=EXHAUSTIVE),
    ],
    ids=["fixed", "elastic", "more fixed", "more elastic"],
)
def test_random_schedules(elastic: bool, seeds: range, one_sided: bool) -> None:
    """No write reaches a block of another transfer."""
    ended: Counter[str | None] = Counter()
    num_late = num_corrupted = num_found = num_duplicated = num_expired = num_kept = 0
    for seed in seeds:
        try:
            world = run(seed, one_sided, 80, elastic)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        ended.update(sequence.ended for sequence in world.wanted)
        num_late += world.num_late_writes
        num_corrupted += world.network.num_corrupted_blocks
        num_found += world.num_found_corrupt
        num_duplicated += world.num_duplicated
        num_expired += world.num_expired_leases
        num_kept += world.num_kept_blocks
    # The schedules must reach every case, or the test proves nothing.
    reasons = ("length", "aborted", "worker_lost", "kv_transfer_failed", "deadline_exceeded")
    least = len(seeds) // 50
    assert min(ended[reason] for reason in reasons) > least, ended
    counts = num_late, num_expired, 5 * num_found, 10 * num_kept, num_duplicated // 4
    assert min(counts) > least, counts


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed roles", "elastic"])
@pytest.mark.parametrize("num_schedules", [600, pytest.param(1500, marks=EXHAUSTIVE)])
def test_blocks_from_tiers_are_those_of_the_prompt(num_schedules: int, elastic: bool) -> None:
    """Tiers fail, lose blocks, answer late and outlive their workers. Each decode step compares its blocks' content."""
    num_loaded = 0
    for seed in range(num_schedules):
        try:
            world = run(seed, seed % 2 == 0, 80, elastic, TIERS[1 + seed % 2])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_loaded += world.num_loaded_blocks
    assert num_loaded > num_schedules // 20


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed roles", "elastic"])
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_requests_are_served_after_hours_of_idleness(one_sided: bool, elastic: bool) -> None:
    """No lease, deadline or pair expires while idle."""
    world = World(3, one_sided, elastic=elastic)
    world.run_to_rest()
    for _ in range(3):
        world.pass_time(5 * 3600.0)
        for _ in range(4):
            world.start()
        assert len(world.wanted) % 4 == 0
        world.settle()
    assert [sequence.ended for sequence in world.wanted] == ["length"] * 12
