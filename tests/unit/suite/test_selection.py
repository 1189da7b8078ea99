"""`make test` selects and groups the tests that tests/selection.py says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection import EXHAUSTIVE, REPRESENTATIVE, group_of, is_exhaustive, is_representative, stage_of

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("name", REPRESENTATIVE + EXHAUSTIVE)
def test_selected_tests_exist(name: str) -> None:
    assert (TESTS / name).is_file(), f"tests/selection.py names {name}, which does not exist"


def test_all_tests_of_a_selected_module_are_selected() -> None:
    assert is_representative("tests/integration/test_serving.py::test_any[a/b]")
    assert not is_representative("tests/integration/test_scale.py::test_any")
    assert is_exhaustive("tests/integration/test_scale.py::test_any")


def test_cluster_tests_form_one_group() -> None:
    clusters = [
        "tests/integration/test_a.py::test_b",
        "tests/faults/test_c.py::test_d",
        "tests/security/test_e.py::test_f",  # may start processes
    ]
    assert len({group_of(node_id) for node_id in clusters}) == 1
    units = ["tests/unit/a/test_b.py::test_c[d]", "tests/unit/a/test_b.py::test_e", "tests/unit/a/test_f.py::test_g"]
    assert len({group_of(node_id) for node_id in units}) == 2
    assert stage_of("tests/security/test_x.py::test_y") == "security"
    assert stage_of("tests/simulation/test_x.py::test_y") == "simulation"
