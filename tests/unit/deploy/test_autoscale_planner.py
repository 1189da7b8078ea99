"""The planner: its arithmetic, stability and limits. `tests/simulation/test_autoscaling.py` has it act."""

from __future__ import annotations

import itertools
import lzma
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.autoscale.demand import Demand, DemandMeter
from tandem.deploy.autoscale.planner import (
    DOWN_AFTER_S,
    REBALANCE_S,
    Planner,
    PlannerConfig,
    decode_needed,
    elastic_needed,
    late_fraction,
    prefill_needed,
    servers_needed,
    wait_probability,
)
from tandem.engine.steps.step_times import StepTimes
from tandem.protocol.messages.membership import Role, WorkerInfo, WorkerLoad

BUSY = Demand(
    num_prefill=1,
    num_decode=1,
    prompts_per_s=10.0,
    prompt_tokens_per_s=20_000.0,
    speed=8000.0,
    most_sequences=200,
    blocks_per_decode=1000,
    fixed_step_s=0.01,
    step_s_per_sequence=0.0005,
)
IDLE = Demand(num_prefill=1, num_decode=1, speed=8000.0)


demands = st.builds(
    Demand,
    num_prefill=st.integers(0, 9),
    num_decode=st.integers(0, 9),
    prompts_per_s=st.just(0.0) | st.floats(0.01, 100),
    prompt_tokens_per_s=st.floats(0, 1e6),
    waiting_tokens=st.integers(0, 10**7),
    speed=st.sampled_from([0.0, 10.0, 8000.0]),
    most_sequences=st.integers(0, 1000),
    most_used_blocks=st.integers(0, 5000),
    blocks_per_decode=st.sampled_from([0, 500]),
    mean_output_tokens=st.floats(0, 1000),
    fixed_step_s=st.floats(0, 0.1),
    step_s_per_sequence=st.sampled_from([0.0, 0.0005, 0.2]),
    decode_is_full=st.booleans(),
    refused_per_s=st.floats(0, 10),
)


def worker(role: Role, epoch: str = "e") -> WorkerInfo:
    return WorkerInfo(f"{role}-0", f"{role}/{epoch}", role, "", 1)


# ---- arithmetic


def test_erlang_c_matches_published_tables() -> None:
    assert wait_probability(1, 0.5) == pytest.approx(0.5)
    assert wait_probability(2, 1.0) == pytest.approx(1 / 3)
    assert wait_probability(10, 8.0) == pytest.approx(0.4092, abs=1e-4)
    assert wait_probability(3, 3.0) == 1.0


@given(st.floats(0, 60), st.floats(0.01, 5), st.floats(0, 5))
def test_the_fewest_servers_that_keep_the_wait_are_chosen(load: float, service_s: float, wait_s: float) -> None:
    count = servers_needed(load, service_s, wait_s, 0.05, 100)
    assert late_fraction(count, load, service_s, wait_s) <= 0.05
    if count > 1:
        assert late_fraction(count - 1, load, service_s, wait_s) > 0.05 or count - 1 < load


def test_step_times_are_means_of_what_the_workers_measured() -> None:
    meter = DemandMeter(64)
    loads = [WorkerLoad(), *(WorkerLoad(fixed_step_s=0.01, step_s_per_sequence=each) for each in (0.0004, 0.0006))]
    workers = [(worker("decode", str(i)), load) for i, load in enumerate(loads)]
    for seen in (workers, workers[:1]):  # the last measurement is remembered
        demand = meter.observe(0.0, seen)
        assert (demand.fixed_step_s, demand.step_s_per_sequence) == pytest.approx((0.01, 0.0005))


def test_a_worker_restart_does_not_distort_rates() -> None:
    meter = DemandMeter(64)
    for second in range(5):
        load = WorkerLoad(num_prompt_tokens=1000 * second, num_finished=second, prompt_tokens_per_s=4000)
        meter.observe(second, [(worker("prefill"), load)])
    fresh = WorkerLoad(num_prompt_tokens=1000, num_finished=1, prompt_tokens_per_s=4000)
    demand = meter.observe(5, [(worker("prefill", "again"), fresh)])
    assert demand.prompt_tokens_per_s == pytest.approx(1000)
    assert demand.mean_prompt_tokens == pytest.approx(1000)


def test_what_a_worker_did_before_it_was_missing_from_a_report_is_not_demand() -> None:
    meter = DemandMeter(max_num_seqs=8)
    load = WorkerLoad(num_prompt_tokens=1_000_000, num_finished=1000)
    other = (worker("prefill", "other"), WorkerLoad())
    for second, seen in enumerate([[other, (worker("prefill"), load)], [other], [other, (worker("prefill"), load)]]):
        demand = meter.observe(second, seen)
    assert demand.prompt_tokens_per_s == demand.prompts_per_s == 0


def test_what_a_worker_did_in_an_earlier_role_is_not_demand() -> None:
    meter = DemandMeter(64)
    info = worker("decode")
    busy = worker("prefill")
    for second in range(5):
        load = WorkerLoad(num_prompt_tokens=50_000, num_finished=9000)
        meter.observe(second, [(busy, WorkerLoad()), (info, load)])
    moved = msgspec.structs.replace(info, role="prefill")
    load = WorkerLoad(num_prompt_tokens=50_800, num_finished=9001)
    demand = meter.observe(5, [(busy, WorkerLoad()), (moved, load)])
    assert demand.prompt_tokens_per_s == pytest.approx(800 / 5) and demand.prompts_per_s == pytest.approx(1 / 5)


def test_cached_tokens_are_not_demand_and_waiting_tokens_are() -> None:
    meter = DemandMeter(64)
    meter.observe(0, [(worker("prefill"), WorkerLoad())])
    load = WorkerLoad(
        num_prompt_tokens=5000, num_cached_tokens=4000, num_finished=2, num_waiting=1, num_waiting_tokens=1000
    )
    demand = meter.observe(4, [(worker("prefill"), load)])
    assert demand.prompt_tokens_per_s == pytest.approx(500)
    assert demand.prompts_per_s == pytest.approx(0.75)


def test_refused_requests_are_demand() -> None:
    config = PlannerConfig(max_workers=50)
    refusing = prefill_needed(Demand(**{**as_dict(BUSY), "refused_per_s": 10.0}), config)
    assert refusing.num_workers > prefill_needed(BUSY, config).num_workers


def test_a_backlog_caused_by_decode_adds_no_prefill_workers() -> None:
    config = PlannerConfig(max_workers=50)
    waiting = {**as_dict(BUSY), "waiting_tokens": 1_000_000}
    full = Demand(**{**waiting, "decode_is_full": True})
    assert prefill_needed(Demand(**waiting), config).num_workers > prefill_needed(full, config).num_workers
    assert decode_needed(full, config).num_workers >= full.num_decode + 1


def test_a_lack_of_blocks_adds_decode_workers() -> None:
    demand = Demand(num_decode=2, most_sequences=4, most_used_blocks=1900, blocks_per_decode=1000)
    assert decode_needed(demand, PlannerConfig()).num_workers == 3


def test_an_unreachable_itl_does_not_add_workers_forever() -> None:
    slow = Demand(**{**as_dict(BUSY), "fixed_step_s": 0.2, "num_decode": 3})
    need = decode_needed(slow, PlannerConfig())
    assert need.num_workers == 3 and "whatever the number of workers" in need.reason


def as_dict(demand: Demand) -> dict[str, Any]:
    return {name: getattr(demand, name) for name in demand.__struct_fields__}


# ---- stability


def test_it_goes_up_soon_and_down_late() -> None:
    planner = Planner(PlannerConfig())
    first = [planner.propose(second, BUSY, 1, 1) for second in range(5)]
    assert [(p.prefill, p.decode) for p in first[:3]] == [(1, 1)] * 3
    assert first[3].prefill > 1 and first[3].decode > 1
    planner = Planner(PlannerConfig())
    down = [planner.propose(second, IDLE, 4, 4).prefill for second in range(122)]
    assert down[:120] == [4] * 120 and down[121] == 1


def test_a_role_that_needs_more_gets_spare_workers_of_the_other_before_new_ones_start() -> None:
    no_decode = Demand(**{**as_dict(BUSY), "most_sequences": 1})
    planner = Planner(PlannerConfig())
    course = [planner.propose(second, no_decode, 2, 4) for second in range(12)]
    needed = course[-1].prefill_need.num_workers
    assert needed > 3 and course[-1].decode_need.num_workers == 1
    totals = {(p.prefill, p.decode) for p in course}
    assert (needed, 4) in totals, "decode may have needed its workers a moment ago"
    assert (course[-1].prefill, course[-1].decode) == (needed, 4 - min(3, needed - 2))


def test_elastic_workers_share_what_each_role_would_round_up() -> None:
    light = Demand(**{**as_dict(BUSY), "prompt_tokens_per_s": 2000.0, "most_sequences": 10, "mean_output_tokens": 20.0})
    prefill, decode = prefill_needed(light, PlannerConfig()), decode_needed(light, PlannerConfig())
    assert (prefill.num_workers, decode.num_workers) == (1, 1)
    assert elastic_needed(light, PlannerConfig()) == 1


def test_elastic_workers_compute_prompts_in_the_time_that_sequences_leave() -> None:
    """Five workers have time for the work of both phases, but prompts beside the sequences would miss the TTFT."""
    loaded = Demand(**{**as_dict(BUSY), "mean_output_tokens": 200.0})
    needs = prefill_needed(loaded, PlannerConfig()), decode_needed(loaded, PlannerConfig())
    assert sum(need.work for need in needs) < 5
    assert elastic_needed(loaded, PlannerConfig()) == 6
    assert elastic_needed(loaded, PlannerConfig(ttft_s=10.0)) == 5


@given(demands, st.sampled_from([0.011, 0.05, 1.0]))
def test_elastic_workers_are_never_more_than_both_roles_need(demand: Demand, itl_s: float) -> None:
    config = PlannerConfig(itl_s=itl_s)
    needs = [need.num_workers for need in (prefill_needed(demand, config), decode_needed(demand, config))]
    assert max(needs) <= elastic_needed(demand, config) <= sum(needs)


def test_elastic_workers_count_for_both_roles() -> None:
    meter = DemandMeter(64)
    for second in range(9):
        load = WorkerLoad(
            num_prompt_tokens=800 * second, num_finished=second, prompt_tokens_per_s=4000.0,
            num_decoding=3, num_running=5, step_time_s=0.02,
        )  # fmt: skip
        demand = meter.observe(second, [(worker("any"), load)])
    assert (demand.num_prefill, demand.num_decode) == (1, 1)
    assert demand.prompt_tokens_per_s == pytest.approx(800) and demand.most_sequences == 3


def test_prompts_that_one_elastic_worker_ships_to_another_count_once() -> None:
    """Each second ten prompts of 100 tokens are computed on the first and generated on the second, 20 tokens each."""
    meter = DemandMeter(64)
    for second in range(9):
        count: dict[str, Any] = {
            "num_prompt_tokens": 1000 * second,
            "num_finished": 10 * second,
            "prompt_tokens_per_s": 4000.0,
        }
        computes = WorkerLoad(**count, num_shipped=10 * second)
        decodes = WorkerLoad(
            **count, num_received_tokens=1000 * second, num_received=10 * second,
            num_decoding=4, num_running=4, step_time_s=0.02,
        )  # fmt: skip
        demand = meter.observe(second, [(worker("any", "1"), computes), (worker("any", "2"), decodes)])
    assert (demand.prompts_per_s, demand.prompt_tokens_per_s) == pytest.approx((10, 1000))
    assert demand.mean_output_tokens == pytest.approx(20, rel=0.02)


def test_one_busy_second_changes_nothing() -> None:
    planner = Planner(PlannerConfig())
    for second in range(100):
        proposal = planner.propose(second, BUSY if second % 3 == 0 else IDLE, 1, 1)
        assert (proposal.prefill, proposal.decode) == (1, 1)


@given(st.lists(st.tuples(demands, st.integers(1, 30)), min_size=1, max_size=30), st.integers(0, 2))
def test_only_the_number_of_elastic_workers_changes_where_there_are_any(
    course: list[tuple[Demand, int]], num_decode: int
) -> None:
    planner, num_any, now = Planner(PlannerConfig(max_workers=9)), 2, 0.0
    for demand, seconds in course:
        now += seconds
        proposal = planner.propose(now, demand, 0, num_decode, num_any)
        assert (proposal.prefill, proposal.decode) == (0, num_decode)
        num_any = proposal.any
        assert 1 <= num_any <= 9 - num_decode


@given(st.lists(st.tuples(demands, st.integers(1, 30)), min_size=1, max_size=30))
def test_proposals_stay_within_the_limits(course: list[tuple[Demand, int]]) -> None:
    planner = Planner(PlannerConfig(max_workers=9))
    prefill, decode, now = 1, 1, 0.0
    for demand, seconds in course:
        now += seconds
        proposal = planner.propose(now, demand, prefill, decode)
        prefill, decode = proposal.prefill, proposal.decode
        assert prefill >= 1 and decode >= 1 and prefill + decode <= 9 and proposal.any == 0


@given(st.lists(st.tuples(demands, st.integers(1, 20)), min_size=2, max_size=30), st.integers(1, 4), st.integers(1, 4))
def test_a_role_gives_up_only_what_it_has_not_needed_or_what_the_other_one_gets(
    course: list[tuple[Demand, int]], prefill: int, decode: int
) -> None:
    """Below the limit, workers are stopped after two minutes without a need for them, and moved one for one."""
    planner, now = Planner(PlannerConfig(max_workers=10**7)), 0
    needs: list[tuple[int, int, int]] = []
    for demand, seconds in course:
        for _ in range(seconds):
            now += 1
            proposal = planner.propose(now, demand, prefill, decode)
            needs.append((now, proposal.prefill_need.num_workers, proposal.decode_need.num_workers))
            lately = [need for need in needs if need[0] > now - DOWN_AFTER_S]
            gained = max(0, proposal.prefill - prefill) + max(0, proposal.decode - decode)
            for index, before, after in ((1, prefill, proposal.prefill), (2, decode, proposal.decode)):
                has_watched = now - needs[0][0] >= DOWN_AFTER_S
                is_unneeded = has_watched and max(need[index] for need in lately) <= max(1, after)
                assert after >= before - gained or is_unneeded
            prefill, decode = proposal.prefill, proposal.decode


def test_workers_go_down_to_the_most_that_two_minutes_needed() -> None:
    planner, counts = Planner(PlannerConfig()), []
    for second in range(400):
        busy = second % 60 == 50  # too short to start workers, and often enough to keep them
        demand = Demand(**{**as_dict(BUSY), "most_sequences": 1}) if busy else IDLE
        counts.append(planner.propose(second, demand, 9, 2).prefill)
    needed = prefill_needed(Demand(**{**as_dict(BUSY), "most_sequences": 1}), PlannerConfig()).num_workers
    assert 1 < needed < 9 and set(counts) == {9, needed}


def test_workers_that_both_roles_need_are_moved_rarely() -> None:
    config = PlannerConfig(max_workers=10)
    waiting = {**as_dict(BUSY), "prompts_per_s": 100.0, "prompt_tokens_per_s": 200_000.0, "most_sequences": 1000}
    kinds = [
        Demand(**{**waiting, "mean_output_tokens": tokens, "waiting_tokens": 10**6, "waiting_prompts": 500})
        for tokens in (1.0, 4000.0)
    ]
    planner, prefill, decode = Planner(config), 5, 5
    moved_at: list[int] = []
    for second in range(200):
        proposal = planner.propose(second, kinds[second // 7 % 2], prefill, decode)
        assert proposal.prefill + proposal.decode == 10
        moved_at += [second] * (proposal.prefill != prefill)
        prefill, decode = proposal.prefill, proposal.decode
    assert len(moved_at) > 2 and all(two - one >= REBALANCE_S for one, two in itertools.pairwise(moved_at))


# ---- early detection


def test_sequences_that_come_and_do_not_end_ask_for_workers_before_they_are_there() -> None:
    meter = DemandMeter(64)
    for second in range(9):
        prefill = WorkerLoad(num_prompt_tokens=1000 * second, num_finished=10 * second, prompt_tokens_per_s=9000)
        running = min(64, 10 * second)  # it is full; others wait with prefill
        decode = WorkerLoad(
            num_running=running, step_time_s=0.01 + 0.001 * running, num_blocks=9, num_free_blocks=1,
            fixed_step_s=0.01, step_s_per_sequence=0.001,
        )  # fmt: skip
        demand = meter.observe(second, [(worker("prefill"), prefill), (worker("decode"), decode)])
    assert demand.growth_per_s == pytest.approx((80 - 2 * 80**0.5) / 8)
    near, far = (decode_needed(demand, PlannerConfig(foresee_s=s)).num_workers for s in (1.0, 30.0))
    assert far > near

    steady = DemandMeter(64)
    for second in range(9):
        prefill = WorkerLoad(num_prompt_tokens=1000 * second, num_finished=10 * second, prompt_tokens_per_s=9000)
        decode = WorkerLoad(num_running=20, num_finished=9 * second, step_time_s=0.02)
        demand = steady.observe(second, [(worker("prefill"), prefill), (worker("decode"), decode)])
    assert demand.growth_per_s == 0.0  # 80 arrived and 72 ended, which may be chance


def test_where_both_want_all_workers_they_get_what_arrives_needs() -> None:
    config = PlannerConfig(max_workers=10)
    waiting = {**as_dict(BUSY), "waiting_tokens": 2_000_000, "waiting_prompts": 1000, "mean_output_tokens": 400.0}
    for most_sequences, decode in ((1000, 5), (200, 4)):  # decode needs less than its share
        planner = Planner(config)
        for second in range(6):
            proposal = planner.propose(second, Demand(**{**waiting, "most_sequences": most_sequences}), 2, 2)
        assert proposal.prefill_need.num_workers > 9, "the backlog adds demand"
        # 2.5 workers for arriving requests, and a backlog of 250 s of work.
        assert proposal.prefill_need.work == pytest.approx((2.5 + 250 / config.foresee_s) / 0.8)
        assert (proposal.prefill, proposal.decode) == (10 - decode, decode)


class Observed(msgspec.Struct, frozen=True):
    """Load reports of all workers of a real cluster, `at` seconds after the recording started."""

    at: float
    workers: list[tuple[WorkerInfo, WorkerLoad]]


def read_recording(file: Path) -> Iterator[Observed]:
    """Reads one JSON line per second, and adds the step times that decode workers measured but did not report."""
    times: defaultdict[str, StepTimes] = defaultdict(StepTimes)

    def fitted(info: WorkerInfo, load: WorkerLoad) -> WorkerLoad:
        if info.role != "decode":
            return load
        fit = times[info.epoch]
        fit.on_step(load.num_running, 0, load.step_time_s)
        return msgspec.structs.replace(load, fixed_step_s=fit.fixed_s, step_s_per_sequence=fit.s_per_sequence)

    for line in lzma.decompress(file.read_bytes()).splitlines():
        observed = msgspec.json.decode(line, type=Observed)
        yield Observed(observed.at, [(info, fitted(info, load)) for info, load in observed.workers])


def test_a_recorded_burst_triggers_one_immediate_proposal() -> None:
    """75 s of a real cluster with one worker per role: 1.5 requests/s from second 5, 14 more and longer requests from
    second 28, and a backlog at the end.
    """
    meter = DemandMeter(max_num_seqs=32)
    planner = Planner(PlannerConfig(ttft_s=0.5, max_workers=8, max_num_seqs=32, foresee_s=10))
    current, course = (1, 1), []
    for observed in read_recording(Path(__file__).parents[2] / "recordings" / "burst_1p1d.jsonl.xz"):
        demand = meter.observe(observed.at, observed.workers)
        proposal = planner.propose(observed.at, demand, *current)
        current = proposal.prefill, proposal.decode
        course.append((observed.at, current, demand))
    assert {proposed for at, proposed, _ in course if at < 28} == {(1, 1)}
    assert next(at for at, (prefill, _), _ in course if prefill > 1) < 34
    assert all(sum(proposed) <= 8 for _, proposed, _ in course)
    at_most = max(course, key=lambda entry: entry[2].prompts_per_s)[2]
    assert at_most.prompts_per_s == pytest.approx(15.5, rel=0.25) and at_most.mean_prompt_tokens > 400
    assert all(sum(proposed) == 8 for at, proposed, _ in course if at > 40), "the backlog lasts to the end"
