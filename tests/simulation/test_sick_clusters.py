"""`tandem doctor` names the fault of each cluster in which one was made on purpose, and finds none in a healthy one."""

from __future__ import annotations

import functools
import re

import pytest

from tandem.deploy.commands.doctor import diagnosis_text
from tandem.deploy.diagnosis.diagnosis import Diagnosis, diagnose
from tests.simulation.sick_clusters import HEALTHY, PAGE, SICK, SickCluster, examine, found

each_cluster = pytest.mark.parametrize("sick", SICK, ids=lambda sick: sick.fault)


@functools.cache
def diagnosis_of(number: int) -> Diagnosis:
    return diagnose(examine(SICK[number]))


def without_figures(text: str) -> str:
    return re.sub(r"[\d.,]*\d%?( (ms|s|[kMG]B/s))?", "#", text)


@each_cluster
def test_the_fault_is_named(sick: SickCluster) -> None:
    diagnosis = diagnosis_of(SICK.index(sick))
    assert found(sick, diagnosis), diagnosis_text(diagnosis, 110)
    for latency in (diagnosis.ttft, diagnosis.itl):
        assert latency is not None and sum(part.share for part in latency.parts) == pytest.approx(1)
        assert all(part.seconds >= 0 for part in latency.parts)


@each_cluster
def test_the_page_has_what_it_says(sick: SickCluster) -> None:
    said = {without_figures(each.text) for each in found(sick, diagnosis_of(SICK.index(sick)))}
    rows = [re.split(r" ?\| ?", line)[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    documented = {fault: without_figures(text) for fault, text in rows}
    assert documented[sick.fault] in said, "run `python -m tests.simulation.sick_clusters`"


def test_nothing_is_found_in_a_healthy_cluster() -> None:
    diagnosis = diagnose(examine(HEALTHY))
    assert found(HEALTHY, diagnosis) and not diagnosis.findings and not diagnosis.advice, diagnosis_text(diagnosis, 110)
