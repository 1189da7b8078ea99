"""`make test` selects and groups the tests that tests/selection.py says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection import (
    EXHAUSTIVE,
    FORKING,
    LONG,
    NEW_EXAMPLES,
    REPRESENTATIVE,
    group_of,
    is_exhaustive,
    is_representative,
    select,
    stage_of,
)

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("name", REPRESENTATIVE + EXHAUSTIVE + FORKING + LONG)
def test_selected_tests_exist(name: str) -> None:
    assert (TESTS / name).is_file(), f"tests/selection.py names {name}, which does not exist"


def test_all_tests_of_a_selected_module_are_selected() -> None:
    assert is_representative("tests/integration/test_serving.py::test_any[a/b]")
    assert not is_representative("tests/integration/test_scale.py::test_any")
    assert is_exhaustive("tests/integration/test_scale.py::test_any")


def test_modules_run_beside_each_other_unless_they_use_ray() -> None:
    of_ray = ["tests/integration/test_ray.py::test_a", "tests/integration/test_ray_gpus.py::test_b"]
    assert len({group_of(node_id) for node_id in of_ray}) == 1
    others = ["tests/unit/a/test_b.py::test_c[d]", "tests/unit/a/test_b.py::test_e", "tests/faults/test_f.py::test_g"]
    assert len({group_of(node_id) for node_id in others}) == 2
    assert stage_of("tests/security/test_x.py::test_y") == "security"
    assert stage_of("tests/simulation/test_x.py::test_y") == "simulation"


drawn: list[int] = []


@settings(max_examples=20, database=None)
@given(st.integers(0, 10**9))
def draw(number: int) -> None:
    drawn.append(number)


def test_what_a_newcomer_runs_draws_the_same_examples_each_time(request: pytest.FixtureRequest) -> None:
    draw()
    first, drawn[:] = drawn[:], []
    draw()
    second, drawn[:] = drawn[:], []
    assert (first == second) is (request.config.getoption("--hypothesis-profile") != NEW_EXAMPLES)


def test_property_tests_are_extended_tests_where_new_examples_are_drawn(request: pytest.FixtureRequest) -> None:
    for new_examples in (False, True):
        item = pytest.Function.from_parent(request.node.parent, name="drawing", callobj=draw)
        select([item], new_examples)
        assert (item.get_closest_marker("extended") is not None) is new_examples
