"""Assignment of GPUs: least used first, each rank of a worker on its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.processes.gpu_environment import least_used, visible_gpus
from tandem.runtime.errors import ConfigError


@given(st.integers(1, 9), st.lists(st.integers(1, 4), max_size=6))
def test_each_rank_gets_its_own_gpu_if_there_are_enough(num_gpus: int, num_ranks: list[int]) -> None:
    gpus = [f"GPU-{i}" for i in range(num_gpus)]
    used: Counter[str] = Counter()
    for count in num_ranks:
        if count > num_gpus:
            with pytest.raises(ConfigError, match=f"but {num_gpus} can be seen"):
                least_used(gpus, used, count)
            continue
        share = least_used(gpus, used, count)
        assert len(set(share)) == count
        used.update(share)
    assert max(used.values(), default=0) == -(-used.total() // num_gpus)


def test_a_new_worker_gets_the_least_used_gpu() -> None:
    assert least_used(["a", "b", "c"], {"a": 1, "b": 0, "c": 1}, 1) == ["b"]


def test_without_gpus_none_are_assigned() -> None:
    assert least_used([], {}, 2) == []


def test_visible_gpus_follow_the_device_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert visible_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert visible_gpus("auto", {"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}) == ["2", "GPU-ab"]
    assert visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus("auto", {}, tmp_path) is None
    for name in ("nvidia1", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus("auto", {}, tmp_path) == ["0", "1"], "each worker gets its own, without nvidia-smi too"
    driver = tmp_path / "nvidia-smi"
    lines = ["GPU 0: NVIDIA H200 (UUID: GPU-12-ab)", "GPU 1: NVIDIA H200 (UUID: GPU-34)"]
    instances = [f"  MIG 3g.71gb     Device  {number}: (UUID: MIG-56-{number})" for number in range(2)]
    for shown, expected in (
        (lines, ["GPU-12-ab", "GPU-34"]),
        ([lines[0], *instances, lines[1]], ["MIG-56-0", "MIG-56-1", "GPU-34"]),  # instances replace their GPU
    ):
        driver.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in shown))
        driver.chmod(0o755)
        assert visible_gpus("auto", {}) == expected
