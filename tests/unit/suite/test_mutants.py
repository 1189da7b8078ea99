"""Shares of mutants that are shown, and whose tests show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run_mutants import Outcome, SourceCopy, interval, package_of, report
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


def test_tests_that_import_the_mutated_file_run_first(tmp_path: Path) -> None:
    tests = SourceCopy(tmp_path).tests_of("tandem.proxy.cluster", "proxy/cluster/worker_table.py")
    imports = [" tandem.proxy.cluster.worker_table " in Path(each).read_text() for each in tests]
    assert imports == sorted(imports, reverse=True)
    assert 0 < sum(imports) < len(imports)
