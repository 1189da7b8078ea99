"""Who computes on a CPU gives way to who answers clients, from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tandem.worker.priority
from tandem.engine.config import Device, EngineConfig


@pytest.mark.parametrize("module", ["decode_worker.__main__", "prefill_worker.__main__"])
def test_a_worker_can_step_back_before_it_imports_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("device", "has_driver", "on_cpu"), [("cpu", True, True), ("cuda", False, False), ("auto", False, True)]
)
def test_what_is_known_without_torch(
    device: Device, has_driver: bool, on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(tandem.worker.priority, "_GPU_DRIVERS", (str(driver),))
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it fails
    assert tandem.worker.priority._computes_on_cpu(EngineConfig("m", device=device)) == on_cpu
