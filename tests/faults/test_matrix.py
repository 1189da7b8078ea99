"""A subset of the fault matrix, over three connectors and with elastic workers.

`python -m bench.faults.fault_matrix` runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.matrix import CLOSES, Case, Matrix, matrix
from tests.faults.phases import LOCAL_PREFILL
from tests.support.nixl import OVER_TCP, nixl_environment

CASES = [
    Case("prefill", "SIGKILL", "shipping"),
    Case("prefill", "SIGSTOP then SIGCONT", "prefilling"),
    Case("decode", "SIGKILL", "first token"),
    Case("decode", "SIGKILL", LOCAL_PREFILL),
    Case("decode", "SIGSTOP then SIGCONT", "decoding"),
    Case("decode", "SIGTERM", "finishing"),
    Case("proxy", "SIGKILL", "shipping"),
    Case("proxy", "SIGSTOP then SIGCONT", "finishing"),
    Case("media cache", "SIGKILL", "prefilling"),
    *(Case("client", CLOSES, phase) for phase in ("queued", "prefilling", "decoding", LOCAL_PREFILL)),
]
ELASTIC_CASES = [
    Case("prefill", "SIGKILL", "shipping"),
    Case("decode", "SIGKILL", LOCAL_PREFILL),
    Case("client", CLOSES, "shipping"),
]
"""The worker of LOCAL_PREFILL does both phases."""
NETWORK_CASES = [
    Case("prefill", "SIGKILL", "shipping"),
    Case("decode", "SIGSTOP then SIGCONT", "first token"),
    Case("client", CLOSES, "shipping"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with matrix(tmp_path_factory.mktemp("vision")) as made:
        yield made


@pytest.fixture(scope="module")
def over_tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with matrix(tmp_path_factory.mktemp("vision"), "tcp") as made:
        yield made


@pytest.fixture(scope="module")
def over_nixl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with matrix(tmp_path_factory.mktemp("vision"), "nixl", env=nixl_environment() | OVER_TCP) as made:
        yield made


@pytest.fixture(scope="module")
def of_elastic_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with matrix(tmp_path_factory.mktemp("vision"), layout="any") as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(running: Matrix, case: Case) -> None:
    result = running.run(case)
    assert not result.problems, result


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", NETWORK_CASES, ids=str)
def test_case_over_tcp(over_tcp: Matrix, case: Case) -> None:
    result = over_tcp.run(case)
    assert not result.problems, result


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", NETWORK_CASES, ids=str)
def test_case_over_nixl(over_nixl: Matrix, case: Case) -> None:
    result = over_nixl.run(case)
    assert not result.problems, result


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ELASTIC_CASES, ids=str)
def test_case_of_elastic_workers(of_elastic_workers: Matrix, case: Case) -> None:
    result = of_elastic_workers.run(case)
    assert not result.problems, result
