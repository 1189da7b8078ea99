"""Shares of mutants that are shown, and whose tests show them."""

from __future__ import annotations

import pytest

from tests.mutants.run_mutants import Outcome, package_of, report
from tests.simulation.mutation import Mutation


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("proxy/dispatch/attempt.py", "tandem.proxy.dispatch"),
        ("worker/pairs/outgoing.py", "tandem.worker"),
        ("deploy/launch/launcher.py", "tandem.deploy.launch"),
    ],
)
def test_a_mutant_is_tried_on_the_tests_of_its_package(file: str, package: str) -> None:
    assert package_of(file) == package


def test_the_report_counts_what_was_tried_whole() -> None:
    def outcome(by_tests: bool | None, by_seeds: bool | None, file: str = "worker/worker.py") -> Outcome:
        return Outcome(Mutation("core/AddNot", file, "if a", "if not a"), by_tests, by_seeds)

    shown, not_shown = outcome(True, False), outcome(False, False, "proxy/cluster/router.py")
    made = report([shown, outcome(False, True), outcome(True, True), not_shown, outcome(True, None)], num_seeds=100)
    assert made.figures["num_mutants"] == 4
    assert made.figures["share_shown_by"] == {"seeds": 0.5, "tests": 0.5, "neither": 0.25}
    assert made.figures["by_package"]["tandem.proxy.cluster"] == {"shown": 0, "not_shown": 1}
    assert [each["file"] for each in made.figures["not_shown"]] == ["proxy/cluster/router.py"]
    assert [aim.met for aim in made.aims] == [False]
