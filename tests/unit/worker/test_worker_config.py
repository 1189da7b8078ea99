"""Units of a worker's settings."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.steps.step_times import StepTimes
from tandem.worker.worker_config import WorkerConfig


@pytest.mark.parametrize("itl_slo_ms", [1, 40, 2500])
def test_the_operators_limit_on_itl_is_the_one_that_steps_keep(itl_slo_ms: int) -> None:
    default = WorkerConfig("worker-0", "any", "ipc://w", ["ipc://p"])
    config = msgspec.structs.replace(default, itl_slo_ms=itl_slo_ms)
    assert StepTimes(config.itl_slo_s).itl_slo_s == pytest.approx(itl_slo_ms / 1000)
    assert StepTimes(default.itl_slo_s).itl_slo_s == 0.0, "the engine chooses"
