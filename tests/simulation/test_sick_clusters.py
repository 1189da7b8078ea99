"""`tandem doctor` names the fault of each cluster in which one was made on purpose, and finds none in a healthy one."""

from __future__ import annotations

import re

import pytest

from tandem.deploy.commands.doctor import diagnosis_text
from tandem.deploy.diagnosis.diagnosis import diagnose
from tests.simulation.sick_clusters import HEALTHY, PAGE, SICK, SickCluster, examine, found


def without_figures(text: str) -> str:
    return re.sub(r"[\d.,]*\d%?( (ms|s|[kMG]B/s))?", "#", text)


@pytest.mark.parametrize(
    "sick",
    [pytest.param(sick, marks=pytest.mark.extended if number % 2 else ()) for number, sick in enumerate(SICK)],
    ids=lambda sick: sick.fault,
)
def test_the_fault_is_named_as_on_the_page(sick: SickCluster) -> None:
    diagnosis = diagnose(examine(sick))
    assert found(sick, diagnosis), diagnosis_text(diagnosis, 110)
    for latency in (diagnosis.ttft, diagnosis.itl):
        assert latency is not None and sum(part.share for part in latency.parts) == pytest.approx(1)
        assert all(part.seconds >= 0 for part in latency.parts)
    said = {without_figures(each.text) for each in found(sick, diagnosis)}
    rows = [re.split(r" ?\| ?", line)[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    documented = {fault: without_figures(text) for fault, text in rows}
    assert documented[sick.fault] in said, "run `python -m tests.simulation.sick_clusters`"


def test_nothing_is_found_in_a_healthy_cluster() -> None:
    diagnosis = diagnose(examine(HEALTHY))
    assert found(HEALTHY, diagnosis) and not diagnosis.findings and not diagnosis.advice, diagnosis_text(diagnosis, 110)
