"""Each kind of process is killed, frozen or drained once, and leaves no descriptor, thread, file or memory behind.

`python -m tests.faults.fault_matrix` goes through all phases; so does `tests/simulation/test_simulated_faults.py`, in
simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.fault_cases import CLOSES, Case
from tests.faults.matrix import Matrix, matrix

CASES = [
    Case("prefill", "SIGKILL", "shipping"),
    Case("decode", "SIGSTOP then SIGCONT", "decoding"),
    Case("decode", "SIGTERM", "finishing"),
    Case("proxy", "SIGKILL", "shipping"),
    Case("proxy", "SIGSTOP then SIGCONT", "finishing"),
    Case("media cache", "SIGKILL", "prefilling"),
    Case("client", CLOSES, "decoding"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with matrix(tmp_path_factory.mktemp("vision")) as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(running: Matrix, case: Case) -> None:
    result = running.run(case)
    assert not result.problems, result
