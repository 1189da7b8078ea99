"""Shares of mutants that are shown, and whose tests show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run_mutants import Outcome, SourceCopy, failed_tests, interval, package_of, report, spare_tests
from tests.simulation.mutation import Mutation


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("proxy/dispatch/sequence.py", "tandem.proxy.dispatch"),
        ("handover/kv_traffic.py", "tandem.handover"),
        ("deploy/launch/launcher.py", "tandem.deploy.launch"),
    ],
)
def test_a_mutant_is_tried_on_the_tests_of_its_package(file: str, package: str) -> None:
    assert package_of(file) == package


def test_the_report_counts_what_is_decided() -> None:
    def outcome(by_tests: bool | None, by_seeds: bool | None, file: str = "worker/worker.py") -> Outcome:
        return Outcome(Mutation("core/AddNot", file, "if a", "if not a"), by_tests, by_seeds)

    shown, not_shown = outcome(True, False), outcome(False, False, "proxy/cluster/router.py")
    undecided = [outcome(False, None), outcome(None, None), outcome(None, False)]
    made = report([shown, outcome(False, True), outcome(True, None), not_shown, *undecided], num_seeds=100)
    assert made.figures["num_drawn"] == 7
    assert made.figures["num_mutants"] == 4
    assert made.figures["shown_by"] == {"tests": 2, "seeds": 1, "neither": 1}
    assert made.figures["num_tried_on_seeds"] == 3
    assert made.figures["by_package"]["tandem.proxy.cluster"] == {"shown": 0, "not_shown": 1}
    assert [each["file"] for each in made.figures["not_shown"]] == ["proxy/cluster/router.py"]
    assert [aim.met for aim in made.aims] == [False]


@pytest.mark.parametrize(
    ("num_found", "num", "limits"), [(0, 10, (0.0, 0.278)), (10, 10, (0.722, 1.0)), (50, 100, (0.404, 0.596))]
)
def test_the_interval_of_a_share(num_found: int, num: int, limits: tuple[float, float]) -> None:
    assert interval(num_found, num) == limits


def test_scripts_run_first_then_tests_that_import_the_mutated_file(tmp_path: Path) -> None:
    found = SourceCopy(tmp_path).tests_of("tandem.proxy.cluster", "proxy/cluster/worker_table.py")
    scripts = [each for each in found if each.endswith("/test_scripts.py")]
    assert found[: len(scripts)] == scripts and {Path(each).parent.name for each in scripts} == {"cluster", "dispatch"}
    tests = found[len(scripts) :]
    imports = [" tandem.proxy.cluster.worker_table " in Path(each).read_text() for each in tests]
    assert imports == sorted(imports, reverse=True)
    assert 0 < sum(imports) < len(imports)


def test_the_tests_that_failed_and_the_one_that_hung_are_read_from_the_output() -> None:
    output = (
        "collected 4 items\n\ntests/unit/a.py::test_one PASSED\ntests/unit/a.py::test_two[a b] FAILED\n"
        "tests/unit/b.py::test_three ERROR\ntests/unit/b.py::test_four "
    )
    failed = ["tests/unit/a.py::test_two[a b]", "tests/unit/b.py::test_three"]
    assert failed_tests(output) == [*failed, "tests/unit/b.py::test_four"]
    assert failed_tests(f"{output}PASSED\n\nERROR tests/unit/c.py\n===== 1 failed =====\n") == failed


def test_a_test_is_spare_if_seeds_or_scripts_show_all_that_it_shows() -> None:
    def outcome(by_seeds: bool | None, *failed: str) -> Outcome:
        mutant = Mutation("core/AddNot", "proxy/dispatch/sequence.py", "if a", "if not a")
        return Outcome(mutant, bool(failed), by_seeds, [f"tests/unit/{each}" for each in failed])

    script = "proxy/dispatch/test_scripts.py::test_script[life]"
    outcomes = [
        outcome(True, "a.py::test_by_seeds", "a.py::test_needed[1]"),
        outcome(None, "a.py::test_by_script[2]", script),
        outcome(False, "a.py::test_needed[2]"),
        outcome(False),
    ]
    spare = {"tests/unit/a.py::test_by_script": 1, "tests/unit/a.py::test_by_seeds": 1}
    assert spare_tests(outcomes) == spare == report(outcomes, 20).figures["spare_tests"]
    assert [each.needs_seeds(only_rest=False, runs_all=True) for each in outcomes] == [True, False, True, False]
