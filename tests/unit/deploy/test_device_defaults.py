"""Defaults by device, and how many ranks share a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.cluster_config import ClusterConfig, load_config, ranks_per_gpu, with_device_defaults
from tandem.deploy.processes.gpu_environment import least_used
from tandem.runtime.errors import ConfigError
from tests.support.settings import cluster_config


def test_settings_that_are_0_follow_the_device_and_others_stay() -> None:
    given = cluster_config(max_num_seqs=7)
    on_cpu, on_gpus = with_device_defaults(given, False), with_device_defaults(given, True)
    assert (on_cpu.engine_settings.max_num_seqs, on_gpus.engine_settings.max_num_seqs) == (7, 7)
    assert 0 < on_cpu.engine_settings.max_num_batched_tokens < on_gpus.engine_settings.max_num_batched_tokens
    assert 0 < on_cpu.admission.max_waiting_requests < on_gpus.admission.max_waiting_requests
    assert with_device_defaults(ClusterConfig(), True).engine_settings.max_num_seqs > 7


@given(
    num_gpus=st.integers(2, 9),
    counts=st.fixed_dictionaries(
        {"prefill": st.integers(0, 5), "decode": st.integers(0, 5), "workers": st.integers(0, 5)}
    ),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_no_gpu_has_more_ranks_than_its_memory_is_divided_among(
    num_gpus: int, counts: dict[str, int], sizes: tuple[int, int]
) -> None:
    config = cluster_config(**counts, prefill_tensor_parallel_size=sizes[0], decode_tensor_parallel_size=sizes[1])
    used: Counter[str] = Counter()
    gpus = [f"GPU-{number}" for number in range(num_gpus)]
    for role, count in config.counts.items():
        for _ in range(count):
            used.update(least_used(gpus, used, config.num_ranks(role)))
    assert max(used.values(), default=1) == ranks_per_gpu(config, num_gpus)


@pytest.mark.parametrize(("key", "least"), [("max_num_batched_tokens", 16), ("block_size", 8)])
def test_steps_and_blocks_of_a_few_tokens_are_refused(tmp_path: Path, key: str, least: int) -> None:
    file = tmp_path / "cluster.toml"
    for accepted in (0, least):
        file.write_text(f"{key} = {accepted}\n")
        load_config(file, {})
    file.write_text(f"{key} = {least - 1}\n")
    with pytest.raises(ConfigError, match=f"{key}: {least - 1} is less than {least}"):
        load_config(file, {})
