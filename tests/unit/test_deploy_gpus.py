"""GPUs are shared out in turn, a worker's ranks on different ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gpus import share_out, visible_gpus
from protocol.errors import ConfigError


@given(st.integers(1, 9), st.lists(st.integers(1, 4), max_size=6))
def test_each_rank_has_a_gpu_of_its_own_while_they_suffice(num_gpus: int, num_ranks: list[int]) -> None:
    gpus = [f"GPU-{i}" for i in range(num_gpus)]
    if max(num_ranks, default=0) > num_gpus:
        with pytest.raises(ConfigError, match=f"and {num_gpus} can be seen"):
            share_out(gpus, num_ranks)
        return
    shares = [share or [] for share in share_out(gpus, num_ranks)]
    assert [len(set(share)) for share in shares] == num_ranks
    used = [gpu for share in shares for gpu in share]
    assert max(map(used.count, used), default=0) == -(-len(used) // num_gpus)


def test_without_gpus_nobody_gets_any() -> None:
    assert share_out([], [2, 1]) == [[], []]
    assert share_out(None, [2, 1]) == [None, None]


def test_cpu_sees_none_and_the_environment_has_the_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert visible_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert visible_gpus("auto", {"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}) == ["2", "GPU-ab"]
    assert visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus("auto", {}) is None
    driver = tmp_path / "nvidia-smi"
    lines = ["GPU 0: NVIDIA H200 (UUID: GPU-12-ab)", "GPU 1: NVIDIA H200 (UUID: GPU-34)"]
    driver.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    driver.chmod(0o755)
    assert visible_gpus("auto", {}) == ["GPU-12-ab", "GPU-34"]
