"""The largest value of each field of each route is read or refused in bounded time and memory, and ends no process.

The values come from the types of the bodies (`tests.security.largest_bodies`), the routes and what they read
(`tests.security.largest_calls`), so new fields, routes, headers and query parameters are covered too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import get_args

import pytest

from tandem.proxy.batches.batch import BatchRequest
from tandem.runtime.processes.forked_process import ONE_THREAD
from tests.security.largest_bodies import all_structs
from tests.support.openapi import documented_routes

MAX_CPU_S = 3.0
"""About twice what the costliest 1 MiB takes, and more than the limit for checks of grammars. Work that is quadratic in
the size takes more."""
MAX_BYTES = 400 << 20
MAX_LOOP_S, MAX_LOOP_S_PER_MIB = 0.25, 0.02
"""For the event loop of a proxy: about three times what the costliest calls take."""
MAX_CALL_BYTES = 100 << 20


def read_largest(*arguments: str) -> dict[str, list[float]]:
    """Runs a module. Returns the figures that it prints for each value, by name: CPU time in seconds, bytes, others."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            capture_output=True,
            text=True,
            timeout=540,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **ONE_THREAD},
        )
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output, errors = (error.stdout or b"").decode(), "it did not end"
    lines = output.splitlines()
    costs = {}
    for begin, end in zip(lines[::2], lines[1::2], strict=False):
        costs[begin.removeprefix("begin ")] = [float(figure) for figure in end.split()[1:]]
    assert len(lines) % 2 == 0 and costs and not errors, f"at {lines[-1] if lines else 'the start'}: {errors[-2000:]}"
    return costs


def read_values(max_bytes: int, *kinds: str) -> dict[str, list[float]]:
    return read_largest("tests.security.largest_values", str(max_bytes), *kinds)


def check(costs: dict[str, list[float]], max_cpu_s: float, max_bytes: int) -> None:
    costly = {name: cost for name, cost in costs.items() if cost[0] > max_cpu_s or cost[1] > max_bytes}
    assert not costly, costly


@pytest.mark.extended
def test_every_field_of_every_route_takes_large_values() -> None:
    costs = read_values(8192, *all_structs(), "batch_file", "adapter")
    assert len(costs) > 2000
    check(costs, MAX_CPU_S, MAX_BYTES)


def test_no_body_is_left_out() -> None:
    documented = set()
    for route in documented_routes("m", has_api_key=False):
        documented |= set(get_args(route.body)) if isinstance(route.body, UnionType) else {route.body}
    assert {*all_structs().values(), BatchRequest, None} == documented


@pytest.mark.extended
def test_calls_with_the_largest_heads_forms_and_bodies_cost_the_loop_little(tmp_path: Path) -> None:
    costs = read_largest("tests.security.largest_calls", str(tmp_path))
    assert len(costs) > 300
    check(costs, MAX_CPU_S, MAX_CALL_BYTES)
    loop_s = {name: (spent, sent / 2**20) for name, (_, _, spent, sent, _) in costs.items()}
    assert not [each for each in loop_s.items() if each[1][0] > MAX_LOOP_S + MAX_LOOP_S_PER_MIB * each[1][1]]
    failed = {name: cost[-1] for name, cost in costs.items() if cost[-1] >= 500 and cost[-1] != 503}  # without workers
    assert not failed


@pytest.mark.extended
@pytest.mark.parametrize(
    ("max_bytes", "kinds"),
    [
        (1 << 20, ("completion", "chat", "embedding", "message", "response")),
        (1 << 17, ("tokenize", "detokenize", "count_tokens")),  # further forms of the same fields
        (1 << 20, ("adapter",)),  # the limit for its configuration
        (16 << 20, ("batch_file",)),  # the limit for a line
    ],
    ids=["generating", "others", "adapters", "batches"],
)
def test_the_largest_value_of_every_field_is_read_in_bounded_time_and_memory(
    max_bytes: int, kinds: tuple[str, ...]
) -> None:
    """Equal fields of several kinds are read by the same code, so once is enough; they are all read when smaller."""
    check(read_largest("tests.security.largest_values", "--once", str(max_bytes), *kinds), MAX_CPU_S, MAX_BYTES)
