"""The times that `tandem up` shows."""

from __future__ import annotations

from tandem.deploy.launch.start import StartStages


def test_each_stage_has_its_time_and_none_comes_back() -> None:
    stages = StartStages(10.0)
    stages.update(11.0, False, None)
    assert stages.current == "preload"
    stages.update(14.0, True, None)
    assert stages.current == "load"
    stages.update(15.0, True, 0.5)
    stages.update(16.5, True, 1.0)
    assert stages.current == "warm up"
    stages.update(17.0, True, 0.5)  # a worker is restarted
    assert stages.current == "warm up"
    assert stages.summary(18.0) == "preload 4.0 s, load 2.5 s, warm up 1.5 s"


def test_stages_that_nobody_saw_took_no_time() -> None:
    stages = StartStages(0.0)
    stages.update(3.0, True, 1.0)
    assert stages.summary(4.0) == "preload 3.0 s, load 0.0 s, warm up 1.0 s"
    assert StartStages(0.0).summary(2.0) == "preload 2.0 s"
