"""Which versions of vLLM workers run, and what differs between them."""

from __future__ import annotations

import importlib.metadata

import pytest

from tandem.vllm_worker import versions


@pytest.mark.parametrize(
    ("installed", "on_cpu", "on_gpu", "draws_seeds"),
    [
        ("0.31.0", "0.31.0", "0.31.0", False),
        ("0.32.0+cu130", "0.31.0", "0.32.0", True),
        ("0.33.0", "0.33.0", "0.33.0", True),
    ],
)
def test_versions_share_blocks_on_cpus_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, installed: str, on_cpu: str, on_gpu: str, draws_seeds: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": installed}.__getitem__)
    assert (versions.block_version("cpu"), versions.block_version("cuda")) == (on_cpu, on_gpu)
    assert versions.draws_seeds_on_cpu() is draws_seeds
    assert versions.SUPPORTED_VERSIONS[-1] == versions.DEFAULT_VERSION, "the oldest one is the first"
