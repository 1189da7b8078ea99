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


def test_the_same_examples_are_drawn_each_time_unless_new_ones_are_wanted(request: pytest.FixtureRequest) -> None:
    draw()
    first, drawn[:] = drawn[:], []
    draw()
    second, drawn[:] = drawn[:], []
    assert (first == second) is (request.config.getoption("--hypothesis-profile") != "new")


def test_property_tests_are_marked(request: pytest.FixtureRequest) -> None:
    def draws_nothing() -> None: ...

    for function, is_property in ((draw, True), (draws_nothing, False)):
        item = pytest.Function.from_parent(request.node.parent, name="drawing", callobj=function)
        select([item])
        assert (item.get_closest_marker("properties") is not None) is is_property
