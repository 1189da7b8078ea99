"""The simulated cluster of `bench.simulation.workers`, with the real router and schedulers."""

from __future__ import annotations

import random

import pytest

from bench.simulation.cluster import Request, Speeds
from bench.simulation.pd_study import ELASTIC, LAYOUTS, SHAPES, summary
from bench.simulation.workers import WorkerSimulation, cost_of_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_request_gets_its_tokens_in_every_layout(layout: str) -> None:
    speeds = Speeds()
    requests = SHAPES[0].requests(random.Random(0), per_s=5.0, seconds=4.0)
    traces = WorkerSimulation(speeds, LAYOUTS[layout]).run(requests)
    for request, trace in zip(requests, traces, strict=True):
        assert trace.num_output_tokens == request.num_output_tokens
        assert trace.ttft_s > request.num_prompt_tokens / speeds.prompt_tokens_per_s
        assert trace.tpot_s is not None and trace.tpot_s > 0.99 * cost_of_step(speeds, 1, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reports_count_each_prompt_and_each_sequence_once(layout: str) -> None:
    """Workers tell what they received from what they computed, and what they shipped from what ended on them."""
    requests = SHAPES[1].requests(random.Random(0), per_s=20.0, seconds=4.0)
    simulation = WorkerSimulation(Speeds(), LAYOUTS[layout])
    simulation.run(requests)
    loads = [worker.scheduler.load() for worker in simulation._workers.values()]
    num_tokens = sum(load.num_prompt_tokens - load.num_cached_tokens - load.num_received_tokens for load in loads)
    assert num_tokens == sum(request.num_prompt_tokens for request in requests)
    assert sum(load.num_finished - load.num_shipped for load in loads) == len(requests)
    assert sum(load.num_shipped for load in loads) == sum(load.num_received for load in loads) > 0


def test_preempted_requests_still_get_their_tokens() -> None:
    simulation = WorkerSimulation(Speeds(num_blocks=12), ["any", "any"])
    traces = simulation.run([Request(0.01 * number, 100, 300) for number in range(12)])
    assert simulation.num_preempted
    assert [trace.num_output_tokens for trace in traces] == [300] * 12


def test_the_summary_compares_elastic_with_the_best_fixed_layout() -> None:
    goodputs = {ELASTIC: 9.0, "1P3D": 2.0, "2P2D": 10.0, "3P1D": 5.0}
    (cell,) = summary([{"shape": "s", "load": 1, "layout": name, "goodput_per_s": g} for name, g in goodputs.items()])
    assert (cell["elastic / best"], cell["worst / best"]) == (0.9, 0.2)
