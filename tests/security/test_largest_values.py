"""The largest value of each field of each route is read or refused in bounded time and memory, and ends no process.

The values come from the types of the bodies (`tests.security.largest_bodies`), so new fields are covered too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAX_CPU_S = 3.0
"""About twice what the costliest 1 MiB takes. Work that is quadratic in the size takes more."""
MAX_BYTES = 400 << 20


def read_largest(max_bytes: int, *kinds: str) -> dict[str, tuple[float, int]]:
    """Returns the CPU time in seconds and the memory in bytes that each body took, by name."""
    command = [sys.executable, "-m", "tests.security.largest_values", str(max_bytes), *kinds]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2])
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output, errors = (error.stdout or b"").decode(), "it did not end"
    lines = output.splitlines()
    costs = {}
    for begin, end in zip(lines[::2], lines[1::2], strict=False):
        _, seconds, num_bytes = end.split()
        costs[begin.removeprefix("begin ")] = float(seconds), int(num_bytes)
    assert len(lines) % 2 == 0 and costs and not errors, f"at {lines[-1] if lines else 'the start'}: {errors[-2000:]}"
    return costs


def check(costs: dict[str, tuple[float, int]], max_cpu_s: float, max_bytes: int) -> None:
    costly = {name: cost for name, cost in costs.items() if cost[0] > max_cpu_s or cost[1] > max_bytes}
    assert not costly, costly


def test_every_field_of_every_route_takes_large_values() -> None:
    kinds = ("completion", "chat", "chat_batch", "embedding", "message", "response")
    costs = read_largest(8192, *kinds, "tokenize", "detokenize", "count_tokens")
    assert len(costs) > 2000
    check(costs, 2.0, MAX_BYTES)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("max_bytes", "kinds"),
    [
        (1 << 20, ("completion", "chat", "embedding", "message", "response")),
        (1 << 17, ("chat_batch", "tokenize", "detokenize", "count_tokens")),  # further forms of the same fields
    ],
    ids=["generating", "others"],
)
def test_the_largest_value_of_every_field_is_read_in_bounded_time_and_memory(
    max_bytes: int, kinds: tuple[str, ...]
) -> None:
    check(read_largest(max_bytes, *kinds), MAX_CPU_S, MAX_BYTES)
