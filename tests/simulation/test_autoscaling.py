"""The planner in a real cluster in simulated time: what a change of the load costs, with and without it.

`test_simulated_launcher` shows that workers start and stop.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.autoscale import measure, shifting
from tandem.deploy.cluster_config import ClusterConfig


@pytest.mark.extended
def test_a_shift_from_long_prompts_to_long_answers_is_followed_by_moves_without_new_processes() -> None:
    """Each mix lasts for less than the planner waits before it stops workers, and needs most of them."""
    trace = shifting(random.Random(3), 150.0)
    limits: dict[str, Any] = {"autoscale_ttft_ms": 4000, "itl_slo_ms": 200, "autoscale_max_workers": 6}
    planned = measure(trace, ClusterConfig(autoscale=True, prefill=5, decode=1, **limits))
    fixed = measure(trace, ClusterConfig(prefill=5, decode=1, **limits))
    assert planned["started"] == planned["most_workers"] == 6
    assert planned["goodput"] > fixed["goodput"] + 0.1, (planned, fixed)
